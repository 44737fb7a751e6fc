"""Where a request to one engine goes. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvconnect.protocol.options import SOURCE
from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.ranking import RankingReason

_CACHED_PER_COMPUTED = 8
"""Cached tokens that are as much load as a computed one."""


class TargetChoice(NamedTuple):
    """The target of a request to an engine, and the reason.

    Attributes:
        tokens: prompt tokens that the target has to compute or receive.
        hit: prompt tokens that the target is expected to have cached.
        source: share ticket of an engine that has clearly more of them; may be empty.
        loading: computed tokens that take as long as loading the cached ones.
    """

    target: Target
    why: RankingReason
    tokens: int = 0
    hit: int = 0
    source: str = ""
    loading: int = 0

    @property
    def load_tokens(self) -> int:
        """Load of the target: cached tokens have a place in its batches, too."""
        return self.tokens + self.hit // _CACHED_PER_COMPUTED

    @property
    def work_tokens(self) -> int:
        """Computed tokens that take as long as the prompt at the target."""
        return self.tokens + self.loading

    @property
    def options(self) -> dict[str, str]:
        """What the request says of its prompt's blocks."""
        return {SOURCE: self.source} if self.source else {}
