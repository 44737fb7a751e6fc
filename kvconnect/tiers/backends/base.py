"""The seam of the tiers below host memory: blocks of bytes under keys, on a disk or a server."""

from __future__ import annotations

import contextlib
import difflib
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

import msgspec

from kvconnect.config import parse_bytes
from kvconnect.errors import ConfigError, Misuse
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import TransferType

S = TypeVar("S", bound=msgspec.Struct)

MAX_KEY_BYTES = 255
MAX_FINGERPRINT_BYTES = 64


class BlockOutcome(str, Enum):
    """What became of one block of a call. Values but the first two are metric labels."""

    OK = "ok"
    ABSENT = "absent"  # get, remove: not there: never stored, evicted, expired or removed
    CORRUPT = "corrupt"  # get: not the bytes that were stored; this copy will not be found again
    SIZE = "size"  # get: stored with another length; put: longer than this store ever takes
    FULL = "full"  # put: no room, not even after eviction
    LIMITED = "limited"  # put: a bound on what may be written is used up for now
    FAILED = "failed"  # tried, and the disk or the server said no
    LATE = "late"  # of no store: its call takes longer than a request waits, and is not waited for
    UNAVAILABLE = "unavailable"  # not tried: closed, or failed so often that it is left alone


class Usage(NamedTuple):
    """What a store holds. ``nbytes`` and ``capacity_bytes`` count all it takes, not payloads alone.
    A store that others use too does not know: ``blocks`` is -1 then, and the others are 0.
    ``available`` is False while the store is left alone."""

    blocks: int
    nbytes: int
    capacity_bytes: int
    available: bool


class Store(ABC):
    """Keeps the bytes of blocks under keys, with their length and digest, until room is needed.

    A store is a cache: any block may be gone at any time, but what ``get`` calls OK is what was
    put last under that key, byte for byte. It belongs to one format of blocks: it is made with
    the format's fingerprint, and blocks that were put under another one do not exist for it.

    Contract:

    - *Blocks* the calling thread while it moves bytes, for a bounded time: calls come from I/O
      threads, and their number bounds what is under way.
    - *Threads*: any, several at a time, for the same keys too. A get during a put of its key
      finds the old block, the new one or none, never a mixture. The GIL is not held for long.
    - *Order*: a put that returned is seen by every call that starts later.
    - *Idempotent*: all calls are.
    - *Memory*: buffers are the caller's. During a call nobody else writes them; afterwards the
      store has no more to do with them. A get into buffers that start at whole pages and a put
      from writable ones of that kind need no copy where the system allows it.
    - *Raises* only :class:`Misuse`, before anything moved, for arguments that cannot be meant. What
      goes wrong later is a :class:`BlockOutcome` per block, in the order of the keys. Of a get
      that is not OK the buffer's content is unknown.
    """

    @abstractmethod
    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        """Store blocks, in place of what was there. If a key occurs twice the last one counts."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        """Fill each buffer with a block, which must be exactly as long; verified by its digest."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[int]:
        """Return the length in bytes of each block, 0 where there is none (or none to be had)."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        """Forget blocks, for good: a restart does not bring them back."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return what the store holds now."""

    @abstractmethod
    def take_stats(self) -> OffloadingConnectorStats | None:
        """Hand over what was recorded since the last time, None if nothing was."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Idempotent; calls under way end first, later ones do nothing."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise :class:`Misuse` for a key that is empty or too long."""
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise Misuse(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def check_buffers(keys: Sequence[bytes], buffers: Sequence[memoryview], writable: bool) -> None:
    """Raise :class:`Misuse` for keys and buffers that no call can be meant for."""
    check_keys(keys)
    if len(keys) != len(buffers):
        raise Misuse(f"{len(keys)} keys but {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.format != "B" or buffer.ndim != 1 or not buffer.c_contiguous:
            raise Misuse("a buffer must be plain contiguous bytes: memoryview(...).cast('B')")
        if not buffer.nbytes or (writable and buffer.readonly):
            raise Misuse("a buffer is empty" if not buffer.nbytes else "a buffer is read-only")


def check_fingerprint(fingerprint: bytes) -> bytes:
    """Return the fingerprint; raise :class:`Misuse` if it is empty or too long."""
    if not 0 < len(fingerprint) <= MAX_FINGERPRINT_BYTES:
        raise Misuse(
            f"a fingerprint has 1 to {MAX_FINGERPRINT_BYTES} bytes, not {len(fingerprint)}"
        )
    return fingerprint


def parse_settings(kind: type[S], settings: Mapping[str, object], sizes: Sequence[str]) -> S:
    """Return a store's settings as its struct. ``sizes`` names the fields that are bytes.

    Raises:
        ConfigError: unknown key (names the nearest one), missing, or of the wrong type.
    """
    known = kind.__struct_fields__
    values = dict(settings)
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            fix = f"unknown setting of the store, did you mean {near[0]!r}?" if near else "leave it"
            raise ConfigError(key, settings[key], fix)
    for field in sizes:
        if field in values:
            values[field] = parse_bytes(field, values[field])
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        missing = next((name for name in known if f"`{name}`" in str(error)), field)
        raise ConfigError(missing, settings.get(missing), str(error)) from error


class WriteBudget:
    """A bound on the bytes written per day; 0 is none. Threads: any.

    What is not used is saved up for an hour, so a day sees at most a twenty-fourth more. One
    batch may overdraw it; then nothing is written until that is made good.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._per_s = bytes_per_day / 86_400
        self._most = bytes_per_day / 24
        self._lock = threading.Lock()
        self._left = self._most
        self._at = now

    def spend(self, nbytes: int, now: float) -> bool:
        """Take bytes from the budget; False if it is used up."""
        if not self._most:
            return True
        with self._lock:
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left <= 0:
                return False
            self._left -= nbytes
            return True


# Who is inside a store, so that it can be closed.


class InFlightGuard:
    """Counts calls under way, and lets none in once it is closed. Threads: any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.closed = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Be inside during the context, if this yields True."""
        with self._changed:
            entered = not self.closed
            self._inside += entered
        try:
            yield entered
        finally:
            with self._changed:
                self._inside -= entered
                self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more; return False if that was so before."""
        with self._changed:
            was, self.closed = self.closed, True
            return not was

    def wait(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)


# What a store records about itself, from several threads.


_QUIET = {BlockOutcome.OK, BlockOutcome.ABSENT}  # a block that is not there is no failure


class StoreMeter:
    """Statistics behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = OffloadingConnectorStats()

    def moved(self, kind: TransferType, nbytes: int, seconds: float) -> None:
        """Record one call that moved bytes of payload; none moved is no operation."""
        if nbytes:
            with self._lock:
                self._stats.record_transfer(kind, nbytes, seconds)

    def count_failed(self, outcomes: Iterable[BlockOutcome]) -> None:
        """Count the blocks of a call that failed, by why."""
        failed = [found for found in outcomes if found not in _QUIET]
        if failed:
            with self._lock:
                for outcome in failed:
                    self._stats.count("store_failed_blocks", label=outcome)

    def evicted(self, blocks: int) -> None:
        """Count blocks dropped to make room, or because they were too old."""
        with self._lock:
            self._stats.count("store_evicted_blocks", blocks)

    def take(self) -> OffloadingConnectorStats | None:
        """Hand over what was recorded since the last time, None if nothing was."""
        with self._lock:
            return self._stats.take()


# Memory that is lent for one transfer and used again: new pages cost more than copying.


_POOLED = 16


class PagePool:
    """Lends memory that starts at a page. Threads: any."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def acquire(self, nbytes: int) -> mmap.mmap:
        """Return memory of at least so many bytes; what is in it is unknown."""
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
            if len(memory) >= nbytes:
                return memory
        memory = mmap.mmap(-1, max(nbytes, 64 * mmap.PAGESIZE))
        with contextlib.suppress(OSError):
            # A child process would keep the pages, or have them copied under a transfer.
            memory.madvise(mmap.MADV_DONTFORK)
        return memory

    def release(self, memory: mmap.mmap) -> None:
        """Take memory back that nobody uses any more."""
        if len(self._free) < _POOLED:
            self._free.append(memory)

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[memoryview]:
        """Lend just so many bytes, during the context."""
        memory = self.acquire(nbytes)
        try:
            yield memoryview(memory)[:nbytes]
        finally:
            self.release(memory)
