"""Cached prefixes by role and target: from KV events where they tell, else from history. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvconnect.router.policy.expected_ttft import Disaggregate
from kvconnect.router.policy.fleet_view import Role, Target
from kvconnect.router.policy.prefixes import CacheHit, CacheHits, PrefixIndex, PromptPrefix
from kvconnect.router.policy.prompt_history import History
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.router.policy.rules import RoutingRules


class Caches:
    """Cache lookups for the roles whose policy is cache-aware; for all if it depends on cached
    tokens whether a prompt is handed off. Not thread-safe."""

    def __init__(self, rules: RoutingRules) -> None:
        auto = rules.disaggregate is Disaggregate.AUTO
        aware = RankingPolicy.CACHE_AWARE
        roles = [role for role in Role if auto or rules.ranking(role) is aware]
        self.indexes = {role: PrefixIndex() for role in roles}
        self._histories = {role: History() for role in roles}

    @property
    def by_ids(self) -> bool:
        """Whether anything is known of prompts of token ids."""
        return any(len(index) or index.whole for index in self.indexes.values())

    def hits(self, prefix: PromptPrefix | None, tokens: int, *, base: bool) -> CacheHits:
        """Return the cached prefixes of a prompt of ``tokens`` tokens, by role and target.

        KV events answer for prompts of token ids; the history of sent prompts answers for others,
        for salted prompts, and for adapters (``base`` False), which events do not identify. Where
        events from the beginning are missing, the longer of both answers counts.
        """
        if prefix is None:
            return {}
        ids: Sequence[int] = prefix.token_ids if base and prefix.plain else ()
        found: dict[Role, dict[Target, CacheHit]] = {}
        for role, index in self.indexes.items():
            whole = index.whole if ids else frozenset()
            estimated = self._histories[role].match(prefix.chunk_hashes)
            here = {target: hit for target, hit in estimated.items() if target not in whole}
            for target, hit in index.match(ids).items():
                if target not in here or hit.tokens >= here[target].tokens:
                    here[target] = hit
            # The record knows bytes: media have many, and no tokens in the prompt's length.
            found[role] = {target: hit.within(tokens) for target, hit in here.items()}
        return found

    def sent(self, targets: Mapping[Role, Target], chunk_hashes: Sequence[int]) -> None:
        """Record that a prompt was sent to ``targets``."""
        for role, history in self._histories.items():
            if role in targets:
                history.sent(targets[role], chunk_hashes)

    def forget(self, role: Role, engine: int, ranks: int) -> None:
        """Forget the prompts sent to an engine that went down."""
        if role in self._histories:
            for rank in (None, *range(ranks)):
                self._histories[role].forget(Target(engine, rank))
