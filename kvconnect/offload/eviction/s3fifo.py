"""S3-FIFO: three queues, so that many prompts that are used once do not flush the tier.

New blocks enter the small queue. Blocks that are used again move to the main queue; the others are
evicted early, and a ghost list keeps their hashes. A block in the ghost list enters the main queue
when it returns. Source: "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import count

from kvconnect.offload.eviction.base import EvictionPolicy

_SMALL_SHARE = 0.1  # the paper's setting; its results hardly differ between 5 and 20 %
_MAX_FREQUENCY = 3  # two bits per block
_STALE = 0
_SWEEP_MIN = 1024  # with fewer entries, a sweep costs more than the stale ones


class S3FIFO(EvictionPolicy):
    """S3-FIFO over ``capacity`` slots. A touch costs one byte store per block.

    A slot that is removed or demoted leaves its entry behind. Each entry has a stamp, and is live
    while it is the last one of its slot; stale ones are skipped, and dropped when they outnumber
    the live ones.
    """

    def __init__(self, capacity: int) -> None:
        self._small_target = max(1, int(capacity * _SMALL_SHARE))
        self._ghost_limit = capacity
        self._small = _Queue()
        self._main = _Queue()
        self._demoted = _Queue()
        self._in: list[_Queue | None] = [None] * capacity
        self._stamp = array("Q", bytes(8 * capacity))  # of the slot's live entry
        self._stamps = count(1)
        self._frequency = bytearray(capacity)
        self._hash: list[int] = [0] * capacity
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def insert(self, slots: Sequence[int], hashes: Sequence[int]) -> None:
        # Insert the tail first: it is evicted before its head, without which it is useless.
        for slot, block_hash in zip(reversed(slots), reversed(hashes), strict=True):
            returning = block_hash in self._ghost
            self._ghost.pop(block_hash, None)
            self._frequency[slot] = 0
            self._hash[slot] = block_hash
            self._append(self._main if returning else self._small, slot)

    def touch(self, slots: Sequence[int]) -> None:
        frequency = self._frequency
        for slot in slots:
            if frequency[slot] < _MAX_FREQUENCY:
                frequency[slot] += 1

    def settle(self, slots: Sequence[int]) -> None:
        """Do nothing: the queues keep the order of insertion."""

    def demote(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.remove(slot)
            self._frequency[slot] = 0
            self._append(self._demoted, slot, first=True)

    def remove(self, slot: int) -> None:
        queue = self._in[slot]
        assert queue is not None
        queue.live -= 1
        self._in[slot] = None
        self._stamp[slot] = _STALE
        if len(queue.entries) > 2 * queue.live + _SWEEP_MIN:
            queue.sweep(self._stamp)

    def evict(self, pins: Sequence[int]) -> int | None:
        if self._demoted.live and (demoted := self._evict_demoted(pins)) is not None:
            return demoted
        if self._small.live >= self._small_target or not self._main.live:
            victim = self._evict_small(pins)
            return self._evict_main(pins) if victim is None else victim
        victim = self._evict_main(pins)
        return self._evict_small(pins) if victim is None else victim

    def clear(self) -> None:
        for queue in (self._small, self._main, self._demoted):
            queue.entries.clear()
            queue.live = 0
        self._ghost.clear()
        self._in = [None] * len(self._in)
        self._stamp = array("Q", bytes(8 * len(self._stamp)))

    def _append(self, queue: _Queue, slot: int, first: bool = False) -> None:
        stamp = self._stamp[slot] = next(self._stamps)
        self._in[slot] = queue
        queue.live += 1
        if first:
            queue.entries.appendleft((slot, stamp))
        else:
            queue.entries.append((slot, stamp))

    def _take(self, queue: _Queue) -> int:
        """Remove and return the first slot of a queue that is not empty."""
        while True:
            slot, stamp = queue.entries.popleft()
            if self._stamp[slot] == stamp:
                queue.live -= 1
                self._in[slot] = None
                return slot

    def _evict_demoted(self, pins: Sequence[int]) -> int | None:
        while self._demoted.live:
            slot = self._take(self._demoted)
            if not (self._frequency[slot] or pins[slot]):
                return slot
            self._frequency[slot] = 0  # it is used again
            self._append(self._main, slot)
        return None

    def _evict_small(self, pins: Sequence[int]) -> int | None:
        while self._small.live:
            slot = self._take(self._small)
            if not (self._frequency[slot] or pins[slot]):
                self._remember(slot)
                return slot
            self._frequency[slot] = 0  # a pinned slot counts as used again
            self._append(self._main, slot)
        return None

    def _evict_main(self, pins: Sequence[int]) -> int | None:
        for _ in range(self._main.live * (_MAX_FREQUENCY + 1)):
            slot = self._take(self._main)
            if self._frequency[slot]:
                self._frequency[slot] -= 1
            elif not pins[slot]:
                return slot
            self._append(self._main, slot)
        return None

    def _remember(self, slot: int) -> None:
        self._ghost[self._hash[slot]] = None
        if len(self._ghost) > self._ghost_limit:
            self._ghost.popitem(last=False)


class _Queue:
    """Entries (slot, stamp) from the first victim on, and how many of them are live."""

    def __init__(self) -> None:
        self.entries: deque[tuple[int, int]] = deque()
        self.live = 0

    def sweep(self, stamps: Sequence[int]) -> None:
        """Drop the stale entries."""
        self.entries = deque(entry for entry in self.entries if stamps[entry[0]] == entry[1])
