"""Where every block of one worker is: the index in memory, and which segment may be dropped."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvconnect.cache.keys import TENANT_BYTES
from kvconnect.offload.eviction import EvictionPolicy
from kvconnect.tiers.backends.disk.record import PAGE, RecordHead, pages_of
from kvconnect.tiers.backends.disk.segment import Segment

SLOTS = 1024
"""Segments at most. There are some 256 full ones; formats that are not in use add a few."""

_ROW = 32  # bits


class RecordPlace(NamedTuple):
    """Where a block is. Its segment is kept until the place is given back."""

    segment: Segment
    row: int
    page: int
    length: int


class RecordRun(NamedTuple):
    """Room for so many records side by side, until it is committed."""

    segment: Segment
    offset: int
    records: int


class TableTotals(NamedTuple):
    """What there is. ``nbytes`` of all files."""

    blocks: int
    nbytes: int
    segments: int


class RecordTable:
    """All segments, and for each key the row of one of them. Threads: any; every call is atomic.

    ``ttl_s`` is the age in seconds from which on a block is not found, 0 for never. A segment that
    is being read or written is never the one to be dropped. ``quota_bytes`` bounds what a tenant
    may have, see :class:`TenantQuota`; without it nothing is counted.
    """

    def __init__(
        self, policy: EvictionPolicy, ttl_s: float, quota_bytes: int | None = None
    ) -> None:
        self.active: Segment | None = None  # the one that gives out room
        self.segments: dict[int, Segment] = {}
        self._policy = policy
        self._ttl_s = ttl_s
        self._lock = threading.RLock()
        self._index: dict[bytes, int] = {}  # key -> slot << _ROW | row
        self._pins = array("I", bytes(4 * SLOTS))
        self._quota = None if quota_bytes is None else TenantQuota(quota_bytes)

    def find(self, keys: Sequence[bytes], now: float) -> list[RecordPlace | None]:
        """Return where blocks are, None for those that are not there. Give the places back."""
        with self._lock:
            found = [self._place(key, now) for key in keys]
            for place in found:
                if place is not None:
                    self._pins[place.segment.slot] += 1
            used = {place.segment.slot: place.segment for place in found if place is not None}
            self._policy.touch([slot for slot, segment in used.items() if segment.sealed])
        return found

    def release(self, places: Iterable[RecordPlace]) -> None:
        """Let go of places that were found."""
        with self._lock:
            for place in places:
                self._pins[place.segment.slot] -= 1

    def lengths(self, keys: Sequence[bytes], now: float) -> list[int]:
        """Return the length of each block, 0 for those that are not there."""
        with self._lock:
            return [place.length if place else 0 for place in (self._place(k, now) for k in keys)]

    def totals(self) -> TableTotals:
        """Return what there is."""
        with self._lock:
            nbytes = sum(segment.nbytes for segment in self.segments.values())
            return TableTotals(len(self._index), nbytes, len(self.segments))

    @contextmanager
    def admit(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
        """Give the numbers of the blocks that their tenants may store during this context."""
        quota = self._quota
        if quota is None:
            yield range(len(keys))
            return
        with self._lock:
            there = {key: self._index[key] for key in keys if key in self._index}
            stored = dict(_blocks(_record(self.segments, at) for at in there.values()))
            admitted, reserved = quota.reserve(keys, lengths, stored)
        try:
            yield admitted
        finally:
            with self._lock:
                quota.release(reserved)

    def reserve(
        self, keys: Sequence[bytes], lengths: Sequence[int], limit: int
    ) -> RecordRun | None:
        """Give out room for the first of these blocks, None if not even one fits."""
        with self._lock:
            if self.active is None:
                return None
            offset = self.active.used
            count = self.active.reserve(keys, lengths, limit)
            return RecordRun(self.active, offset, count) if count else None

    def commit(
        self, run: RecordRun, heads: Sequence[RecordHead], offsets: Sequence[int]
    ) -> tuple[list[tuple[Segment, int]], bool]:
        """Have the records of a run found that were written, none if that failed.

        Return the (segment, row) of those they replace, and whether the segment is complete now.
        """
        replaced: list[tuple[Segment, int]] = []
        segment = run.segment
        with self._lock:
            for head, offset in zip(heads, offsets, strict=True):
                before = self._index.get(head.key)
                if before is not None:
                    replaced.append(_record(self.segments, before))
                self._index[head.key] = segment.slot << _ROW | len(segment.rows.keys)
                segment.rows.add(offset // PAGE, head)
            if self._quota is not None:
                self._quota.update(((h.key, h.length) for h in heads), _blocks(replaced))
            segment.writers -= 1
            return replaced, segment.full and not segment.writers

    def retire(self, segment: Segment) -> bool:
        """Give out no more room of a segment; return whether nobody writes it any more."""
        with self._lock:
            segment.full = True
            return not segment.writers

    def pop(self, keys: Sequence[bytes]) -> list[tuple[Segment, int] | None]:
        """Forget blocks; return the (segment, row) of each, None for those not there."""
        with self._lock:
            found = [self._index.pop(key, None) for key in keys]
            pairs = [None if at is None else _record(self.segments, at) for at in found]
            if self._quota is not None:
                self._quota.update((), _blocks(pair for pair in pairs if pair is not None))
            return pairs

    def add(self, segment: Segment, ours: bool) -> None:
        """Take in a segment; its blocks are found if they are ``ours``, of this format.

        If a key is there already, the newer segment's block counts.
        """
        with self._lock:
            slot = next(slot for slot in range(SLOTS) if slot not in self.segments)
            segment.slot = slot
            self.segments[slot] = segment
            if not ours:
                return
            keys = segment.rows.keys
            first = slot << _ROW
            if self._quota is not None:
                older = {self._index[key] for key in keys if key in self._index}
                self._quota.update((), _blocks(_record(self.segments, at) for at in older))
            self._index.update(zip(keys, range(first, first + len(keys)), strict=True))
            if self._quota is not None:  # a segment may have a key more than once
                self._quota.update(_blocks((segment, row) for row in self.live(segment)), ())

    def live(self, segment: Segment) -> list[int]:
        """Return the rows of a segment that count."""
        first = segment.slot << _ROW
        with self._lock:
            get = self._index.get
            return [row for row, key in enumerate(segment.rows.keys) if get(key) == first + row]

    def complete(self, segment: Segment) -> None:
        """Let the policy have a segment that is sealed."""
        with self._lock:
            segment.sealed = True
            self._policy.insert([segment.slot], [segment.slot])

    def evict(self, before: float | None = None) -> tuple[Segment, int] | None:
        """Take out the segment to drop next; return it and how many blocks it had.

        With ``before``, one whose blocks are all older than that, in seconds since 1970; without,
        the policy's choice. None if there is none.
        """
        with self._lock:
            if before is None:
                slot = self._policy.evict(self._pins)
            else:
                found = self.segments.items()
                free = (slot for slot, it in found if it.sealed and not self._pins[slot])
                slot = next((n for n in free if self.segments[n].newest() <= before), None)
                if slot is not None:
                    self._policy.remove(slot)
            if slot is None:
                return None
            segment = self.segments.pop(slot)
            live = self.live(segment)
            for row in live:
                del self._index[segment.rows.keys[row]]
            if self._quota is not None:
                self._quota.update((), _blocks((segment, row) for row in live))
            return segment, len(live)

    def _place(self, key: bytes, now: float) -> RecordPlace | None:
        at = self._index.get(key)
        if at is None:
            return None
        segment, row = _record(self.segments, at)
        rows = segment.rows
        # Put by a clock that was ahead, a block would stay until that time has come.
        if self._ttl_s and abs(now - rows.seconds[row]) >= self._ttl_s:
            return None
        return RecordPlace(segment, row, rows.pages[row], rows.lengths[row])


def _record(segments: dict[int, Segment], at: int) -> tuple[Segment, int]:
    """Return the (segment, row) that the index names."""
    return segments[at >> _ROW], at & (1 << _ROW) - 1


def _blocks(records: Iterable[tuple[Segment, int]]) -> Iterator[Block]:
    for segment, row in records:
        yield segment.rows.keys[row], segment.rows.lengths[row]


# What each tenant's blocks take of a disk, and which more may come.


Block = tuple[bytes, int]
"""Key, and length of the payload in bytes."""


class TenantQuota:
    """Bytes per tenant, each block in whole pages with its head, and a bound on them.

    A tenant is what a key begins with; a shorter key is a tenant of its own. Not synchronised.
    """

    def __init__(self, most: int) -> None:
        self.held: dict[bytes, int] = {}  # by tenant; none that has nothing
        self._most = most
        self._reserved: dict[bytes, int] = {}  # what was let in and may not be there yet

    def __repr__(self) -> str:
        return f"<Shares of {self._most} bytes, {len(self.held)} tenants>"

    def update(self, added: Iterable[Block], removed: Iterable[Block]) -> None:
        """Count blocks that are found from now on, and those that are not any more."""
        held = self.held
        for key, length in added:  # a restart comes here with a million
            tenant = key[:TENANT_BYTES]
            held[tenant] = held.get(tenant, 0) + pages_of(length) * PAGE
        for key, length in removed:
            _change(held, key[:TENANT_BYTES], -record_bytes(length))

    def reserve(
        self, keys: Sequence[bytes], lengths: Sequence[int], stored: Mapping[bytes, int]
    ) -> tuple[list[int], dict[bytes, int]]:
        """Let in the blocks that their tenants have room for, in the place of those that are there.

        ``stored`` are those, with the lengths that they have now. Until :meth:`leave` what was let
        in counts beside what is held, so calls at the same time do not pass the bound together.
        Return the blocks' numbers, and bytes by tenant.
        """
        admitted: list[int] = []
        reserved: dict[bytes, int] = {}
        spared: dict[bytes, int] = {}  # what is replaced, by tenant
        there = dict(stored)  # a key that comes twice replaces that block once
        for number, key in enumerate(keys):
            tenant, nbytes = key[:TENANT_BYTES], record_bytes(lengths[number])
            freed = spared.get(tenant, 0) + (record_bytes(there[key]) if key in there else 0)
            comes = reserved.get(tenant, 0) + nbytes
            taken = self.held.get(tenant, 0) + self._reserved.get(tenant, 0) + comes
            if taken - freed <= self._most:
                admitted.append(number)
                there.pop(key, None)
                spared[tenant], reserved[tenant] = freed, comes
        for tenant, nbytes in reserved.items():
            _change(self._reserved, tenant, nbytes)
        return admitted, reserved

    def release(self, reserved: dict[bytes, int]) -> None:
        """End what :meth:`enter` began, with what it returned."""
        for tenant, nbytes in reserved.items():
            _change(self._reserved, tenant, -nbytes)


def record_bytes(length: int) -> int:
    """Return what a block of this length takes of the disk."""
    return pages_of(length) * PAGE


def _change(counts: dict[bytes, int], tenant: bytes, nbytes: int) -> None:
    left = counts.get(tenant, 0) + nbytes
    if left:
        counts[tenant] = left
    else:
        counts.pop(tenant, None)
