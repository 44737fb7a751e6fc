"""Which block lies in which slot of the host tier. All ranks use the same slot for a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.plan.policy import Policy
from kvconnect.plan.slots import PENDING, READY, Slots


class Removed(NamedTuple):
    """A block that left the tier to make room, or because it was quarantined."""

    group: int
    block_hash: bytes


class HostIndex:
    """Maps (group, block hash) to a slot and says what can be loaded.

    Owned by the scheduler's thread. Blocks being stored are kept apart from those that can be
    loaded. Each slot remembers which slot held the next block of its prefix when that was last
    stored or looked up. A lookup follows this hint and compares the hash it finds there, which
    walks memory in order; a dict access per block would miss the cache several times, and it is
    needed only where the hint is wrong. Slot numbers are shared objects, not made anew: a lookup
    that allocates thousands of integers is two to three times slower in a fragmented heap.

    Attributes:
        removed: blocks that left since the caller last took them.
        evictions: how many blocks ever had to make room.
    """

    def __init__(self, num_slots: int, num_groups: int, policy: Policy) -> None:
        self.slots = Slots(num_slots)
        self.policy = policy
        self.removed: list[Removed] = []
        self.evictions = 0
        self._ready: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._pending: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._storing: dict[int, bytes] = {}  # hash of PENDING slots
        self._disowned: set[int] = set()  # PENDING slots that stand for no block any more
        self._group = bytearray(num_slots)
        # One more than there are slots: where a lookup's hints start.
        self._readable: list[bytes] = [b""] * (num_slots + 1)  # hash of READY slots only
        self._next: list[int] = [num_slots] * (num_slots + 1)  # the hint

    def __repr__(self) -> str:
        return f"<HostIndex {self.slots!r}>"

    def has(self, group: int, block_hash: bytes) -> bool:
        """Whether the block is there or being stored."""
        return block_hash in self._ready[group] or block_hash in self._pending[group]

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return the slots of the leading blocks that can be loaded now, up to the first that
        cannot."""
        ready, readable, groups, hint = self._ready[group], self._readable, self._group, self._next
        slots: list[int] = []
        append, slot = slots.append, len(self.slots)
        for block_hash in hashes:
            previous, slot = slot, hint[slot]
            if readable[slot] != block_hash or groups[slot] != group:
                found = ready.get(block_hash)
                if found is None:
                    break
                hint[previous] = slot = found
            append(slot)
        return slots

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        """Return the slot of a block that can be loaded now, else None."""
        return self._ready[group].get(block_hash)

    def hash_of(self, slot: int) -> bytes:
        """Return the hash of the block that can be loaded from a slot."""
        return self._readable[slot]

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        """Take a slot for a block about to be stored, evicting if need be; None if all slots
        are busy.

        Raises:
            Misuse: the block is already there or being stored.
        """
        if self.has(group, block_hash):
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
        self._storing[slot] = block_hash
        self._group[slot] = group
        self._pending[group][block_hash] = slot
        return slot

    def commit(self, slots: Sequence[int]) -> None:
        """Make pending slots (in prefix order) readable."""
        own: list[int] = []
        for slot in slots:
            self.slots.publish(slot)
            group, block_hash = self._group[slot], self._storing.pop(slot)
            kept = self._ready[group][block_hash] = self._pending[group].pop(block_hash)
            self._readable[slot] = block_hash
            own.append(kept)
        for slot, following in pairwise(own):
            self._next[slot] = following
        self.policy.insert(own, [hash(self._readable[slot]) for slot in own])

    def abandon(self, slots: Iterable[int], held: bool = False) -> list[tuple[int, bytes]]:
        """Give pending slots back: their block, returned as (group, hash), was not stored.

        ``held``: what was to bring them hangs, and may write to them yet. The blocks may be stored
        elsewhere, but the slots stay taken until they are abandoned again.
        """
        dropped = []
        for slot in slots:
            self.slots.expect(slot, PENDING)
            group, block_hash = self._group[slot], self._storing[slot]
            if slot not in self._disowned:
                del self._pending[group][block_hash]
                dropped.append((group, block_hash))
            if held:
                self._disowned.add(slot)
            else:
                self._disowned.discard(slot)
                del self._storing[slot]
                self.slots.give_back(slot)
        return dropped

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
        for ready in self._ready:
            for slot in ready.values():
                self._readable[slot] = b""
                self.slots.drop(slot)
            ready.clear()

    def check(self) -> None:
        """Prove that slots and blocks match one to one.

        Raises:
            Misuse: naming what is wrong.
        """
        self.slots.check()
        linked: dict[int, int] = {}
        entries = 0
        for state, maps in ((READY, self._ready), (PENDING, self._pending)):
            for by_hash in maps:
                entries += len(by_hash)
                linked.update(dict.fromkeys(by_hash.values(), state))
        if len(linked) != entries:
            raise Misuse("two blocks share a slot")
        for slot in range(len(self.slots)):
            state = self.slots.state(slot)
            named = state in (PENDING, READY) and slot not in self._disowned
            if linked.get(slot) != (state if named else None):
                raise Misuse(f"slot {slot} in state {state} is wrongly in or out of the map")
            if (slot in self._storing) != (state == PENDING):
                raise Misuse(f"slot {slot} in state {state} is wrongly being stored or not")
            block_hash = self._readable[slot]
            there = self.slot_of(self._group[slot], block_hash) == slot
            if there != (state == READY) or (block_hash and not there):
                raise Misuse(f"slot {slot} in state {state} is wrongly readable or not")

    def _unlink(self, slot: int) -> None:
        group, block_hash = self._group[slot], self._readable[slot]
        del self._ready[group][block_hash]
        self._readable[slot] = b""
        self.slots.drop(slot)
        self.removed.append(Removed(group, block_hash))
