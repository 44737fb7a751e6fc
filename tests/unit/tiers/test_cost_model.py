"""When a fetch is worth it: the estimates, and what they cost and gain in a simulated engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse
from kvconnect.tiers.cost_model import CostModel, LoadChoice, LoadReason, TierSegment
from kvconnect.types import Tier

UNIT = 16
TOKEN_BYTES = 128 << 10
PER_TOKEN_S = 1e-4
PER_CONTEXT_S = PER_TOKEN_S / 32768  # twice the time at that depth
STEP_S = 0.008
STEP_TOKENS = 8192


NOTHING = LoadChoice(0, LoadReason.RECOMPUTE, None, None, 0.0)


# The simulator -----------------------------------------------------------------------------------


class Net(NamedTuple):
    """What a tier really does: a round trip, and tokens per computed token's time."""

    latency_s: float
    speed: float


class Ask(NamedTuple):
    """One request: its prompt, and its leading tokens that tiers have, in prefix order."""

    tokens: int
    held: Sequence[tuple[Tier, int]]


class Totals(NamedTuple):
    """Seconds that the same requests took, by who chose."""

    model: float
    recompute: float
    oracle: float
    probes: int


Slowdown = Callable[[float], float]
"""From progress in [0, 1) of a run to the factor on the bytes' time."""


def steady(progress: float) -> float:
    return 1.0


def lognormal(rng: random.Random, sigma: float) -> float:
    """A factor with mean 1."""
    return math.exp(rng.gauss(-sigma * sigma / 2, sigma))


class Weather(NamedTuple):
    """One request's luck: the engine's factor and, per tier, the bytes' and the fetch's."""

    engine: float
    bandwidth: dict[Tier, float]
    fetch: dict[Tier, float]


class World:
    """An engine and its tiers, both noisy and drifting. A request's luck is drawn once, whatever
    is chosen for it, so that totals differ by the choices alone."""

    def __init__(self, nets: dict[Tier, Net], seed: int, slowdown: Slowdown = steady) -> None:
        self.nets = nets
        self.slowdown = slowdown
        self.rng = random.Random(seed)

    def run(self, model: CostModel | Always, asks: Sequence[Ask], warm_up: int) -> Totals:
        model_s = recompute_s = oracle_s = 0.0
        probes = 0
        for number, ask in enumerate(asks):
            mean, real = self.draw(number / len(asks))
            segments = [TierSegment(tier, n, n * TOKEN_BYTES) for tier, n in ask.held if n]
            choice = model.choose(ask.tokens, 0, segments) if segments else NOTHING
            fetches = self.fetches(ask, choice.tokens, real)
            waited = sum(fetches.values())
            cut = choice.tokens
            if waited > choice.give_up_s:  # and nothing of it is of use
                waited, cut = choice.give_up_s, 0
            if number >= warm_up:
                model_s += waited + self.computing(ask, cut, real)
                recompute_s += self.computing(ask, 0, real)
                best = min(self.cuts(ask), key=lambda cut: self.total(ask, cut, mean))
                oracle_s += self.total(ask, best, real)
                probes += choice.reason is LoadReason.PROBE
            for (tier, nbytes), seconds in fetches.items():
                model.loaded(tier, nbytes, min(seconds, choice.give_up_s))
            for tokens, seconds, context in self.steps(ask, cut, real):
                model.prefilled(tokens, seconds, context)
            model.prefilled(self.rng.randrange(3), STEP_S, 500.0)  # mostly decoding
        return Totals(model_s, recompute_s, oracle_s, probes)

    def draw(self, progress: float) -> tuple[Weather, Weather]:
        """Return what is to be expected now, and what one request meets."""
        wave = 1.0 + 0.2 * math.sin(20 * progress)
        bandwidth = (1.0 + 0.2 * math.cos(13 * progress)) * self.slowdown(progress)
        mean = Weather(wave, dict.fromkeys(self.nets, bandwidth), dict.fromkeys(self.nets, 1.0))
        luck = {tier: lognormal(self.rng, 0.4) for tier in self.nets}
        return mean, Weather(wave * lognormal(self.rng, 0.15), mean.bandwidth, luck)

    def total(self, ask: Ask, cut: int, weather: Weather) -> float:
        return sum(self.fetches(ask, cut, weather).values()) + self.computing(ask, cut, weather)

    def computing(self, ask: Ask, cut: int, weather: Weather) -> float:
        return sum(seconds for _, seconds, _ in self.steps(ask, cut, weather))

    def cuts(self, ask: Ask) -> Iterator[int]:
        cut = 0
        yield cut
        for _, tokens in ask.held:
            cut += tokens
            yield cut

    def fetches(self, ask: Ask, cut: int, weather: Weather) -> dict[tuple[Tier, int], float]:
        """Return seconds by (tier, bytes); each tier is asked once, one after the other."""
        tokens: dict[Tier, int] = {}
        for tier, held in ask.held:
            part = min(held, cut)
            cut -= part
            if part:
                tokens[tier] = tokens.get(tier, 0) + part
        found = {}
        for tier, count in tokens.items():
            net = self.nets[tier]
            moving_s = weather.bandwidth[tier] * count * PER_TOKEN_S / net.speed
            found[tier, count * TOKEN_BYTES] = weather.fetch[tier] * (net.latency_s + moving_s)
        return found

    def steps(self, ask: Ask, cut: int, weather: Weather) -> Iterator[tuple[int, float, float]]:
        """Yield (tokens, seconds, mean context) of each step; one token at least is computed."""
        start = min(cut, ask.tokens - 1)
        while start < ask.tokens:
            tokens = min(STEP_TOKENS, ask.tokens - start)
            context = start + tokens / 2
            seconds = STEP_S + tokens * (PER_TOKEN_S + PER_CONTEXT_S * context)
            yield tokens, weather.engine * seconds, context
            start += tokens


class Always:
    """The control: loads whatever there is."""

    def choose(self, tokens: int, context: int, segments: Sequence[TierSegment]) -> LoadChoice:
        return LoadChoice(
            sum(part.tokens for part in segments), LoadReason.LOAD, None, None, math.inf
        )

    def loaded(self, tier: Tier, nbytes: int, seconds: float) -> None:
        pass

    def prefilled(self, tokens: int, seconds: float, context: float) -> None:
        pass


def prompts(seed: int, count: int, rate: float, tiers: Sequence[Tier]) -> list[Ask]:
    """Prompts of 256 to 32768 tokens, of which tiers have the first ``rate`` in equal parts."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        tokens = int(min(32768, max(256, 3000 * math.exp(rng.gauss(0, 1)))))
        part = int(tokens * rate) // len(tiers) // UNIT * UNIT
        asks.append(Ask(tokens, [(tier, part) for tier in tiers]))
    return asks


DISK, REMOTE = Tier.DISK, Tier.REMOTE
SPEEDS = [10.0, 3.0, 1.5, 1.0, 0.8, 0.5, 0.1]
RATES = [0.0, 0.1, 0.5, 1.0]


def test_it_is_never_slower_than_recomputing_by_more_than_a_hundredth() -> None:
    worst = 0.0
    for speed in SPEEDS:
        for number, rate in enumerate(RATES):
            world = World({DISK: Net(0.002, speed)}, seed=number)
            totals = world.run(CostModel(UNIT), prompts(number, 800, rate, [DISK]), 100)
            worst = max(worst, totals.model / totals.recompute)
            if not rate:
                assert totals.model == totals.recompute
            elif speed >= 1.5:  # elsewhere there is next to nothing to gain
                gain = totals.recompute - totals.model
                assert gain >= 0.9 * (totals.recompute - totals.oracle), (speed, rate)
            if speed <= 0.5 and rate:
                assert totals.probes >= 5, "a slow tier is not tried again"
    assert worst <= 1.01


def test_control_always_loading_is_slower_on_slow_tiers() -> None:
    world = World({DISK: Net(0.002, 0.5)}, seed=1)
    totals = world.run(Always(), prompts(1, 400, 0.5, [DISK]), 100)
    assert totals.model > 1.2 * totals.recompute


def spell(progress: float) -> float:
    return 50.0 if 0.3 <= progress < 0.5 else 1.0


@pytest.mark.parametrize("speed", [10.0, 2.0, 1.0, 0.5])
def test_a_spell_fifty_times_slower_costs_little_and_ends(speed: float) -> None:
    asks = prompts(3, 1500, 0.75, [REMOTE])
    during = World({REMOTE: Net(0.002, speed)}, 5, spell).run(CostModel(UNIT), asks, 100)
    # What shows that a tier has changed is lost: a few of the largest requests, given up.
    largest_s = 32768 * (PER_TOKEN_S + PER_CONTEXT_S * 16384)
    assert during.model <= 1.01 * during.recompute + 3 * largest_s
    after = World({REMOTE: Net(0.002, speed)}, 5, spell).run(CostModel(UNIT), asks, 1050)
    assert after.model <= 1.01 * after.recompute
    if speed >= 2.0:
        gain = after.recompute - after.model
        assert gain >= 0.9 * (after.recompute - after.oracle), "it has not come back"


def test_control_a_spell_costs_much_if_it_is_not_noticed() -> None:
    world = World({REMOTE: Net(0.002, 2.0)}, 5, spell)
    totals = world.run(Always(), prompts(3, 1500, 0.75, [REMOTE]), 100)
    assert totals.model > 2 * totals.recompute


def test_of_two_tiers_each_is_judged_by_itself() -> None:
    nets = {DISK: Net(0.001, 5.0), REMOTE: Net(0.005, 0.2)}
    totals = World(nets, 2).run(CostModel(UNIT), prompts(2, 800, 0.9, [DISK, REMOTE]), 100)
    gain = totals.recompute - totals.model
    assert gain >= 0.9 * (totals.recompute - totals.oracle) > 0.2 * totals.recompute
    assert totals.probes >= 5


# Estimates ---------------------------------------------------------------------------------------


def taught(seed: int = 1) -> CostModel:
    """Return a model that knows an engine without noise: 10000 tokens a second."""
    model, rng = CostModel(UNIT), random.Random(seed)
    for _ in range(100):
        tokens = rng.randrange(500, 8000)
        model.prefilled(tokens, STEP_S + tokens * PER_TOKEN_S)
    return model


def fetch(model: CostModel, tier: Tier, latency_s: float, rate: float, times: int = 60) -> None:
    """Teach it fetches of 64 to 4096 tokens at ``rate`` tokens a second."""
    for number in range(times):
        tokens = 64 << number % 7
        model.loaded(tier, tokens * TOKEN_BYTES, latency_s + tokens / rate)


def test_estimates_find_what_is_there() -> None:
    model, rng = CostModel(UNIT), random.Random(3)
    for _ in range(300):
        tokens, before = rng.randrange(100, 8000), rng.randrange(0, 30000)
        context = before + tokens / 2
        seconds = STEP_S + tokens * (PER_TOKEN_S + PER_CONTEXT_S * context)
        model.prefilled(tokens, seconds, context)
    for context in (0, 30000):
        true_s = 5000 * (PER_TOKEN_S + PER_CONTEXT_S * (context + 2500))
        assert model.compute_seconds(5000, context) == pytest.approx(true_s, rel=0.05)
    fetch(model, DISK, 0.004, 40000)
    speed = model.speed(DISK)
    assert speed is not None and model.speed(REMOTE) is None
    assert speed.latency_s == pytest.approx(0.004, rel=0.05)
    assert speed.byte_s == pytest.approx(1 / 40000 / TOKEN_BYTES, rel=0.05)
    assert "disk" in repr(model)


def test_steps_that_mostly_decode_and_odd_ones_change_little() -> None:
    model = taught()
    before = model.compute_seconds(4000, 0)
    assert before == pytest.approx(0.4, rel=0.05)
    for _ in range(200):
        model.prefilled(0, 0.02)
        model.prefilled(1, 0.02)
    model.prefilled(100, 30.0)
    assert model.compute_seconds(4000, 0) == pytest.approx(before, rel=0.1)
    for _ in range(100):  # control: what lasts is learnt
        model.prefilled(4000, 0.8)
    assert model.compute_seconds(4000, 0) == pytest.approx(0.8, rel=0.1)


def test_noise_that_is_no_news_is_ignored() -> None:
    model = CostModel(UNIT)
    model.prefilled(1000, 0.0)
    model.loaded(DISK, 0, 1.0)
    model.loaded(DISK, 1, 0.0)
    assert model.compute_seconds(1, 0) is None and model.speed(DISK) is None


# Choices -----------------------------------------------------------------------------------------


def segment(tier: Tier, tokens: int) -> TierSegment:
    return TierSegment(tier, tokens, tokens * TOKEN_BYTES)


def test_before_anything_is_known_it_loads_a_few_blocks() -> None:
    model = CostModel(48)
    assert model.choose(4000, 0, []) == LoadChoice(0, LoadReason.UNKNOWN, None, None, 1.0)
    held = [segment(DISK, 3840)]
    assert model.choose(4000, 0, held) == LoadChoice(48, LoadReason.UNKNOWN, None, None, 1.0)
    assert model.choose(4000, 0, held).tokens == 0  # the probe has not come back


def test_an_unknown_tier_is_probed_until_it_is_known() -> None:
    model, held = taught(), [segment(DISK, 3840)]
    for tokens in (32, 128, 32):
        choice = model.choose(4000, 0, held)
        assert (choice.tokens, choice.reason) == (tokens, LoadReason.PROBE)
        assert model.choose(4000, 0, held).reason is LoadReason.RECOMPUTE  # one at a time
        model.loaded(DISK, tokens * TOKEN_BYTES, 0.001 + tokens / 100_000)
    choice = model.choose(4000, 0, held)
    assert (choice.tokens, choice.reason) == (3840, LoadReason.LOAD)
    assert choice.load_s is not None and choice.compute_s is not None
    assert choice.load_s < 0.2 * choice.compute_s


def test_a_probe_that_nobody_reports_on_is_not_the_last() -> None:
    model, held = taught(), [segment(DISK, 3840)]
    reasons = [model.choose(4000, 0, held).reason for _ in range(200)]
    assert [at for at, reason in enumerate(reasons) if reason is LoadReason.PROBE] == [
        0,
        65,
        130,
        195,
    ]


def test_probes_of_a_slow_tier_stay_within_their_allowance() -> None:
    model, held = taught(), [segment(REMOTE, 3840)]
    fetch(model, REMOTE, 0.5, 1000)
    lost = spent = 0.0
    for _ in range(2000):
        choice = model.choose(4000, 0, held)
        spent += 0.4
        if choice.tokens:
            assert choice.reason is LoadReason.PROBE
            seconds = 0.5 + choice.tokens / 1000
            lost += seconds - choice.tokens * PER_TOKEN_S
            model.loaded(REMOTE, choice.tokens * TOKEN_BYTES, seconds)
    assert 0.003 * spent < lost < 0.004 * spent + 1.5  # saved up, and one that overdraws


def test_the_cut_is_where_the_whole_is_cheapest() -> None:
    model = taught()
    fetch(model, DISK, 0.002, 100_000)
    fetch(model, REMOTE, 0.002, 2_000)
    assert model.choose(4000, 0, [segment(DISK, 2000), segment(REMOTE, 1000)]).tokens == 2000
    slow_first = [segment(REMOTE, 16), segment(DISK, 3000)]
    assert model.choose(4000, 0, slow_first).tokens == 3016  # worth it for what follows
    slow_first = [segment(REMOTE, 1600), segment(DISK, 400)]
    assert model.choose(4000, 0, slow_first).tokens == 0
    refused = model.choose(4000, 0, slow_first)
    assert refused.load_s is not None and refused.compute_s is not None
    assert refused.load_s > refused.compute_s
    assert model.choose(4000, 0, []).tokens == 0


def test_deep_in_a_context_a_slower_fetch_is_worth_it() -> None:
    model, rng = CostModel(UNIT), random.Random(3)
    for _ in range(200):
        tokens, context = rng.randrange(500, 8000), rng.randrange(0, 60000)
        model.prefilled(tokens, tokens * (PER_TOKEN_S + PER_CONTEXT_S * context), context)
    fetch(model, DISK, 0.001, 6_000)
    held = [segment(DISK, 2000)]
    assert model.choose(2016, 0, held).reason is LoadReason.RECOMPUTE
    assert model.choose(2016, 50_000, held).reason is LoadReason.LOAD


def test_a_wait_is_given_up_when_both_ways_would_have_been_done() -> None:
    model = taught()
    fetch(model, DISK, 0.002, 100_000)
    fetch(model, REMOTE, 0.002, 11_000)
    fast = model.choose(4000, 0, [segment(DISK, 3840)])
    assert fast.give_up_s == fast.compute_s
    close = model.choose(4000, 0, [segment(REMOTE, 3840)])
    assert close.reason is LoadReason.LOAD
    assert close.give_up_s == pytest.approx(4 * (0.002 + 3840 / 11_000), rel=0.05)


@pytest.mark.parametrize(
    "held",
    [
        [TierSegment(DISK, 0, 1)],
        [TierSegment(DISK, 1, 0)],
        [segment(DISK, 60), segment(REMOTE, 60)],
    ],
)
def test_what_cannot_be_meant_is_refused(held: list[TierSegment]) -> None:
    with pytest.raises(Misuse):
        CostModel(UNIT).choose(100, 0, held)
    with pytest.raises(Misuse):
        CostModel(0)


seconds = st.floats(1e-6, 1e4)
events = st.lists(
    st.one_of(
        st.tuples(st.just("prefilled"), st.integers(0, 1 << 20), seconds, st.integers(0, 1 << 20)),
        st.tuples(st.just("loaded"), st.sampled_from(Tier), st.integers(0, 1 << 40), seconds),
        st.tuples(
            st.just("choose"),
            st.integers(0, 1 << 20),
            st.lists(st.tuples(st.sampled_from(Tier), st.integers(1, 9999)), max_size=4),
        ),
    ),
    max_size=60,
)


@given(events, st.sampled_from([1, 16, 528]))
def test_whatever_it_is_told_its_choices_make_sense(told: list[tuple[Any, ...]], unit: int) -> None:
    model = CostModel(unit)
    for name, *values in told:
        if name != "choose":
            getattr(model, name)(*values)
            continue
        context, parts = values
        held = [segment(tier, tokens) for tier, tokens in parts]
        total = sum(part.tokens for part in held)
        choice = model.choose(total + 1, context, held)
        assert 0 <= choice.tokens <= total
        starts = [sum(part.tokens for part in held[:end]) for end in range(len(held) + 1)]
        at_unit = any((choice.tokens - start) % unit == 0 for start in starts)
        assert choice.tokens in starts or at_unit
        assert (choice.tokens == 0) >= (choice.reason is LoadReason.RECOMPUTE)
        known = [s for s in (choice.load_s, choice.compute_s, choice.give_up_s) if s is not None]
        assert all(0.0 <= s < math.inf for s in known)
