"""Which blocks to look up in the secondary tiers, and which to prefetch."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvconnect.bounded import remember
from kvconnect.cache.groups import CacheGroup, leading_group, longest_prefix
from kvconnect.cache.keys import PREFIX_BYTES, block_key
from kvconnect.offload.index import HostIndex
from kvconnect.protocol.addresses import Addresses
from kvconnect.tiers.messages import SECONDARY_TIERS
from kvconnect.types import Block, Tier

logger = logging.getLogger(__name__)

SHARED = bytes(PREFIX_BYTES)
"""Tenant and scope of a request that has neither."""

_MISS_S = 1.0  # another engine may store a missing block meanwhile
_MAX_MISSES = 1 << 16


class LookupResult(NamedTuple):
    """Blocks that secondary tiers have for a request: the tier of each block after the first
    ``context`` tokens, up to the end of the prefix. Without a prefetch, ``tokens`` tokens must be
    computed."""

    context: int
    tokens: int
    block_tokens: int
    tiers: Sequence[Tier]


class PrefetchDecision(NamedTuple):
    """How many blocks to prefetch, and after how many seconds to compute them instead."""

    blocks: int
    give_up_s: float = math.inf


class ChosenBlocks(NamedTuple):
    """The blocks to prefetch, after how many seconds to give up waiting for them, whether more were
    found, which are to be computed, and whether a hint of the request decided."""

    blocks: list[Block]
    give_up_s: float = 0.0
    more_found: bool = False
    hinted: bool = False


Choose = Callable[[LookupResult], PrefetchDecision]


class LookupRequest(NamedTuple):
    """Blocks that a request can use: of tokens [local_tokens, max_tokens).

    ``prefix`` is the tenant and scope. ``block_names`` has, by hash, the names of blocks that the
    secondary tiers know under another name than their hash. The first ``prefetch_tokens`` tokens
    are to be loaded at any cost, if the tiers have them. ``source``: the engine that is said to
    have blocks; () if none is named. ``page_names`` has, by hash, the names of the pages of blocks
    that peers know by pages.
    """

    hashes: Sequence[Sequence[bytes]]
    local_tokens: int
    max_tokens: int
    prefix: bytes = SHARED
    block_names: Mapping[bytes, bytes] = MappingProxyType({})
    prefetch_tokens: int = 0
    source: Addresses = ()
    page_names: Mapping[bytes, Sequence[bytes]] = MappingProxyType({})

    def key(self, group: int, block_hash: bytes) -> bytes:
        """Return the key of a block in the secondary tiers."""
        return block_key(self.prefix, group, self.block_names.get(block_hash, block_hash))

    def page_keys(self, blocks: Iterable[Block]) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
        """Yield the keys of those blocks that peers know by pages, and the keys of the pages."""
        if self.page_names:
            for group, block_hash in blocks:
                names = self.page_names.get(block_hash, ())
                pages = tuple(block_key(self.prefix, group, name) for name in names)
                if pages:
                    yield self.key(group, block_hash), pages

    def rows(self, groups: Sequence[CacheGroup]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield each group's number and the hashes of its blocks in the range of tokens."""
        for number, group in enumerate(groups):
            start = self.local_tokens // group.block_tokens
            yield number, self.hashes[number][start : self.max_tokens // group.block_tokens]


class RecentMisses:
    """Keys that were looked up and not found a short time ago. Bounded."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._until

    def add(self, key: bytes, now: float) -> None:
        remember(self._until, key, now + _MISS_S, _MAX_MISSES)

    def discard(self, key: bytes) -> None:
        self._until.pop(key, None)

    def expire(self, now: float) -> None:
        """Forget keys that were missing too long ago."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def clear(self) -> None:
        self._until.clear()


class PendingPrefetches:
    """Blocks that are being prefetched, and since when."""

    def __init__(self) -> None:
        self._since: dict[Block, float] = {}

    def add(self, blocks: Iterable[Block], now: float) -> None:
        self._since.update(dict.fromkeys(blocks, now))

    def discard(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._since.pop(block, None)

    def since(self, block: Block) -> float:
        """Return when the prefetch of a block began; before all times if it is not under way."""
        return self._since.get(block, -math.inf)

    def first_since(
        self, rows: Iterable[tuple[int, Sequence[bytes]]], start: float
    ) -> Block | None:
        """Return one of these blocks whose prefetch began after ``start``; None without one."""
        since = self._since
        if not since:
            return None
        blocks = (Block(group, block_hash) for group, row in rows for block_hash in row)
        return next((block for block in blocks if since.get(block, start) > start), None)


class PinnedSlots:
    """Host slots that waiting requests are about to load. A slot that several share counts once."""

    def __init__(self, index: HostIndex) -> None:
        self._index = index
        self._requests: Counter[int] = Counter()  # by slot

    def __len__(self) -> int:
        return len(self._requests)

    def pin(self, slots: Sequence[int]) -> None:
        self._index.pin(slots)
        self._requests.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self._index.unpin(slots)
        for slot in slots:
            self._requests[slot] -= 1
            if not self._requests[slot]:
                del self._requests[slot]


class _HostAndFound:
    """The host tier and the blocks found in secondary tiers, for :func:`longest_prefix`."""

    def __init__(self, index: HostIndex, found: Mapping[Block, int]) -> None:
        self._index = index
        self._found = found

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        slot = self._index.slot_of(group, block_hash)
        return self._found.get(Block(group, block_hash)) if slot is None else slot

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        slots = []
        for block_hash in hashes:
            slot = self.slot_of(group, block_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots


def blocks_to_prefetch(
    index: HostIndex,
    groups: Sequence[CacheGroup],
    request: LookupRequest,
    found: Mapping[Block, int],
    choose: Choose,
) -> ChosenBlocks:
    """Return the blocks to prefetch, in prefix order within each group.

    ``found`` maps blocks to indexes in :data:`SECONDARY_TIERS`. ``choose`` is given the blocks of
    the leading group, with full attention if there is one; the other groups follow from the length
    of its prefix. If all groups have windows, all blocks are prefetched or none.
    """
    view, number = _HostAndFound(index, found), leading_group(groups)
    lead, row, local = groups[number], request.hashes[number], request.local_tokens
    total = longest_prefix(view, groups, request.hashes, local, request.max_tokens)
    start, end = local // lead.block_tokens, total // lead.block_tokens
    if not lead.is_full:
        start = max(start, lead.first_block(total))
    start += len(index.ready_slots(number, row[start:end]))
    tiers: list[Tier] = []
    for block_hash in row[start:end]:
        tier = SECONDARY_TIERS[found.get(Block(number, block_hash), 0)]
        if tier or tiers:  # blocks in between that host memory has cost nothing more
            tiers.append(tier or tiers[-1])
    if not tiers:
        return ChosenBlocks([])
    context = start * lead.block_tokens
    least = min(len(tiers), max(0, request.prefetch_tokens - context) // lead.block_tokens)
    decision = PrefetchDecision(0)
    if least < len(tiers):
        tokens = request.max_tokens - context
        decision = choose(LookupResult(context, tokens, lead.block_tokens, tiers))
    hinted = decision.blocks < least
    if hinted:
        decision = PrefetchDecision(least)
    if decision.blocks < len(tiers):
        if not lead.is_full:
            return ChosenBlocks([], more_found=True, hinted=hinted)
        max_tokens = context + decision.blocks * lead.block_tokens
        total = longest_prefix(view, groups, request.hashes, local, max_tokens)
    blocks = [
        block
        for group_number, group in enumerate(groups)
        for block_hash in request.hashes[group_number][
            max(group.first_block(total), local // group.block_tokens) : total // group.block_tokens
        ]
        if (block := Block(group_number, block_hash)) in found
        and not index.has(group_number, block_hash)
    ]
    return ChosenBlocks(blocks, decision.give_up_s, decision.blocks < len(tiers), hinted)
