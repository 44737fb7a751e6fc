"""Copies for KV caches on a CUDA device: a gather/scatter kernel, or batched DMA.

Direction and length of a block's runs decide, by the thresholds of ``calibration``. Only ``store``,
``load``, constructors and the first use of a wire-block table wait for the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy.base import Copier, Digests, Runs, check_request, check_sizes
from kvconnect.copy.calibration import PAGES, SAMPLE_BYTES, CopyThreshold, SampleCopy, scattered
from kvconnect.copy.driver import Driver
from kvconnect.copy.kernels import DIGEST_OVER, PIECE_BYTES, ROW, lanes_for, page_table, unit_table
from kvconnect.errors import Misuse

Direction = Literal["store", "load"]
_Ids = tuple["array[int]", "array[int]"]

GRID, THREADS = 16, 512
"""A few multiprocessors keep 1 MiB in flight, several times what PCIe 5 needs."""
_DIGEST_GRID, _DIGEST_THREADS = 16, 128
_KERNELS = {"store": "gather_pages", "load": "scatter_pages"}


class _GroupTables:
    """Tables of one group: rows for the kernels on the device, runs for DMA on the host.

    ``area`` and ``arena`` are addresses.
    """

    def __init__(self, driver: Driver, group: GroupGeometry, area: int, arena: int) -> None:
        table = page_table((s.offset, s.stride, s.length) for s in group.segments)
        self.table = driver.upload(table)
        self.lanes = lanes_for(table)
        self.lengths = array("q", (s.length for s in group.segments))
        self.run_bytes = sorted(self.lengths)[len(self.lengths) // 2]
        self.pages = torch.tensor([s.offset for s in group.segments]) + area
        self.strides = torch.tensor([s.stride for s in group.segments])
        lengths = torch.tensor(self.lengths)
        self.held = lengths.cumsum(0) - lengths + arena
        # Per run, its first row; long runs have several rows.
        self.rows = [0, *accumulate(-(-length // PIECE_BYTES) for length in self.lengths)]
        self.all_runs = (0, len(self.lengths))


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
    ) -> None:
        self._num_slots = check_sizes(geometry, area.nbytes, arena.nbytes)
        if not area.is_contiguous() or not arena.is_contiguous():
            raise Misuse("copies on a device need a contiguous area and arena")
        self._owners = (area, arena)  # keeps the addresses below valid
        self._area, self._arena = area.data_ptr(), arena.data_ptr()
        self._geometry = geometry
        self._driver = driver
        self._choice = choice
        addresses = self._area, self._arena
        self._groups = [_GroupTables(driver, group, *addresses) for group in geometry.groups]
        driver.synchronize()  # other streams read the tables

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
        """Return the method that copies a group's blocks: ``kernel`` or ``dma``."""
        limit = self._choice.store if direction == "store" else self._choice.load
        return "kernel" if self._groups[group].run_bytes <= limit else "dma"

    def hashes(self, group: int) -> bool:
        return self._geometry.groups[group].block_bytes > DIGEST_OVER

    def enqueue_digests(self, group: int, block_ids: Sequence[int]) -> Digests:
        slots = [0] * len(block_ids)
        found = check_request(self._geometry, self._num_slots, group, block_ids, slots)
        if not self.hashes(group):
            raise Misuse(f"blocks of {found.block_bytes} bytes cannot be hashed on the device")
        if not block_ids:
            return lambda: array("Q")
        made, count = self._groups[group], len(block_ids)
        pairs = self._driver.upload(_pairs(array("q", block_ids), array("q", slots)))
        digests = self._driver.host_memory(8 * count)
        arguments = (
            *(self._area, made.table.data_ptr(), made.rows[-1], pairs.data_ptr(), count),
            *(found.block_bytes, digests.data_ptr()),
        )
        self._driver.launch("digest_pages", min(count, _DIGEST_GRID), _DIGEST_THREADS, arguments)
        return lambda: array("Q", digests.numpy().tobytes())

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
        num_blocks = self._geometry.groups[group].num_blocks
        if not (_within(blocks, num_blocks) and _within(places, self._num_slots)):
            # Raises and names the number that does not exist.
            check_request(self._geometry, self._num_slots, group, block_ids, slots)
        made = self._groups[group]
        copy = self._launch if self.method(direction, group) == "kernel" else self._copy_batch
        copy(direction, made, (blocks, places), runs or made.all_runs)

    def _launch(self, direction: Direction, made: _GroupTables, ids: _Ids, runs: Runs) -> None:
        pairs = self._driver.upload(_pairs(*ids))
        first, end = (made.rows[run] for run in runs)
        arguments = (
            *(self._area, self._arena, made.table.data_ptr() + first * ROW * 8, end - first),
            *(pairs.data_ptr(), len(ids[0]), self._geometry.slot_bytes, made.lanes),
        )
        self._driver.launch(_KERNELS[direction], GRID, THREADS, arguments)

    def _copy_batch(self, direction: Direction, made: _GroupTables, ids: _Ids, runs: Runs) -> None:
        blocks, places = (torch.frombuffer(i, dtype=torch.int64).unsqueeze(1) for i in ids)
        some = slice(*runs)
        pages = _numbers(made.pages[some] + blocks * made.strides[some])
        held = _numbers(made.held[some] + places * self._geometry.slot_bytes)
        sizes = made.lengths[some] * len(ids[0])
        if direction == "store":
            self._driver.copy_batch(held, pages, sizes, early=False)
        else:
            self._driver.copy_batch(pages, held, sizes, early=True)


def _pairs(block_ids: array[int], slots: array[int]) -> array[int]:
    pairs = array("q", bytes(16 * len(slots)))
    pairs[::2] = block_ids
    pairs[1::2] = slots
    return pairs


def _within(numbers: array[int], limit: int) -> bool:
    """Return whether all are in [0, limit). Takes a tenth of the time of Python's min and max."""
    low, high = torch.frombuffer(numbers, dtype=torch.int64).aminmax()
    return bool(low.item() >= 0 and high.item() < limit)


def _numbers(tensor: torch.Tensor) -> array[int]:
    return array("q", tensor.numpy().tobytes())


def sample_move(driver: Driver) -> SampleCopy:
    """Return the copy that :func:`kvconnect.copy.calibration.calibrated` measures.

    The copy owns ``SAMPLE_BYTES`` of scratch memory on the device and on the host. Raises
    :class:`TransferFailed` if there is not enough memory.
    """
    area, arena = driver.device_memory(SAMPLE_BYTES), driver.host_memory(SAMPLE_BYTES)
    copiers = {}
    for page in PAGES:
        geometry = Geometry((GroupGeometry((ByteRun(0, page, page),), SAMPLE_BYTES // page),))
        for method, limit in (("kernel", page), ("dma", 0)):
            choice = CopyThreshold(store=limit, load=limit)
            copiers[method, page] = CudaCopier(area, arena, geometry, driver, choice)

    def move(direction: str, method: str, page: int) -> None:
        count = SAMPLE_BYTES // page
        copier = copiers[method, page]
        copy = copier.enqueue_store if direction == "store" else copier.enqueue_load
        copy(0, scattered(count), range(count))

    return move


# Wire blocks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _UnitTable:
    rows: torch.Tensor
    count: int
    lanes: int


class BlockCopier:
    """Packs and unpacks wire blocks of a KV cache, on the calling thread's current stream.

    ``area`` is the whole KV cache. The caller checks the ids of the wire blocks. Any thread may
    call any method. A call returns when its copy is launched, or raises :class:`TransferFailed`.
    """

    def __init__(self, area: torch.Tensor, driver: Driver) -> None:
        self._owner = area  # keeps the address below valid
        self._area = area.data_ptr()
        self._driver = driver
        # Keyed by content: peers come and go, but nearly all agree on the same segments.
        self._tables: dict[tuple[bytes, int], _UnitTable] = {}

    def pack(self, segments: array[int], phases: int, ids: array[int], staged: int) -> None:
        """Copy wire blocks to address ``staged``, back to back.

        ``segments`` and ``phases`` are those of :func:`~kvconnect.cache.pages.unit_segments`.
        """
        self._move("pack_blocks", (segments, phases), ids, staged)

    def unpack(self, segments: array[int], phases: int, ids: array[int], staged: int) -> None:
        """Copy wire blocks from address ``staged``, back to back, into the KV cache."""
        self._move("unpack_blocks", (segments, phases), ids, staged)

    def _move(
        self, kernel: str, unit: tuple[array[int], int], ids: array[int], staged: int
    ) -> None:
        if not ids:
            return
        segments, phases = unit
        table = self._tables.get((segments.tobytes(), phases)) or self._made(segments, phases)
        block_bytes = sum(segments[2 : len(segments) // phases : 3])
        numbers = self._driver.upload(ids)
        arguments = (
            *(self._area, staged, table.rows.data_ptr(), table.count, phases),
            *(numbers.data_ptr(), len(ids), block_bytes, table.lanes),
        )
        self._driver.launch(kernel, GRID, THREADS, arguments)

    def _made(self, segments: array[int], phases: int) -> _UnitTable:
        rows, count = unit_table(segments, phases)
        table = _UnitTable(self._driver.upload(rows), count, lanes_for(rows))
        self._driver.synchronize()  # other streams read the table
        self._tables[segments.tobytes(), phases] = table
        return table
