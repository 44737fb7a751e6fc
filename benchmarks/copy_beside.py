"""The part of ``copy_cuda.py`` for a GPU that computes: what stores cost a matrix product, by the
way they take.

- ``slowdown_<way>``: by how much a bf16 matrix product slows down while the executor stores blocks.
- ``gbps_beside_<way>``: what the stores move meanwhile.

``way`` is ``dma``, ``staged``, or ``kernel_<grid>``: the kernel with so many thread blocks, each of
which takes a multiprocessor. Blocks have 64 runs. A driver without kernels has ``dma`` alone.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.common import progress
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy.calibration import DMA_ONLY, GRIDS, CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.copy.driver import Driver
from kvconnect.copy.staged import Staging
from kvconnect.offload.copy_executor import CopyExecutor
from kvconnect.offload.messages import GroupBlocks, StoreBlocks
from kvconnect.types import JobId

if TYPE_CHECKING:
    from benchmarks.copy_cuda import CudaBench

MIB = 1 << 20
RUNS = 64  # of a block
JOB_BLOCKS = 16
JOBS = 256  # more than are copied while the products run
SEGMENT_BYTES = 32 * MIB
ENDLESS = 1 << 40
_JOB_S = 120.0

Products = Callable[[], float]
"""Computes some matrix products; returns their milliseconds."""


def make_products(device: torch.device, matrix: int, count: int) -> Products:
    shape = (matrix, matrix)
    left, right = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def products() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            torch.mm(left, right, out=out)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    products()
    return products


def ways(has_kernels: bool) -> dict[str, CopyThreshold]:
    """Return what makes a copier store by each way."""
    found = {"dma": DMA_ONLY}
    if has_kernels:
        found["staged"] = CopyThreshold(0, 0, staged_store=ENDLESS)
        for grid in GRIDS:
            found[f"kernel_{grid}"] = CopyThreshold(ENDLESS, 0, fewest_rows=1, grid=grid)
    return found


class Stores:
    """An executor that stores all blocks of the KV cache by one way, again and again."""

    def __init__(self, bench: CudaBench, driver: Driver, way: str, choice: CopyThreshold) -> None:
        block_bytes = bench.store.slot_bytes
        run, blocks = block_bytes // RUNS, bench.area.nbytes // block_bytes
        runs = tuple(ByteRun(number * blocks * run, run, run) for number in range(RUNS))
        geometry = Geometry((GroupGeometry(runs, blocks),))
        staging = partial(Staging, driver, segment_bytes=SEGMENT_BYTES)
        copier = CudaCopier(bench.area, bench.arena, geometry, driver, choice, staging)
        if copier.method("store", 0) != way.partition("_")[0]:
            raise SystemExit(f"blocks are stored by {copier.method('store', 0)}, not by {way}")
        self._executor = CopyExecutor(copier, bench.store, geometry, bench.streams)
        self._blocks = array("q", bench.random.sample(range(blocks), min(JOB_BLOCKS, blocks)))
        self._job_bytes = len(self._blocks) * block_bytes

    def beside(self, work: Products) -> tuple[float, float]:
        """Return what ``work`` returns, and the bytes per second that were stored meanwhile."""
        part = GroupBlocks(0, self._blocks, self._blocks)
        for number in range(JOBS):
            job = StoreBlocks(JobId(number), (part,), _JOB_S)
            self._executor.submit(job, self._executor.fence())
        began = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - began
        ended = self._ended()
        if ended == JOBS:
            progress("the stores ended before the products: the slowdown reads too low")
        moved = ended * self._job_bytes
        while ended < JOBS:
            time.sleep(0.001)
            ended += self._ended()
        return found, moved / seconds

    def close(self) -> None:
        self._executor.close()

    def _ended(self) -> int:
        done = self._executor.poll()
        for copy in done:
            if copy.report.failures:
                raise SystemExit(f"a copy failed: {copy.report.failures[0]}")
        return len(done)


def sweep(bench: CudaBench, driver: Driver, products: Products, rounds: int) -> dict[str, float]:
    """Return every figure; ends the process if a copy fails."""
    figures: dict[str, float] = {}
    for way, choice in ways(driver.kernels_unavailable_reason is None).items():
        progress(f"matrix products beside stores by {way}: {rounds} rounds")
        with closing(Stores(bench, driver, way, choice)) as stores:
            alone, beside = [], []
            for _ in range(rounds):
                alone.append(products())
                beside.append(stores.beside(products))
        slow = statistics.median(milliseconds for milliseconds, _ in beside)
        figures[f"slowdown_{way}"] = slow / statistics.median(alone) - 1
        figures[f"gbps_beside_{way}"] = statistics.median(rate for _, rate in beside) / 1e9
    return figures
