"""The buffers of records that lie side by side on the disk, for one read or write of them all."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvconnect.tiers.backends.disk.files import starts_at_page
from kvconnect.tiers.backends.disk.record import PAGE, RecordHead, pack_record, unpack_record
from kvconnect.tiers.backends.support import PagePool

MOST_RECORDS = 128  # three buffers each; the system takes 1,024 at a time
MOST_BYTES = 8 << 20  # of one transfer: more would only make others wait
MOST_PAYLOAD = 1 << 30  # the system moves less than twice that at a time


class Frames:
    """Buffers for a run of records, each payload as the caller has it wherever that can be.

    A disk that is used past the page cache takes whole pages of memory. Heads, the last part of a
    payload that is no whole page, and payloads that do not start at a page go through memory
    that is borrowed for the run: this is a context. For one thread.
    """

    def __init__(self, pool: PagePool, buffers: Sequence[memoryview]) -> None:
        self._pool = pool
        self._buffers = buffers
        self._direct = [
            buffer.nbytes // PAGE * PAGE if starts_at_page(buffer) else 0 for buffer in buffers
        ]
        rests = [
            -(-(buffer.nbytes - direct) // PAGE) * PAGE
            for buffer, direct in zip(buffers, self._direct, strict=True)
        ]
        self._memory = pool.lend(len(buffers) * PAGE + sum(rests))
        self._heads: list[memoryview] = []
        self._rests: list[memoryview] = []
        whole, at = memoryview(self._memory), 0
        for rest in rests:
            self._heads.append(whole[at : at + PAGE])
            self._rests.append(whole[at + PAGE : at + PAGE + rest])
            at += PAGE + rest

    def __enter__(self) -> Frames:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.give_back(self._memory)

    def views(self) -> list[memoryview]:
        """Return what is to be read or written, in the order of the disk."""
        found = []
        for number, buffer in enumerate(self._buffers):
            found.append(self._heads[number])
            if self._direct[number]:
                found.append(buffer[: self._direct[number]])
            if self._rests[number].nbytes:
                found.append(self._rests[number])
        return found

    def fill(self, heads: Sequence[RecordHead], identity: bytes) -> None:
        """Get ready for a write."""
        for number, (head, buffer) in enumerate(zip(heads, self._buffers, strict=True)):
            # What others left in the borrowed memory must not get to the disk.
            self._heads[number][:] = bytes(PAGE)
            pack_record(head, identity, self._heads[number])
            rest, tail = self._rests[number], buffer[self._direct[number] :]
            rest[: tail.nbytes] = tail
            rest[tail.nbytes :] = bytes(rest.nbytes - tail.nbytes)

    def take(self, number: int, identity: bytes) -> RecordHead | None:
        """After a read, complete the payload of one record; return the head that came with it."""
        tail = self._buffers[number][self._direct[number] :]
        tail[:] = self._rests[number][: tail.nbytes]
        return unpack_record(self._heads[number], identity)
