"""Copies for KV caches on a CUDA device: a gather/scatter kernel, batched DMA, or both in turn.

Direction and length of a block's runs decide, by the thresholds of ``calibration``. If a driver has
no kernels, DMA copies all runs, and the host computes digests and packs wire blocks. Only
``store``, ``load``, constructors and the first use of a wire-block table wait for the device.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy.base import (
    Copier,
    Digests,
    Direction,
    Runs,
    StagedCopy,
    check_request,
    check_sizes,
)
from kvconnect.copy.calibration import (
    DIRECTIONS,
    DMA_ONLY,
    GRIDS,
    PAGES,
    SAMPLE_BYTES,
    CopyThreshold,
    SampleCopy,
    scattered,
)
from kvconnect.copy.driver import Driver
from kvconnect.copy.kernels import (
    DIGEST_LANES,
    DIGEST_OVER,
    DIGEST_STEP_BYTES,
    PIECE_BYTES,
    ROW,
    lanes_for,
    page_table,
)
from kvconnect.copy.run_addresses import run_addresses
from kvconnect.copy.staged import BlockPlaces, Staging
from kvconnect.errors import Misuse, TransferFailed

logger = logging.getLogger(__name__)


_Ids = tuple["array[int]", "array[int]"]

GRID, THREADS = GRIDS[-1], 512
"""These keep 1 MiB in flight, several times what PCIe 5 needs."""
_SUMS_BYTES = 8 << 20
"""Scratch for the sums of 128 MiB: a chunk of a fast link is hashed by one launch, since each may
wait for room beside the model's kernels (1.6 ms beside prefill: LMCache's pull request 5067)."""
_ZERO = array("q", [0])
_SAMPLE_BLOCK_BYTES = 2 * PAGES[-1]
_KERNELS = {"store": "gather_pages", "load": "scatter_pages"}


class _GroupTables:
    """Tables of one group: rows for the kernels on the device, runs for DMA on the host.

    ``area`` and ``arena`` are addresses.
    """

    def __init__(
        self,
        driver: Driver,
        group: GroupGeometry,
        area: int,
        arena: int,
        slot_bytes: int,
        num_slots: int,
    ) -> None:
        table = page_table((s.offset, s.stride, s.length) for s in group.segments)
        self.table = driver.upload(table)
        self.lanes = lanes_for(table)
        self.lengths = array("q", (s.length for s in group.segments))
        self.run_bytes = sorted(self.lengths)[len(self.lengths) // 2]
        self.pages = array("q", (area + s.offset for s in group.segments))
        self.strides = array("q", (s.stride for s in group.segments))
        self.held = array("q", accumulate(self.lengths[:-1], initial=arena))
        self.slot_strides = array("q", [slot_bytes]) * len(self.lengths)
        # Per run, its first row; long runs have several rows.
        self.rows = [0, *accumulate(-(-length // PIECE_BYTES) for length in self.lengths)]
        self.all_runs = (0, len(self.lengths))
        self.places = BlockPlaces(
            area=area,
            arena=arena,
            slot_bytes=slot_bytes,
            block_bytes=sum(self.lengths),
            num_slots=num_slots,
            table=self.table.data_ptr(),
            rows=self.rows[-1],
        )
        self.digest_buffers: deque[_DigestBuffers] = deque()  # free ones


class _DigestBuffers:
    """Memory of one call for digests, used again when its digests were read: torch's allocators
    give up the GIL. ``capacity``: blocks."""

    def __init__(self, driver: Driver, capacity: int, sums_bytes: int) -> None:
        self.capacity = capacity
        self.ids = driver.device_memory(8 * capacity)
        self.sums = driver.device_memory(sums_bytes)
        self.ready = driver.upload(_ZERO)
        self.digests = driver.host_memory(8 * capacity)
        self.result = memoryview(self.digests.numpy())
        self._host_ids = driver.host_memory(8 * capacity)
        self._view = memoryview(self._host_ids.numpy()).cast("q")

    def upload(self, driver: Driver, block_ids: array[int]) -> None:
        """Copy block ids to the device, ahead of later work of the current stream."""
        self._view[: len(block_ids)] = memoryview(block_ids)
        target, source = (array("q", [ids.data_ptr()]) for ids in (self.ids, self._host_ids))
        driver.copy_batch(target, source, array("q", [8 * len(block_ids)]), early=True)


class CudaCopier(Copier):
    """Copies by kernel or DMA, with the same bytes as the reference.

    ``area`` and ``arena`` must be contiguous. The arena must be page-locked, or the kernel cannot
    reach it. ``driver`` must be of the area's device.
    """

    def __init__(
        self,
        area: torch.Tensor,
        arena: torch.Tensor,
        geometry: Geometry,
        driver: Driver,
        choice: CopyThreshold,
        make_staging: Callable[[Direction], Staging] | None = None,
    ) -> None:
        self._num_slots = check_sizes(geometry, area.nbytes, arena.nbytes)
        if not area.is_contiguous() or not arena.is_contiguous():
            raise Misuse("copies on a device need a contiguous area and arena")
        self._owners = (area, arena)  # keeps the addresses below valid
        self._area, self._arena = area.data_ptr(), arena.data_ptr()
        self._geometry = geometry
        self._driver = driver
        self._has_kernels = driver.kernels_unavailable_reason is None
        self._choice = choice if self._has_kernels else DMA_ONLY
        self._groups = [
            _GroupTables(
                driver, group, self._area, self._arena, geometry.slot_bytes, self._num_slots
            )
            for group in geometry.groups
        ]
        self._staging = self._make_stagings(make_staging)
        driver.synchronize()  # other streams read the tables

    def _make_stagings(
        self, make: Callable[[Direction], Staging] | None
    ) -> dict[Direction, Staging]:
        """Return the staging of the directions in which it is the way of a group."""
        made: dict[Direction, Staging] = {}
        for direction in DIRECTIONS:
            ways = {self._choice.method(direction, found.run_bytes) for found in self._groups}
            if make is not None and "staged" in ways:
                try:
                    made[direction] = make(direction)
                except TransferFailed as error:
                    logger.warning("copies are not staged, which is slower: %s", error)
        return made

    def store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.enqueue_store(group, block_ids, slots)
        self._driver.synchronize()

    def load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.enqueue_load(group, block_ids, slots)
        self._driver.synchronize()

    def enqueue_store(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._enqueue("store", group, block_ids, slots)

    def enqueue_load(self, group: int, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._enqueue("load", group, block_ids, slots)

    def enqueue_runs(
        self, group: int, block_ids: Sequence[int], slots: Sequence[int], runs: Runs
    ) -> None:
        self._enqueue("load", group, block_ids, slots, runs)

    def method(self, direction: Direction, group: int) -> str:
        """Return the method that copies many blocks of a group: ``kernel``, ``staged`` or
        ``dma``."""
        run_bytes = self._groups[group].run_bytes
        way = self._choice.method(direction, run_bytes)
        if way == "staged" and not self._stages(direction, group):
            return self._choice.direct(direction, run_bytes)
        return way

    def _stages(self, direction: Direction, group: int) -> bool:
        """Return whether blocks of a group have several runs, and there is memory to stage one."""
        staging, found = self._staging.get(direction), self._geometry.groups[group]
        several = len(found.segments) > 1
        return several and staging is not None and staging.most_blocks(found.block_bytes) > 0

    def descriptors(self, direction: Direction, group: int) -> int:
        copies = {"kernel": 0, "staged": 1, "dma": len(self._groups[group].lengths)}
        return copies[self.method(direction, group)]

    def most_blocks(self, direction: Direction, group: int) -> int:
        if self.method(direction, group) != "staged":
            return super().most_blocks(direction, group)
        return self._staging[direction].most_blocks(self._geometry.groups[group].block_bytes)

    def stage(
        self,
        direction: Direction,
        group: int,
        block_ids: Sequence[int],
        slots: Sequence[int],
        hashed: bool,
    ) -> StagedCopy | None:
        found = check_request(self._geometry, self._num_slots, group, block_ids, slots)
        if not block_ids or self.method(direction, group) != "staged":
            return None
        if hashed and not self.hashes(group):
            raise Misuse(f"blocks of {found.block_bytes} bytes cannot be hashed on the device")
        return self._staging[direction].copy(
            self._groups[group].places, array("q", block_ids), array("q", slots), hashed
        )

    def hashes(self, group: int) -> bool:
        return self._has_kernels and self._geometry.groups[group].block_bytes > DIGEST_OVER

    def enqueue_digests(self, group: int, block_ids: Sequence[int]) -> Digests:
        slots = [0] * len(block_ids)
        found = check_request(self._geometry, self._num_slots, group, block_ids, slots)
        if not self.hashes(group):
            raise Misuse(f"blocks of {found.block_bytes} bytes cannot be hashed on the device")
        if not block_ids:
            return lambda: array("Q")
        made, count = self._groups[group], len(block_ids)
        sums_bytes, per_launch = _sums_bytes(found.block_bytes), _per_launch(found.block_bytes)
        # Of this call only: another stream may fold while this one sums.
        buffers = made.digest_buffers.pop() if made.digest_buffers else None
        if buffers is None or buffers.capacity < count:
            capacity = 1 << (count - 1).bit_length()
            sums = min(capacity, per_launch) * sums_bytes
            buffers = _DigestBuffers(self._driver, capacity, sums)
        buffers.upload(self._driver, array("q", block_ids))
        scratch = buffers.sums.data_ptr()
        for first in range(0, count, per_launch):
            some, place = min(per_launch, count - first), 8 * first
            table = made.table.data_ptr(), made.rows[-1]
            blocks = buffers.ids.data_ptr() + place, some, found.block_bytes
            results = buffers.ready.data_ptr(), buffers.digests.data_ptr() + place
            arguments = self._area, *table, *blocks, scratch, *results
            self._driver.launch("hash_blocks", GRID, THREADS, arguments)

        @functools.cache  # the buffers go back once, and then belong to another call
        def read() -> array[int]:
            found = array("Q", bytes(buffers.result[: 8 * count]))
            made.digest_buffers.append(buffers)
            return found

        return read

    def _enqueue(
        self,
        direction: Direction,
        group: int,
        block_ids: Sequence[int],
        slots: Sequence[int],
        runs: Runs | None = None,
    ) -> None:
        if len(block_ids) != len(slots) or not 0 <= group < len(self._groups) or not len(slots):
            check_request(self._geometry, self._num_slots, group, block_ids, slots)
            return
        blocks, places = array("q", block_ids), array("q", slots)
        made = self._groups[group]
        some = runs or made.all_runs
        rows = (made.rows[some[1]] - made.rows[some[0]]) * len(blocks)
        way = self._choice.direct(direction, made.run_bytes)
        by_kernel = way == "kernel" and rows >= self._choice.fewest_rows
        copy = self._launch if by_kernel else self._copy_batch
        try:
            copy(direction, group, (blocks, places), some)
        except IndexError:  # names the number that does not exist
            check_request(self._geometry, self._num_slots, group, block_ids, slots)
            raise

    def _launch(self, direction: Direction, group: int, ids: _Ids, runs: Runs) -> None:
        made = self._groups[group]
        for numbers, limit in zip(ids, self._limits(group), strict=True):
            run_addresses(_ZERO, _ZERO, numbers, limit)  # checks them
        first, end = (made.rows[run] for run in runs)
        block_ids, slots = ids
        with self._driver.lend(_pairs(block_ids, slots)) as pairs:
            arguments = (
                *(self._area, self._arena, made.table.data_ptr() + first * ROW * 8, end - first),
                *(pairs, len(block_ids), self._geometry.slot_bytes, made.lanes),
            )
            self._driver.launch(_KERNELS[direction], self._choice.grid, THREADS, arguments)

    def _copy_batch(self, direction: Direction, group: int, ids: _Ids, runs: Runs) -> None:
        made, (first, end) = self._groups[group], runs
        some = slice(first, end)
        num_blocks, num_slots = self._limits(group)
        pages = run_addresses(made.pages[some], made.strides[some], ids[0], num_blocks)
        held = run_addresses(made.held[some], made.slot_strides[some], ids[1], num_slots)
        sizes = made.lengths[some] * len(ids[0])
        if direction == "store":
            self._driver.copy_batch(array("q", held), array("q", pages), sizes, early=False)
        else:
            self._driver.copy_batch(array("q", pages), array("q", held), sizes, early=True)

    def _limits(self, group: int) -> tuple[int, int]:
        return self._geometry.groups[group].num_blocks, self._num_slots


def _sums_bytes(block_bytes: int) -> int:
    """Return the bytes of one block's sums."""
    return 8 * DIGEST_LANES * -(-block_bytes // DIGEST_STEP_BYTES)


def _per_launch(block_bytes: int) -> int:
    """Return how many blocks are hashed together."""
    return max(1, _SUMS_BYTES // _sums_bytes(block_bytes))


def digest_launches(block_bytes: int, blocks: int) -> int:
    """Return how many launches of a kernel hash blocks."""
    return -(-blocks // _per_launch(block_bytes))


def _pairs(block_ids: array[int], slots: array[int]) -> array[int]:
    pairs = array("q", bytes(16 * len(slots)))
    pairs[::2] = block_ids
    pairs[1::2] = slots
    return pairs


def sample_move(driver: Driver) -> SampleCopy:
    """Return the copy that :func:`kvconnect.copy.calibration.calibrated` measures.

    The copy owns ``SAMPLE_BYTES`` of scratch memory on the host, and nine times as much on the
    device. Raises :class:`TransferFailed` if there is not enough memory.
    """
    area, arena = driver.device_memory(SAMPLE_BYTES), driver.host_memory(SAMPLE_BYTES)
    copiers = {}
    stagings = {way: Staging(driver, way, SAMPLE_BYTES) for way in DIRECTIONS}
    blocks = SAMPLE_BYTES // _SAMPLE_BLOCK_BYTES
    for page in PAGES:
        pages = (ByteRun(0, page, page),)
        layers = range(_SAMPLE_BLOCK_BYTES // page)
        runs = tuple(ByteRun(layer * blocks * page, page, page) for layer in layers)
        for method, group, choice in (
            ("kernel", GroupGeometry(pages, SAMPLE_BYTES // page), CopyThreshold(page, page, 1)),
            ("dma", GroupGeometry(pages, SAMPLE_BYTES // page), DMA_ONLY),
            ("staged", GroupGeometry(runs, blocks), CopyThreshold(0, 0, 1, page, page)),
        ):
            geometry = Geometry((group,))
            copiers[method, page] = CudaCopier(
                area, arena, geometry, driver, choice, stagings.__getitem__
            )
        for grid in GRIDS:
            choice = CopyThreshold(page, page, 1, grid=grid)
            geometry = Geometry((GroupGeometry(pages, SAMPLE_BYTES // page),))
            copiers[f"kernel/{grid}", page] = CudaCopier(area, arena, geometry, driver, choice)

    def move(direction: Direction, method: str, page: int) -> None:
        copier = copiers[method, page]
        if method == "staged":
            copy = copier.stage(direction, 0, scattered(blocks), range(blocks), hashed=False)
            assert copy is not None
            try:
                copy.work()
            finally:
                copy.release()  # whoever takes this segment next runs on the same stream
            return
        count = SAMPLE_BYTES // page
        enqueue = copier.enqueue_store if direction == "store" else copier.enqueue_load
        enqueue(0, scattered(count), range(count))

    return move
