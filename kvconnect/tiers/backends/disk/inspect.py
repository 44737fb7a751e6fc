"""Inspects a folder of the disk tier for ``kvconnect cache``, also while engines use it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from kvconnect.cache.keys import TENANT_BYTES
from kvconnect.errors import ConfigError
from kvconnect.tiers.backends.base import PagePool
from kvconnect.tiers.backends.disk.files import Directory, PageFile
from kvconnect.tiers.backends.disk.folder import (
    LOCK,
    Folder,
    lock_folder,
    lock_holder,
    numbers_in,
    segment_path,
)
from kvconnect.tiers.backends.disk.formats import MODEL, read_format
from kvconnect.tiers.backends.disk.segment import (
    Segment,
    SegmentPath,
    delete_segment,
    is_gone,
    is_readable,
    read_head,
    read_records,
)

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


class BlockEntry(NamedTuple):
    """One block. ``seconds`` since 1970; ``model`` is "" if unknown."""

    owner: str
    format: str
    model: str
    tenant: str
    key: str
    nbytes: int
    seconds: int


class BlockFilter(NamedTuple):
    """Selects blocks that meet all conditions.

    Attributes:
        before: put before this time in seconds since 1970; None: at any time.
        formats: prefix of the hexadecimal fingerprint.
        model: name of the model; "" for unknown; None: any.
        tenant: first bytes of the key, see :mod:`kvconnect.cache.keys`; None: any.
    """

    before: float | None = None
    formats: str = ""
    model: str | None = None
    tenant: bytes | None = None

    def rows(self, segment: Segment) -> list[int]:
        """Return the selected rows of a segment, whose format is selected."""
        keys, _, _, seconds = segment.rows
        return [
            row
            for row, key in enumerate(keys)
            if (self.before is None or seconds[row] < self.before)
            and (self.tenant is None or key[:TENANT_BYTES] == self.tenant)
        ]


@dataclass
class WorkerBlocks:
    """Blocks of one format in one worker's folder. Times in seconds since 1970, 0 for none;
    ``model`` is "" if unknown; ``tenants`` has the bytes of blocks by tenant id."""

    owner: str
    format: str
    in_use_by: str
    model: str = ""
    segments: int = 0
    file_bytes: int = 0
    blocks: int = 0
    block_bytes: int = 0
    oldest: int = 0
    newest: int = 0
    tenants: dict[str, int] = field(default_factory=dict)

    def add(self, segment: Segment) -> None:
        """Add a segment's numbers."""
        seconds = segment.rows.seconds
        self.segments += 1
        self.file_bytes += segment.nbytes
        self.blocks += len(seconds)
        self.block_bytes += sum(segment.rows.lengths)
        if seconds:
            self.oldest = min(self.oldest or seconds[0], *seconds)
            self.newest = max(self.newest, *seconds)
        by_tenant: Counter[bytes] = Counter()
        for key, nbytes in zip(segment.rows.keys, segment.rows.lengths, strict=True):
            by_tenant[key[:TENANT_BYTES]] += nbytes
        for tenant, nbytes in by_tenant.items():
            self.tenants[tenant.hex()] = self.tenants.get(tenant.hex(), 0) + nbytes

    def json(self) -> dict[str, object]:
        """Return the numbers under their names."""
        return asdict(self)


@dataclass
class Verification:
    """Result of :func:`verify`. ``bad`` blocks are damaged or cannot be read; ``removed`` of them
    were removed, which happens only in folders that no engine uses."""

    blocks: int = 0
    nbytes: int = 0
    bad: int = 0
    removed: int = 0

    def json(self) -> dict[str, object]:
        """Return the numbers under their names."""
        return asdict(self)


def owners(path: str) -> list[str]:
    """Return the names of the workers that have a folder in the tier.

    Raises:
        ConfigError: there is no such folder, or it is not one of the tier.
    """
    try:
        found = [n for n in os.listdir(path) if os.path.isfile(os.path.join(path, n, LOCK))]
    except OSError as error:
        raise ConfigError("path", path, f"{error.strerror}: name the tier's folder") from error
    if not found:
        raise ConfigError("path", path, "no worker has blocks there: name the tier's folder")
    return sorted(found)


@contextmanager
def _opened(path: str, owner: str) -> Iterator[Directory]:
    """Open a worker's folder. Raises :class:`ConfigError`."""
    try:
        with closing(Directory(path)) as top:
            folder = top.folder(owner)
    except OSError as error:
        fix = f"{owner} in it cannot be opened: {error.strerror}"
        raise ConfigError("path", path, fix) from error
    with closing(folder):
        yield folder


def stats(path: str, model: str | None = None) -> list[WorkerBlocks]:
    """Return the blocks of each worker by format. Raises :class:`ConfigError`."""
    parts: list[WorkerBlocks] = []
    for owner in owners(path):
        by_format: dict[str, WorkerBlocks] = {}
        with _opened(path, owner) as folder:
            user = _user(folder)
            for segment, called in _of(folder, BlockFilter(model=model)):
                name = segment.head.fingerprint.hex()
                by_format.setdefault(name, WorkerBlocks(owner, name, user, called)).add(segment)
        parts += by_format.values()
        if not by_format and model is None:
            parts.append(WorkerBlocks(owner, "", user))
    return parts


def ls(path: str, wanted: BlockFilter) -> Iterator[BlockEntry]:
    """Yield blocks, worker by worker, oldest segment first. Raises :class:`ConfigError`."""
    for owner in owners(path):
        with _opened(path, owner) as folder:
            for segment, model in _of(folder, wanted):
                name, (keys, _, lengths, seconds) = segment.head.fingerprint.hex(), segment.rows
                for row in wanted.rows(segment):
                    tenant, key = keys[row][:TENANT_BYTES].hex(), keys[row].hex()
                    yield BlockEntry(owner, name, model, tenant, key, lengths[row], seconds[row])


def verify(path: str, progress: Progress) -> Verification:
    """Read every block and compare its digest.

    Bad blocks are removed if no engine uses the folder; an engine removes them when it reads them.
    Raises :class:`ConfigError`.
    """
    verdict = Verification()
    total = sum(part.block_bytes for part in stats(path))
    pool = PagePool()
    for owner in owners(path):
        with _opened(path, owner) as folder:
            handle = _try_lock(folder)
            try:
                for segment in segments(folder, os.O_RDONLY if handle < 0 else os.O_RDWR):
                    bad, gone = [], 0
                    for row, nbytes in enumerate(segment.rows.lengths):
                        if not is_readable(segment, row, pool):
                            if handle < 0 and _gone(segment, row, pool):
                                gone += 1
                            else:
                                bad.append(row)
                        verdict.nbytes += nbytes
                        progress(verdict.nbytes, total)
                    if (bad or gone) and _reused(segment, pool):
                        continue  # its file now belongs to another segment
                    verdict.blocks += len(segment.rows.keys) - gone
                    verdict.bad += len(bad)
                    if bad and handle >= 0:
                        verdict.removed += _remove(segment, bad)
            finally:
                if handle >= 0:
                    os.close(handle)
    return verdict


def clear(path: str, wanted: BlockFilter) -> int:
    """Remove blocks and return their number. Their bytes are not overwritten.

    Raises:
        ConfigError: an engine uses one of the folders; nothing is removed then.
    """
    folders = []
    removed = 0
    try:
        for owner in owners(path):
            folders.append(Folder(path, owner))
        for folder in folders:
            for segment, _ in _of(folder.files, wanted, os.O_RDWR):
                rows = wanted.rows(segment)
                if rows or not segment.rows.keys:
                    removed += _remove(segment, rows)
    finally:
        for folder in folders:
            folder.close()
    return removed


def segments(folder: Directory, mode: int = os.O_RDONLY) -> Iterator[Segment]:
    """Yield the segments of a worker's folder, each open until the next one is requested.

    Segments that an engine creates or deletes meanwhile may be missing.
    """
    pool = PagePool()
    for number in numbers_in(folder):
        path = segment_path(folder, number)
        try:
            file = PageFile(folder, path.segment_file, mode)
        except OSError as error:  # deleted meanwhile, or not readable
            logger.debug("disk tier: %s: %s", path, error)
            continue
        try:
            segment = _look(path, file, pool)
            if segment is not None:
                yield segment
        finally:
            file.close()


def _of(
    folder: Directory, wanted: BlockFilter, mode: int = os.O_RDONLY
) -> Iterator[tuple[Segment, str]]:
    """Yield the :func:`segments` of the wanted formats, each with its model's name."""
    models: dict[bytes, str] = {}
    for segment in segments(folder, mode):
        fingerprint = segment.head.fingerprint
        if fingerprint not in models:
            models[fingerprint] = read_format(folder, fingerprint).get(MODEL, "")
        model = models[fingerprint]
        if fingerprint.hex().startswith(wanted.formats) and wanted.model in (None, model):
            yield segment, model


def _look(path: SegmentPath, file: PageFile, pool: PagePool) -> Segment | None:
    try:
        head = read_head(file, pool)
        if head is None:
            return None
        segment = Segment(path, head, file)
        read_records(segment, pool)
        return segment
    except OSError as error:
        logger.warning("disk tier: %s cannot be read: %s", path, error)
        return None


def _gone(segment: Segment, row: int, pool: PagePool) -> bool:
    """Return whether an engine has replaced or removed a block meanwhile."""
    try:
        return is_gone(segment, row, pool)
    except OSError:
        return False


def _reused(segment: Segment, pool: PagePool) -> bool:
    try:
        return read_head(segment.file, pool) != segment.head
    except OSError:
        return False


def _remove(segment: Segment, rows: list[int]) -> int:
    """Remove records of a segment that no engine uses. Return their number."""
    if len(rows) == len(segment.rows.keys):
        delete_segment(segment.path)
        return len(rows)
    gone = set(rows).difference(segment.mark_deleted(rows))
    if gone:
        segment.seal([row for row in range(len(segment.rows.keys)) if row not in gone])
    return len(gone)


def _user(folder: Directory) -> str:
    """Return the process that uses a worker's folder as text, "" for none."""
    handle = _try_lock(folder)
    if handle < 0:
        return lock_holder(folder)
    os.close(handle)
    return ""


def _try_lock(folder: Directory) -> int:
    """Lock a folder. Return the handle, -1 if it is in use or cannot be written."""
    try:
        return lock_folder(folder)
    except OSError as error:
        logger.debug("disk tier: %s cannot be locked: %s", folder.path, error)
        return -1
