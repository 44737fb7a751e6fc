"""One segment: a file of records, and what is in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvconnect.tiers.backends.disk.files import Directory, PageFile
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
)

logger = logging.getLogger(__name__)

SEGMENT, INDEX = ".seg", ".idx"


class Stem(NamedTuple):
    """Where a segment's two files are. ``name`` has no ending."""

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
    """A segment that is open for reading, and for writing until it is full.

    ``rows`` are the records that were written, those that do not count any more among them.
    ``slot`` is the number that the table gives it. Not synchronised: the table's lock guards
    everything but ``file``, and whoever kills or seals does so alone.
    """

    def __init__(self, stem: Stem, head: SegmentHead, file: PageFile) -> None:
        self.stem = stem
        self.head = head
        self.file = file
        self.slot = -1
        self.rows = Columns.empty()
        self.used = PAGE  # bytes that are written or given out
        self.index_bytes = index_bytes(())  # what the index takes for what was given out
        self.writers = 0
        self.nbytes = file.size()
        self.indexed = False  # whether the index on the disk is right
        self.full = False  # gives out no more room
        self.sealed = False  # full, and nobody writes it any more

    def __repr__(self) -> str:
        state = "full" if self.full else "open"
        return (
            f"Segment({self.stem.name}, {len(self.rows.keys)} records, {self.used} bytes, {state})"
        )

    def reserve(self, keys: Sequence[bytes], lengths: Sequence[int], limit: int) -> int:
        """Give out room for records, side by side from ``used`` on; return for how many.

        ``limit`` is the bytes that the segment and its index may have.
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
        """Return when the last record was written, in seconds since 1970."""
        return self.rows.seconds[-1] if self.rows.seconds else self.head.created

    def kill(self, rows: Iterable[int]) -> bool:
        """Mark records as gone, on the disk too; return False if the disk refused.

        The segment's index goes first: it knows them as live.
        """
        try:
            self.drop_index()
            for row in rows:
                page = bytearray(PAGE)
                key, length = self.rows.keys[row], self.rows.lengths[row]
                gone = RecordHead(key, self.head.fingerprint, length, 0, 0, live=False)
                pack_record(gone, self.head.identity, memoryview(page))
                self.file.write_page(page, self.rows.pages[row] * PAGE)
        except OSError as error:
            logger.warning("disk tier: cannot mark records of %s as gone: %s", self.stem, error)
            return False
        return True

    def drop_index(self) -> None:
        """Remove the index from the disk, before it is wrong."""
        if self.indexed:
            self.stem.folder.unlink(self.stem.index_file)
            self.indexed = False

    def seal(self, live: Sequence[int]) -> None:
        """Write the index, of the rows that count, and give back what was not used.

        Raises :class:`OSError`; the segment can be read all the same, and be scanned later.
        """
        self.full = self.sealed = True
        self.file.finish(self.used)
        packed = pack_index(self.head.identity, self.rows.pick(live), self.used // PAGE)
        self.stem.folder.put(self.stem.index_file, packed)
        self.indexed = True
        self.nbytes = self.used + len(packed)

    def reopen(self, nbytes: int) -> None:
        """Make a segment ready to give out room again; raise :class:`OSError` if it cannot be."""
        self.drop_index()
        self.file.allocate(nbytes)
        self.nbytes = self.file.size()
        self.index_bytes = index_bytes(self.rows.keys)

    def delete(self) -> None:
        """Close the file and remove it. Idempotent on the disk; errors are logged."""
        self.file.close()
        delete(self.stem)


def create(stem: Stem, head: SegmentHead, nbytes: int, spare: Segment | None) -> Segment:
    """Make a new segment with room for ``nbytes``, out of the file of a ``spare`` one if there is.

    What has been written before is written faster than what is new to the file system. Records of
    the old segment are none of the new one's. Raises :class:`OSError` if that fails.
    """
    if spare is None:
        file = PageFile(stem.folder, stem.segment_file, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    else:
        file = spare.file
    try:
        if spare is not None:
            # Whether one of another format has an index was not looked at.
            with contextlib.suppress(FileNotFoundError):
                spare.stem.folder.unlink(spare.stem.index_file)
        file.write_page(pack_segment(head), 0)
        if spare is not None:
            stem.folder.rename(spare.stem.segment_file, stem.segment_file)
        file.allocate(nbytes)
        return Segment(stem, head, file)
    except OSError:
        file.close()
        for made in (stem, spare.stem if spare else stem):
            delete(made)
        raise


def delete(stem: Stem) -> None:
    """Remove a segment's files, the index first: alone it says nothing."""
    for name in (stem.index_file, stem.segment_file):
        try:
            stem.folder.unlink(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("disk tier: cannot remove %s of %s: %s", name, stem, error)
