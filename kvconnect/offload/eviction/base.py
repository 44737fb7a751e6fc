"""Contract of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class EvictionPolicy(ABC):
    """Decides which slot of a full tier loses its block. A pinned slot is never evicted.

    The scheduler's thread owns a policy. Methods do not block and do no I/O. Over time, each takes
    a number of operations that depends on the slots that it is given or that it evicts, not on how
    many there are.
    """

    @abstractmethod
    def insert(self, slots: Sequence[int], hashes: Sequence[int]) -> None:
        """Add slots that became readable, in prefix order (parents before children).

        ``hashes`` has one integer hash per slot's block, for policies that remember evicted blocks.
        """

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """Record a use of ``slots`` (in prefix order). All must have been inserted."""

    @abstractmethod
    def settle(self, slots: Sequence[int]) -> None:
        """Record the end of a request that stored or used ``slots`` (in prefix order).

        A request's blocks were inserted as they filled, the head long before the tail; here a
        policy can reorder them. This call is not a use of the blocks.
        """

    @abstractmethod
    def demote(self, slots: Sequence[int]) -> None:
        """Make ``slots`` (in prefix order) the next victims, the last one first. All must have been
        inserted."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """Remove a slot that lost its block without eviction (quarantine)."""

    @abstractmethod
    def evict(self, pins: Sequence[int]) -> int | None:
        """Remove and return the next victim with ``pins[slot] == 0``; None if all are pinned.

        A pinned slot that would have been the victim may count as used.
        """

    @abstractmethod
    def clear(self) -> None:
        """Remove all slots."""
