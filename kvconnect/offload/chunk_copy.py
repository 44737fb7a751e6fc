"""One chunk of a job on its way between device and host tier: verify, launch, take the result."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier, Digests, Direction, StagedCopy
from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.layer_loads import SyncLoad, pieces
from kvconnect.offload.messages import GroupBlocks
from kvconnect.offload.streams import Ahead, Fence, InFlightCopy, Streams
from kvconnect.types import FailureCause, TransferType

logger = logging.getLogger(__name__)

DIRECTIONS: dict[TransferType, Direction] = {
    TransferType.CPU_TO_GPU: "load",
    TransferType.GPU_TO_CPU: "store",
}


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
    staged: StagedCopy | None = None  # by way of device memory


class ChunkCopier:
    """Copies chunks; for the copy thread, which gets all errors of the copier and the device.

    If the copier can, the device computes the digests: a store's beside the copy, a load's behind
    it, or both on their way by device memory. Otherwise the host hashes the slots, before a load
    and after a store.
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
        fence: Fence | None,
        part: GroupBlocks,
        sync: SyncLoad | None = None,
        launched: Callable[[Fence], None] | None = None,
    ) -> ChunkCopy:
        """Launch a chunk behind ``fence``, if there is one; a synchronous load layer by layer.
        ``launched`` gets a fence behind the copy of another load."""
        if kind is TransferType.CPU_TO_GPU:
            return self._load(fence, part, sync, launched)
        return self._store_blocks(fence, part)

    def finish(self, chunk: ChunkCopy) -> tuple[int, FailureCause | None]:
        """Return the number of leading blocks that were copied, and why the next one was not.

        Waits for the copy, so call this when it has ended. Raises :class:`TransferFailed` if the
        device failed.
        """
        chunk.in_flight.wait()
        found = chunk.digests[0]() if chunk.digests else None
        if chunk.staged is not None:
            chunk.staged.release()
        good, cause = chunk.good, chunk.cause
        if chunk.kind is TransferType.GPU_TO_CPU:
            self._seal(chunk, found)
        elif found is not None:
            good, cause = self._verified(chunk.part, chunk.sealed, found) or (good, cause)
        return good, cause

    def _store_blocks(self, fence: Fence | None, part: GroupBlocks) -> ChunkCopy:
        sealed = [i for i, slot in enumerate(part.slots) if self._store.digests.begin(slot)]
        kind, digests = TransferType.GPU_TO_CPU, list[Digests]()
        staged = self._stage(kind, part, sealed)

        def copy() -> None:
            if staged is None:
                self._copier.enqueue_store(part.group, part.block_ids, part.slots)

        if staged is not None:
            in_flight = self._launch_staged(kind, fence, copy, staged, sealed, digests)
        else:
            digest = self._digest(part, sealed, digests)
            in_flight = self._streams.launch(kind, fence, copy, digest)
        return ChunkCopy(part, kind, len(part.slots), None, in_flight, sealed, digests, staged)

    def _stage(
        self, kind: TransferType, part: GroupBlocks, sealed: Sequence[int]
    ) -> StagedCopy | None:
        hashed = bool(sealed) and self._copier.hashes(part.group)
        return self._copier.stage(DIRECTIONS[kind], part.group, part.block_ids, part.slots, hashed)

    def _launch_staged(
        self,
        kind: TransferType,
        fence: Fence | None,
        copy: Callable[[], None],
        staged: StagedCopy,
        sealed: Sequence[int],
        digests: list[Digests],
    ) -> InFlightCopy:
        """Launch a staged copy with ``copy`` behind it; add the digests of ``sealed`` blocks."""
        read = staged.digests
        if read is not None:
            digests.append(lambda: array("Q", map(read().__getitem__, sealed)))
        with ExitStack() as undo:
            undo.callback(staged.release)  # after an error, nothing of it is in flight
            ahead = Ahead(staged.lane, staged.work)
            in_flight = self._streams.launch(kind, fence, copy, ahead=ahead)
            undo.pop_all()
        return in_flight

    def _load(
        self,
        fence: Fence | None,
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
        whole = GroupBlocks(part.group, blocks, slots)
        staged = self._stage(kind, whole, sealed) if sync is None else None

        def copy() -> None:
            if sync is not None:
                self._load_layers(sync, part.group, blocks, slots)
            elif staged is None:
                self._copier.enqueue_load(part.group, blocks, slots)
            if sync is None and launched is not None:
                launched(self._streams.fence())

        if staged is not None:
            in_flight = self._launch_staged(kind, fence, copy, staged, sealed, digests)
        else:
            digest = self._digest(part, sealed, digests)
            in_flight = self._streams.launch(kind, fence, copy, digest)
        return ChunkCopy(part, kind, good, cause, in_flight, sealed, digests, staged)

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

    def _seal(self, chunk: ChunkCopy, found: array[int] | None) -> None:
        slots = [chunk.part.slots[i] for i in chunk.sealed]
        if found is not None:
            for slot, digest in zip(slots, found, strict=True):
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
