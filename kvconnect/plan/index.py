"""Which block lies in which slot of the host tier.

A slot goes FREE -> PENDING (a store writes it) -> READY (can be loaded) -> FREE (evicted). A
READY slot that loses its block while a load still reads it is CONDEMNED until unpinned, so its
bytes are not overwritten under the reader. All ranks use the same slot number for a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.plan.policy import Policy

_FREE, _PENDING, _READY, _CONDEMNED = range(4)
_NO_SLOT = -1


class Removed(NamedTuple):
    """A block that left the tier to make room, or because it was quarantined."""

    group: int
    block_hash: bytes


class HostIndex:
    """Maps (group, block hash) to a slot and says what can be loaded.

    Owned by the scheduler's thread. A pending entry is stored as ``-2 - slot`` in the same dict,
    so that a lookup is one dict access per block.
    """

    def __init__(self, num_slots: int, num_groups: int, policy: Policy) -> None:
        self.num_slots = num_slots
        self.removed: list[Removed] = []  # since the caller last took them
        self.evictions = 0
        self.pinned = 0  # slots that cannot be evicted now: being written or read
        self._policy = policy
        self._where: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._free = list(range(num_slots - 1, -1, -1))
        self._hash: list[bytes] = [b""] * num_slots
        self._group = bytearray(num_slots)
        self._state = bytearray(num_slots)
        self._pins = array("H", bytes(2 * num_slots))

    def __repr__(self) -> str:
        used = self.num_slots - len(self._free)
        return f"<HostIndex {used}/{self.num_slots} slots used>"

    @property
    def used(self) -> int:
        """Slots that hold or are about to hold a block."""
        return self.num_slots - len(self._free)

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
        are pinned or pending.

        Raises:
            Misuse: the block is already there or being stored.
        """
        where = self._where[group]
        if block_hash in where:
            raise Misuse(f"block {block_hash.hex()} of group {group} is reserved twice")
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._policy.evict(self._pins)
            if victim is None:
                return None
            slot = victim
            self.evictions += 1
            self._unlink(slot)
        self._hash[slot] = block_hash
        self._group[slot] = group
        self._state[slot] = _PENDING
        where[block_hash] = -2 - slot
        self.pinned += 1
        return slot

    def commit(self, slots: Sequence[int]) -> None:
        """Make pending slots (in prefix order) readable."""
        hashes = []
        for slot in slots:
            self._expect(slot, _PENDING)
            self._state[slot] = _READY
            self._where[self._group[slot]][self._hash[slot]] = slot
            hashes.append(hash(self._hash[slot]))
        self.pinned -= len(slots)
        self._policy.insert(slots, hashes)

    def abandon(self, slots: Iterable[int]) -> None:
        """Give pending slots back: their block was not stored."""
        for slot in slots:
            self._expect(slot, _PENDING)
            del self._where[self._group[slot]][self._hash[slot]]
            self.pinned -= 1
            self._release(slot)

    def touch(self, slots: Sequence[int]) -> None:
        """Note the use of readable slots, in prefix order."""
        self._policy.touch(slots)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep readable slots from eviction while a load reads them; counted."""
        for slot in slots:
            self._expect(slot, _READY)
            self.pinned += not self._pins[slot]
            self._pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one :meth:`pin` of each slot."""
        for slot in slots:
            if not self._pins[slot]:
                raise Misuse(f"slot {slot} is unpinned more often than pinned")
            self._pins[slot] -= 1
            if not self._pins[slot]:
                self.pinned -= 1
                if self._state[slot] == _CONDEMNED:
                    self._release(slot)

    def discard(self, slot: int) -> bool:
        """Quarantine: make sure the block in ``slot`` is never loaded again. Return whether it
        still could have been."""
        if self._state[slot] != _READY:
            return False
        self._policy.remove(slot)
        self._unlink(slot)
        self._retire(slot)
        return True

    def clear(self) -> None:
        """Forget every readable block. Pending ones are left to their store jobs."""
        self._policy.clear()
        for slot in range(self.num_slots):
            if self._state[slot] == _READY:
                del self._where[self._group[slot]][self._hash[slot]]
                self._retire(slot)

    def check(self) -> None:
        """Prove that every slot is in exactly one place.

        Raises:
            Misuse: naming what is wrong.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise Misuse("a slot is free twice")
        linked = {slot if slot >= 0 else -2 - slot for w in self._where for slot in w.values()}
        if len(linked) != sum(len(w) for w in self._where):
            raise Misuse("two blocks share a slot")
        busy = sum(s == _PENDING or p > 0 for s, p in zip(self._state, self._pins, strict=True))
        if busy != self.pinned:
            raise Misuse(f"{busy} slots are in use, counted {self.pinned}")
        for slot, state in enumerate(self._state):
            if (state == _FREE) != (slot in free):
                raise Misuse(f"slot {slot} in state {state} is wrongly on or off the free list")
            if (state in (_PENDING, _READY)) != (slot in linked):
                raise Misuse(f"slot {slot} in state {state} is wrongly in or out of the map")
            if self._pins[slot] and state not in (_READY, _CONDEMNED):
                raise Misuse(f"slot {slot} in state {state} is pinned")
            if state == _CONDEMNED and not self._pins[slot]:
                raise Misuse(f"condemned slot {slot} has no reader")

    def _unlink(self, slot: int) -> None:
        group, block_hash = self._group[slot], self._hash[slot]
        del self._where[group][block_hash]
        self.removed.append(Removed(group, block_hash))

    def _retire(self, slot: int) -> None:
        if self._pins[slot]:
            self._state[slot] = _CONDEMNED
        else:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._state[slot] = _FREE
        self._hash[slot] = b""
        self._free.append(slot)

    def _expect(self, slot: int, state: int) -> None:
        if self._state[slot] != state:
            raise Misuse(f"slot {slot} is in state {self._state[slot]}, not {state}")
