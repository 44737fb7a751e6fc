"""One chunk of a job on its way between device and host tier: verify, launch, take the result."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier, Digests
from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.layer_loads import SyncLoad, pieces
from kvconnect.offload.messages import GroupBlocks
from kvconnect.offload.streams import Fence, InFlightCopy, Streams
from kvconnect.types import FailureCause, TransferType

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ChunkCopy:
    """A launched chunk: its ``good`` leading blocks, and why the next block was not copied."""

    part: GroupBlocks
    kind: TransferType
    good: int
    cause: FailureCause | None
    in_flight: InFlightCopy
    sealed: list[int]  # indices in the part of the blocks that have a digest
    digests: list[Digests]  # one, if the device computes them


class ChunkCopier:
    """Copies chunks; for the copy thread, which gets all errors of the copier and the device.

    If the copier can, the device computes the digests: a store's beside the copy, a load's behind
    it. Otherwise the host hashes the slots, before a load and after a store.
    """

    def __init__(
        self, copier: Copier, store: HostArena, geometry: Geometry, streams: Streams
    ) -> None:
        self._copier = copier
        self._store = store
        self.geometry = geometry
        self._streams = streams

    def block_bytes(self, part: GroupBlocks) -> int:
        """Return the bytes of one block of a part."""
        return self.geometry.groups[part.group].block_bytes

    def start(
        self,
        kind: TransferType,
        fence: Fence,
        part: GroupBlocks,
        sync: SyncLoad | None = None,
        launched: Callable[[Fence], None] | None = None,
    ) -> ChunkCopy:
        """Launch a chunk behind ``fence``; a synchronous load layer by layer. ``launched`` gets a
        fence behind the copy of another load."""
        if kind is TransferType.CPU_TO_GPU:
            return self._load(fence, part, sync, launched)
        return self._store_blocks(fence, part)

    def finish(self, chunk: ChunkCopy) -> tuple[int, FailureCause | None]:
        """Return the number of leading blocks that were copied, and why the next one was not.

        Waits for the copy, so call this when it has ended. Raises :class:`TransferFailed` if the
        device failed.
        """
        chunk.in_flight.wait()
        good, cause = chunk.good, chunk.cause
        if chunk.kind is TransferType.GPU_TO_CPU:
            self._seal(chunk)
        elif chunk.digests:
            found = chunk.digests[0]()
            good, cause = self._verified(chunk.part, chunk.sealed, found) or (good, cause)
        return good, cause

    def _store_blocks(self, fence: Fence, part: GroupBlocks) -> ChunkCopy:
        sealed = [i for i, slot in enumerate(part.slots) if self._store.digests.begin(slot)]
        kind, digests = TransferType.GPU_TO_CPU, list[Digests]()

        def copy() -> None:
            self._copier.enqueue_store(part.group, part.block_ids, part.slots)

        digest = self._digest(part, sealed, digests)
        in_flight = self._streams.launch(kind, fence, copy, digest)
        return ChunkCopy(part, kind, len(part.slots), None, in_flight, sealed, digests)

    def _load(
        self,
        fence: Fence,
        part: GroupBlocks,
        sync: SyncLoad | None,
        launched: Callable[[Fence], None] | None,
    ) -> ChunkCopy:
        good, cause = self._present(part)
        sealed = [i for i in range(good) if self._store.digests.is_sealed(part.slots[i])]
        if not self._copier.hashes(part.group):
            good, cause = self._verified(part, sealed, None) or (good, cause)
        blocks, slots = part.block_ids[:good], part.slots[:good]
        kind, digests = TransferType.CPU_TO_GPU, list[Digests]()

        def copy() -> None:
            if sync is None:
                self._copier.enqueue_load(part.group, blocks, slots)
                if launched is not None:
                    launched(self._streams.fence())
            else:
                self._load_layers(sync, part.group, blocks, slots)

        digest = self._digest(part, sealed, digests)
        in_flight = self._streams.launch(kind, fence, copy, digest)
        return ChunkCopy(part, kind, good, cause, in_flight, sealed, digests)

    def _load_layers(
        self, sync: SyncLoad, group: int, blocks: array[int], slots: array[int]
    ) -> None:
        for runs in pieces(self.geometry.groups[group], len(slots)):
            self._copier.enqueue_runs(group, blocks, slots, runs)
            sync.mark_loaded(group, runs[1], self._streams.fence())

    def _digest(
        self, part: GroupBlocks, places: Sequence[int], digests: list[Digests]
    ) -> Callable[[], None] | None:
        """Return what starts to hash the blocks at ``places`` on the device, and adds the result to
        ``digests``; None if nothing is to be hashed there."""
        if not places or not self._copier.hashes(part.group):
            return None
        blocks = array("q", (part.block_ids[i] for i in places))
        return lambda: digests.append(self._copier.enqueue_digests(part.group, blocks))

    def _present(self, part: GroupBlocks) -> tuple[int, FailureCause | None]:
        """Return how many leading blocks have a slot, and the cause of failure of the next one."""
        for number, slot in enumerate(part.slots):
            if slot < 0:
                return number, FailureCause.MISSING
        return len(part.slots), None

    def _seal(self, chunk: ChunkCopy) -> None:
        slots = [chunk.part.slots[i] for i in chunk.sealed]
        if chunk.digests:
            for slot, digest in zip(slots, chunk.digests[0](), strict=True):
                self._store.digests.put(slot, digest)
            return
        for slot in slots:
            self._store.digests.seal(slot, self._content(slot, chunk.part))

    def _verified(
        self, part: GroupBlocks, sealed: Sequence[int], found: array[int] | None
    ) -> tuple[int, FailureCause] | None:
        """Return the first index whose block differs from the stored one, None if none does.

        ``found`` holds the digests of the blocks at ``sealed``; None: hash the slots here.
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
