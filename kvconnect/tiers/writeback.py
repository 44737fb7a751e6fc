"""Which blocks of the host tier are written back to the tiers below it, and when."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvconnect.offload.index import HostIndex
from kvconnect.stats import OffloadingConnectorStats

_JOB_BLOCKS = 256  # the slots of a job stay pinned until it ends, so jobs are small


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
    """

    def __init__(
        self, index: HostIndex, max_slots: int, reused: bool, stats: OffloadingConnectorStats
    ) -> None:
        self._index = index
        self._max_slots = max_slots
        self.reused = reused
        self._stats = stats
        self._queue: deque[_QueuedBlock] = deque()
        self._handled = bytearray(len(index.slots))  # per slot: queued, or a secondary tier has it
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
        self._handled[slot] = False
        if not self.reused:
            self._add(_QueuedBlock(slot, group, block_hash, key))

    def loaded(self, group: int, slot: int, key: bytes) -> None:
        """Note a block that is loaded from the host tier."""
        if self.reused and not self._handled[slot]:
            self._add(_QueuedBlock(slot, group, self._index.hash_of(slot), key))

    def promoted(self, slots: Iterable[int]) -> None:
        """Note blocks that were prefetched from a secondary tier."""
        for slot in slots:
            self._handled[slot] = True

    def take_jobs(self) -> Iterator[tuple[tuple[bytes, ...], array[int]]]:
        """Yield the (keys, slots) of jobs to start now. The slots stay pinned until they end."""
        while self.ready:
            keys: list[bytes] = []
            slots: array[int] = array("q")
            while self._queue and len(slots) < min(_JOB_BLOCKS, self._max_slots - self._writing):
                block = self._queue.popleft()
                if self._is_current(block):
                    keys.append(block.key)
                    slots.append(block.slot)
            if keys:
                self._index.pin(slots)
                self._writing += len(slots)
                yield tuple(keys), slots

    def ended(self, slots: Sequence[int], timed_out: bool = False) -> None:
        """Unpin the slots of a job. Blocks that were not written are not tried again."""
        self._index.unpin(slots)
        if not timed_out:
            self._writing -= len(slots)

    def timed_out(self, slots: Sequence[int]) -> None:
        """Let other jobs start in place of one that takes too long. Its slots stay pinned."""
        self._writing -= len(slots)

    def clear(self) -> None:
        """Drop the queue: the keys in it are not valid any more."""
        self._queue.clear()

    def _add(self, block: _QueuedBlock) -> None:
        if len(self._queue) >= self._max_slots:
            self._stats.count("tier_skipped_blocks")
            return
        self._handled[block.slot] = True
        self._queue.append(block)

    def _is_current(self, block: _QueuedBlock) -> bool:
        """Return whether the slot still has the queued block. Blocks of other groups may have the
        same hash."""
        return self._index.slot_of(block.group, block.block_hash) == block.slot
