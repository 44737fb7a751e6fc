"""Maps blocks to slots of the host tier. All ranks use the same slot for a block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.offload.eviction import EvictionPolicy


class RemovedBlock(NamedTuple):
    """A block that was evicted or quarantined."""

    group: int
    block_hash: bytes


class HostIndex:
    """Maps (group, block hash) to a slot and knows which blocks can be loaded.

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

    def __init__(self, num_slots: int, num_groups: int, policy: EvictionPolicy) -> None:
        self.slots = Slots(num_slots)
        self.policy = policy
        self.removed: list[RemovedBlock] = []
        self.evictions = 0
        self._ready: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._pending: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._storing: dict[int, bytes] = {}  # hash of PENDING slots
        self._disowned: set[int] = set()  # PENDING slots whose block may be stored elsewhere
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

        ``held``: the job that fills the slots hangs and may still write them. Their blocks may be
        stored elsewhere, but the slots stay taken until they are abandoned again.
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
        self.removed.append(RemovedBlock(group, block_hash))


# States of the slots: who may write a slot, who reads it, when it is free again.
#
# A slot goes FREE -> PENDING (a store writes it) -> READY (can be loaded) -> FREE. A READY slot
# that loses its block while a load still reads it is CONDEMNED until unpinned, so that its bytes
# are not overwritten under the reader.


FREE, PENDING, READY, CONDEMNED = range(4)


class Slots:
    """States and readers of ``count`` slots. Owned by the scheduler's thread.

    Attributes:
        pins: readers per slot; a policy must not evict a slot that has any.
        busy: slots that cannot be evicted now, being written or read.
    """

    def __init__(self, count: int) -> None:
        self.pins = array("H", bytes(2 * count))
        self.busy = 0
        self._state = bytearray(count)
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return f"<Slots {self.used}/{len(self)} used, {self.busy} busy>"

    @property
    def used(self) -> int:
        """Slots that hold, or are about to hold, a block."""
        return len(self._state) - len(self._free)

    def state(self, slot: int) -> int:
        """Return FREE, PENDING, READY or CONDEMNED."""
        return self._state[slot]

    def take(self) -> int | None:
        """FREE -> PENDING; None if no slot is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._state[slot] = PENDING
        self.busy += 1
        return slot

    def publish(self, slot: int) -> None:
        """PENDING -> READY."""
        self.expect(slot, PENDING)
        self._state[slot] = READY
        self.busy -= 1

    def give_back(self, slot: int) -> None:
        """PENDING -> FREE."""
        self.expect(slot, PENDING)
        self.busy -= 1
        self._release(slot)

    def drop(self, slot: int) -> None:
        """READY -> FREE, or CONDEMNED while it is pinned."""
        self.expect(slot, READY)
        if self.pins[slot]:
            self._state[slot] = CONDEMNED
        else:
            self._release(slot)

    def pin(self, slot: int) -> None:
        """Add a reader to a READY slot."""
        self.expect(slot, READY)
        self.busy += not self.pins[slot]
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Take a reader away; the last one frees a CONDEMNED slot."""
        if not self.pins[slot]:
            raise Misuse(f"slot {slot} is unpinned more often than pinned")
        self.pins[slot] -= 1
        if not self.pins[slot]:
            self.busy -= 1
            if self._state[slot] == CONDEMNED:
                self._release(slot)

    def expect(self, slot: int, state: int) -> None:
        """Raise :class:`Misuse` if a slot is in another state."""
        if self._state[slot] != state:
            raise Misuse(f"slot {slot} is in state {self._state[slot]}, not {state}")

    def check(self) -> None:
        """Prove that free list, states and pins agree.

        Raises:
            Misuse: naming the slot that does not.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise Misuse("a slot is free twice")
        busy = 0
        for slot, state in enumerate(self._state):
            if (state == FREE) != (slot in free):
                raise Misuse(f"slot {slot} in state {state} is wrongly on or off the free list")
            if self.pins[slot] and state not in (READY, CONDEMNED):
                raise Misuse(f"slot {slot} in state {state} is pinned")
            if state == CONDEMNED and not self.pins[slot]:
                raise Misuse(f"condemned slot {slot} has no reader")
            busy += state == PENDING or self.pins[slot] > 0
        if busy != self.busy:
            raise Misuse(f"{busy} slots are busy, counted {self.busy}")

    def _release(self, slot: int) -> None:
        self._state[slot] = FREE
        self._free.append(slot)
