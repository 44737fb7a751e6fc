"""Ranking policies: pick one of several targets. Pure: the same candidates, the same pick.

Loads are in tokens. An unknown foreign load counts as the highest known one and loses every tie,
so unknown is never idle. Equal targets take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from kvconnect.router.policy.fleet_view import EngineView, Target, TargetLoad
from kvconnect.router.policy.prefixes import CacheHit

_SPILL_FACTOR = 1.25  # of the mean load: above it, a session's request goes elsewhere


class RankingPolicy(StrEnum):
    """How a target is picked; values of the flags."""

    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    CACHE_AWARE = "cache_aware"
    SESSION = "session"


class RankingReason(StrEnum):
    """Why a target was picked."""

    ONLY = "only"  # the only candidate
    LEAST = "least_tokens"
    TURN = "turn"
    RANDOM = "random"
    LESS_OF_TWO = "less_of_two"
    HIT = "hit"  # cached tokens save more than the target's load costs
    NO_HIT = "no_hit"  # nothing cached, or too busy where cached: least tokens
    STICKY = "sticky"
    SPILLED = "spilled"  # the session's target was too busy
    NO_SESSION = "no_session"  # the request names no session: least tokens
    DRAINED = "drained"  # it is drained, and has the blocks of the stream that leaves it


class Candidate(NamedTuple):
    """A target that could serve the request.

    Attributes:
        name: the engine's name; equal after restarts and in all routers.
        hit: worth of the cached prompt tokens: tokens less the cost of loading them.
    """

    target: Target
    load: TargetLoad
    name: str = ""
    hit: float = 0.0


class RankingJob(NamedTuple):
    """The request to place.

    Attributes:
        tokens: length of the prompt.
        turn: number of the request, plus its attempts so far.
        draw: a random number, at least 0 and less than 1.
        session: the client's name for a series of requests; may be empty.
    """

    tokens: int
    turn: int
    draw: float = 0.0
    session: str = ""


class Pick(NamedTuple):
    """The picked candidate, and the reason."""

    candidate: Candidate
    why: RankingReason


def candidates_of(
    engines: Sequence[EngineView], hits: Mapping[Target, CacheHit]
) -> list[Candidate]:
    """Return the targets of engines; ``hits``: what they have cached."""
    return [
        Candidate(target, load, engine.name, hits[target].worth if target in hits else 0.0)
        for engine in engines
        for target, load in engine.targets
    ]


def pick(policy: RankingPolicy, candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    """Return the target of ``job``. There must be at least one candidate."""
    if len(candidates) == 1:
        return Pick(candidates[0], RankingReason.ONLY)
    return _POLICIES[policy](candidates, job)


def tokens_at(candidates: Sequence[Candidate]) -> list[int]:
    """Return the load of each candidate, with unknown foreign loads estimated. Never negative."""
    worst = max((candidate.load.foreign or 0 for candidate in candidates), default=0)
    return [
        candidate.load.own + (worst if candidate.load.foreign is None else candidate.load.foreign)
        for candidate in candidates
    ]


def least(candidates: Sequence[Candidate], costs: Sequence[float], turn: int) -> Candidate:
    """Return the candidate of least cost. Among equals: one of known load, then the one with the
    oldest last request, then by turn."""
    ranked = [
        (cost, candidate.load.foreign is None, candidate.load.sent)
        for cost, candidate in zip(costs, candidates, strict=True)
    ]
    best = min(ranked)
    ties = [candidate for key, candidate in zip(ranked, candidates, strict=True) if key == best]
    return ties[turn % len(ties)]


def _least_tokens(candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    return Pick(least(candidates, tokens_at(candidates), job.turn), RankingReason.LEAST)


def _round_robin(candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    return Pick(candidates[job.turn % len(candidates)], RankingReason.TURN)


def _random(candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    return Pick(candidates[int(job.draw * len(candidates))], RankingReason.RANDOM)


def _power_of_two(candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    others = len(candidates) - 1
    first, second = divmod(int(job.draw * len(candidates) * others), others)
    second += second >= first
    loads = tokens_at(candidates)
    two = [candidates[first], candidates[second]]
    return Pick(least(two, [loads[first], loads[second]], job.turn), RankingReason.LESS_OF_TWO)


def _cache_aware(candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    """Take the target with the least work until the prompt is computed: its load less the hit.

    A busier target is preferred to the least busy one only while the hit saves more than that.
    """
    loads = tokens_at(candidates)
    costs = [load - candidate.hit for load, candidate in zip(loads, candidates, strict=True)]
    best = least(candidates, costs, job.turn)
    return Pick(best, RankingReason.HIT if best.hit > 0 else RankingReason.NO_HIT)


def _session(candidates: Sequence[Candidate], job: RankingJob) -> Pick:
    """Rendezvous hashing: when a target is added or removed, only its own sessions move."""
    loads = tokens_at(candidates)
    if not job.session:
        return Pick(least(candidates, loads, job.turn), RankingReason.NO_SESSION)
    order = sorted(zip(candidates, loads, strict=True), key=lambda p: _weight(job.session, p[0]))
    bound = _SPILL_FACTOR * sum(loads) / len(loads) + job.tokens
    for index, (candidate, load) in enumerate(order):
        if load <= bound:
            return Pick(candidate, RankingReason.SPILLED if index else RankingReason.STICKY)
    raise AssertionError("one load is not above their mean")


def _weight(session: str, candidate: Candidate) -> bytes:
    """Return a hash that is equal in all routers and after restarts, unlike Python's ``hash``."""
    text = f"{session}\0{candidate.name}\0{candidate.target.rank}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


_POLICIES: dict[RankingPolicy, Callable[[Sequence[Candidate], RankingJob], Pick]] = {
    RankingPolicy.LEAST_TOKENS: _least_tokens,
    RankingPolicy.ROUND_ROBIN: _round_robin,
    RankingPolicy.RANDOM: _random,
    RankingPolicy.POWER_OF_TWO: _power_of_two,
    RankingPolicy.CACHE_AWARE: _cache_aware,
    RankingPolicy.SESSION: _session,
}
