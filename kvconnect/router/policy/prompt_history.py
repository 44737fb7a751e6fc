"""Prompts that were sent to targets: an estimate of caches without KV events. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import (
    CHUNK_TOKENS,
    CacheHit,
    CacheTier,
    PrefixIndex,
    StoredBlocks,
)

_MOST = 500_000  # remembered chunks of all targets: about 200 MB


class History:
    """Prompt prefixes sent to targets: an estimate of caches without KV events. Not thread-safe.

    A target is assumed to hold the chunks that it was sent, until the oldest are forgotten.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._index = PrefixIndex()
        self._sent: OrderedDict[tuple[Target, int], None] = OrderedDict()
        self._most = most

    def match(self, chunk_hashes: Sequence[int]) -> dict[Target, CacheHit]:
        """Return the longest prefix of a prompt that each target was sent, if any."""
        found = self._index.match(chunk_hashes)
        return {
            target: CacheHit(tokens * CHUNK_TOKENS, worth * CHUNK_TOKENS, readable * CHUNK_TOKENS)
            for target, (tokens, worth, readable) in found.items()
        }

    def sent(self, target: Target, chunk_hashes: Sequence[int]) -> None:
        """Record that a prompt was sent to ``target``."""
        hashes: list[int] = []
        for unit in chunk_hashes:
            hashes.append(hash((hashes[-1] if hashes else 0, unit)))
        self._index.stored(target, StoredBlocks(hashes, None, chunk_hashes, 1, CacheTier.DEVICE))
        for name in reversed(hashes):  # a prompt's end is forgotten first
            self._sent[target, name] = None
            self._sent.move_to_end((target, name))
        for old, name in list(islice(self._sent, max(0, len(self._sent) - self._most))):
            del self._sent[old, name]
            self._index.removed(old, [name], CacheTier.DEVICE)

    def forget(self, target: Target) -> None:
        """Forget all prompts sent to ``target``."""
        self._index.cleared(target)
