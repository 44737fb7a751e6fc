"""Which blocks of the host tier are written to the tiers below it, and when."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvconnect.offload.index import HostIndex
from kvconnect.stats import OffloadingConnectorStats

_JOB_BLOCKS = 256  # of one job: its end lets their slots be evicted


class _Due(NamedTuple):
    slot: int
    group: int
    block_hash: bytes
    key: bytes


class WriteBacks:
    """A queue of blocks to write down. At most ``most`` slots are kept from eviction for it; blocks
    queue up to that number again, and what comes then is not written. ``reused``: only blocks that
    were used once are.

    A block may be evicted while it waits in the queue: nothing waits for a slow disk.
    """

    def __init__(
        self, index: HostIndex, most: int, reused: bool, stats: OffloadingConnectorStats
    ) -> None:
        self._index = index
        self._most = most
        self.reused = reused
        self._stats = stats
        self._queue: deque[_Due] = deque()
        self._below = bytearray(len(index.slots))  # of each slot: its block is, or will be, below
        self._writing = 0

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something to give."""
        return bool(self._queue) and self._writing < self._most

    def stored(self, group: int, block_hash: bytes, key: bytes) -> None:
        """A block came to the host tier from the device; below that, ``key`` is its name."""
        slot = self._index.slot_of(group, block_hash)
        if slot is None:
            return
        self._below[slot] = False
        if not self.reused:
            self._add(_Due(slot, group, block_hash, key))

    def used(self, group: int, slot: int, key: bytes) -> None:
        """A block of the host tier is loaded."""
        if self.reused and not self._below[slot]:
            self._add(_Due(slot, group, self._index.hash_of(slot), key))

    def brought(self, slots: Iterable[int]) -> None:
        """Blocks came to the host tier from below."""
        for slot in slots:
            self._below[slot] = True

    def take(self) -> Iterator[tuple[tuple[bytes, ...], array[int]]]:
        """Yield the (keys, slots) of jobs to start now; the slots are pinned until they end."""
        while self.ready:
            keys: list[bytes] = []
            slots: array[int] = array("q")
            while self._queue and len(slots) < min(_JOB_BLOCKS, self._most - self._writing):
                due = self._queue.popleft()
                if self._holds(due):
                    keys.append(due.key)
                    slots.append(due.slot)
            if keys:
                self._index.pin(slots)
                self._writing += len(slots)
                yield tuple(keys), slots

    def ended(self, slots: Sequence[int], given_up: bool = False) -> None:
        """A job ended, well or not: what was not written is not tried again."""
        self._index.unpin(slots)
        if not given_up:
            self._writing -= len(slots)

    def given_up(self, slots: Sequence[int]) -> None:
        """A job takes too long: others may begin. Its slots stay pinned until it has ended."""
        self._writing -= len(slots)

    def clear(self) -> None:
        """Blocks have other names from now on."""
        self._queue.clear()

    def _add(self, due: _Due) -> None:
        if len(self._queue) >= self._most:
            self._stats.count("tier_skipped_blocks")
            return
        self._below[due.slot] = True
        self._queue.append(due)

    def _holds(self, due: _Due) -> bool:
        """Whether a slot still has the block that was queued: blocks of other groups, for other
        layers, have the same hashes."""
        return self._index.slot_of(due.group, due.block_hash) == due.slot
