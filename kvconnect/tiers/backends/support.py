"""When to leave something alone that fails, and how much may be written. Time is an argument."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterable, Iterator

from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends.base import BlockOutcome
from kvconnect.types import TransferType


class Budget:
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
            let_in = not self.closed
            self._inside += let_in
        try:
            yield let_in
        finally:
            with self._changed:
                self._inside -= let_in
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

    def ended(self, outcomes: Iterable[BlockOutcome]) -> None:
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

    def lend(self, nbytes: int) -> mmap.mmap:
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

    def give_back(self, memory: mmap.mmap) -> None:
        """Take memory back that nobody uses any more."""
        if len(self._free) < _POOLED:
            self._free.append(memory)

    @contextlib.contextmanager
    def lent(self, nbytes: int) -> Iterator[memoryview]:
        """Lend just so many bytes, during the context."""
        memory = self.lend(nbytes)
        try:
            yield memoryview(memory)[:nbytes]
        finally:
            self.give_back(memory)
