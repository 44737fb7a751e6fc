"""Which blocks of the host tier are written back to the tiers below it, and when."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvconnect.offload.index import HostIndex
from kvconnect.stats import OffloadingConnectorStats

_JOB_BLOCKS = 256  # the slots of a job stay pinned until it ends, so jobs are small

_LACKED, _QUEUED, _HANDLED = range(3)
"""State of a slot's block: to be written back, queued for it, or being written or in a tier."""


class _QueuedBlock(NamedTuple):
    slot: int
    group: int
    block_hash: bytes
    key: bytes


class WriteBacks:
    """A queue of blocks to write back.

    The jobs that run pin at most ``max_slots`` slots. As many blocks are queued at most; further
    ones are not written back. A queued block may be evicted: no slot waits for a slow disk.
    ``reused``: write back only blocks that were loaded once.

    Attributes:
        running: keys in jobs that have not ended, and in how many.
        ended_jobs: number of jobs that have ended.
    """

    def __init__(
        self, index: HostIndex, max_slots: int, reused: bool, stats: OffloadingConnectorStats
    ) -> None:
        self._index = index
        self._max_slots = max_slots
        self.reused = reused
        self._stats = stats
        self._queue: deque[_QueuedBlock] = deque()
        self._state = bytearray(len(index.slots))
        self._keys: dict[int, bytes] = {}  # of the slots in jobs
        self.running: Counter[bytes] = Counter()
        self.ended_jobs = 0
        self._writing = 0  # slots

    @property
    def ready(self) -> bool:
        """Whether :meth:`take_jobs` yields something."""
        return bool(self._queue) and self._writing < self._max_slots

    def stored(self, group: int, block_hash: bytes, key: bytes) -> None:
        """Note a block that was copied from the device. ``key`` names it in the secondary tiers."""
        slot = self._index.slot_of(group, block_hash)
        if slot is None:
            return
        self._state[slot] = _LACKED
        if not self.reused:
            self._add(_QueuedBlock(slot, group, block_hash, key))

    def loaded(self, group: int, slot: int, key: bytes) -> None:
        """Note a block that is loaded from the host tier."""
        if self.reused and self._state[slot] == _LACKED:
            self._add(_QueuedBlock(slot, group, self._index.hash_of(slot), key))

    def demoted(self, group: int, block_hash: bytes, key: bytes) -> None:
        """Note a block that is to be evicted soon: it is tried again if no tier took it before."""
        slot = self._index.slot_of(group, block_hash)
        if slot is not None and not self.reused and self._state[slot] == _LACKED:
            self._add(_QueuedBlock(slot, group, block_hash, key))

    def waiting(self, slots: Iterable[int]) -> set[int]:
        """Return those of ``slots`` that are queued."""
        return {slot for slot in slots if self._state[slot] == _QUEUED}

    def promoted(self, slots: Iterable[int]) -> None:
        """Note blocks that were prefetched from a secondary tier."""
        for slot in slots:
            self._state[slot] = _HANDLED

    def take_jobs(self) -> Iterator[tuple[tuple[bytes, ...], array[int]]]:
        """Yield the (keys, slots) of jobs to start now. The slots stay pinned until they end."""
        while self.ready:
            keys: list[bytes] = []
            slots: array[int] = array("q")
            while self._queue and len(slots) < min(_JOB_BLOCKS, self._max_slots - self._writing):
                block = self._queue.popleft()
                if not self._is_current(block):  # it was evicted meanwhile
                    self._stats.count("tier_skipped_blocks")
                elif self._state[block.slot] == _QUEUED:
                    keys.append(block.key)
                    slots.append(block.slot)
                    self._state[block.slot] = _HANDLED
            if keys:
                self._index.pin(slots)
                self._writing += len(slots)
                self._keys.update(zip(slots, keys, strict=True))
                self.running.update(keys)
                yield tuple(keys), slots

    def ended(
        self, slots: Sequence[int], timed_out: bool = False, failed: Iterable[int] = ()
    ) -> None:
        """Unpin the slots of a job. Blocks that were not written, in ``failed`` slots, are tried
        again only if they are demoted."""
        for slot in () if self.reused else failed:
            self._state[slot] = _LACKED
        self._index.unpin(slots)
        if not timed_out:
            self._writing -= len(slots)
        for key in map(self._keys.pop, slots):
            self.running[key] -= 1
            if not self.running[key]:
                del self.running[key]
        self.ended_jobs += 1

    def timed_out(self, slots: Sequence[int]) -> None:
        """Let other jobs start in place of one that takes too long. Its slots stay pinned."""
        self._writing -= len(slots)

    def clear(self) -> None:
        """Write back nothing that the slots have now: the keys of it are not valid any more."""
        self._queue.clear()
        self._state[:] = bytes([_HANDLED]) * len(self._state)

    def _add(self, block: _QueuedBlock) -> None:
        if len(self._queue) >= self._max_slots:
            self._stats.count("tier_skipped_blocks")
            return
        self._state[block.slot] = _QUEUED
        self._queue.append(block)

    def _is_current(self, block: _QueuedBlock) -> bool:
        """Return whether the slot still has the queued block. Blocks of other groups may have the
        same hash."""
        return self._index.slot_of(block.group, block.block_hash) == block.slot
