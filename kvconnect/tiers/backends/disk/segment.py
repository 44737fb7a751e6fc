"""One segment, a file of records: writes it, and reads it again after a restart."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from kvconnect.tiers.backends.base import PagePool
from kvconnect.tiers.backends.disk.files import MAX_BYTES, Directory, PageFile
from kvconnect.tiers.backends.disk.record import (
    PAGE,
    Columns,
    RecordHead,
    SegmentHead,
    index_bytes,
    pack_index,
    pack_record,
    pack_segment,
    pages_of,
    unpack_index,
    unpack_record,
    unpack_segment,
)

logger = logging.getLogger(__name__)

SEGMENT, INDEX = ".seg", ".idx"


class SegmentPath(NamedTuple):
    """Folder of a segment's two files, and their name without suffix."""

    folder: Directory
    name: str

    def __str__(self) -> str:
        return os.path.join(self.folder.path, self.name)

    @property
    def index_file(self) -> str:
        return self.name + INDEX

    @property
    def segment_file(self) -> str:
        return self.name + SEGMENT


class Segment:
    """A segment that is open for reading and, until it is full, for writing.

    ``rows`` has all written records, also those that were replaced or removed. ``slot`` is its
    number in the table. Not thread-safe: the table's lock guards everything except ``file``, and
    one thread at a time deletes records or seals.
    """

    def __init__(self, path: SegmentPath, head: SegmentHead, file: PageFile) -> None:
        self.path = path
        self.head = head
        self.file = file
        self.slot = -1
        self.rows = Columns.empty()
        self.used = PAGE  # bytes that are written or reserved
        self.index_bytes = index_bytes(())  # of the index with the reserved records
        self.writers = 0
        self.nbytes = file.size()
        self.indexed = False  # the index on the disk is current
        self.full = False  # no more space is reserved
        self.sealed = False  # full, and without writers

    def __repr__(self) -> str:
        state = "full" if self.full else "open"
        return (
            f"Segment({self.path.name}, {len(self.rows.keys)} records, {self.used} bytes, {state})"
        )

    def reserve(self, keys: Sequence[bytes], lengths: Sequence[int], limit: int) -> int:
        """Reserve consecutive space for records from ``used`` on. Return for how many.

        ``limit`` is the maximum size of segment and index in bytes.
        """
        if self.full:
            return 0
        count = 0
        for key, length in zip(keys, lengths, strict=True):
            nbytes, row = pages_of(length) * PAGE, index_bytes((key,)) - index_bytes(())
            if self.used + nbytes + self.index_bytes + row > limit:
                break
            self.used += nbytes
            self.index_bytes += row
            count += 1
        self.writers += count > 0
        return count

    def newest(self) -> int:
        """Return the time of the last record in seconds since 1970."""
        return self.rows.seconds[-1] if self.rows.seconds else self.head.created

    def mark_deleted(self, rows: Iterable[int]) -> list[int]:
        """Mark records as deleted on disk. Return those for which the disk returns an error.

        The index is deleted first, since it lists these records.
        """
        errors: dict[int, str] = {}
        for row in rows:
            page = bytearray(PAGE)
            key, length = self.rows.keys[row], self.rows.lengths[row]
            head = RecordHead(key, self.head.fingerprint, length, 0, 0, live=False)
            pack_record(head, self.head.identity, memoryview(page))
            try:
                self.drop_index()
                self.file.write_page(page, self.rows.pages[row] * PAGE)
            except OSError as error:
                errors[row] = str(error)
        if errors:
            text = "disk tier: cannot delete %d records of %s: %s"
            logger.warning(text, len(errors), self.path, next(iter(errors.values())))
        return list(errors)

    def drop_index(self) -> None:
        """Delete the index on disk before the segment changes."""
        if self.indexed:
            self.path.folder.unlink(self.path.index_file)
            self.indexed = False

    def seal(self, live: Sequence[int]) -> None:
        """Write the index of the ``live`` rows, and cut off unused space.

        Raises :class:`OSError`; the segment stays readable and is scanned after a restart.
        """
        self.full = self.sealed = True
        self.file.finish(self.used)
        packed = pack_index(self.head.identity, self.rows.pick(live), self.used // PAGE)
        self.path.folder.put(self.path.index_file, packed)
        self.indexed = True
        self.nbytes = self.used + len(packed)

    def reopen(self, nbytes: int) -> None:
        """Prepare a segment for more records. Raises :class:`OSError`."""
        self.drop_index()
        self.file.allocate(nbytes)
        self.nbytes = self.file.size()
        self.index_bytes = index_bytes(self.rows.keys)

    def delete(self) -> None:
        """Close the file and delete it. Errors are logged."""
        self.file.close()
        delete_segment(self.path)


def create_segment(
    path: SegmentPath, head: SegmentHead, nbytes: int, spare: Segment | None
) -> Segment:
    """Create a segment of ``nbytes`` bytes; if there is a ``spare`` one, from its file.

    Rewriting a file is faster than growing a new one. Records of the old segment are not valid in
    the new one, since its identity differs. Raises :class:`OSError`.
    """
    if spare is None:
        file = PageFile(path.folder, path.segment_file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    else:
        file = spare.file
    try:
        if spare is not None:
            # A segment of another format may have an index although ``indexed`` is False.
            with contextlib.suppress(FileNotFoundError):
                spare.path.folder.unlink(spare.path.index_file)
        file.write_page(pack_segment(head), 0)
        if spare is not None:
            path.folder.rename(spare.path.segment_file, path.segment_file)
        file.allocate(nbytes)
        return Segment(path, head, file)
    except OSError:
        file.close()
        for made in (path, spare.path if spare else path):
            delete_segment(made)
        raise


def delete_segment(path: SegmentPath) -> None:
    """Delete a segment's files, the index first, since it is useless alone."""
    for name in (path.index_file, path.segment_file):
        try:
            path.folder.unlink(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("disk tier: cannot remove %s of %s: %s", name, path, error)


_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system at the start of a process, which say nothing of a file."""
_SMALL_BYTES = 64 << 10  # reading records up to this size is faster than skipping them
_AHEAD_BYTES = 1 << 20
_TAIL_BYTES = 64 << 20
"""Records this close to the end of a scanned segment may be torn by a crash."""


def open_segment(path: SegmentPath, fingerprint: bytes, pool: PagePool) -> Segment | None:
    """Open a segment of an earlier process, and read its records if they have this format.

    Return None if it cannot be read. It is deleted then, unless the system has no files or memory
    left.
    """
    file = None
    try:
        file = PageFile(path.folder, path.segment_file, os.O_RDWR)
        head = read_head(file, pool)
        if head is not None:
            segment = Segment(path, head, file)
            if head.fingerprint == fingerprint:
                load_records(segment, pool)
            return segment
        logger.warning("disk tier: %s is damaged and is removed", path)
    except OSError as error:
        if error.errno in _SHORT_OF:
            logger.warning("disk tier: %s cannot be opened and is left alone: %s", path, error)
            if file is not None:
                file.close()
            return None
        logger.warning("disk tier: %s cannot be read and is removed: %s", path, error)
    if file is not None:
        file.close()
    delete_segment(path)
    return None


def read_head(file: PageFile, pool: PagePool) -> SegmentHead | None:
    """Return a file's head, None if the file is not a segment.

    Raises :class:`OSError`.
    """
    if file.size() < PAGE:
        return None
    with pool.borrow(PAGE) as memory:
        file.read([memory], 0)
        return unpack_segment(memory)


def load_records(segment: Segment, pool: PagePool) -> None:
    """Read a segment's records and delete those that a crash has torn. Raises :class:`OSError`."""
    read_records(segment, pool)
    rows = segment.rows
    if segment.indexed or segment.file.size() == segment.used:
        return  # complete: sealing has cut off the unused space
    torn = [row for row in _tail(rows, segment.used) if not is_readable(segment, row, pool)]
    if torn:
        logger.info("disk tier: %d torn records dropped from %s", len(torn), segment.path)
        segment.mark_deleted(torn)
        segment.rows = rows.pick(sorted(set(range(len(rows.keys))) - set(torn)))


def read_records(segment: Segment, pool: PagePool) -> None:
    """Read a segment's records from its index, or by a scan if the index is not intact.

    Raises :class:`OSError`.
    """
    found = _read_index(segment)
    if found is None:
        segment.rows, segment.used = scan_records(segment.file, segment.head, pool)
    else:
        segment.rows, segment.used = found[0], found[1] * PAGE
        segment.indexed = True


def scan_records(file: PageFile, head: SegmentHead, pool: PagePool) -> tuple[Columns, int]:
    """Read the heads of a segment's records. Return the live records and the end of the last one.

    Other pages are skipped: reserved space that was never written, and bytes of an earlier segment
    in the same file. Raises :class:`OSError`.
    """
    rows, end = Columns.empty(), PAGE
    size, offset = file.size() // PAGE * PAGE, PAGE
    with _Pages(file, size, pool) as pages:
        while offset < size:
            page = pages.at(offset)
            record = unpack_record(page, head.identity) if page else None
            after = offset + pages_of(record.length) * PAGE if record else size + 1
            if record is None or after > size or record.fingerprint != head.fingerprint:
                pages.ahead = _AHEAD_BYTES  # a reused file has no holes to skip
                offset = file.next_data(offset + PAGE)
                continue
            if record.live:
                rows.add(offset // PAGE, record)
            pages.ahead = _AHEAD_BYTES if after - offset <= _SMALL_BYTES else PAGE
            offset = end = after
    return rows, end


class _Pages:
    """Reads pages of a file in ascending order, ``ahead`` bytes at a time."""

    def __init__(self, file: PageFile, size: int, pool: PagePool) -> None:
        self.ahead = PAGE
        self._file = file
        self._size = size
        self._pool = pool
        self._memory = pool.acquire(_AHEAD_BYTES)
        self._window = range(0)  # offsets in memory

    def __enter__(self) -> _Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._memory)

    def at(self, offset: int) -> bytes:
        """Return the page at an offset within the file; empty if it is a bad spot of the disk.
        Raises :class:`OSError`."""
        if offset not in self._window:
            read = self._read(offset, self.ahead) or self._read(offset, PAGE)
            if not read:
                return b""
        start = offset - self._window.start
        return self._memory[start : start + PAGE]

    def _read(self, offset: int, nbytes: int) -> bool:
        nbytes = min(nbytes, self._size - offset)
        try:
            self._file.read([memoryview(self._memory)[:nbytes]], offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        self._window = range(offset, offset + nbytes)
        return True


def is_intact(segment: Segment, row: int, pool: PagePool) -> bool:
    """Return whether the record on disk belongs to the row and its payload matches its digest.

    Raises :class:`OSError`.
    """
    rows = segment.rows
    length = rows.lengths[row]
    with pool.borrow(pages_of(length) * PAGE) as memory:
        for start in range(0, memory.nbytes, MAX_BYTES):
            part = memory[start : start + MAX_BYTES]
            segment.file.read([part], rows.pages[row] * PAGE + start)
        record = unpack_record(memory[:PAGE], segment.head.identity)
        if record is None or (record.key, record.length) != (rows.keys[row], length):
            return False
        payload = memory[PAGE : PAGE + length]
        return record.live and record.digest == xxhash.xxh3_64_intdigest(payload)


def is_readable(segment: Segment, row: int, pool: PagePool) -> bool:
    """As :func:`is_intact`; a record that the disk cannot read is not."""
    try:
        return is_intact(segment, row, pool)
    except OSError as error:
        logger.warning("disk tier: %s cannot be read: %s", segment.path, error)
        return False


def is_gone(segment: Segment, row: int, pool: PagePool) -> bool:
    """Return whether the record of a row has been deleted. Raises :class:`OSError`."""
    with pool.borrow(PAGE) as memory:
        segment.file.read([memory], segment.rows.pages[row] * PAGE)
        record = unpack_record(memory, segment.head.identity)
    return record is not None and not record.live


def _read_index(segment: Segment) -> tuple[Columns, int] | None:
    """Return a segment's columns and pages, None without an intact index."""
    try:
        # The limit keeps a wrong, huge file from using up memory.
        data = segment.path.folder.read(segment.path.index_file, segment.nbytes)
    except FileNotFoundError:
        return None
    found = None if data is None else unpack_index(data, segment.head.identity)
    if found is None or found[1] * PAGE > segment.file.size():
        logger.warning("disk tier: the index of %s is damaged; scanning the segment", segment.path)
        return None
    return found


def _tail(rows: Columns, end: int) -> list[int]:
    first = (end - _TAIL_BYTES) // PAGE
    return [row for row, page in enumerate(rows.pages) if page >= first]
