"""Which block leaves a full tier first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class EvictionPolicy(ABC):
    """Order of eviction over slots that hold a block.

    A policy knows slots, not blocks. It never evicts a pinned slot. Nothing here blocks, does
    I/O or is thread-safe: the scheduler's thread owns it.
    """

    @abstractmethod
    def insert(self, slots: Sequence[int], hashes: Sequence[int]) -> None:
        """Add slots that became readable, in prefix order (parents before children).

        Args:
            hashes: one integer hash per slot's block, for policies that remember evicted blocks.
        """

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """Note that ``slots`` (in prefix order) were used. Slots must have been inserted."""

    @abstractmethod
    def settle(self, slots: Sequence[int]) -> None:
        """A request that filled or used ``slots`` (in prefix order) is over.

        Its blocks were inserted as they filled, the head long before the tail; here a policy can
        put them in order. This is no further use of the blocks.
        """

    @abstractmethod
    def remove(self, slot: int) -> None:
        """Forget a slot that lost its block without eviction (quarantine)."""

    @abstractmethod
    def evict(self, pins: Sequence[int]) -> int | None:
        """Forget and return the next victim with ``pins[slot] == 0``; None if all are pinned."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""
