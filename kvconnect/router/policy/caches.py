"""What targets have cached of a prompt, from the best source there is for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvconnect.router.body import CHUNK_TOKENS, PromptPrefix
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.choice import CacheHits, RoutingChoice, TargetChoice
from kvconnect.router.policy.loads import Role, Target
from kvconnect.router.policy.prefixes import CacheHit, CacheTier, PrefixIndex, StoredBlocks
from kvconnect.router.policy.ranking import RankingPolicy


class Caches:
    """The views of the roles whose policy looks at caches. On the event loop."""

    def __init__(self, options: RouterOptions) -> None:
        policies = {Role.PREFILL: options.prefill_policy, Role.DECODE: options.decode_policy}
        roles = [role for role, policy in policies.items() if policy is RankingPolicy.CACHE_AWARE]
        self.indexes = {role: PrefixIndex() for role in roles}
        self._histories = {role: History() for role in roles}

    def hits(self, prefix: PromptPrefix | None, *, base: bool) -> CacheHits:
        """Return what is known of a prompt: of token ids what engines' events tell, of the rest
        what was sent where. ``base``: its model is no adapter.

        Engines' events name blocks by their tokens alone, so of a prompt with a salt, or of an
        adapter, they tell nothing.
        """
        if prefix is None:
            return {}
        ids = prefix.token_ids if base and prefix.plain else []
        found: dict[Role, dict[Target, CacheHit]] = {}
        for role, index in self.indexes.items():
            told = index.targets() if ids else frozenset()
            guessed = self._histories[role].match(prefix.chunk_hashes)
            found[role] = {target: hit for target, hit in guessed.items() if target not in told}
            found[role] |= index.match(ids)
        return found

    def sent(self, choice: RoutingChoice, prefix: PromptPrefix | None) -> None:
        """A prompt goes to the engines of ``choice``."""
        if prefix is None:
            return
        for role, history in self._histories.items():
            place = choice.prefill if role is Role.PREFILL else choice.decode
            if isinstance(place, TargetChoice):
                history.sent(place.target, prefix.chunk_hashes)

    def forget(self, role: Role, worker: int, ranks: int) -> None:
        """An engine was lost: what it had been sent is no longer there."""
        if role in self._histories:
            for rank in (None, *range(ranks)):
                self._histories[role].forget(Target(worker, rank))


# A guess at the caches of engines without KV events, and for prompts of text. Pure: a target is
# taken to hold what it was sent, chunk by chunk, until the oldest chunks are forgotten.

_MOST = 500_000  # units remembered, of all targets: some 200 MB


class History:
    """Prefixes that were sent to targets. Not thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._index = PrefixIndex()
        self._sent: OrderedDict[tuple[Target, int], None] = OrderedDict()
        self._most = most

    def match(self, chunk_hashes: Sequence[int]) -> dict[Target, CacheHit]:
        """Return what each target was sent of a prompt's beginning, if anything."""
        found = self._index.match(chunk_hashes)
        return {
            target: CacheHit(hit.tokens * CHUNK_TOKENS, hit.worth * CHUNK_TOKENS)
            for target, hit in found.items()
        }

    def sent(self, target: Target, chunk_hashes: Sequence[int]) -> None:
        """A prompt goes to ``target``."""
        hashes: list[int] = []
        for unit in chunk_hashes:
            hashes.append(hash((hashes[-1] if hashes else 0, unit)))
        self._index.stored(target, StoredBlocks(hashes, None, chunk_hashes, 1, CacheTier.DEVICE))
        for name in reversed(hashes):  # the end of a prompt is forgotten first
            self._sent[target, name] = None
            self._sent.move_to_end((target, name))
        for old, name in list(islice(self._sent, max(0, len(self._sent) - self._most))):
            del self._sent[old, name]
            self._index.removed(old, [name], CacheTier.DEVICE)

    def forget(self, target: Target) -> None:
        """``target`` is another incarnation, or gone."""
        self._index.cleared(target)
