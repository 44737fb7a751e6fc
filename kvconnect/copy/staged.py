"""Copies by way of device memory: DMA moves whole blocks, a kernel the runs of bytes.

A slot holds the runs of a block back to back. So DMA between a slot and a segment of device memory
needs one copy a block, instead of one a run, each of which costs CPU time. A kernel moves the runs
between the segment and the KV cache at the rate of device memory, and hashes what it holds anyway.

Each chunk in flight has a segment, and a stream of its own, so that one chunk's DMA runs while the
kernel of another one waits for room beside the model's.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from kvconnect.copy.base import MAX_DESCRIPTORS, MAX_IN_FLIGHT, Direction, StagedCopy
from kvconnect.copy.driver import Driver
from kvconnect.copy.kernels import DIGEST_LANES, DIGEST_STEP_BYTES
from kvconnect.copy.run_addresses import run_addresses

GRID, THREADS = 16, 512
"""A few multiprocessors move more than any link: about 500 GB/s within device memory."""

_ALIGNMENT = 16  # of a block in a segment
_ZERO = array("q", [0])
_KERNELS = {"store": "gather_staged", "load": "scatter_staged"}


def stride_of(block_bytes: int) -> int:
    """Return the bytes from one block of a segment to the next."""
    return -(-block_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of one group are: ``table`` has ``rows`` rows for the kernels, from ``area``
    on; ``num_slots`` slots begin at ``arena`` and lie ``slot_bytes`` apart. All else are addresses
    or bytes."""

    area: int
    arena: int
    slot_bytes: int
    block_bytes: int
    num_slots: int
    table: int
    rows: int


class _Segment:
    """Device memory of one chunk in flight, and what its kernel reads and writes."""

    def __init__(self, driver: Driver, lane: int, nbytes: int) -> None:
        self.lane = lane
        blocks = MAX_DESCRIPTORS
        self.memory = driver.device_memory(nbytes)
        # A block's last step may be a part of one.
        steps = nbytes // DIGEST_STEP_BYTES + blocks
        self.sums = driver.device_memory(8 * DIGEST_LANES * steps)
        self.ready = driver.upload(_ZERO)
        self.digests = driver.host_memory(8 * blocks)
        self.ids = driver.device_memory(8 * blocks)
        self.host_ids = driver.host_memory(8 * blocks)
        self.view = memoryview(self.host_ids.numpy()).cast("q")


class Staging:
    """Segments of ``segment_bytes`` for one direction. For the copy thread.

    The constructor raises :class:`TransferFailed` if the device has not enough memory.
    """

    def __init__(
        self,
        driver: Driver,
        direction: Direction,
        segment_bytes: int,
        segments: int = MAX_IN_FLIGHT,
    ) -> None:
        self._driver = driver
        self._direction = direction
        self._segment_bytes = segment_bytes
        self._free = deque(_Segment(driver, lane, segment_bytes) for lane in range(segments))

    def most_blocks(self, block_bytes: int) -> int:
        """Return how many blocks one copy can have."""
        return min(self._segment_bytes // stride_of(block_bytes), MAX_DESCRIPTORS)

    def copy(
        self, places: BlockPlaces, block_ids: array[int], slots: array[int], hashed: bool
    ) -> StagedCopy | None:
        """Return a copy of blocks that exist; None if there are too many, or no segment is free."""
        if len(slots) > self.most_blocks(places.block_bytes) or not self._free:
            return None
        segment = self._free.popleft()

        def work() -> None:
            if self._direction == "load":
                self._move(segment, places, slots)
            self._launch(segment, places, block_ids, hashed)
            if self._direction == "store":
                self._move(segment, places, slots)

        def digests() -> array[int]:
            return array("Q", bytes(memoryview(segment.digests.numpy())[: 8 * len(slots)]))

        return StagedCopy(
            segment.lane, work, digests if hashed else None, lambda: self._free.append(segment)
        )

    def _move(self, segment: _Segment, places: BlockPlaces, slots: array[int]) -> None:
        """Copy between slots and segment: one copy a block."""
        stride, base = stride_of(places.block_bytes), segment.memory.data_ptr()
        staged = array("q", range(base, base + stride * len(slots), stride))
        first, step = array("q", [places.arena]), array("q", [places.slot_bytes])
        held = array("q", run_addresses(first, step, slots, places.num_slots))
        sizes = array("q", [places.block_bytes]) * len(slots)
        if self._direction == "load":
            self._driver.copy_batch(staged, held, sizes, early=True)
        else:
            self._driver.copy_batch(held, staged, sizes, early=False)

    def _launch(
        self, segment: _Segment, places: BlockPlaces, block_ids: array[int], hashed: bool
    ) -> None:
        segment.view[: len(block_ids)] = memoryview(block_ids)
        target, source = (array("q", [ids.data_ptr()]) for ids in (segment.ids, segment.host_ids))
        self._driver.copy_batch(target, source, array("q", [8 * len(block_ids)]), early=True)
        digests = segment.digests.data_ptr() if hashed else 0
        arguments = (
            *(places.area, places.table, places.rows),
            *(segment.ids.data_ptr(), len(block_ids), places.block_bytes),
            *(segment.sums.data_ptr(), segment.ready.data_ptr(), digests),
            *(segment.memory.data_ptr(), stride_of(places.block_bytes)),
        )
        self._driver.launch(_KERNELS[self._direction], GRID, THREADS, arguments)
