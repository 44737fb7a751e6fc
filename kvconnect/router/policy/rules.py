"""What an operator sets about the choice of engines. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.ranking import RankingPolicy


class RoutingRules(NamedTuple):
    """What an operator sets about choices.

    Attributes:
        prefill, decode: how an engine and rank of the role are ranked.
        pull: never push.
        push_min_tokens: prompts estimated to be shorter are pulled. Unit: tokens.
        dp_minimum_tokens: under policies that ignore loads, use the chosen engine's rank with the
            fewest tokens.
        disaggregate: whether prompts are handed off.
    """

    prefill: RankingPolicy = RankingPolicy.CACHE_AWARE
    decode: RankingPolicy = RankingPolicy.LEAST_TOKENS
    pull: bool = False
    push_min_tokens: int = 0
    dp_minimum_tokens: bool = False
    disaggregate: Disaggregate = Disaggregate.ALWAYS

    @property
    def within(self) -> RankingPolicy:
        """How a rank is picked of an engine that was chosen by a policy that ignores loads."""
        return RankingPolicy.LEAST_TOKENS if self.dp_minimum_tokens else RankingPolicy.ROUND_ROBIN

    def disaggregation(self, asked: Disaggregate | None) -> Disaggregate:
        """Return whether a prompt is handed off. ``asked``: by a client that may."""
        return self.disaggregate if asked is None else asked

    def ranking(self, role: Role) -> RankingPolicy:
        """Return how engines of a role are ranked."""
        return self.prefill if role is Role.PREFILL else self.decode
