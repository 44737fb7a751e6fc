"""One chunk of a job on its way between device and host tier: checked, launched, landed."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier, Digests
from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostStore
from kvconnect.offload.layer_loads import SyncLoad, pieces
from kvconnect.offload.messages import GroupBlocks
from kvconnect.offload.streams import Fence, Flight, Streams
from kvconnect.types import FailureCause, TransferType

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Move:
    """A chunk that was launched: its ``good`` leading blocks, and why the next one was not."""

    part: GroupBlocks
    kind: TransferType
    good: int
    cause: FailureCause | None
    flight: Flight
    sealed: list[int]  # places in the part whose blocks have a digest
    digests: list[Digests]  # one, if the device works them out


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk: its ``good`` leading blocks are there."""

    good: int
    cause: FailureCause | None
    seconds: float


class ChunkCopier:
    """For the copy thread. What a copier or the device raises is raised to it.

    Digests are worked out on the device, behind the copy, where the copier can do that: of a
    store's blocks before the host could change them, of a load's after the whole way. Otherwise
    the host hashes the slots, before a load and after a store.
    """

    def __init__(
        self, copier: Copier, store: HostStore, geometry: Geometry, streams: Streams
    ) -> None:
        self._copier = copier
        self._store = store
        self._geometry = geometry
        self._streams = streams

    def fence(self) -> Fence:
        """Mark the device's work so far; for the engine's thread."""
        return self._streams.fence()

    def block_bytes(self, part: GroupBlocks) -> int:
        """Return the bytes of one block of a part."""
        return self._geometry.groups[part.group].block_bytes

    def start(
        self, kind: TransferType, fence: Fence, part: GroupBlocks, sync: SyncLoad | None = None
    ) -> Move:
        """Launch a chunk behind ``fence``; of a load that is followed, layer by layer."""
        if kind is TransferType.CPU_TO_GPU:
            return self._load(fence, part, sync)
        return self._store_blocks(fence, part)

    def land(self, move: Move) -> ChunkResult | None:
        """Return what became of a chunk, None while it is on its way; does not block."""
        seconds = move.flight.poll()
        if seconds is None:
            return None
        if move.kind is TransferType.GPU_TO_CPU:
            self._seal(move)
            return ChunkResult(move.good, move.cause, seconds)
        good, cause = move.good, move.cause
        if move.digests:
            good, cause = self._verified(move.part, move.sealed, move.digests[0]()) or (good, cause)
        return ChunkResult(good, cause, seconds)

    def _store_blocks(self, fence: Fence, part: GroupBlocks) -> Move:
        sealed = [i for i, slot in enumerate(part.slots) if self._store.digests.begin(slot)]
        found: list[Digests] = []

        def copy() -> None:
            self._copier.enqueue_store(part.group, part.block_ids, part.slots)
            found.extend(self._hashes(part, sealed))

        kind = TransferType.GPU_TO_CPU
        flight = self._streams.launch(kind, fence, copy)
        return Move(part, kind, len(part.slots), None, flight, sealed, found)

    def _load(self, fence: Fence, part: GroupBlocks, sync: SyncLoad | None) -> Move:
        good, cause = self._present(part)
        sealed = [i for i in range(good) if self._store.digests.is_sealed(part.slots[i])]
        if not self._copier.hashes(part.group):
            good, cause = self._verified(part, sealed, None) or (good, cause)
        blocks, slots = part.block_ids[:good], part.slots[:good]
        found: list[Digests] = []

        def copy() -> None:
            if sync is None:
                self._copier.enqueue_load(part.group, blocks, slots)
            else:
                self._load_layers(sync, part.group, blocks, slots)
            found.extend(self._hashes(part, sealed))

        kind = TransferType.CPU_TO_GPU
        flight = self._streams.launch(kind, fence, copy)
        return Move(part, kind, good, cause, flight, sealed, found)

    def _load_layers(
        self, sync: SyncLoad, group: int, blocks: array[int], slots: array[int]
    ) -> None:
        for runs in pieces(self._geometry.groups[group], len(slots)):
            self._copier.enqueue_runs(group, blocks, slots, runs)
            sync.reach(group, runs[1], self._streams.fence())

    def _hashes(self, part: GroupBlocks, places: Sequence[int]) -> list[Digests]:
        if not places or not self._copier.hashes(part.group):
            return []
        blocks = array("q", (part.block_ids[i] for i in places))
        return [self._copier.enqueue_digests(part.group, blocks)]

    def _present(self, part: GroupBlocks) -> tuple[int, FailureCause | None]:
        """Return how many leading slots there are, and what is wrong with the next."""
        for number, slot in enumerate(part.slots):
            if slot < 0:
                return number, FailureCause.MISSING
        return len(part.slots), None

    def _seal(self, move: Move) -> None:
        slots = [move.part.slots[i] for i in move.sealed]
        if move.digests:
            for slot, digest in zip(slots, move.digests[0](), strict=True):
                self._store.digests.put(slot, digest)
            return
        for slot in slots:
            self._store.digests.seal(slot, self._content(slot, move.part))

    def _verified(
        self, part: GroupBlocks, sealed: Sequence[int], found: array[int] | None
    ) -> tuple[int, FailureCause] | None:
        """Return the first place whose block is not what was stored, None if all are.

        ``found`` are digests of the blocks at ``sealed``; None: the slots are hashed here.
        """
        for number, place in enumerate(sealed):
            slot = part.slots[place]
            try:
                if found is None:
                    self._store.digests.verify(slot, self._content(slot, part))
                else:
                    self._store.digests.compare(slot, found[number])
            except Corrupt as error:
                logger.error("%s; the block is recomputed", error)
                return place, FailureCause.DIGEST
        return None

    def _content(self, slot: int, part: GroupBlocks) -> memoryview:
        return self._store.view(slot, self.block_bytes(part))
