"""Memory that is lent for one transfer and used again: new pages cost more than copying."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

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
