"""Which blocks to look for below the host tier, and which of those found to bring up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvconnect.plan.groups import CacheGroup, longest_prefix
from kvconnect.plan.index import HostIndex
from kvconnect.plan.instructions import BELOW
from kvconnect.plan.keys import PREFIX_BYTES, block_key
from kvconnect.types import Tier

SHARED = bytes(PREFIX_BYTES)
"""Tenant and scope of a request that has neither."""

_ABSENT_S = 5.0  # another engine may write meanwhile what a shared tier lacks
_MOST_ABSENT = 1 << 16

Block = tuple[int, bytes]
"""(group, hash)"""

Choose = Callable[[int, int, Sequence[Tier]], int]
"""Given tokens that are there already, tokens per block, and where each further block of the
prefix is: how many of these blocks are worth bringing up?"""


class Wanted(NamedTuple):
    """What a request could use: tokens [local, most). ``prefix``: its tenant and scope."""

    hashes: Sequence[Sequence[bytes]]
    local_tokens: int
    most_tokens: int
    prefix: bytes = SHARED

    def rows(self, groups: Sequence[CacheGroup]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield each group's number and the hashes of its blocks that could be used."""
        for number, group in enumerate(groups):
            start = self.local_tokens // group.block_tokens
            yield number, self.hashes[number][start : self.most_tokens // group.block_tokens]


class Absent:
    """Keys that were looked up and not found, for a while. Bounded."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._until

    def add(self, key: bytes, now: float) -> None:
        self._until[key] = now + _ABSENT_S
        self._until.move_to_end(key)
        if len(self._until) > _MOST_ABSENT:
            self._until.popitem(last=False)

    def drop(self, key: bytes) -> None:
        """It is there now."""
        self._until.pop(key, None)

    def expire(self, now: float) -> None:
        """Forget what was found absent too long ago; the oldest come first."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def clear(self) -> None:
        self._until.clear()


class _View:
    """The host tier and what was found below it, as :func:`longest_prefix` reads an index."""

    def __init__(self, index: HostIndex, found: Mapping[Block, int]) -> None:
        self._index = index
        self._found = found

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        slot = self._index.slot_of(group, block_hash)
        return self._found.get((group, block_hash)) if slot is None else slot

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        slots = []
        for block_hash in hashes:
            slot = self.slot_of(group, block_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots


def missing(
    index: HostIndex, groups: Sequence[CacheGroup], wanted: Wanted, absent: Absent
) -> Iterator[Block]:
    """Yield the blocks that the host tier lacks, of a full group up to one that is nowhere."""
    for number, row in wanted.rows(groups):
        for block_hash in row:
            if index.has(number, block_hash):
                continue
            if block_key(wanted.prefix, number, block_hash) not in absent:
                yield number, block_hash
            elif groups[number].is_full:
                break


def worth_fetching(
    index: HostIndex,
    groups: Sequence[CacheGroup],
    wanted: Wanted,
    there: Mapping[Block, int],
    choose: Choose,
) -> list[Block]:
    """Return which of the blocks found below to bring up, in prefix order within each group.

    ``there``: what was found, by its place in :data:`BELOW`. What is weighed is the prefix of
    group 0; the others' blocks follow from it.
    """
    view, first = _View(index, there), groups[0]
    local, row = wanted.local_tokens, wanted.hashes[0]
    total = longest_prefix(view, groups, wanted.hashes, local, wanted.most_tokens)
    start, end = local // first.block_tokens, total // first.block_tokens
    start += len(index.ready_slots(0, row[start:end]))
    tiers = [BELOW[there.get((0, block), 0)] or Tier.HOST for block in row[start:end]]
    if not tiers:
        return []
    worth = choose(start * first.block_tokens, first.block_tokens, tiers)
    if worth < len(tiers):
        most = (start + worth) * first.block_tokens
        total = longest_prefix(view, groups, wanted.hashes, local, most)
    return [
        (number, block_hash)
        for number, group in enumerate(groups)
        for block_hash in wanted.hashes[number][
            max(group.first_block(total), local // group.block_tokens) : total // group.block_tokens
        ]
        if (number, block_hash) in there and not index.has(number, block_hash)
    ]
