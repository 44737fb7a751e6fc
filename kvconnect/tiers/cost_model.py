"""Load or recompute: how many of the tokens that slower tiers have are worth waiting for.

Of a request's prompt, tiers below host memory have a part. Whatever follows the first block that
is not loaded must be computed anyway, so the decision is one cut: load the tokens before it,
compute the rest. :class:`CostModel` learns from finished prefill steps and finished fetches what
both take here, and picks the cut. A fetch must be faster even if its estimate is somewhat off, so
large ones wait until smaller ones have shown what they take.

A tier that is not known is probed with a few blocks, three times. One that was refused for some
time is probed too, since networks recover; the time that those probes lose, as it turns out, comes
out of an allowance: a small part of what computing everything takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.types import Tier

_MEMORY = 32.0  # as many observations count; older ones fade
_ENOUGH = 3  # with fewer, an estimate is none
_ROUNDS = 4  # of the fit, per observation

_STEP_TOKENS = 1024  # a prefill step with fewer tokens counts for less
_STEP_SCALE = 256  # tokens; errors of steps are taken relative to their tokens plus these
_CONTEXT_SCALE = 8192  # tokens; keeps the terms of the fit of one size
_STEP_OUTLIER = 3.0  # a step that took longer than expected by more than this counts as this

_FETCH_SCALE = 1 << 20  # bytes; as above, and about what a round trip is worth
_FETCH_OUTLIER = 10.0
_SURPRISE = 3.0  # two fetches in a row off by this, to one side: the tier has changed
_DOUBT = 0.25  # what older observations are worth then
_CAUTION = 1.5  # standard errors by which a fetch must be faster
_GIVE_UP = 4.0  # times what was expected
_BLIND_S = 1.0  # to wait for a fetch when nothing is known of the engine

_PROBE_TOKENS = 32
_PROBE_GROWTH = 4  # every other probe is larger, which tells latency from bandwidth
_PROBE_SURE = 1024  # tokens; a larger probe must be cheap even if its estimate is off
_PROBE_EVERY = 8  # refused offers of a tier that is known
_PATIENCE = 64  # offers after which a probe is taken for lost
_ALLOWANCE = 0.004  # of the time to compute everything, for what probes lose
_SAVED_S = 0.5  # of it can be saved up


class LoadReason(str, Enum):
    """Why a cut was chosen. Values are metric labels."""

    LOAD = "load"  # expected to be faster
    RECOMPUTE = "recompute"  # no cut is
    PROBE = "probe"  # a few blocks more than is worth it, to learn what a tier does now
    UNKNOWN = "unknown"  # nothing is known of the engine yet; at most a few blocks


class TierSegment(NamedTuple):
    """Consecutive tokens that ``tier`` has, and the bytes to fetch for them."""

    tier: Tier
    tokens: int
    nbytes: int

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of the first ``tokens`` tokens."""
        return max(1, self.nbytes * tokens // self.tokens)


class LoadChoice(NamedTuple):
    """Load the first ``tokens`` tokens, compute the rest.

    ``load_s`` are the seconds expected for that, a probe's part left out; where nothing is to be
    loaded, for the best cut that was refused. ``compute_s`` are those for computing everything.
    None: not known. Fetches not done after ``give_up_s`` are better given up for computing: it is
    never less than that takes, nor than four times what was expected.
    """

    tokens: int
    reason: LoadReason
    load_s: float | None
    compute_s: float | None
    give_up_s: float


class Speed(NamedTuple):
    """What fetches from a tier take: seconds for each, and seconds per byte."""

    latency_s: float
    byte_s: float


class CostModel:
    """Estimates for one engine, and the choice. For one thread; its state does not grow.

    Args:
        unit_tokens: cuts within a segment are at multiples of this many tokens from its start.
    """

    def __init__(self, unit_tokens: int) -> None:
        if unit_tokens < 1:
            raise Misuse(f"a unit has at least one token, not {unit_tokens}")
        self._unit = unit_tokens
        self._prefill = _Fit(3)
        self._tiers: dict[Tier, _TierCost] = {}
        self._allowance_s = 0.0  # negative: probes took more than was saved up

    def __repr__(self) -> str:
        tiers = {tier.value: self.speed(tier) for tier in self._tiers}
        return f"<CostModel {self.compute_seconds(1000, 0)} s per 1000 tokens, {tiers}>"

    def prefilled(self, tokens: int, seconds: float, context: float = 0.0) -> None:
        """Note an engine step that computed ``tokens`` prompt tokens; one without is ignored.

        Args:
            context: tokens before each of them, on average. Always 0: its cost is not estimated.
        """
        if tokens < 1 or seconds <= 0.0:
            return
        scale = tokens + _STEP_SCALE
        share = tokens / scale
        terms = share, share * context / _CONTEXT_SCALE, 1.0 - share
        value = seconds / scale
        if self._prefill.count >= _ENOUGH:
            value = min(value, _STEP_OUTLIER * self._prefill.at(terms))
        self._prefill.add(terms, value, min(1.0, tokens / _STEP_TOKENS))

    def loaded(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """Note a fetch of ``nbytes`` for one request, finished or given up, and the seconds from
        its order to its end. The first after a probe of the tier is taken for the probe."""
        if nbytes < 1 or seconds <= 0.0:
            return
        cost = self._tiers.setdefault(tier, _TierCost())
        if cost.probe_s is not None:
            self._allow(cost.probe_s - seconds)
            cost.probe_s = None
        cost.add(nbytes, seconds)

    def compute_seconds(self, tokens: int, context: int) -> float | None:
        """Return what computing ``tokens`` after ``context`` others adds to a step, if known."""
        if self._prefill.count < _ENOUGH:
            return None
        per_token, per_context, _ = self._prefill.factors
        attended = (context + tokens / 2) / _CONTEXT_SCALE
        return tokens * (per_token + per_context * attended)

    def speed(self, tier: Tier) -> Speed | None:
        """Return the estimate for a tier, if there is one."""
        cost = self._tiers.get(tier)
        if cost is None or not cost.known:
            return None
        return Speed(cost.seconds(0), (cost.seconds(_FETCH_SCALE) - cost.seconds(0)) / _FETCH_SCALE)

    def choose(self, tokens: int, context: int, segments: Sequence[TierSegment]) -> LoadChoice:
        """Return the cut for a request. Asked once for each request that has segments, since each
        time counts as an offer.

        Args:
            tokens: those of the prompt that must be computed if nothing is loaded.
            context: tokens before them.
            segments: what tiers have of them, from the first on, in prefix order.

        Raises:
            Misuse: an empty segment, or more tokens in segments than ``tokens``.
        """
        if any(part.tokens < 1 or part.nbytes < 1 for part in segments):
            raise Misuse("a segment is empty")
        if sum(part.tokens for part in segments) > tokens:
            raise Misuse(f"segments have more than the request's {tokens} tokens")
        compute_s = self.compute_seconds(tokens, context)
        if compute_s is None:
            probe = self._probe(segments, 0, context)
            return LoadChoice(probe, LoadReason.UNKNOWN, None, None, _BLIND_S)
        self._allow(_ALLOWANCE * compute_s)
        cut, load_s = self._best(context, segments, compute_s)
        probe = self._probe(segments, cut, context)
        reason = LoadReason.PROBE if probe else LoadReason.LOAD if cut else LoadReason.RECOMPUTE
        fetch_s = self._fetch(segments, cut + probe)[0]
        return LoadChoice(
            cut + probe, reason, load_s, compute_s, max(compute_s, _GIVE_UP * fetch_s)
        )

    def _best(
        self, context: int, segments: Sequence[TierSegment], compute_s: float
    ) -> tuple[int, float | None]:
        """Return the best cut and the seconds expected for it, or 0 and those for the best of the
        others. Ends of segments are enough: within one, each token costs the same to fetch and
        ever more to compute."""
        best, best_s = 0, math.inf
        least, refused_s = compute_s, math.inf
        cut = 0
        for part in segments:
            cost = self._tiers.get(part.tier)
            if cost is None or not cost.known:
                break
            cut += part.tokens
            fetch_s, doubt_s = self._fetch(segments, cut)
            rest_s = compute_s - (self.compute_seconds(cut, context) or 0.0)
            if fetch_s + doubt_s + rest_s < least:
                least = fetch_s + doubt_s + rest_s
                best, best_s = cut, fetch_s + rest_s
            refused_s = min(refused_s, fetch_s + rest_s)
        load_s = best_s if best else refused_s
        return best, load_s if load_s < math.inf else None

    def _fetch(self, segments: Sequence[TierSegment], cut: int) -> tuple[float, float]:
        """Return the seconds expected to fetch the tokens before the cut, and the doubt in them;
        a tier that is not known counts nothing."""
        sizes: dict[Tier, int] = {}
        for part in segments:
            tokens = min(part.tokens, cut)
            if tokens and self._tiers[part.tier].known:
                sizes[part.tier] = sizes.get(part.tier, 0) + part.bytes_of(tokens)
            cut -= tokens
        costs = [(self._tiers[tier], size) for tier, size in sizes.items()]
        fetch_s = sum(cost.seconds(size) for cost, size in costs)
        return fetch_s, sum(cost.doubt(size) for cost, size in costs)

    def _probe(self, segments: Sequence[TierSegment], cut: int, context: int) -> int:
        """Return how many tokens after the cut to load only to learn about the tier that has them;
        0 if it is not due or the allowance is used up."""
        start = 0
        for part in segments:
            if start == cut:
                break
            start += part.tokens
        else:
            return 0
        cost = self._tiers.setdefault(part.tier, _TierCost())
        if self._allowance_s < 0.0 or not cost.due():
            return 0
        tokens = self._probe_tokens(cost, part, context + cut)
        compute_s = self.compute_seconds(tokens, context + cut) or 0.0
        if cost.known:
            cost.probe_s = cost.seconds(part.bytes_of(tokens))
            self._allow(min(0.0, compute_s - cost.probe_s))
        return tokens

    def _probe_tokens(self, cost: _TierCost, part: TierSegment, context: int) -> int:
        """Return a few blocks, or as many as are expected to lose no more than those or than the
        allowance: near a tie whole segments, and many where each fetch costs much."""

        def loss_s(tokens: int) -> float:
            nbytes = part.bytes_of(tokens)
            compute_s = self.compute_seconds(tokens, context) or 0.0
            doubt_s = cost.doubt(nbytes) if tokens > _PROBE_SURE else 0.0
            return cost.seconds(nbytes) + doubt_s - compute_s

        least = _PROBE_TOKENS * (1 if cost.probes % 2 else _PROBE_GROWTH)
        tokens = min(part.tokens, -(-least // self._unit) * self._unit)
        if not cost.known:
            return tokens
        bound_s = max(self._allowance_s, loss_s(tokens))
        while tokens < part.tokens:
            larger = min(part.tokens, tokens * _PROBE_GROWTH)
            if loss_s(larger) > bound_s:
                break
            tokens = larger
        return tokens

    def _allow(self, seconds: float) -> None:
        self._allowance_s = min(_SAVED_S, self._allowance_s + seconds)


class _TierCost:
    """What fetches from one tier take, and when it was last heard of."""

    def __init__(self) -> None:
        self.probes = 0
        self.probe_s: float | None = None  # what the probe under way was taken to cost
        self._fit = _Fit(2)
        self._seen = 0  # fetches; no more than are enough to know it
        self._offers = 0  # refused since the last fetch; negative while a probe is awaited
        self._side = 0  # whether the last fetch was far slower (1) or faster (-1) than expected

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self._seen >= _ENOUGH

    def seconds(self, nbytes: int) -> float:
        """Return what a fetch of so many bytes is expected to take."""
        return self._fit.at((1.0, nbytes / _FETCH_SCALE))

    def doubt(self, nbytes: int) -> float:
        """Return by how many seconds that may well be too little; infinite if nothing tells."""
        return _CAUTION * self._fit.error((1.0, nbytes / _FETCH_SCALE))

    def due(self) -> bool:
        """Note an offer that was refused; return whether to probe, which is begun then."""
        self._offers += 1
        if self._offers < (_PROBE_EVERY if self.known else 1):
            return False
        self._offers = -_PATIENCE
        self.probes += 1
        return True

    def add(self, nbytes: int, seconds: float) -> None:
        """Note a fetch."""
        scale = nbytes / _FETCH_SCALE + 1.0
        terms = (1.0 / scale, 1.0 - 1.0 / scale)
        value, expected = seconds / scale, self._fit.at(terms)
        side = 0
        if expected > 0.0:
            value = min(value, _FETCH_OUTLIER * expected)
            side = (value > expected * _SURPRISE) - (value < expected / _SURPRISE)
            if side and side == self._side:
                self._fit.fade(_DOUBT)
        self._side = side
        self._seen = min(_ENOUGH, self._seen + 1)
        self._offers = _PROBE_EVERY if side < 0 else 0  # it may have recovered: look again at once
        self._fit.add(terms, value, 1.0)


class _Fit:
    """A sum of terms with factors >= 0 fitted to observations, of which older ones fade."""

    def __init__(self, size: int) -> None:
        self.count = 0.0
        self.factors = [0.0] * size
        self._products = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size
        self._squares = 0.0  # of the errors made

    def at(self, terms: Sequence[float]) -> float:
        """Return the fitted value."""
        return sum(factor * term for factor, term in zip(self.factors, terms, strict=True))

    def error(self, terms: tuple[float, float]) -> float:
        """Return the standard error of the fitted value, of a fit of two terms."""
        (aa, ab), (_, bb) = self._products
        a, b = terms
        spread = aa * bb - ab * ab
        if spread <= 1e-9 * aa * bb:
            return math.inf
        return math.sqrt(
            self._squares / self.count * (a * a * bb - 2 * a * b * ab + b * b * aa) / spread
        )

    def fade(self, share: float) -> None:
        """Give what was observed so far only this share of its weight."""
        self.count *= share
        self._squares *= share
        self._moments = [share * value for value in self._moments]
        self._products = [[share * value for value in row] for row in self._products]

    def add(self, terms: Sequence[float], value: float, weight: float) -> None:
        """Note an observation; ``weight`` in (0, 1]."""
        self.fade(1.0 - weight / _MEMORY)
        if self.count:
            self._squares += weight * (value - self.at(terms)) ** 2
        self.count += weight
        for row, (left, products) in enumerate(zip(terms, self._products, strict=True)):
            self._moments[row] += weight * left * value
            for column, right in enumerate(terms):
                products[column] += weight * left * right
        for _ in range(_ROUNDS):
            self._improve()

    def _improve(self) -> None:
        """Move each factor to its best value >= 0 given the others; it starts from the last fit,
        so what observations cannot tell apart stays as it was."""
        for row, products in enumerate(self._products):
            if products[row] > 0.0:
                rest = self.at(products) - products[row] * self.factors[row]
                self.factors[row] = max(0.0, (self._moments[row] - rest) / products[row])
