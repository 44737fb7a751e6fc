"""The segments as files: made, completed, changed, dropped, and found again after a restart."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

from kvconnect.tiers.backends.base import PagePool
from kvconnect.tiers.backends.disk.folder import DiskOptions, Folder, numbers_in
from kvconnect.tiers.backends.disk.record import LAST_SECOND, RecordHead, SegmentHead
from kvconnect.tiers.backends.disk.segment import Segment, create_segment, open_segment
from kvconnect.tiers.backends.disk.table import SLOTS, RecordRun, RecordTable

logger = logging.getLogger(__name__)

_REOPEN = 0.75  # a segment that is filled to less than this is written on after a restart


class SegmentLog:
    """What is done to whole segments, one thing at a time, beside reads and writes of records.

    Those need no lock: a reader's place pins its segment, a writer counts as one of its writers,
    and a record is never written twice in one place. Threads: any. ``evicted`` is told how many
    blocks were dropped.
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
        self._load()

    def reserve(self, keys: Sequence[bytes], lengths: Sequence[int]) -> RecordRun:
        """Give out room for the first of these blocks, as many as fit side by side.

        Each must fit into an empty segment. Raises :class:`OSError`: with ENOSPC or EBUSY if there
        is no room even after eviction, or what the file system says.
        """
        while True:
            active = self._table.active
            run = self._table.reserve(keys, lengths, self._options.segment_bytes)
            if run is not None:
                return run
            self._roll(active)

    def commit(self, run: RecordRun, heads: Sequence[RecordHead], offsets: Sequence[int]) -> None:
        """Have the records found that were written at these offsets of a run."""
        replaced, complete = self._table.commit(run, heads, offsets)
        if replaced or complete:
            with self._changing:
                self._mark_deleted(replaced)
                if complete:
                    self._seal(run.segment)

    def abandon(self, run: RecordRun) -> None:
        """Give up records that could not be written. Their segment takes no more."""
        self._table.retire(run.segment)
        self.commit(run, [], [])

    def drop(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Forget blocks; per block, whether the disk took note of it, None if it was not there."""
        with self._changing:
            pairs = self._table.pop(keys)
            noted = self._mark_deleted([pair for pair in pairs if pair is not None])
        return [None if pair is None else noted[pair[0]] for pair in pairs]

    def expire(self) -> None:
        """Drop segments in which every block is too old."""
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
        """Complete all indexes and close all files. Nobody may be reading or writing."""
        with self._changing:
            self._table.active = None
            for segment in list(self._table.segments.values()):
                if not segment.indexed and segment.head.fingerprint == self._fingerprint:
                    self._write_index(segment)
                segment.file.close()

    def _roll(self, seen: Segment | None) -> None:
        """Start a new segment, unless another thread has since ``seen`` was the active one."""
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
        """Drop segments until there is room for one more; the last one's file is for it, if any.

        Raises :class:`OSError` if none can be dropped: EBUSY if that is because all are being read
        or written, ENOSPC if others have filled the disk.
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
                raise OSError(code, "no segment can be dropped to make room now")
            spare, blocks = found
            self._evicted(blocks)

    def _drop_one(self, before: float | None) -> bool:
        """Drop a segment, see :meth:`RecordTable.evict`; return False if there was none to drop."""
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
        except OSError as error:  # it is scanned at the next start
            logger.warning("disk tier: no index of %s: %s", segment.path, error)

    def _mark_deleted(self, pairs: Iterable[tuple[Segment, int]]) -> dict[Segment, bool]:
        """Mark records as gone on the disk; return per segment whether it took note."""
        rows: dict[Segment, list[int]] = {}
        for segment, row in pairs:
            rows.setdefault(segment, []).append(row)
        # A segment that was dropped meanwhile has taken its records with it.
        there = self._table.segments
        return {
            segment: there.get(segment.slot) is not segment or segment.mark_deleted(which)
            for segment, which in rows.items()
        }

    def _load(self) -> None:
        """Take in what an earlier process left, and write on where it stopped."""
        pool = PagePool()
        last = None
        for number in numbers_in(self._folder.files)[-SLOTS:]:
            segment = open_segment(self._folder.path_of(number), self._fingerprint, pool)
            if segment is not None:
                ours = segment.head.fingerprint == self._fingerprint
                self._table.add(segment, ours)
                last = segment if ours else last
        for segment in self._table.segments.values():
            if segment is not last or not self._write_on(segment):
                if segment.indexed or segment.head.fingerprint != self._fingerprint:
                    self._table.complete(segment)
                else:
                    self._seal(segment)
        self.expire()
        while self._table.totals().nbytes > self._options.capacity and self._drop_one(None):
            pass  # it was larger before

    def _write_on(self, segment: Segment) -> bool:
        """Have a segment of an earlier process take more records; return whether it can."""
        if segment.used > _REOPEN * self._options.segment_bytes:
            return False
        try:
            segment.reopen(self._options.segment_bytes)
        except OSError as error:
            logger.warning("disk tier: %s cannot be written on: %s", segment.path, error)
            return False
        self._table.active = segment
        return True
