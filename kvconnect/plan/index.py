"""Which block lies in which slot of the host tier. All ranks use the same slot for a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.plan.policy import Policy
from kvconnect.plan.slots import PENDING, READY, Slots

_NO_SLOT = -1


class Removed(NamedTuple):
    """A block that left the tier to make room, or because it was quarantined."""

    group: int
    block_hash: bytes


class HostIndex:
    """Maps (group, block hash) to a slot and says what can be loaded.

    Owned by the scheduler's thread. A pending entry is stored as ``-2 - slot`` in the same dict,
    so that a lookup is one dict access per block.

    Attributes:
        removed: blocks that left since the caller last took them.
        evictions: how many blocks ever had to make room.
    """

    def __init__(self, num_slots: int, num_groups: int, policy: Policy) -> None:
        self.slots = Slots(num_slots)
        self.policy = policy
        self.removed: list[Removed] = []
        self.evictions = 0
        self._where: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._hash: list[bytes] = [b""] * num_slots
        self._group = bytearray(num_slots)

    def __repr__(self) -> str:
        return f"<HostIndex {self.slots!r}>"

    def has(self, group: int, block_hash: bytes) -> bool:
        """Whether the block is there or being stored."""
        return block_hash in self._where[group]

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return the slots of the leading blocks that can be loaded now, stopping at the first
        that cannot."""
        get = self._where[group].get
        slots: list[int] = []
        append = slots.append
        for block_hash in hashes:
            slot = get(block_hash, _NO_SLOT)
            if slot < 0:
                break
            append(slot)
        return slots

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        """Return the slot of a block that can be loaded now, else None."""
        slot = self._where[group].get(block_hash, _NO_SLOT)
        return None if slot < 0 else slot

    def hash_of(self, slot: int) -> bytes:
        """Return the hash of the block in a slot."""
        return self._hash[slot]

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        """Take a slot for a block about to be stored, evicting if need be; None if all slots
        are busy.

        Raises:
            Misuse: the block is already there or being stored.
        """
        if block_hash in self._where[group]:
            raise Misuse(f"block {block_hash.hex()} of group {group} is reserved twice")
        slot = self.slots.take()
        if slot is None:
            victim = self.policy.evict(self.slots.pins)
            if victim is None:
                return None
            self.evictions += 1
            self._unlink(victim)
            slot = self.slots.take()
            assert slot is not None
        self._hash[slot] = block_hash
        self._group[slot] = group
        self._where[group][block_hash] = -2 - slot
        return slot

    def commit(self, slots: Sequence[int]) -> None:
        """Make pending slots (in prefix order) readable."""
        for slot in slots:
            self.slots.publish(slot)
            self._where[self._group[slot]][self._hash[slot]] = slot
        self.policy.insert(slots, [hash(self._hash[slot]) for slot in slots])

    def abandon(self, slots: Iterable[int]) -> None:
        """Give pending slots back: their block was not stored."""
        for slot in slots:
            self.slots.give_back(slot)
            del self._where[self._group[slot]][self._hash[slot]]

    def pin(self, slots: Iterable[int]) -> None:
        """Keep readable slots from eviction while a load reads them; counted."""
        for slot in slots:
            self.slots.pin(slot)

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one :meth:`pin` of each slot."""
        for slot in slots:
            self.slots.unpin(slot)

    def discard(self, slot: int) -> bool:
        """Quarantine: make sure the block in ``slot`` is never loaded again. Return whether it
        still could have been."""
        if self.slots.state(slot) != READY:
            return False
        self.policy.remove(slot)
        self._unlink(slot)
        return True

    def clear(self) -> None:
        """Forget every readable block. Pending ones are left to their store jobs."""
        self.policy.clear()
        for where in self._where:
            for block_hash in [key for key, slot in where.items() if slot >= 0]:
                self.slots.drop(where.pop(block_hash))

    def check(self) -> None:
        """Prove that slots and blocks match one to one.

        Raises:
            Misuse: naming what is wrong.
        """
        self.slots.check()
        entries = [slot if slot >= 0 else -2 - slot for w in self._where for slot in w.values()]
        linked = set(entries)
        if len(linked) != len(entries):
            raise Misuse("two blocks share a slot")
        for slot in range(len(self.slots)):
            if (self.slots.state(slot) in (PENDING, READY)) != (slot in linked):
                raise Misuse(f"slot {slot} is wrongly in or out of the map")

    def _unlink(self, slot: int) -> None:
        group, block_hash = self._group[slot], self._hash[slot]
        del self._where[group][block_hash]
        self.slots.drop(slot)
        self.removed.append(Removed(group, block_hash))
