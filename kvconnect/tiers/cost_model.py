"""Load or recompute: decides how many tokens to load from slower tiers.

Lower tiers have a part of a request's prompt. Everything after the first block that is not loaded
must be computed, so the decision is one cut: load the tokens before it, compute the rest.
:class:`CostModel` learns the cost of both from finished prefill steps and finished loads, and
chooses the cut. A load must be faster even if its estimate is somewhat wrong, so large loads wait
until smaller ones have been measured.

An unknown tier is probed with a few blocks, three times. A tier that was refused for some time is
probed too, since networks recover. The time that such probes lose is limited by an allowance, a
small part of the time to compute everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.types import Tier

_MEMORY = 32.0  # effective number of observations; older ones fade
_ENOUGH = 3  # observations needed for an estimate
_ROUNDS = 4  # of the fit, per observation

_STEP_TOKENS = 1024  # a prefill step with fewer tokens has less weight
_STEP_SCALE = 256  # tokens; the error of a step is relative to its tokens plus this number
_CONTEXT_SCALE = 8192  # tokens; gives the terms of the fit a similar size
_STEP_OUTLIER = 3.0  # a step counts at most this many times its expected time

_LOAD_SCALE = 1 << 20  # bytes; as _STEP_SCALE, and about the cost of a round trip
_LOAD_OUTLIER = 10.0
_SURPRISE = 3.0  # two loads in a row slower, or faster, by this factor: the tier has changed
_SURPRISE_WEIGHT = 0.25  # weight of older observations after a surprise
_CAUTION = 1.5  # standard errors by which a load must be faster
_GIVE_UP = 4.0  # times the expected time
_BLIND_S = 1.0  # to wait for a load while nothing is known of the engine

_PROBE_TOKENS = 32
_PROBE_GROWTH = 4  # every other probe is larger, to separate latency from bandwidth
_PROBE_SURE = 1024  # tokens; a larger probe must be cheap even if its estimate is wrong
_PROBE_EVERY = 8  # refused offers of a known tier
_PATIENCE = 64  # offers after which a probe counts as lost
_ALLOWANCE = 0.004  # of the time to compute everything, for the losses of probes
_SAVED_S = 0.5  # maximum of unused allowance


class LoadReason(StrEnum):
    """Reason for a cut. Values are metric labels."""

    LOAD = "load"  # loading is expected to be faster
    RECOMPUTE = "recompute"  # no load is expected to be faster
    PROBE = "probe"  # a few blocks more than pay off, to measure a tier
    UNKNOWN = "unknown"  # nothing is known of the engine yet; at most a few blocks are loaded


class TierSegment(NamedTuple):
    """Consecutive tokens that ``tier`` has, and the bytes to load for them."""

    tier: Tier
    tokens: int
    nbytes: int

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of the first ``tokens`` tokens."""
        return max(1, self.nbytes * tokens // self.tokens)


class LoadChoice(NamedTuple):
    """Load the first ``tokens`` tokens, compute the rest.

    ``load_s`` is the expected time of that in seconds, without a probe; if nothing is loaded, of
    the best refused cut. ``compute_s`` is the expected time to compute everything. None: unknown.
    A load that takes longer than ``give_up_s`` should be given up. It is at least ``compute_s`` and
    four times the expected time of the load.
    """

    tokens: int
    reason: LoadReason
    load_s: float | None
    compute_s: float | None
    give_up_s: float


class Speed(NamedTuple):
    """Cost of loads from a tier: seconds per load, and seconds per byte."""

    latency_s: float
    byte_s: float


class CostModel:
    """Estimates costs for one engine and chooses cuts. For one thread; its state does not grow.

    Args:
        unit_tokens: a cut within a segment is a multiple of this many tokens from its start.
    """

    def __init__(self, unit_tokens: int) -> None:
        if unit_tokens < 1:
            raise Misuse(f"a unit must have at least one token, not {unit_tokens}")
        self._unit = unit_tokens
        self._prefill = _Fit(3)
        self._tiers: dict[Tier, _TierCost] = {}
        self._allowance_s = 0.0  # negative: probes took more than was saved up

    def __repr__(self) -> str:
        tiers = {tier.value: self.speed(tier) for tier in self._tiers}
        return f"<CostModel {self.compute_seconds(1000, 0)} s per 1000 tokens, {tiers}>"

    def prefilled(self, tokens: int, seconds: float, context: float = 0.0) -> None:
        """Note an engine step that computed ``tokens`` prompt tokens; 0 tokens are ignored.

        Args:
            context: average number of tokens before each. If always 0, its cost is not estimated.
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
        """Note a load of ``nbytes`` for one request, finished or given up, and its seconds. The
        first load after a probe of the tier counts as the probe."""
        if nbytes < 1 or seconds <= 0.0:
            return
        cost = self._tiers.setdefault(tier, _TierCost())
        if cost.probe_s is not None:
            self._allow(cost.probe_s - seconds)
            cost.probe_s = None
        cost.add(nbytes, seconds)

    def compute_seconds(self, tokens: int, context: int) -> float | None:
        """Return the seconds that computing ``tokens`` after ``context`` others adds to a step."""
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
        return Speed(cost.seconds(0), (cost.seconds(_LOAD_SCALE) - cost.seconds(0)) / _LOAD_SCALE)

    def choose(self, tokens: int, context: int, segments: Sequence[TierSegment]) -> LoadChoice:
        """Return the cut for a request. Call this once per request, since each call counts as an
        offer of its tiers.

        Args:
            tokens: prompt tokens that must be computed if nothing is loaded.
            context: number of tokens before them.
            segments: the first of these tokens by the tier that has them, in prefix order.

        Raises:
            Misuse: an empty segment, or more tokens in segments than ``tokens``.
        """
        if any(part.tokens < 1 or part.nbytes < 1 for part in segments):
            raise Misuse("a segment is empty")
        if sum(part.tokens for part in segments) > tokens:
            raise Misuse(f"segments have more tokens than the request, which has {tokens}")
        compute_s = self.compute_seconds(tokens, context)
        if compute_s is None:
            probe = self._probe(segments, 0, context)
            return LoadChoice(probe, LoadReason.UNKNOWN, None, None, _BLIND_S)
        self._allow(_ALLOWANCE * compute_s)
        cut, load_s = self._best(context, segments, compute_s)
        probe = self._probe(segments, cut, context)
        reason = LoadReason.PROBE if probe else LoadReason.LOAD if cut else LoadReason.RECOMPUTE
        load_cost_s = self._load_cost(segments, cut + probe)[0]
        return LoadChoice(
            cut + probe, reason, load_s, compute_s, max(compute_s, _GIVE_UP * load_cost_s)
        )

    def _best(
        self, context: int, segments: Sequence[TierSegment], compute_s: float
    ) -> tuple[int, float | None]:
        """Return the best cut and its expected seconds, or 0 and those of the best refused cut.

        Only ends of segments are tried: within a segment, each token costs the same to load and
        more to compute than the one before.
        """
        best, best_s = 0, math.inf
        least, refused_s = compute_s, math.inf
        cut = 0
        for part in segments:
            cost = self._tiers.get(part.tier)
            if cost is None or not cost.known:
                break
            cut += part.tokens
            load_cost_s, error_s = self._load_cost(segments, cut)
            rest_s = compute_s - (self.compute_seconds(cut, context) or 0.0)
            if load_cost_s + error_s + rest_s < least:
                least = load_cost_s + error_s + rest_s
                best, best_s = cut, load_cost_s + rest_s
            refused_s = min(refused_s, load_cost_s + rest_s)
        load_s = best_s if best else refused_s
        return best, load_s if load_s < math.inf else None

    def _load_cost(self, segments: Sequence[TierSegment], cut: int) -> tuple[float, float]:
        """Return the expected seconds to load the tokens before the cut, and their uncertainty.
        An unknown tier counts 0."""
        sizes: dict[Tier, int] = {}
        for part in segments:
            tokens = min(part.tokens, cut)
            if tokens and self._tiers[part.tier].known:
                sizes[part.tier] = sizes.get(part.tier, 0) + part.bytes_of(tokens)
            cut -= tokens
        costs = [(self._tiers[tier], size) for tier, size in sizes.items()]
        load_cost_s = sum(cost.seconds(size) for cost, size in costs)
        return load_cost_s, sum(cost.error(size) for cost, size in costs)

    def _probe(self, segments: Sequence[TierSegment], cut: int, context: int) -> int:
        """Return how many tokens after the cut to load as a probe of their tier; 0 if no probe is
        due or the allowance is used up."""
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
        """Return the tokens of a probe: a few blocks, or more if the expected loss is no larger
        than theirs or than the allowance."""

        def loss_s(tokens: int) -> float:
            nbytes = part.bytes_of(tokens)
            compute_s = self.compute_seconds(tokens, context) or 0.0
            error_s = cost.error(nbytes) if tokens > _PROBE_SURE else 0.0
            return cost.seconds(nbytes) + error_s - compute_s

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
    """Estimated cost of loads from one tier, and the state of its probes."""

    def __init__(self) -> None:
        self.probes = 0
        self.probe_s: float | None = None  # expected cost of the running probe
        self._fit = _Fit(2)
        self._seen = 0  # loads, at most _ENOUGH
        self._offers = 0  # refused since the last load; negative while a probe is awaited
        self._side = 0  # 1 if the last load was far slower than expected, -1 if far faster

    @property
    def known(self) -> bool:
        """Whether the tier has an estimate."""
        return self._seen >= _ENOUGH

    def seconds(self, nbytes: int) -> float:
        """Return the expected seconds of a load."""
        return self._fit.at((1.0, nbytes / _LOAD_SCALE))

    def error(self, nbytes: int) -> float:
        """Return the uncertainty of :meth:`seconds`; infinite if it cannot be estimated."""
        return _CAUTION * self._fit.error((1.0, nbytes / _LOAD_SCALE))

    def due(self) -> bool:
        """Note a refused offer. Return True if a probe is due, which starts then."""
        self._offers += 1
        if self._offers < (_PROBE_EVERY if self.known else 1):
            return False
        self._offers = -_PATIENCE
        self.probes += 1
        return True

    def add(self, nbytes: int, seconds: float) -> None:
        """Note a load."""
        scale = nbytes / _LOAD_SCALE + 1.0
        terms = (1.0 / scale, 1.0 - 1.0 / scale)
        value, expected = seconds / scale, self._fit.at(terms)
        side = 0
        if expected > 0.0:
            value = min(value, _LOAD_OUTLIER * expected)
            side = (value > expected * _SURPRISE) - (value < expected / _SURPRISE)
            if side and side == self._side:
                self._fit.fade(_SURPRISE_WEIGHT)
        self._side = side
        self._seen = min(_ENOUGH, self._seen + 1)
        self._offers = _PROBE_EVERY if side < 0 else 0  # a recovered tier is probed again at once
        self._fit.add(terms, value, 1.0)


class _Fit:
    """Fits a sum of terms with factors >= 0 to observations; older observations fade."""

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
        """Return the standard error of the fitted value. Only for fits of two terms."""
        (aa, ab), (_, bb) = self._products
        a, b = terms
        spread = aa * bb - ab * ab
        if spread <= 1e-9 * aa * bb:
            return math.inf
        return math.sqrt(
            self._squares / self.count * (a * a * bb - 2 * a * b * ab + b * b * aa) / spread
        )

    def fade(self, share: float) -> None:
        """Multiply the weight of earlier observations by ``share``."""
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
        """Move each factor to its best value >= 0 given the others. This starts from the last fit,
        so factors that the observations do not determine keep their values."""
        for row, products in enumerate(self._products):
            if products[row] > 0.0:
                rest = self.at(products) - products[row] * self.factors[row]
                self.factors[row] = max(0.0, (self._moments[row] - rest) / products[row])
