"""What a segment holds, after a restart: from its index, or from its records."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from mmap import mmap

import xxhash

from kvconnect.store.disk.files import PageFile, PagePool
from kvconnect.store.disk.frames import MOST_BYTES
from kvconnect.store.disk.record import (
    PAGE,
    Columns,
    RecordHead,
    SegmentHead,
    pages_of,
    unpack_index,
    unpack_record,
    unpack_segment,
)
from kvconnect.store.disk.segment import INDEX, SEGMENT, Segment, delete

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 << 20
"""Records this near the end of a scanned segment may have been under way when the process died."""


def open_segment(stem: str, fingerprint: bytes, pool: PagePool) -> Segment | None:
    """Open a segment of an earlier process, with its records if they are of this format.

    One that cannot be read is removed, and None returned.
    """
    file = None
    try:
        file = PageFile(stem + SEGMENT, os.O_RDWR)
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
    memory = pool.lend(PAGE)
    try:
        file.read([memoryview(memory)[:PAGE]], 0)
        return unpack_segment(memory[:PAGE])
    finally:
        pool.give_back(memory)


def load(segment: Segment, pool: PagePool) -> None:
    """Fill in what a segment holds, from its index if that is intact, else by a scan.

    A record that was torn by a crash is dropped: marked as gone, and not among the rows.
    Raises :class:`OSError`.
    """
    found = read_index(segment)
    if found is not None:
        segment.rows, pages = found
        segment.used = pages * PAGE
        segment.indexed = True
        return
    rows, segment.used = scan(segment.file, segment.head, pool)
    segment.rows = rows
    torn = [row for row in _tail(rows, segment.used) if not _whole(segment, row, pool)]
    if torn:
        logger.info("disk tier: %d torn records dropped from %s", len(torn), segment.stem)
        segment.kill(torn)
        segment.rows = rows.pick(sorted(set(range(len(rows.keys))) - set(torn)))


def scan(file: PageFile, head: SegmentHead, pool: PagePool) -> tuple[Columns, int]:
    """Return the live records of a segment, read from their heads, and where the last one ends.

    What is no record, such as room that was given out and never written, is stepped over.
    Raises :class:`OSError`.
    """
    rows, end = Columns.empty(), PAGE

    def note(offset: int, record: RecordHead) -> None:
        nonlocal end
        end = offset + pages_of(record.length) * PAGE
        if record.live:
            rows.add(offset // PAGE, record)

    walk(file, head, pool, note)
    return rows, end


def walk(
    file: PageFile, head: SegmentHead, pool: PagePool, note: Callable[[int, RecordHead], None]
) -> None:
    """Call ``note`` with the offset and the head of every record of a segment.

    Raises :class:`OSError`.
    """
    memory = pool.lend(PAGE)
    page = memoryview(memory)[:PAGE]
    size, offset = file.size() // PAGE * PAGE, PAGE
    try:
        while offset < size:
            file.read([page], offset)
            record = unpack_record(page, head.identity)
            after = offset + pages_of(record.length) * PAGE if record else size + 1
            if record is not None and after <= size and record.fingerprint == head.fingerprint:
                note(offset, record)
                offset = after
            else:
                offset = file.next_data(offset + PAGE)
    finally:
        page.release()
        pool.give_back(memory)


def read_payload(file: PageFile, offset: int, length: int, memory: mmap) -> memoryview:
    """Return a record's payload, read into ``memory``; raise :class:`OSError`.

    ``memory`` must have room for the payload in whole pages.
    """
    whole = memoryview(memory)[: (pages_of(length) - 1) * PAGE]
    for start in range(0, whole.nbytes, MOST_BYTES):
        part = whole[start : start + MOST_BYTES]
        file.read([part], offset + PAGE + start)
    return whole[:length]


def read_index(segment: Segment) -> tuple[Columns, int] | None:
    """Return a segment's columns and pages, None if there is no index that is intact."""
    try:
        with open(segment.stem + INDEX, "rb") as index:
            # A bad index costs a scan; a huge one must not cost memory.
            if os.fstat(index.fileno()).st_size > segment.nbytes:
                return None
            found = unpack_index(index.read(), segment.head.identity)
    except FileNotFoundError:
        return None
    if found is None or found[1] * PAGE > segment.file.size():
        logger.warning("disk tier: the index of %s is damaged, reading it anew", segment.stem)
        return None
    return found


def _tail(rows: Columns, end: int) -> list[int]:
    first = (end - _TAIL_BYTES) // PAGE
    return [row for row, page in enumerate(rows.pages) if page >= first]


def _whole(segment: Segment, row: int, pool: PagePool) -> bool:
    """Whether a record's payload is what its head says."""
    offset, length = segment.rows.pages[row] * PAGE, segment.rows.lengths[row]
    memory = pool.lend(pages_of(length) * PAGE)
    try:
        segment.file.read([memoryview(memory)[:PAGE]], offset)
        record = unpack_record(memory[:PAGE], segment.head.identity)
        payload = read_payload(segment.file, offset, length, memory)
        return record is not None and record.digest == xxhash.xxh3_64_intdigest(payload)
    finally:
        pool.give_back(memory)
