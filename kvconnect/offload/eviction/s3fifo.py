"""S3-FIFO: three queues, so that many prompts that are used once do not flush the tier.

New blocks enter the small queue. Blocks that are used again move to the main queue; the others are
evicted early, and a ghost list keeps their hashes. A block in the ghost list enters the main queue
when it returns. Source: "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from kvconnect.offload.eviction.base import EvictionPolicy

_SMALL_SHARE = 0.1  # the paper's setting; its results hardly differ between 5 and 20 %
_MAX_FREQUENCY = 3  # two bits per block
_ABSENT, _SMALL, _MAIN, _DEMOTED = 0, 1, 2, 3


class S3FIFO(EvictionPolicy):
    """S3-FIFO over ``capacity`` slots. A touch costs one byte store per block."""

    def __init__(self, capacity: int) -> None:
        self._small_target = max(1, int(capacity * _SMALL_SHARE))
        self._ghost_limit = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._demoted: deque[int] = deque()
        self._where = bytearray(capacity)
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
            self._where[slot] = _MAIN if returning else _SMALL
            (self._main if returning else self._small).append(slot)

    def touch(self, slots: Sequence[int]) -> None:
        frequency = self._frequency
        for slot in slots:
            if frequency[slot] < _MAX_FREQUENCY:
                frequency[slot] += 1

    def settle(self, slots: Sequence[int]) -> None:
        """Do nothing: the queues keep the order of insertion."""

    def demote(self, slots: Sequence[int]) -> None:
        gone = set(slots)
        for queue in (self._small, self._main, self._demoted):  # linear time, once for all slots
            kept = [slot for slot in queue if slot not in gone]
            queue.clear()
            queue.extend(kept)
        for slot in slots:
            self._demoted.appendleft(slot)
            self._where[slot] = _DEMOTED
            self._frequency[slot] = 0

    def remove(self, slot: int) -> None:
        queues = {_SMALL: self._small, _MAIN: self._main, _DEMOTED: self._demoted}
        queues[self._where[slot]].remove(slot)  # linear time, but only for few blocks
        self._where[slot] = _ABSENT

    def evict(self, pins: Sequence[int]) -> int | None:
        if self._demoted and (demoted := self._evict_demoted(pins)) is not None:
            return demoted
        if len(self._small) >= self._small_target or not self._main:
            victim = self._evict_small(pins)
            return self._evict_main(pins) if victim is None else victim
        victim = self._evict_main(pins)
        return self._evict_small(pins) if victim is None else victim

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._demoted.clear()
        self._ghost.clear()
        self._where = bytearray(len(self._where))

    def _evict_demoted(self, pins: Sequence[int]) -> int | None:
        while self._demoted:
            slot = self._demoted.popleft()
            if not (self._frequency[slot] or pins[slot]):
                self._where[slot] = _ABSENT
                return slot
            self._frequency[slot] = 0  # it is used again
            self._where[slot] = _MAIN
            self._main.append(slot)
        return None

    def _evict_small(self, pins: Sequence[int]) -> int | None:
        for _ in range(len(self._small)):
            slot = self._small.popleft()
            if self._frequency[slot] or pins[slot]:  # a pinned slot counts as used again
                self._frequency[slot] = 0
                self._where[slot] = _MAIN
                self._main.append(slot)
            else:
                self._remember(slot)
                self._where[slot] = _ABSENT
                return slot
        return None

    def _evict_main(self, pins: Sequence[int]) -> int | None:
        for _ in range(len(self._main) * (_MAX_FREQUENCY + 1)):
            slot = self._main.popleft()
            if self._frequency[slot]:
                self._frequency[slot] -= 1
            elif not pins[slot]:
                self._where[slot] = _ABSENT
                return slot
            self._main.append(slot)
        return None

    def _remember(self, slot: int) -> None:
        self._ghost[self._hash[slot]] = None
        if len(self._ghost) > self._ghost_limit:
            self._ghost.popitem(last=False)
