"""The part of ``copy_cuda.py`` for a GPU that computes: what copies cost a matrix product, by the
way they take.

- ``slowdown_<way>_<dir>_<page>``: by how much bf16 matrix products, each launched by itself, slow
  down while the executor copies blocks.
- ``gbps_beside_<way>_<dir>_<page>``: what it moves meanwhile.

``way`` is ``dma``, ``staged``, or ``kernel_<grid>``: the kernel with so many thread blocks, each of
which takes a multiprocessor. A driver without kernels has ``dma`` alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.common import progress
from benchmarks.copy_jobs import BlockCopy, CopyJobs
from kvconnect.copy.calibration import DMA_ONLY, GRIDS, CopyThreshold
from kvconnect.copy.cuda import CudaCopier
from kvconnect.copy.driver import Driver
from kvconnect.copy.staged import Staging

if TYPE_CHECKING:
    from benchmarks.copy_cuda import CudaBench

MIB = 1 << 20
PAGES = {"16k": 16 << 10, "64k": 64 << 10}
DIRECTIONS = ("store", "load")
JOB_BLOCKS = 16
SEGMENT_BYTES = 42 * MIB  # as on PCIe 5
ENDLESS = 1 << 40

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
    """Return what makes a copier copy by each way."""
    found = {"dma": DMA_ONLY}
    if has_kernels:
        found["staged"] = CopyThreshold(0, 0, staged_store=ENDLESS, staged_load=ENDLESS)
        for grid in GRIDS:
            found[f"kernel_{grid}"] = CopyThreshold(ENDLESS, ENDLESS, fewest_rows=1, grid=grid)
    return found


def jobs_by(
    bench: CudaBench, driver: Driver, page: int, way: str, choice: CopyThreshold
) -> CopyJobs:
    """Return an executor that copies blocks of runs of ``page`` bytes by one way."""
    geometry = bench.geometry(page)
    staging = partial(Staging, driver, segment_bytes=SEGMENT_BYTES)
    copier = CudaCopier(bench.area, bench.arena, geometry, driver, choice, staging)
    if copier.method("store", 0) != way.partition("_")[0]:
        raise SystemExit(f"blocks are copied by {copier.method('store', 0)}, not by {way}")
    return CopyJobs(copier, bench.store, geometry, bench.streams)


def beside(jobs: CopyJobs, copy: BlockCopy, work: Products) -> tuple[float, float]:
    """Return what ``work`` returns, and the bytes per second that were copied meanwhile."""
    with jobs.endless(copy) as copied:
        before, began = copied(), time.perf_counter()
        found = work()
        seconds = time.perf_counter() - began
        return found, (copied() - before) / seconds


def sweep(bench: CudaBench, driver: Driver, products: Products, rounds: int) -> dict[str, float]:
    """Return every figure; ends the process if a copy fails."""
    figures: dict[str, float] = {}
    for name, page in PAGES.items():
        for way, choice in ways(driver.kernels_unavailable_reason is None).items():
            progress(f"matrix products beside copies of {name} by {way}: {rounds} rounds")
            with closing(jobs_by(bench, driver, page, way, choice)) as jobs:
                for direction in DIRECTIONS:
                    (copy,) = bench.pick(direction, JOB_BLOCKS)
                    products()  # after a pause, the first ones are slower
                    alone, measured = [], []
                    for _ in range(rounds):
                        alone.append(products())
                        measured.append(beside(jobs, copy, products))
                    slow = statistics.median(milliseconds for milliseconds, _ in measured)
                    rate = statistics.median(rate for _, rate in measured)
                    key = f"{way}_{direction}_{name}"
                    figures[f"slowdown_{key}"] = slow / statistics.median(alone) - 1
                    figures[f"gbps_beside_{key}"] = rate / 1e9
    return figures
