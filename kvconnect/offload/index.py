"""Index of the host tier's blocks and slots. All ranks use the same slot for a block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from kvconnect.cache.groups import CacheGroup
from kvconnect.errors import Misuse
from kvconnect.offload.eviction import EvictionPolicy
from kvconnect.offload.retention import KeepOutcome, KeepTimes, Retention
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block, FailureCause, Tier

QUARANTINED = (FailureCause.DIGEST, FailureCause.COPY)
"""Causes after which a stored copy cannot be trusted."""


class HostIndex:
    """Maps (group, block hash) to a slot. Owned by the scheduler's thread.

    A block is pending while it is stored, then ready: it can be loaded.

    Each slot has a hint: the slot that held the next block of the prefix at the last store or
    lookup. A lookup follows the hints and compares hashes, which reads memory in order. It uses the
    dict, which costs several cache misses per block, only where a hint is wrong. The lists share
    their int objects with the dicts: in a fragmented heap, a lookup that allocates thousands of
    ints takes two to three times as long.

    Attributes:
        evictions: blocks evicted since the start.
        policy: picks the blocks to evict.
        retention: the policy too, from the first :meth:`keep` on. Who keeps no block pays nothing.
    """

    def __init__(
        self, num_slots: int, num_groups: int, policy: EvictionPolicy, share: float = 0.0
    ) -> None:
        """``share`` of the slots may be pinned, and as many retained."""
        self.slots = Slots(num_slots)
        self.policy = policy
        self.retention: Retention | None = None
        self._share = share
        self.evictions = 0
        self._evictions_counted = 0
        self._removed: list[Block] = []
        self._ready: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._pending: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._storing: dict[int, bytes] = {}  # hash of PENDING slots
        self._disowned: set[int] = set()  # PENDING slots whose block may be stored elsewhere
        self._group = bytearray(num_slots)
        # The entry after the last slot is the first hint of every lookup.
        self._readable: list[bytes] = [b""] * (num_slots + 1)  # hash of READY slots only
        self._next: list[int] = [num_slots] * (num_slots + 1)  # the hint

    def has(self, group: int, block_hash: bytes) -> bool:
        """Return whether a block is ready or pending."""
        return block_hash in self._ready[group] or block_hash in self._pending[group]

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """Return the slots of the leading blocks, up to the first that is not ready."""
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
        """Return the slot of a block; None if it is not ready."""
        return self._ready[group].get(block_hash)

    def hash_of(self, slot: int) -> bytes:
        """Return the hash of the block in a READY slot; empty for other slots."""
        return self._readable[slot]

    def in_prefix_order(
        self, groups: Sequence[CacheGroup], rows: Sequence[Sequence[bytes]]
    ) -> list[int]:
        """Return the slots of a prefix's READY blocks by the end of their tokens. So a policy that
        evicts the last slot first keeps a state as long as the tokens before it.

        Args:
            rows: per group, the hashes of its blocks.
        """
        if len(rows) == 1 and groups[0].states is None:
            return self.ready_slots(0, rows[0])
        ends: list[tuple[int, int]] = []
        for number, (group, row) in enumerate(zip(groups, rows, strict=True)):
            if group.states is None:
                slots: Iterable[int | None] = self.ready_slots(number, row)
            else:
                slots = [self.slot_of(number, block_hash) for block_hash in row]
            ends += [
                (block * group.block_tokens, slot)
                for block, slot in enumerate(slots, 1)
                if slot is not None
            ]
        return [slot for _, slot in sorted(ends)]

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        """Take a slot for a block to be stored, with an eviction if no slot is free. None if all
        slots are busy.

        Raises:
            Misuse: the block is already ready or pending.
        """
        if self.has(group, block_hash):
            raise Misuse(f"block {block_hash.hex()} of group {group} is reserved twice")
        slot = self.slots.take()
        if slot is None:
            if self.slots.busy == len(self.slots):
                return None  # an eviction would look at all of them to learn this
            victim = self.policy.evict(self.slots.pins)
            if victim is None:
                return None
            self.evictions += 1
            self.remove((victim,), evicted=True)
            slot = self.slots.take()
            assert slot is not None
        self._storing[slot] = block_hash
        self._group[slot] = group
        self._pending[group][block_hash] = slot
        return slot

    def keep(self, slot: int, times: KeepTimes, now: float) -> KeepOutcome:
        """Keep the block of a READY slot: see :meth:`Retention.keep`."""
        if self.retention is None:
            slots = len(self.slots)
            self.retention = Retention(self.policy, slots, self._share, self.hash_of)
            self.policy = self.retention
        return self.retention.keep(slot, times, now)

    def commit(self, slots: Sequence[int]) -> None:
        """Make pending slots (in prefix order) READY."""
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

    def abandon(self, slots: Iterable[int], held: bool = False) -> list[Block]:
        """Free pending slots whose store failed; return their blocks.

        ``held``: the store job hangs and may still write the slots. Then the blocks may be stored
        in other slots, but these slots stay taken until the next ``abandon`` without ``held``.
        """
        dropped = []
        for slot in slots:
            self.slots.expect(slot, PENDING)
            group, block_hash = self._group[slot], self._storing[slot]
            if slot not in self._disowned:
                del self._pending[group][block_hash]
                dropped.append(Block(group, block_hash))
            if held:
                self._disowned.add(slot)
            else:
                self._disowned.discard(slot)
                del self._storing[slot]
                self.slots.give_back(slot)
        return dropped

    def pin(self, slots: Iterable[int]) -> None:
        """Keep READY slots from eviction while a load reads them. Counted per slot."""
        for slot in slots:
            self.slots.pin(slot)

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one :meth:`pin` of each slot."""
        for slot in slots:
            self.slots.unpin(slot)

    def quarantine(self, slot: int, cause: FailureCause, stats: OffloadingConnectorStats) -> None:
        """Remove the block of a READY slot after a failed load, and count it, if ``cause`` says
        that the copy cannot be trusted. A slot of -1 stands for a block without a copy."""
        if cause in QUARANTINED and slot >= 0 and self.slots.state(slot) == READY:
            self.remove([slot])
            stats.count("quarantined_blocks", label=cause.value)

    def remove(self, slots: Iterable[int], evicted: bool = False) -> None:
        """Remove the blocks of READY slots, which the policy may have ``evicted``. Loads that read
        them go on."""
        for slot in slots:
            if not evicted:
                self.policy.remove(slot)
            group, block_hash = self._group[slot], self._readable[slot]
            del self._ready[group][block_hash]
            self._readable[slot] = b""
            self.slots.drop(slot)
            self._removed.append(Block(group, block_hash))

    def take_removed(self, stats: OffloadingConnectorStats) -> list[Block]:
        """Return the blocks removed since the last call, and count those that were evicted."""
        fresh, self._evictions_counted = self.evictions - self._evictions_counted, self.evictions
        stats.count("evicted_blocks", fresh, label=Tier.HOST.value)
        removed, self._removed = self._removed, []
        return removed

    def clear(self) -> None:
        """Forget every ready block. The store jobs still own the pending ones."""
        self.policy.clear()
        for ready in self._ready:
            for slot in ready.values():
                self._readable[slot] = b""
                self.slots.drop(slot)
            ready.clear()

    def check(self) -> None:
        """Raise :class:`Misuse` unless slots and blocks match one to one, and kept slots add up."""
        self.slots.check()
        if self.retention is not None:
            self.retention.check()
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
            indexed = self.slot_of(self._group[slot], block_hash) == slot
            if indexed != (state == READY) or (block_hash and not indexed):
                raise Misuse(f"slot {slot} in state {state} is wrongly readable or not")


FREE, PENDING, READY, CONDEMNED = range(4)


class Slots:
    """States and readers of ``count`` slots. Owned by the scheduler's thread.

    A slot goes FREE -> PENDING (a store writes it) -> READY (loads may read it) -> FREE. A READY
    slot that loses its block while a load reads it is CONDEMNED until the load unpins it, so that
    no store overwrites the bytes.

    Attributes:
        pins: readers per slot; a policy must not evict a slot with readers.
        busy: number of slots that are written or read now and cannot be evicted.
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
        """Number of slots that are not FREE."""
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
        """Remove a reader. Without readers, a CONDEMNED slot is FREE."""
        if not self.pins[slot]:
            raise Misuse(f"slot {slot} is unpinned more often than pinned")
        self.pins[slot] -= 1
        if not self.pins[slot]:
            self.busy -= 1
            if self._state[slot] == CONDEMNED:
                self._release(slot)

    def gauges(self, slot_bytes: int) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of each gauge; ``slot_bytes`` over all workers."""
        yield "host_blocks_used", self.used, None
        yield "host_blocks_capacity", len(self), None
        yield "host_blocks_pinned", self.busy, None
        yield "host_bytes_used", self.used * slot_bytes, None
        yield "host_bytes_capacity", len(self) * slot_bytes, None

    def expect(self, slot: int, state: int) -> None:
        """Raise :class:`Misuse` if a slot is in another state."""
        if self._state[slot] != state:
            raise Misuse(f"slot {slot} is in state {self._state[slot]}, not {state}")

    def check(self) -> None:
        """Raise :class:`Misuse` unless free list, states and pins agree."""
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
