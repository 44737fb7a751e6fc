"""What a segment holds, after a restart: from its index, or from its records."""

from __future__ import annotations

import logging
import os

import xxhash

from kvconnect.tiers.backends.disk.files import PageFile
from kvconnect.tiers.backends.disk.frames import MOST_BYTES
from kvconnect.tiers.backends.disk.record import (
    PAGE,
    Columns,
    SegmentHead,
    pages_of,
    unpack_index,
    unpack_record,
    unpack_segment,
)
from kvconnect.tiers.backends.disk.segment import Segment, Stem, delete
from kvconnect.tiers.backends.support import PagePool

logger = logging.getLogger(__name__)

_SMALL_BYTES = 64 << 10  # of a record: up to here it is faster to read all than to skip
_AHEAD_BYTES = 1 << 20
_TAIL_BYTES = 64 << 20
"""Records this near the end of a scanned segment may have been under way when the process died."""


def open_segment(stem: Stem, fingerprint: bytes, pool: PagePool) -> Segment | None:
    """Open a segment of an earlier process, with its records if they are of this format.

    One that cannot be read is removed, and None returned.
    """
    file = None
    try:
        file = PageFile(stem.folder, stem.segment_file, os.O_RDWR)
        head = read_head(file, pool)
        if head is not None:
            segment = Segment(stem, head, file)
            if head.fingerprint == fingerprint:
                load(segment, pool)
            return segment
        logger.warning("disk tier: %s is damaged and is removed", stem)
    except OSError as error:
        logger.warning("disk tier: %s cannot be read and is removed: %s", stem, error)
    if file is not None:
        file.close()
    delete(stem)
    return None


def read_head(file: PageFile, pool: PagePool) -> SegmentHead | None:
    """Return what a file says about itself, None if it is no segment.

    Raises :class:`OSError`.
    """
    if file.size() < PAGE:
        return None
    with pool.lent(PAGE) as memory:
        file.read([memory], 0)
        return unpack_segment(memory)


def load(segment: Segment, pool: PagePool) -> None:
    """Fill in what a segment holds, and drop the records that were torn by a crash.

    A torn record is marked as gone. Raises :class:`OSError`.
    """
    look(segment, pool)
    rows = segment.rows
    if segment.indexed or segment.file.size() == segment.used:
        return  # it was complete: the room that is left is cut off then
    torn = [row for row in _tail(rows, segment.used) if not intact(segment, row, pool)]
    if torn:
        logger.info("disk tier: %d torn records dropped from %s", len(torn), segment.stem)
        segment.kill(torn)
        segment.rows = rows.pick(sorted(set(range(len(rows.keys))) - set(torn)))


def look(segment: Segment, pool: PagePool) -> None:
    """Fill in what a segment holds, from its index if that is intact, else by a scan.

    Raises :class:`OSError`.
    """
    found = _read_index(segment)
    if found is None:
        segment.rows, segment.used = scan(segment.file, segment.head, pool)
    else:
        segment.rows, segment.used = found[0], found[1] * PAGE
        segment.indexed = True


def scan(file: PageFile, head: SegmentHead, pool: PagePool) -> tuple[Columns, int]:
    """Return the live records of a segment, read from their heads, and where the last one ends.

    What is no record is stepped over: room that was given out and never written, or what was in
    the file when it was another segment's.
    Raises :class:`OSError`.
    """
    rows, end = Columns.empty(), PAGE
    size, offset = file.size() // PAGE * PAGE, PAGE
    with _Pages(file, size, pool) as pages:
        while offset < size:
            record = unpack_record(pages.at(offset), head.identity)
            after = offset + pages_of(record.length) * PAGE if record else size + 1
            if record is None or after > size or record.fingerprint != head.fingerprint:
                pages.ahead = _AHEAD_BYTES  # a file that was used before has no holes to skip
                offset = file.next_data(offset + PAGE)
                continue
            if record.live:
                rows.add(offset // PAGE, record)
            pages.ahead = _AHEAD_BYTES if after - offset <= _SMALL_BYTES else PAGE
            offset = end = after
    return rows, end


class _Pages:
    """Reads pages of a file in ascending order, ``ahead`` bytes at a time where they are dense."""

    def __init__(self, file: PageFile, size: int, pool: PagePool) -> None:
        self.ahead = PAGE
        self._file = file
        self._size = size
        self._pool = pool
        self._memory = pool.lend(_AHEAD_BYTES)
        self._window = range(0)  # offsets in memory

    def __enter__(self) -> _Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.give_back(self._memory)

    def at(self, offset: int) -> bytes:
        """Return the page at an offset within the file; raise :class:`OSError`."""
        if offset not in self._window:
            nbytes = min(self.ahead, self._size - offset)
            self._file.read([memoryview(self._memory)[:nbytes]], offset)
            self._window = range(offset, offset + nbytes)
        start = offset - self._window.start
        return self._memory[start : start + PAGE]


def intact(segment: Segment, row: int, pool: PagePool) -> bool:
    """Whether a record on the disk is the one the row tells of, and its payload what was stored.

    Raises :class:`OSError`.
    """
    rows = segment.rows
    length = rows.lengths[row]
    with pool.lent(pages_of(length) * PAGE) as memory:
        for start in range(0, memory.nbytes, MOST_BYTES):
            part = memory[start : start + MOST_BYTES]
            segment.file.read([part], rows.pages[row] * PAGE + start)
        record = unpack_record(memory[:PAGE], segment.head.identity)
        if record is None or (record.key, record.length) != (rows.keys[row], length):
            return False
        payload = memory[PAGE : PAGE + length]
        return record.live and record.digest == xxhash.xxh3_64_intdigest(payload)


def _read_index(segment: Segment) -> tuple[Columns, int] | None:
    """Return a segment's columns and pages, None if there is no index that is intact."""
    try:
        # A bad index costs a scan; a huge one must not cost memory.
        data = segment.stem.folder.read(segment.stem.index_file, segment.nbytes)
    except FileNotFoundError:
        return None
    found = None if data is None else unpack_index(data, segment.head.identity)
    if found is None or found[1] * PAGE > segment.file.size():
        logger.warning("disk tier: the index of %s is damaged, reading it anew", segment.stem)
        return None
    return found


def _tail(rows: Columns, end: int) -> list[int]:
    first = (end - _TAIL_BYTES) // PAGE
    return [row for row, page in enumerate(rows.pages) if page >= first]
