"""The life of the host tier's slots: who may write one, who reads it, when it is free again.

A slot goes FREE -> PENDING (a store writes it) -> READY (can be loaded) -> FREE. A READY slot
that loses its block while a load still reads it is CONDEMNED until unpinned, so that its bytes
are not overwritten under the reader.
"""

from __future__ import annotations

from array import array

from kvconnect.errors import Misuse

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
