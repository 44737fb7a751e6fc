"""Which blocks of a worker's host tier other engines may read."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class ServedBlock(NamedTuple):
    """A block's slot. The slot has this block as long as its version is the same. ``page``: the
    part of the slot, if the block is a page of a larger one."""

    slot: int
    version: int
    page: int = 0


class ServedBlocks:
    """Blocks by key. Thread-safe.

    A block stays here when the host tier evicts it, until something else is written into its slot.
    Its bytes are whole until then. :meth:`withdraw` comes before the first byte is overwritten, so
    a slot whose version is the same after a read as before it had the block all the time.
    """

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[int, int]] = {}  # slot and page
        self._keys: list[Sequence[bytes]] = [()] * num_slots  # of the pages in each slot
        self._versions = array("Q", bytes(8 * num_slots))

    @property
    def versions_address(self) -> int:
        """Where the versions of the slots are, of 8 bytes each. They stay there."""
        return self._versions.buffer_info()[0]

    def __len__(self) -> int:
        return len(self._places)

    def offer(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Add blocks, as (key, slot); their bytes are complete."""
        self.offer_pages(((key,), slot) for key, slot in blocks)

    def offer_pages(self, blocks: Iterable[tuple[Sequence[bytes], int]]) -> None:
        """Add blocks, as (keys of their pages, slot); their bytes are complete."""
        with self._lock:
            for keys, slot in blocks:
                self._forget(slot)
                for page, key in enumerate(keys):
                    before = self._places.get(key)
                    if before is not None:
                        self._forget(before[0])
                    self._places[key] = slot, page
                self._keys[slot] = keys

    def withdraw(self, slots: Iterable[int]) -> None:
        """Remove the blocks of slots that will be overwritten, or whose bytes are not right."""
        with self._lock:
            for slot in slots:
                self._forget(slot)
                self._versions[slot] += 1

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove blocks by key. What a read in progress gets of them is not sent."""
        with self._lock:
            places = [place for key in keys if (place := self._places.get(key)) is not None]
        self.withdraw({slot for slot, _ in places})

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            for slot in [slot for slot, keys in enumerate(self._keys) if keys]:
                self._forget(slot)
                self._versions[slot] += 1

    def find(self, key: bytes) -> ServedBlock | None:
        """Return where a block is; None if it is not there."""
        with self._lock:
            place = self._places.get(key)
            if place is None:
                return None
            slot, page = place
            return ServedBlock(slot, self._versions[slot], page)

    def is_current(self, block: ServedBlock) -> bool:
        """Return whether nothing was written into a block's slot since it was found."""
        return self._versions[block.slot] == block.version

    def _forget(self, slot: int) -> None:
        keys, self._keys[slot] = self._keys[slot], ()
        for key in keys:
            self._places.pop(key, None)
