"""Which engine a target is told to read a prompt's blocks from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvconnect.router.policy.fleet_view import EngineView, Role
from kvconnect.router.policy.prefixes import CacheHit, CacheHits

SOURCE_MIN_TOKENS = 256
"""More tokens that a source must have than the chosen target: asking it takes a step of the engine,
in which fewer are computed."""


def source_ticket(
    engines: Mapping[Role, Sequence[EngineView]],
    hits: CacheHits,
    own: EngineView,
    hit_tokens: int,
) -> str:
    """Return the share ticket of the target, in either role, that has the most of a prompt, if that
    is clearly more than the ``hit_tokens`` of the chosen one, at the engine ``own``; else ""."""
    found = [
        (hits.get(role, {}).get(place, CacheHit()).readable, -load.own, ticket)
        for role, those in engines.items()
        for engine in those
        if engine is own or (engine.pairs_with(own) and not engine.is_same(own))
        for place, load in engine.targets
        if (ticket := engine.share_ticket(place.rank))
    ]
    readable, _, ticket = max(found, default=(0, 0, ""))
    return ticket if readable - hit_tokens >= SOURCE_MIN_TOKENS else ""
