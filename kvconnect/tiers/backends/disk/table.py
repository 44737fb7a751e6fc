"""The index in memory: where each block of a worker is, and which segment may be evicted."""

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
"""Maximum number of segments. About 256 are full; formats not in use add a few."""

_ROW = 32  # bits


class RecordPlace(NamedTuple):
    """Place of a block. Its segment stays pinned until the place is released."""

    segment: Segment
    row: int
    page: int
    length: int


class RecordRun(NamedTuple):
    """Space reserved for consecutive records until it is committed."""

    segment: Segment
    offset: int
    records: int


class TableTotals(NamedTuple):
    """Totals of a table; ``nbytes`` is the size of all files."""

    blocks: int
    nbytes: int
    segments: int


class RecordTable:
    """All segments, and for each key the row of one of them. Thread-safe; each call is atomic.

    Blocks older than ``ttl_s`` seconds are not found; 0 for no limit. A segment that is being read
    or written is not evicted. ``quota_bytes`` limits the bytes of a tenant, see
    :class:`TenantQuota`; None for no limit.
    """

    def __init__(
        self, policy: EvictionPolicy, ttl_s: float, quota_bytes: int | None = None
    ) -> None:
        self.active: Segment | None = None  # new records go here
        self.segments: dict[int, Segment] = {}
        self._policy = policy
        self._ttl_s = ttl_s
        self._lock = threading.RLock()
        self._index: dict[bytes, int] = {}  # key -> slot << _ROW | row
        self._pins = array("I", bytes(4 * SLOTS))
        self._quota = None if quota_bytes is None else TenantQuota(quota_bytes)

    def find(self, keys: Sequence[bytes], now: float) -> list[RecordPlace | None]:
        """Return the places of blocks, None for absent ones. The caller releases the places."""
        with self._lock:
            found = [self._place(key, now) for key in keys]
            for place in found:
                if place is not None:
                    self._pins[place.segment.slot] += 1
            used = {place.segment.slot: place.segment for place in found if place is not None}
            self._policy.touch([slot for slot, segment in used.items() if segment.sealed])
        return found

    def release(self, places: Iterable[RecordPlace]) -> None:
        """Unpin places that :meth:`find` returned."""
        with self._lock:
            for place in places:
                self._pins[place.segment.slot] -= 1

    def lengths(self, keys: Sequence[bytes], now: float) -> list[int]:
        """Return the length of each block, 0 for absent ones."""
        with self._lock:
            return [place.length if place else 0 for place in (self._place(k, now) for k in keys)]

    def totals(self) -> TableTotals:
        """Return the totals."""
        with self._lock:
            nbytes = sum(segment.nbytes for segment in self.segments.values())
            return TableTotals(len(self._index), nbytes, len(self.segments))

    @contextmanager
    def admit(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the indexes of the blocks that their tenants may store during this context."""
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
        """Reserve space for the first of these blocks. Return None if none fits."""
        with self._lock:
            if self.active is None:
                return None
            offset = self.active.used
            count = self.active.reserve(keys, lengths, limit)
            return RecordRun(self.active, offset, count) if count else None

    def commit(
        self, run: RecordRun, heads: Sequence[RecordHead], offsets: Sequence[int]
    ) -> tuple[list[tuple[Segment, int]], bool]:
        """Add the written records of a run to the index; pass none if the write failed.

        Return the (segment, row) of replaced records, and whether the segment is complete now.
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
        """Reserve no more space in a segment. Return whether it has no writers left."""
        with self._lock:
            segment.full = True
            return not segment.writers

    def pop(self, keys: Sequence[bytes]) -> list[tuple[Segment, int] | None]:
        """Remove blocks. Return the (segment, row) of each, None for absent ones."""
        with self._lock:
            found = [self._index.pop(key, None) for key in keys]
            pairs = [None if at is None else _record(self.segments, at) for at in found]
            if self._quota is not None:
                self._quota.update((), _blocks(pair for pair in pairs if pair is not None))
            return pairs

    def add(self, segment: Segment, ours: bool) -> list[tuple[Segment, int]]:
        """Add a segment. Its blocks are indexed only if they have this store's format (``ours``).

        A key that exists already now refers to this segment's block. Return the (segment, row) of
        such older records, which a crash has kept from being deleted.
        """
        with self._lock:
            slot = next(slot for slot in range(SLOTS) if slot not in self.segments)
            segment.slot = slot
            self.segments[slot] = segment
            if not ours:
                return []
            keys = segment.rows.keys
            first, blocks = slot << _ROW, len(self._index)
            older = {self._index[key] for key in keys if key in self._index}
            replaced = [_record(self.segments, at) for at in older]
            self._index.update(zip(keys, range(first, first + len(keys)), strict=True))
            if len(self._index) - blocks + len(older) < len(keys):  # it has a key more than once
                replaced += [(segment, row) for row in _others(self.live(segment), len(keys))]
            if self._quota is not None:
                self._quota.update((), _blocks(_record(self.segments, at) for at in older))
                self._quota.update(_blocks((segment, row) for row in self.live(segment)), ())
            return replaced

    def live(self, segment: Segment) -> list[int]:
        """Return the rows of a segment that the index refers to."""
        first = segment.slot << _ROW
        with self._lock:
            get = self._index.get
            return [row for row, key in enumerate(segment.rows.keys) if get(key) == first + row]

    def complete(self, segment: Segment) -> None:
        """Seal a segment and add it to the eviction policy."""
        with self._lock:
            segment.sealed = True
            self._policy.insert([segment.slot], [segment.slot])

    def evict(self, before: float | None = None) -> tuple[Segment, int] | None:
        """Remove the segment to evict next. Return it and its number of blocks, None if none.

        Without ``before``, the eviction policy chooses. With ``before``, in seconds since 1970, it
        is a segment whose blocks are all older.
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
        # A block with a future time, from a clock that was ahead, must not stay longer.
        if self._ttl_s and abs(now - rows.seconds[row]) >= self._ttl_s:
            return None
        return RecordPlace(segment, row, rows.pages[row], rows.lengths[row])


def _others(rows: Sequence[int], count: int) -> list[int]:
    """Return the rows below ``count`` that are not among ``rows``."""
    return sorted(set(range(count)).difference(rows))


def _record(segments: dict[int, Segment], at: int) -> tuple[Segment, int]:
    """Return the (segment, row) of an index entry."""
    return segments[at >> _ROW], at & (1 << _ROW) - 1


def _blocks(records: Iterable[tuple[Segment, int]]) -> Iterator[tuple[bytes, int]]:
    for segment, row in records:
        yield segment.rows.keys[row], segment.rows.lengths[row]


class TenantQuota:
    """Limits the bytes of each tenant. A block counts as whole pages, its head included.

    The first bytes of a key are its tenant; a shorter key is a tenant of its own. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self.held: dict[bytes, int] = {}  # by tenant, without zeros
        self._max_bytes = max_bytes
        self._reserved: dict[bytes, int] = {}  # of admitted blocks that are being written

    def __repr__(self) -> str:
        return f"<TenantQuota of {self._max_bytes} bytes, {len(self.held)} tenants>"

    def update(
        self, added: Iterable[tuple[bytes, int]], removed: Iterable[tuple[bytes, int]]
    ) -> None:
        """Count blocks that were added to the index and removed from it, each as its key and the
        length of its payload in bytes."""
        held = self.held
        for key, length in added:  # inlined, since a restart adds a million blocks
            tenant = key[:TENANT_BYTES]
            held[tenant] = held.get(tenant, 0) + pages_of(length) * PAGE
        for key, length in removed:
            _change(held, key[:TENANT_BYTES], -record_bytes(length))

    def reserve(
        self, keys: Sequence[bytes], lengths: Sequence[int], stored: Mapping[bytes, int]
    ) -> tuple[list[int], dict[bytes, int]]:
        """Admit the blocks that fit into their tenants' quotas; return their indexes, and the
        reserved bytes by tenant.

        ``stored`` has the current lengths of blocks that will be replaced. Until :meth:`release`,
        admitted blocks count in addition, so concurrent calls cannot exceed the quota together.
        """
        admitted: list[int] = []
        reserved: dict[bytes, int] = {}
        replaced: dict[bytes, int] = {}  # bytes by tenant
        existing = dict(stored)  # a key that occurs twice replaces its block once
        for number, key in enumerate(keys):
            tenant, nbytes = key[:TENANT_BYTES], record_bytes(lengths[number])
            freed = replaced.get(tenant, 0)
            freed += record_bytes(existing[key]) if key in existing else 0
            added = reserved.get(tenant, 0) + nbytes
            used = self.held.get(tenant, 0) + self._reserved.get(tenant, 0) + added
            if used - freed <= self._max_bytes:
                admitted.append(number)
                existing.pop(key, None)
                replaced[tenant], reserved[tenant] = freed, added
        for tenant, nbytes in reserved.items():
            _change(self._reserved, tenant, nbytes)
        return admitted, reserved

    def release(self, reserved: dict[bytes, int]) -> None:
        """Release the bytes that :meth:`reserve` returned."""
        for tenant, nbytes in reserved.items():
            _change(self._reserved, tenant, -nbytes)


def record_bytes(length: int) -> int:
    """Return the bytes that a block of this length needs on the disk."""
    return pages_of(length) * PAGE


def _change(counts: dict[bytes, int], tenant: bytes, nbytes: int) -> None:
    left = counts.get(tenant, 0) + nbytes
    if left:
        counts[tenant] = left
    else:
        counts.pop(tenant, None)
