"""Where requests go: picks, pairs, loads and cached prefixes. No I/O."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.errors import Refused
from kvconnect.router.apis import APIS
from kvconnect.router.body import Prompt
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy import loads as loads_module
from kvconnect.router.policy.choice import (
    SOURCE_MIN_TOKENS,
    FailedTargets,
    Mode,
    RoutingReason,
    RoutingRequest,
    Unserved,
    choose,
    explain_no_choice,
)
from kvconnect.router.policy.fleet_view import (
    Engine,
    FleetView,
    Role,
    Target,
    TargetLoad,
    WorkerView,
)
from kvconnect.router.policy.loads import LoadQuery, Loads
from kvconnect.router.policy.prefixes import CacheHit, CacheTier, PrefixIndex, StoredBlocks
from kvconnect.router.policy.ranking import (
    Candidate,
    RankingJob,
    RankingPolicy,
    RankingReason,
    pick,
    tokens_at,
)
from tests.architecture import NOT_IN_PURE, imports

LOAD_AWARE = (RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE)


def candidates(*loads: tuple[int, int | None], hits: dict[int, float] | None = None) -> Any:
    """One candidate per (own, foreign)."""
    hits = hits or {}
    return [
        Candidate(Target(place), TargetLoad(*load), f"w{place}", hits.get(place, 0.0))
        for place, load in enumerate(loads)
    ]


def picked(policy: RankingPolicy, some: list[Candidate], **job: Any) -> int:
    return pick(
        policy, some, RankingJob(**{"tokens": 100, "turn": 0, **job})
    ).candidate.target.worker


# Picks ------------------------------------------------------------------------------------------

LOADS = st.lists(
    st.tuples(st.integers(0, 10**6), st.none() | st.integers(0, 10**6)), min_size=1, max_size=9
)
JOBS = st.builds(
    RankingJob,
    tokens=st.integers(0, 10**5),
    turn=st.integers(0, 10**6),
    draw=st.floats(0, 1, exclude_max=True),
    session=st.text(max_size=5),
)


@given(st.sampled_from(list(RankingPolicy)), LOADS, JOBS)
def test_a_pick_is_one_of_the_candidates_and_always_the_same(
    policy: RankingPolicy, loads: list[tuple[int, int | None]], job: RankingJob
) -> None:
    some = candidates(*loads)
    found = pick(policy, some, job)
    assert found.candidate in some
    assert pick(policy, some, job) == found
    assert min(tokens_at(some)) >= 0


@given(st.sampled_from(LOAD_AWARE), LOADS, JOBS)
def test_unknown_is_never_picked_while_a_known_one_is_idle(
    policy: RankingPolicy, loads: list[tuple[int, int | None]], job: RankingJob
) -> None:
    some = candidates(*loads, (0, 0))
    assert pick(policy, some, job).candidate.load.foreign is not None


@given(LOADS, JOBS)
def test_of_two_the_unknown_is_not_picked_before_an_idle_one(
    loads: list[tuple[int, int | None]], job: RankingJob
) -> None:
    found = pick(RankingPolicy.POWER_OF_TWO, candidates((0, None), (0, 0)), job)
    assert found.candidate.load.foreign == 0


@given(LOADS, JOBS)
def test_least_tokens_takes_the_least(loads: list[tuple[int, int | None]], job: RankingJob) -> None:
    some = candidates(*loads)
    place = pick(RankingPolicy.LEAST_TOKENS, some, job).candidate.target.worker
    assert tokens_at(some)[place] == min(tokens_at(some))


def test_an_unknown_one_counts_as_busy_as_the_busiest_known() -> None:
    assert tokens_at(candidates((5, None), (1, 10), (0, 70))) == [75, 11, 70]
    assert picked(RankingPolicy.LEAST_TOKENS, candidates((0, None), (0, 10))) == 1
    assert picked(RankingPolicy.LEAST_TOKENS, candidates((0, None), (11, 10))) == 0, (
        "it gets its turn"
    )


@pytest.mark.parametrize(
    "policy", [RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE, RankingPolicy.ROUND_ROBIN]
)
def test_equal_ones_take_turns(policy: RankingPolicy) -> None:
    some = candidates((7, 0), (7, 0), (7, 0))
    assert [picked(policy, some, turn=turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


def test_of_equal_ones_the_one_that_was_sent_to_longest_ago_is_picked() -> None:
    some = [Candidate(Target(n), TargetLoad(7, 0, sent)) for n, sent in enumerate([3.0, 1.0, 2.0])]
    assert {picked(RankingPolicy.LEAST_TOKENS, some, turn=turn) for turn in range(6)} == {1}


@pytest.mark.parametrize("policy", [RankingPolicy.RANDOM, RankingPolicy.POWER_OF_TWO])
def test_draws_are_spread_evenly(policy: RankingPolicy) -> None:
    some = candidates((0, 0), (0, 0), (0, 0), (0, 0))
    found = Counter(
        picked(policy, some, draw=draw / 1200, turn=draw * 7919 // 1200) for draw in range(1200)
    )
    assert all(250 <= found[place] <= 350 for place in range(4)), found


def test_power_of_two_takes_the_less_busy_of_its_two() -> None:
    some = candidates((3, 0), (2, 0), (1, 0))
    found = Counter(
        picked(RankingPolicy.POWER_OF_TWO, some, draw=draw / 600) for draw in range(600)
    )
    assert found == {2: 400, 1: 200}, "the busiest of all never wins"


def test_cache_aware_weighs_a_hit_against_the_load() -> None:
    def where(load: int, hit: float) -> tuple[int, RankingReason]:
        found = pick(
            RankingPolicy.CACHE_AWARE,
            candidates((load, 0), (0, 0), hits={0: hit}),
            RankingJob(1000, 1),
        )
        return found.candidate.target.worker, found.why

    assert where(0, 900.0) == (0, RankingReason.HIT)
    assert where(899, 900.0) == (0, RankingReason.HIT)
    assert where(901, 900.0) == (1, RankingReason.NO_HIT), "too busy for what it saves"
    assert where(0, 0.0)[1] is RankingReason.NO_HIT


@given(LOADS, st.dictionaries(st.integers(0, 8), st.floats(0, 1000)), JOBS)
def test_cache_aware_never_adds_more_load_than_it_saves(
    loads: list[tuple[int, int | None]], hits: dict[int, float], job: RankingJob
) -> None:
    some = candidates(*loads, hits=hits)
    found = pick(RankingPolicy.CACHE_AWARE, some, job).candidate
    tokens = tokens_at(some)
    assert tokens[found.target.worker] - min(tokens) <= found.hit + 1e-6


def test_a_session_stays_and_only_those_of_a_lost_target_move() -> None:
    some = candidates(*[(0, 0)] * 5)
    sessions = [f"s{n}" for n in range(200)]
    before = {session: picked(RankingPolicy.SESSION, some, session=session) for session in sessions}
    assert len(set(before.values())) == 5
    assert before == {s: picked(RankingPolicy.SESSION, some, session=s, turn=3) for s in sessions}
    after = {
        session: picked(RankingPolicy.SESSION, some[:4], session=session) for session in sessions
    }
    assert all(after[session] == place for session, place in before.items() if place != 4)


def test_a_session_moves_on_from_a_target_that_is_too_busy() -> None:
    idle = candidates(*[(0, 0)] * 4)
    home = picked(RankingPolicy.SESSION, idle, session="s", tokens=10)
    loads = [(0, 0)] * 4
    loads[home] = (10_000, 0)
    found = pick(RankingPolicy.SESSION, candidates(*loads), RankingJob(10, 0, 0.0, "s"))
    assert found.why is RankingReason.SPILLED and found.candidate.target.worker != home
    assert pick(RankingPolicy.SESSION, idle, RankingJob(10, 0)).why is RankingReason.NO_SESSION


@given(st.sampled_from(list(RankingPolicy)), st.integers(2, 6), st.integers(0, 2**32))
def test_nobody_starves(policy: RankingPolicy, number: int, seed: int) -> None:
    """Requests that stay: each target gets some, whichever the policy."""
    own, found = [0] * number, Counter[int]()
    for turn in range(40 * number):
        some = candidates(*[(tokens, 0) for tokens in own])
        draw = (seed + turn * 2654435761) % 2**32 / 2**32
        place = picked(policy, some, turn=turn, draw=draw, session=f"{seed} {turn}")
        own[place] += 100
        found[place] += 1
    assert len(found) == number, found


# Loads ------------------------------------------------------------------------------------------


class LoadsMachine(RuleBasedStateMachine):
    """Requests come and go on four ranks while reports arrive late, wrong or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.loads = Loads(stale_s=10.0)
        self.running: list[tuple[int | None, int]] = []
        self.asked: list[LoadQuery] = []

    @rule(rank=st.none() | st.integers(0, 3), tokens=st.integers(0, 1000))
    def begin(self, rank: int | None, tokens: int) -> None:
        if rank is not None and rank >= len(self.loads.own):
            rank = None
        self.loads.begin(rank, tokens, self.now)
        self.running.append((rank, tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.loads.end(*self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(passed=st.floats(0, 8))
    def time_passes(self, passed: float) -> None:
        self.now += passed

    @rule()
    def ask(self) -> None:
        self.asked.append(self.loads.ask(self.now))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), totals=st.lists(st.integers(-5, 3000), min_size=0, max_size=4))
    def report(self, data: st.DataObject, totals: list[int]) -> None:
        asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        used = self.loads.report(asked, dict(enumerate(totals)))
        assert not (used and (not totals or min(totals) < 0))

    @rule()
    def lost(self) -> None:
        self.loads.forget()

    @invariant()
    def own_tokens_are_those_of_running_requests(self) -> None:
        want = Counter[int]()
        for rank, tokens in self.running:
            want[rank or 0] += tokens
        assert all(self.loads.own[rank] == want[rank] for rank in range(len(self.loads.own)))

    @invariant()
    def nothing_is_negative(self) -> None:
        for load in self.loads.at(self.now):
            assert load.own >= 0 and (load.foreign is None or load.foreign >= 0)

    def teardown(self) -> None:
        while self.running:
            self.loads.end(*self.running.pop())
        assert sum(self.loads.own) == 0


TestLoads = LoadsMachine.TestCase


def tokens(loads: Loads, now: float) -> list[tuple[int, int | None]]:
    return [load[:2] for load in loads.at(now)]


def test_a_report_adds_only_what_is_not_ones_own() -> None:
    loads = Loads(stale_s=10.0)
    loads.begin(None, 500, 0.0)
    assert tokens(loads, 0.0) == [(500, None)]
    assert loads.report(loads.ask(0.0), {0: 700.0, 1: 30.0})
    assert tokens(loads, 0.0) == [(500, 200), (0, 30)]
    loads.begin(1, 1000, 0.5)
    assert tokens(loads, 0.5) == [(500, 200), (1000, 30)], "between two reports it is added"
    asked = loads.ask(1.0)
    loads.end(None, 500)
    assert loads.report(asked, {0: 700, 1: 1030})
    assert tokens(loads, 1.0) == [(0, 200), (1000, 30)], "covered, so it counts once"
    loads.end(1, 1000)
    assert tokens(loads, 1.0) == [(0, 200), (0, 30)]
    assert [load.sent for load in loads.at(1.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    "totals", [{}, {0: -1}, {0: 5, 1: -1}, {1: 5}, {0: float("nan")}, {0: float("inf")}]
)
def test_a_report_that_makes_no_sense_is_discarded(totals: dict[int, float]) -> None:
    loads = Loads(stale_s=10.0)
    assert loads.report(loads.ask(0.0), {0: 9})
    assert not loads.report(loads.ask(1.0), totals)
    assert loads.at(1.0) == (TargetLoad(0, 9),)


def test_a_stale_report_is_discarded_and_an_old_one_says_nothing() -> None:
    loads = Loads(stale_s=10.0)
    early, late = loads.ask(1.0), loads.ask(2.0)
    assert loads.report(late, {0: 5})
    assert not loads.report(early, {0: 0}), "overtaken"
    assert not loads.report(late, {0: 0}), "twice"
    assert loads.at(12.0) == (TargetLoad(0, 5),)
    assert loads.at(12.1) == (TargetLoad(0, None),)


def test_requests_end_after_an_engine_came_back_with_fewer_ranks() -> None:
    loads = Loads(stale_s=10.0)
    assert loads.report(loads.ask(0.0), {0: 0, 1: 0, 2: 0})
    loads.begin(2, 50, 0.0)
    loads.forget()
    assert loads.report(loads.ask(1.0), {0: 0})
    assert loads.at(1.0) == (TargetLoad(0, 0),)
    loads.end(2, 50)
    assert loads.own == (0, 0, 0)


# Pairs ------------------------------------------------------------------------------------------

ASK = Prompt(single=True, tokens=100)
GENERATE = next(api for api in APIS if api.path == "/generate")
OPTIONS = RouterOptions((), ())


def worker(index: int, *ranks: int, **more: Any) -> WorkerView:
    loads = tuple(TargetLoad(tokens, 0) for tokens in ranks) or (TargetLoad(0, 0),)
    return WorkerView(index, more.pop("up", True), loads, name=f"w{index}", **more)


def chosen(view: FleetView, options: RouterOptions = OPTIONS, **wish: Any) -> Any:
    return choose(
        view, RoutingRequest(**{"prompt": ASK, "turn": 0, **wish}), FailedTargets(), options
    )


def test_instances_and_ranks_are_chosen_together_by_the_least_tokens() -> None:
    view = FleetView((worker(0, 5, 9), worker(1, 7, 2)), (worker(0, 3, 3, 1), worker(1, 2)))
    found = chosen(view)
    assert found.prefill.target == Target(1, 1)
    assert found.decode.target == Target(0, 2)
    assert (found.prefill.why, found.prefill.tokens, found.prefill.hit) == (
        RankingReason.LEAST,
        100,
        0,
    )


def test_the_minimum_token_rank_of_the_engine_whose_turn_it_is() -> None:
    view = FleetView((worker(0, 5, 9), worker(1, 7, 2)), (worker(0),))
    turns = {"prefill_policy": RankingPolicy.ROUND_ROBIN}
    least = RouterOptions((), (), dp_minimum_tokens=True, **turns)
    assert [chosen(view, least, turn=turn).prefill.target for turn in range(4)] == [
        (0, 0),
        (1, 1),
        (0, 0),
        (1, 1),
    ]
    plain = RouterOptions((), (), **turns)
    assert [chosen(view, plain, turn=turn).prefill.target for turn in range(4)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_only_uncached_tokens_count() -> None:
    view = FleetView((worker(0, 0, 0), worker(1, 0)), (worker(0),))
    hits = {Role.PREFILL: {Target(0, 1): CacheHit(64, 64.0, 64)}}
    options = RouterOptions((), (), prefill_policy=RankingPolicy.CACHE_AWARE)
    found = chosen(view, options, hits=hits)
    assert (found.prefill.target, found.prefill.tokens, found.prefill.hit) == ((0, 1), 36, 64)
    assert found.decode.tokens == 100
    long = {Role.PREFILL: {Target(0, 1): CacheHit(640, 640.0, 640)}}
    assert chosen(view, options, hits=long).prefill.tokens == 0, "never negative"


@pytest.mark.parametrize("unified", [True, False])
def test_a_source_is_named_if_it_has_clearly_more(unified: bool) -> None:
    """Of targets that share, it is the one with most to read, the least busy of several."""
    role = Role.DECODE if unified else Role.PREFILL
    options = RouterOptions((), (), **{f"{role.value}_policy": RankingPolicy.CACHE_AWARE})

    def named(*hits: CacheHit, lost: tuple[int, ...] = ()) -> str:
        tickets = [None if index in lost else f"t{index}" for index in range(4)]
        workers = tuple(
            worker(index, load, share_tickets=(tickets[index],))
            for index, load in enumerate([0, 5000, 4000, 5000])  # the first one is chosen
        )
        prefill = () if unified else workers
        decode = workers if unified else (worker(0),)
        view = FleetView(prefill, decode, (), unified)
        found = {Target(index): hit for index, hit in enumerate(hits)}
        wish = {"prompt": Prompt(tokens=1000), "hits": {role: found}}
        choice = chosen(view, options, **wish)
        picked = choice.decode if unified else choice.prefill
        assert picked.target == Target(0)
        assert unified or not choice.decode.source, "what is handed off is not read elsewhere"
        assert picked.options == ({"source": picked.source} if picked.source else {})
        return str(picked.source)

    none, some = CacheHit(), CacheHit(300, 300.0, 300)
    more = CacheHit(300 + SOURCE_MIN_TOKENS, 500.0, 300 + SOURCE_MIN_TOKENS)
    assert named(none, some, more, some) == "t2"
    assert named(some, none, more, none) == "t2"
    assert named(some, none, more._replace(readable=299 + SOURCE_MIN_TOKENS), none) == ""
    assert named(none, more, more, none) == "t2", "the less busy one"
    assert named(more, none, more, none) == ""
    assert named(none, none, none, none) == ""
    assert named(none, some, more, none, lost=(2,)) == "t1"
    assert named(none, some, more, none, lost=(0,)) == "", "the chosen one cannot read"


def test_a_source_is_one_rank_of_an_engine() -> None:
    options = RouterOptions((), (), decode_policy=RankingPolicy.CACHE_AWARE)
    view = FleetView((), (worker(0, 0, 5000, share_tickets=("a", "b")),), (), True)
    hits = {Role.DECODE: {Target(0, 1): CacheHit(900, 900.0, 900)}}
    found = chosen(view, options, prompt=Prompt(tokens=1000), hits=hits).decode
    assert (found.target, found.source) == (Target(0, 0), "b")


def test_versions_and_engines_pair_only_with_their_like() -> None:
    view = FleetView(
        (worker(0, version="1"), worker(1, version="2"), worker(2, engine=Engine.SGLANG)),
        (worker(0, version="2"), worker(1, version="1"), worker(2, engine=Engine.SGLANG)),
    )
    pairs = [chosen(view, turn=turn) for turn in range(6)]
    assert [(p.prefill.target.worker, p.decode.target.worker) for p in pairs[:3]] == [
        (0, 1),
        (1, 0),
        (2, 2),
    ]
    assert [p.mode for p in pairs[:3]] == [Mode.PULL, Mode.PULL, Mode.BOOTSTRAP]
    split = FleetView((worker(0, version="1"),), (worker(0, version="2"),))
    assert chosen(split) is None
    assert "version differ" in explain_no_choice(split, RoutingRequest(ASK, 0))


def test_an_upgrade_gets_requests_by_the_smaller_side() -> None:
    view = FleetView(
        tuple(worker(n, version="1" if n < 3 else "2") for n in range(4)),
        tuple(worker(n, version="1" if n < 2 else "2") for n in range(4)),
    )
    found = Counter(chosen(view, turn=turn).prefill.target.worker >= 3 for turn in range(30))
    assert found == {False: 20, True: 10}


VERSIONS = st.sampled_from(["", "1", "2"])
ENGINES = st.sampled_from(list(Engine))
MODELS = st.sampled_from([frozenset(), frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})])
FLEETS = st.lists(st.tuples(st.booleans(), VERSIONS, ENGINES, MODELS), max_size=4)


@given(FLEETS, FLEETS, st.sampled_from(["", "a"]), st.integers(0, 99), st.booleans())
def test_any_choice_is_a_pair_that_can_hand_over(
    prefill: list[Any], decode: list[Any], model: str, turn: int, single: bool
) -> None:
    def fleet(some: list[Any]) -> tuple[WorkerView, ...]:
        return tuple(
            worker(n, up=up, version=version, engine=engine, models=models)
            for n, (up, version, engine, models) in enumerate(some)
        )

    view = FleetView(fleet(prefill), fleet(decode))
    prompt = Prompt(single, 10, model)
    found = chosen(view, prompt=prompt, turn=turn)
    pairs = [
        (p, d)
        for p in view.prefill
        for d in view.decode
        if p.up and d.up and p.pairs_with(d) and p.serves(model) and d.serves(model)
    ]
    if found is None:
        assert not pairs
        try:
            assert explain_no_choice(view, RoutingRequest(prompt, turn))
        except Unserved:
            assert not all(
                any(w.serves(model) for w in side) for side in (view.prefill, view.decode)
            )
    elif found.prefill is None:
        assert not single and view.decode[found.decode.target.worker].up
    else:
        p, d = view.prefill[found.prefill.target.worker], view.decode[found.decode.target.worker]
        assert (p, d) in pairs


def test_models_decide_who_may_serve() -> None:
    view = FleetView(
        (worker(0, models=frozenset({"a"})), worker(1, models=frozenset({"b"}))),
        (worker(0, models=frozenset({"b"})), worker(1, models=frozenset({"a"}))),
    )
    for turn in range(3):
        found = chosen(view, prompt=ASK._replace(model="b"), turn=turn)
        assert (found.prefill.target.worker, found.decode.target.worker) == (1, 0)
    missing = RoutingRequest(ASK._replace(model="c"), 0)
    assert choose(view, missing, FailedTargets(), OPTIONS) is None
    with pytest.raises(Unserved, match="The model `c` does not exist"):
        explain_no_choice(view, missing)
    unknown = FleetView((*view.prefill, worker(2, up=False)), (*view.decode, worker(2, up=False)))
    assert "serves the model 'c'" in explain_no_choice(unknown, missing)
    assert "no prefill engine is up" in explain_no_choice(
        FleetView((), view.decode), RoutingRequest(ASK, 0)
    )


@pytest.mark.parametrize(
    ("engine", "model", "serves"),
    [
        (Engine.SGLANG, "a:adapter", True),
        (Engine.SGLANG, "s3://m:adapter", True),
        (Engine.SGLANG, "b:adapter", False),
        (Engine.SGLANG, "ab", False),
        (Engine.VLLM, "a:adapter", False),
    ],
)
def test_sglang_takes_an_adapters_name_behind_the_models(
    engine: Engine, model: str, serves: bool
) -> None:
    assert worker(0, engine=engine, models=frozenset({"a", "s3://m"})).serves(model) == serves


def test_sglangs_own_requests_go_to_sglang() -> None:
    view = FleetView(
        (worker(0), worker(1, engine=Engine.SGLANG)), (worker(0), worker(1, engine=Engine.SGLANG))
    )
    assert {chosen(view, api=GENERATE, turn=turn).prefill.target.worker for turn in range(4)} == {1}
    several = chosen(view, api=GENERATE, prompt=Prompt(False, 5))
    assert (several.mode, several.reason) == (Mode.BOOTSTRAP, RoutingReason.DEFAULT)


def test_sglang_takes_several_prompts_but_not_several_answers() -> None:
    view = FleetView((worker(0, engine=Engine.SGLANG),), (worker(0, engine=Engine.SGLANG),))
    assert chosen(view, prompt=Prompt(False, 5)).mode is Mode.BOOTSTRAP
    several = Prompt(False, 5, sampled=True)
    assert chosen(view, prompt=several) is None
    with pytest.raises(Refused, match="without n, once for each answer"):
        explain_no_choice(view, RoutingRequest(several, 0))
    mixed = FleetView(view.prefill, (*view.decode, worker(1)))
    assert chosen(mixed, prompt=several).decode.target == Target(1)
    with pytest.raises(Refused):  # vLLM knows no /generate
        explain_no_choice(mixed, RoutingRequest(several, 0, api=GENERATE))
    down = FleetView(view.prefill, (*view.decode, worker(1, up=False)))
    assert chosen(down, prompt=several) is None
    assert "no decode engine of vLLM is up" in explain_no_choice(down, RoutingRequest(several, 0))


def test_the_decode_engine_of_an_earlier_attempt_is_kept_if_it_can_be() -> None:
    view = FleetView((worker(0), worker(1)), (worker(0), worker(1), worker(2)))
    assert {chosen(view, keep=2, turn=turn).decode.target.worker for turn in range(4)} == {2}
    gone = FleetView(view.prefill, (*view.decode[:2], worker(2, up=False)))
    assert chosen(gone, keep=2).decode.target.worker == 0


# Prefixes ---------------------------------------------------------------------------------------


def stored(
    tokens: list[int], first: int = 1, parent: int | None = None, **more: Any
) -> StoredBlocks:
    hashes = list(range(first, first + len(tokens) // 4))
    return StoredBlocks(hashes, parent, tokens, 4, more.get("tier", CacheTier.DEVICE))


A, B = Target(0), Target(1, 2)
TOKENS = list(range(16))


def test_the_longest_cached_prefix_of_each_target() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(B, stored(TOKENS[:8], first=70))
    assert index.match(TOKENS) == {A: CacheHit(16, 16.0, 16), B: CacheHit(8, 8.0, 8)}
    assert index.match(TOKENS[:15]) == {A: CacheHit(12, 12.0, 12), B: CacheHit(8, 8.0, 8)}
    assert index.match([9, *TOKENS]) == {}
    index.stored(B, stored([50, 51, 52, 53], first=80, parent=71))
    assert index.match([*TOKENS[:8], 50, 51, 52, 53])[B] == CacheHit(12, 12.0, 12)
    index.stored(B, stored([1, 2, 3, 4], first=90, parent=999))
    assert index.match([1, 2, 3, 4]) == {}, "its beginning is unknown"


def test_removal_ends_a_prefix_and_tiers_weigh() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(A, StoredBlocks([2], None, [], 4, CacheTier.HOST))
    index.removed(A, [2], CacheTier.DEVICE)
    assert index.match(TOKENS) == {A: CacheHit(16, 4 + 4 * 0.9 + 8, 16)}
    index.removed(A, [2, 2, 99], CacheTier.HOST)
    assert index.match(TOKENS) == {A: CacheHit(4, 4.0, 4)}
    index.cleared(A)
    assert (index.match(TOKENS), len(index), index.targets()) == ({}, 0, frozenset())


def test_what_is_only_on_a_disk_is_not_read_by_others() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(A, StoredBlocks([3], None, [], 4, CacheTier.DISK))
    assert index.match(TOKENS)[A].readable == 16
    index.removed(A, [3], CacheTier.DEVICE)
    assert index.match(TOKENS)[A] == CacheHit(16, 12 + 4 * 0.6, 8)
    index.stored(A, StoredBlocks([3], None, [], 4, CacheTier.HOST))
    assert index.match(TOKENS)[A].readable == 16


def test_blocks_of_different_sizes_do_not_meet() -> None:
    index = PrefixIndex()
    index.stored(A, stored(TOKENS))
    index.stored(B, StoredBlocks([1, 2], None, TOKENS, 8, CacheTier.DEVICE))
    assert index.match(TOKENS[:13]) == {A: CacheHit(12, 12.0, 12), B: CacheHit(8, 8.0, 8)}
    index.stored(A, StoredBlocks([5], None, [1, 2, 3], 4, CacheTier.DEVICE))
    assert index.match([1, 2, 3]) == {}, "the tokens do not fill its blocks"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from(["store", "move", "remove", "clear"]),
            st.lists(st.integers(0, 3), min_size=0, max_size=12),
            st.sampled_from(list(CacheTier)),
        ),
        max_size=30,
    )
)
def test_an_index_says_what_was_stored_and_no_more(events: list[Any]) -> None:
    index, model, names = PrefixIndex(), Model(), {}  # type: ignore[var-annotated]
    for target, what, drawn, tier in events:
        tokens = drawn[: len(drawn) // 4 * 4]
        chain = [tuple(tokens[: end + 4]) for end in range(0, len(tokens), 4)]
        hashes = [names.setdefault(prefix, len(names)) for prefix in chain]
        getattr(model, what)(target, chain, tier)
        if what == "remove":
            index.removed(target, hashes, tier)
        elif what == "clear":
            index.cleared(target)
        else:
            index.stored(
                target, StoredBlocks(hashes, None, tokens if what == "store" else [], 4, tier)
            )
    for prompt in names:
        for target in (A, B):
            assert index.match(prompt).get(target, CacheHit()).tokens == model.longest(
                target, prompt
            )
    for target in (A, B):
        index.cleared(target)
    assert len(index) == 0


class Model:
    """What an index stands for: the prefixes that each target holds, and in which tiers."""

    def __init__(self) -> None:
        self.held: dict[Target, dict[Any, set[CacheTier]]] = {A: {}, B: {}}

    def store(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        for prefix in chain:
            self.held[target].setdefault(prefix, set()).add(tier)

    def move(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        self.store(target, [prefix for prefix in chain if prefix in self.held[target]], tier)

    def remove(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        for prefix in chain:
            self.held[target].get(prefix, set()).discard(tier)
            if self.held[target].get(prefix) == set():
                del self.held[target][prefix]

    def clear(self, target: Target, chain: list[Any], tier: CacheTier) -> None:
        self.held[target].clear()

    def longest(self, target: Target, prompt: tuple[int, ...]) -> int:
        end = 0
        while end < len(prompt) and prompt[: end + 4] in self.held[target]:
            end += 4
        return end


# Purity -----------------------------------------------------------------------------------------


def test_decisions_do_no_io() -> None:
    folder = Path(loads_module.__file__).parent.parent
    for name in (
        *("policy/choice", "policy/loads", "policy/prefixes", "policy/ranking"),
        *("http/engine_bodies", "body", "apis"),
        *("fleet/kv_events", "fleet/pairing", "fleet/reports"),
    ):
        text = (folder / f"{name}.py").read_text()
        assert ast.parse(text)
        found = {item.target.split(".")[0] for item in imports(name, text)}
        assert not found & NOT_IN_PURE, name
