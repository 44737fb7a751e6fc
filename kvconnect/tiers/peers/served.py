"""Which blocks of a worker's host tier other engines may read."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from typing import NamedTuple


class ServedBlock(NamedTuple):
    """A block's slot. The slot has this block as long as its version is the same."""

    slot: int
    version: int


class ServedBlocks:
    """Blocks by key. Thread-safe.

    A block stays here when the host tier evicts it, until something else is written into its slot.
    Its bytes are whole until then. :meth:`withdraw` comes before the first byte is overwritten, so
    a slot whose version is the same after a read as before it had the block all the time.
    """

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes] = [b""] * num_slots
        self._versions = array("Q", bytes(8 * num_slots))

    def __len__(self) -> int:
        return len(self._slots)

    def offer(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Add blocks, as (key, slot); their bytes are complete."""
        with self._lock:
            for key, slot in blocks:
                self._forget(slot)
                before = self._slots.get(key)
                if before is not None:
                    self._keys[before] = b""
                self._slots[key] = slot
                self._keys[slot] = key

    def withdraw(self, slots: Iterable[int]) -> None:
        """Remove the blocks of slots that will be overwritten, or whose bytes are not right."""
        with self._lock:
            for slot in slots:
                self._forget(slot)
                self._versions[slot] += 1

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove blocks by key. What a read in progress gets of them is not sent."""
        with self._lock:
            slots = [slot for key in keys if (slot := self._slots.get(key)) is not None]
        self.withdraw(slots)

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._slots.clear()
            self._keys = [b""] * len(self._keys)

    def find(self, key: bytes) -> ServedBlock | None:
        """Return where a block is; None if it is not there."""
        with self._lock:
            slot = self._slots.get(key)
            return None if slot is None else ServedBlock(slot, self._versions[slot])

    def is_current(self, block: ServedBlock) -> bool:
        """Return whether nothing was written into a block's slot since it was found."""
        return self._versions[block.slot] == block.version

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key:
            self._keys[slot] = b""
            del self._slots[key]
