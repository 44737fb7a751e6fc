"""The contracts of what a secondary tier reads, and of a store, which keeps blocks; helpers."""

from __future__ import annotations

import contextlib
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.protocol.addresses import Addresses
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import TransferType

MAX_KEY_BYTES = 255
MAX_FINGERPRINT_BYTES = 64


class BlockOutcome(StrEnum):
    """Result for one block of a call. Values except the first two are metric labels."""

    OK = "ok"
    ABSENT = "absent"  # get, remove: never stored, evicted, expired or removed
    CORRUPT = "corrupt"  # get: the bytes do not match their digest; the copy is removed
    SIZE = "size"  # get: stored with another length; put: longer than the store accepts
    FULL = "full"  # put: no room, even after eviction
    LIMITED = "limited"  # put: a write budget or tenant quota is used up for now
    FAILED = "failed"  # the disk or the server returned an error
    LATE = "late"  # the call takes longer than a request waits; no store returns this
    UNAVAILABLE = "unavailable"  # not tried: the store is closed, or its circuit breaker is open


class Usage(NamedTuple):
    """Usage of a store. ``nbytes`` and ``capacity_bytes`` include headers and indexes. A store that
    other engines use too does not know its usage: ``blocks`` is -1, the byte counts are 0.
    ``available`` is False while the store is closed or its circuit breaker is open."""

    blocks: int
    nbytes: int
    capacity_bytes: int
    available: bool


class BlockSource(ABC):
    """Has the bytes of blocks under keys, with their length and digest; who reads does not write.

    A source is a cache: any block may disappear at any time. A source is made with the fingerprint
    of one block format; blocks of another fingerprint do not exist for it.

    Contract, also of what a store adds:

    - *Blocking*: a call blocks its thread for a bounded time. Calls come from I/O threads, whose
      number limits the calls in flight.
    - *Threads*: any, several at a time, also for the same keys. A get during a put of its key
      returns the old block, the new one or none, never a mixture. The GIL is not held for long.
    - *Order*: a call that starts after a put returned sees that put.
    - *Idempotent*: all calls.
    - *Memory*: buffers belong to the caller. Nobody else writes them during a call, and the store
      does not use them afterwards. Page-aligned buffers for get and page-aligned writable ones for
      put avoid a copy where the system allows it.
    - *Raises* only :class:`Misuse`, for wrong arguments, before any byte is moved. Later errors are
      a :class:`BlockOutcome` per block, in the order of the keys. After a get that is not OK the
      content of the buffer is unknown.
    """

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        """Read blocks into buffers of exactly their length and verify their digests."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[int]:
        """Return the length in bytes of each block, 0 if it is absent or cannot be read now."""

    def exists_at(self, keys: Sequence[bytes], engines: Addresses) -> list[int]:  # noqa: ARG002
        """As :meth:`exists`. If ``engines`` are given and the source is engines, only these are
        asked."""
        return self.exists(keys)

    @property
    def asks_one_by_one(self) -> bool:
        """Whether :meth:`exists` costs a request to a server for each key."""
        return False

    @abstractmethod
    def usage(self) -> Usage:
        """Return the current usage."""

    @abstractmethod
    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return the statistics since the last call, None if there are none."""

    @abstractmethod
    def close(self) -> None:
        """Wait for running calls and free all resources. Later calls do nothing. Idempotent."""


class Store(BlockSource):
    """Keeps blocks until room is needed. A block that ``get`` returns as OK is, byte for byte, the
    one that was put last under its key."""

    @abstractmethod
    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        """Store blocks and replace older ones. If a key occurs twice, its last block is stored."""

    def exists_whole(self, keys: Sequence[bytes]) -> list[int]:
        """As :meth:`exists`, for who writes what is absent: a block that lacks a part is absent,
        however many requests it takes to see that."""
        return self.exists(keys)

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        """Remove blocks permanently: a restart does not bring them back."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise :class:`Misuse` for a key that is empty or too long."""
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise Misuse(f"a key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def check_buffers(keys: Sequence[bytes], buffers: Sequence[memoryview], writable: bool) -> None:
    """Raise :class:`Misuse` for keys or buffers that no store can use."""
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
            f"a fingerprint must have 1 to {MAX_FINGERPRINT_BYTES} bytes, not {len(fingerprint)}"
        )
    return fingerprint


class WriteBudget:
    """Limits the bytes written per day; 0 for no limit. Thread-safe.

    Unused budget is kept for an hour, so one day can exceed the limit by 1/24. One batch may
    overdraw the budget; nothing is written then until the budget is positive again.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._per_s = bytes_per_day / 86_400
        self._most = bytes_per_day / 24
        self._lock = threading.Lock()
        self._left = self._most
        self._at = now

    def spend(self, nbytes: int, now: float) -> bool:
        """Take bytes from the budget. Return False if it is used up."""
        if not self._most:
            return True
        with self._lock:
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left <= 0:
                return False
            self._left -= nbytes
            return True


class InFlightGuard:
    """Counts running calls and refuses new ones once it is closed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.closed = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Count a call while the context lasts. Yield False if the guard is closed."""
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
        """Refuse new calls. Return False if the guard was closed before."""
        with self._changed:
            was, self.closed = self.closed, True
            return not was

    def wait(self, timeout_s: float) -> bool:
        """Wait until no call is running. Return False after ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)


_NOT_FAILED = {BlockOutcome.OK, BlockOutcome.ABSENT}


class StoreMeter:
    """Collects a store's statistics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = OffloadingConnectorStats()

    def moved(self, kind: TransferType, nbytes: int, seconds: float) -> None:
        """Record a call that moved ``nbytes`` of payload; nothing is recorded for 0 bytes."""
        if nbytes:
            with self._lock:
                self._stats.record_transfer(kind, nbytes, seconds)

    def count_failed(self, outcomes: Iterable[BlockOutcome]) -> None:
        """Count the failed blocks of a call by outcome."""
        failed = [outcome for outcome in outcomes if outcome not in _NOT_FAILED]
        if failed:
            with self._lock:
                for outcome in failed:
                    self._stats.count("store_failed_blocks", label=outcome)

    def evicted(self, blocks: int) -> None:
        """Count blocks that were evicted or that expired."""
        with self._lock:
            self._stats.count("store_evicted_blocks", blocks)

    def refused(self, blocks: int) -> None:
        """Count blocks that a peer asked for and that were not sent."""
        with self._lock:
            self._stats.count("peer_refused_blocks", blocks)

    def take(self) -> OffloadingConnectorStats | None:
        """Return the statistics since the last call, None if there are none."""
        with self._lock:
            return self._stats.take()


_MAX_POOLED = 16


class PagePool:
    """Page-aligned buffers that transfers reuse: new pages cost more than a copy. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def acquire(self, nbytes: int) -> mmap.mmap:
        """Return memory of at least ``nbytes`` bytes with unknown content."""
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
            if len(memory) >= nbytes:
                return memory
        memory = mmap.mmap(-1, max(nbytes, 64 * mmap.PAGESIZE))
        with contextlib.suppress(OSError):
            # A forked child would keep the pages, or cause copy-on-write during a transfer.
            memory.madvise(mmap.MADV_DONTFORK)
        return memory

    def release(self, memory: mmap.mmap) -> None:
        """Take back memory that is not used any more."""
        if len(self._free) < _MAX_POOLED:
            self._free.append(memory)

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[memoryview]:
        """Yield a buffer of exactly ``nbytes`` bytes for the duration of the context."""
        memory = self.acquire(nbytes)
        try:
            yield memoryview(memory)[:nbytes]
        finally:
            self.release(memory)
