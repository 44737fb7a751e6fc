"""The segments as files: creates, seals, changes, deletes and, after a restart, reopens them."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from kvconnect.tiers.backends.base import PagePool
from kvconnect.tiers.backends.disk.disk_options import DiskOptions
from kvconnect.tiers.backends.disk.folder import Folder, numbers_in
from kvconnect.tiers.backends.disk.record import LAST_SECOND, RecordHead, SegmentHead
from kvconnect.tiers.backends.disk.segment import Segment, create_segment, open_segment
from kvconnect.tiers.backends.disk.table import SLOTS, RecordRun, RecordTable

logger = logging.getLogger(__name__)

_AGAIN = 16  # records that could not be marked are tried at a time: each may take a disk seconds
_REOPEN = 0.75  # after a restart, a segment filled to less than this takes more records


class SegmentLog:
    """Changes whole segments, one at a time. Thread-safe.

    Reads and writes of records run beside it without a lock: a reader's place pins the segment, a
    writer is counted in the segment, and no place is written twice. ``evicted`` is called with the
    number of evicted blocks.
    """

    def __init__(
        self,
        folder: Folder,
        table: RecordTable,
        options: DiskOptions,
        fingerprint: bytes,
        clock: Callable[[], float],
        evicted: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._table = table
        self._options = options
        self._fingerprint = fingerprint
        self._clock = clock
        self._evicted = evicted
        self._changing = threading.RLock()
        self._unmarked: list[tuple[Segment, int]] = []  # dead, but not yet so on the disk
        self._load()

    def reserve(self, keys: Sequence[bytes], lengths: Sequence[int]) -> RecordRun:
        """Reserve consecutive space for the first of these blocks, as many as fit.

        Each must fit into an empty segment. Raises :class:`OSError`: ENOSPC or EBUSY if there is no
        room even after eviction, or the file system's error.
        """
        while True:
            active = self._table.active
            run = self._table.reserve(keys, lengths, self._options.segment_bytes)
            if run is not None:
                return run
            self._roll(active)

    def commit(self, run: RecordRun, heads: Sequence[RecordHead], offsets: Sequence[int]) -> None:
        """Index the records that were written at these offsets of a run."""
        replaced, complete = self._table.commit(run, heads, offsets)
        if replaced or complete:
            with self._changing:
                self._mark_dead(replaced)
                if complete:
                    self._seal(run.segment)

    def abandon(self, run: RecordRun) -> None:
        """Release a run that could not be written. Its segment takes no more records."""
        self._table.retire(run.segment)
        self.commit(run, [], [])

    def drop(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Remove blocks. Return for each whether it is deleted on disk too, None if absent."""
        with self._changing:
            pairs = self._table.pop(keys)
            self._mark_dead([pair for pair in pairs if pair is not None])
            left = {segment.rows.keys[row] for segment, row in self._unmarked}
        return [
            False if key in left else None if pair is None else True
            for key, pair in zip(keys, pairs, strict=True)
        ]

    def expire(self) -> None:
        """Delete segments in which every block has expired."""
        ttl_s = self._options.ttl_s
        if not ttl_s:
            return
        with self._changing:
            before, active = self._clock() - ttl_s, self._table.active
            if active is not None and active.newest() <= before:
                self._table.active = None
                if self._table.retire(active):
                    self._seal(active)
            while self._drop_one(before):
                pass

    def close(self) -> None:
        """Write missing indexes and close all files. No call may be reading or writing."""
        with self._changing:
            self._table.active = None
            for segment in list(self._table.segments.values()):
                if not segment.indexed and segment.head.fingerprint == self._fingerprint:
                    self._write_index(segment)
                segment.file.close()

    def _roll(self, seen: Segment | None) -> None:
        """Start a new segment, unless ``seen`` is not the active one any more."""
        with self._changing:
            if self._table.active is not seen:
                return
            self._table.active = None
            if seen is not None and self._table.retire(seen):
                self._seal(seen)
            self.expire()
            spare = self._make_room()
            created = min(max(int(self._clock()), 0), LAST_SECOND)
            head = SegmentHead(secrets.token_bytes(16), created, self._fingerprint)
            nbytes = self._options.segment_bytes
            segment = create_segment(self._folder.new_path(), head, nbytes, spare)
            self._table.add(segment, ours=True)
            self._table.active = segment

    def _make_room(self) -> Segment | None:
        """Evict segments until a new one fits. Return the last evicted, to reuse its file, or None.
        Raises :class:`OSError` if no segment can be evicted: EBUSY if all are being read or
        written, ENOSPC if other files fill the disk.
        """
        nbytes, most = self._options.segment_bytes, self._options.capacity
        spare = None
        while True:
            totals = self._table.totals()
            own = spare.file.size() if spare else 0
            fits = totals.nbytes + nbytes <= most and totals.segments < SLOTS
            if fits and self._folder.free_bytes() - nbytes + own >= self._options.min_free:
                return spare
            if spare is not None:
                spare.delete()
            found = self._table.evict()
            if found is None:
                code = errno.ENOSPC if fits else errno.EBUSY
                raise OSError(code, "no segment can be evicted now")
            spare, blocks = found
            self._evicted(blocks)

    def _drop_one(self, before: float | None) -> bool:
        """Evict a segment, see :meth:`RecordTable.evict`. Return False if there is none."""
        found = self._table.evict(before)
        if found is not None:
            found[0].delete()
            self._evicted(found[1])
        return found is not None

    def _seal(self, segment: Segment) -> None:
        if not segment.sealed:
            self._write_index(segment)
            self._table.complete(segment)

    def _write_index(self, segment: Segment) -> None:
        try:
            segment.seal(self._table.live(segment))
        except OSError as error:  # the segment is scanned at the next start
            logger.warning("disk tier: cannot write the index of %s: %s", segment.path, error)

    def _mark_dead(self, pairs: Sequence[tuple[Segment, int]]) -> None:
        """Mark replaced or removed records as deleted on disk, and then those for which that failed
        before: a restart would bring them back."""
        again, later = self._unmarked[:_AGAIN], self._unmarked[_AGAIN:]
        rows: dict[Segment, list[int]] = {}
        for segment, row in [*pairs, *again]:
            rows.setdefault(segment, []).append(row)
        current = self._table.segments
        self._unmarked = [each for each in later if current.get(each[0].slot) is each[0]]
        self._unmarked += [
            (segment, row)
            for segment, which in rows.items()
            if current.get(segment.slot) is segment  # else it was evicted with all its records
            for row in segment.mark_deleted(which)
        ]

    def _load(self) -> None:
        """Add the segments of an earlier process, and continue its last one."""
        pool = PagePool()
        last = None
        replaced: list[tuple[Segment, int]] = []
        for number in numbers_in(self._folder.files)[-SLOTS:]:
            segment = open_segment(self._folder.path_of(number), self._fingerprint, pool)
            if segment is not None:
                ours = segment.head.fingerprint == self._fingerprint
                replaced += self._table.add(segment, ours)
                last = segment if ours else last
        self._mark_dead(replaced)
        for segment in self._table.segments.values():
            if segment is not last or not self._write_on(segment):
                if segment.indexed or segment.head.fingerprint != self._fingerprint:
                    self._table.complete(segment)
                else:
                    self._seal(segment)
        self.expire()
        while self._table.totals().nbytes > self._options.capacity and self._drop_one(None):
            pass  # the capacity was larger before

    def _write_on(self, segment: Segment) -> bool:
        """Reopen a segment of an earlier process for more records. Return whether that works."""
        if segment.used > _REOPEN * self._options.segment_bytes:
            return False
        try:
            segment.reopen(self._options.segment_bytes)
        except OSError as error:
            logger.warning("disk tier: cannot continue %s: %s", segment.path, error)
            return False
        self._table.active = segment
        return True
