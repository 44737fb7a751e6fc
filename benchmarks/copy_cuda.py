"""The part of ``copy.py`` for CUDA devices: the copy executor against the hardware and two others.

A block has ``BLOCK_BYTES`` in runs of one page, each in a layer of its own, as most KV caches have
them; slots hold whole blocks.

- ``ratio_limit_<dir>_<page>``: throughput of random blocks over that of large ``cudaMemcpyAsync``
  of the same bytes, page-locked; ``ratio_batch_`` over the same executor with
  ``cuMemcpyBatchAsync`` alone, ``ratio_torch_`` over torch indexing. ``dir`` is ``store``, ``load``
  or ``both`` at once.
- ``cpu_ms_per_gib_<dir>_<page>``: CPU time of the process, for each GiB that is copied.
- ``gbps_<dir>_<page>_<size>``: for transfers of 64 MiB to 2 GiB.
- ``gbps_digest_<page>``: digests on the device of blocks of one page.
- ``slowdown_``, ``gbps_beside_``: see ``copy_beside.py``.
- ``executor_ratio_``: see ``copy_executor.py``.

Variants take turns in one run; every figure is a ratio of medians.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import torch

from benchmarks import copy_beside, copy_executor
from benchmarks.common import interleave, medians, progress
from benchmarks.copy_beside import make_products
from benchmarks.copy_jobs import BlockCopy, CopyJobs
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy import make_copier, open_driver
from kvconnect.copy.calibration import DMA_ONLY
from kvconnect.copy.cuda import CudaCopier
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.streams import Streams, make_streams
from kvconnect.types import TransferType

MIB = 1 << 20
PAGES = {
    "4k": 4 << 10,
    "16k": 16 << 10,
    "64k": 64 << 10,
    "256k": 256 << 10,
    "1m": MIB,
    "4m": 4 * MIB,
}
BLOCK_BYTES = PAGES["4m"]
SAMPLE_BYTES = 512 * MIB
DIGESTED_BYTES = 256 * MIB
SIZES = {"64m": 64 * MIB, "256m": 256 * MIB, "1g": 1024 * MIB, "2g": 2048 * MIB}
SIZE_PAGE = "64k"
AREA_BYTES = 2 * max(SIZES.values())
PIECE_BYTES = 256 * MIB
"""Of a large copy: it must not span pieces of the arena that were page-locked one by one."""

MATRIX = 8192
PRODUCTS = 40
DIRECTIONS = ("store", "load", "both")
_KINDS = {"store": TransferType.GPU_TO_CPU, "load": TransferType.CPU_TO_GPU}


class CudaBench:
    """A KV area on the device, a page-locked arena, and the ways to move a sample."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.area = torch.empty(AREA_BYTES, dtype=torch.uint8, device=self.device).random_()
        self.store = self.make_arena(AREA_BYTES // BLOCK_BYTES, BLOCK_BYTES)
        self.arena = self.store.tensor()
        self.streams: Streams = make_streams(self.device)

    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        """Return a page-locked arena; end the process if it cannot be locked."""
        arena = HostArena(num_slots, slot_bytes, "off")
        if not arena.pin():
            raise SystemExit("the arena cannot be page-locked: raise ulimit -l")
        return arena

    def geometry(self, page: int) -> Geometry:
        """Return blocks of ``BLOCK_BYTES``, or of one page if that is larger, in runs of a page."""
        block = max(BLOCK_BYTES, page)
        blocks = AREA_BYTES // block
        runs = (ByteRun(layer * blocks * page, page, page) for layer in range(block // page))
        return Geometry((GroupGeometry(tuple(runs), blocks),))

    def jobs(self, page: int) -> dict[str, CopyJobs]:
        """Return executors for blocks of such runs: as a user has it, and with DMA alone."""
        geometry = self.geometry(page)
        driver = open_driver(self.device)
        copiers = {
            "ours": make_copier(self.area, self.arena, geometry),
            "batch": CudaCopier(self.area, self.arena, geometry, driver, DMA_ONLY),
        }
        return {
            name: CopyJobs(copier, self.store, geometry, self.streams)
            for name, copier in copiers.items()
        }

    def pick(self, direction: str, count: int) -> list[BlockCopy]:
        """Return copies of random blocks; no block or slot is in both directions."""
        names = ("store", "load") if direction == "both" else (direction,)
        everything = range(AREA_BYTES // BLOCK_BYTES)
        blocks, slots = (
            array("q", self.random.sample(everything, count * len(names))) for _ in range(2)
        )
        some = [slice(number * count, (number + 1) * count) for number in range(len(names))]
        return [
            BlockCopy(name, blocks[part], slots[part])
            for name, part in zip(names, some, strict=True)
        ]

    def run(self, direction: str, copies: dict[str, Callable[[], None]]) -> None:
        """Start the copies of a direction and wait for them."""
        fence = self.streams.fence()
        names = ("store", "load") if direction == "both" else (direction,)
        flights = [self.streams.launch(_KINDS[name], fence, copies[name]) for name in names]
        for flight in flights:
            flight.wait()

    def large(self, nbytes: int) -> dict[str, Callable[[], None]]:
        """Copies as large as can be, of all bytes; the two directions do not touch the same."""
        starts = range(0, nbytes, PIECE_BYTES)
        pieces = [slice(start, min(start + PIECE_BYTES, nbytes)) for start in starts]
        area, arena = self.area, self.arena
        other, there = self.area[AREA_BYTES // 2 :], self.arena[AREA_BYTES // 2 :]

        def store() -> None:
            for piece in pieces:
                arena[piece].copy_(area[piece], non_blocking=True)

        def load() -> None:
            for piece in pieces:
                other[piece].copy_(there[piece], non_blocking=True)

        return {"store": store, "load": load}

    def indexed(self, page: int, nbytes: int) -> dict[str, Callable[[], None]]:
        """What plain torch does: pages gathered into one tensor on either side."""
        everything, count = range(AREA_BYTES // page), nbytes // page
        blocks, slots = (torch.tensor(self.random.sample(everything, count)) for _ in range(2))
        on_device = blocks.to(self.device)
        area, arena = self.area.view(-1, page), self.arena.view(-1, page)
        staged = torch.empty((len(slots), page), dtype=torch.uint8, pin_memory=True)

        def store() -> None:
            staged.copy_(area.index_select(0, on_device), non_blocking=True)
            torch.cuda.current_stream().synchronize()
            arena.index_copy_(0, slots, staged)

        def load() -> None:
            torch.index_select(arena, 0, slots, out=staged)
            area.index_copy_(0, on_device, staged.to(self.device, non_blocking=True))

        return {"store": store, "load": load}


def check_bytes(bench: CudaBench, page: int, jobs: CopyJobs) -> None:
    """Store and load a few blocks and compare all bytes, so that only right copies are timed."""
    (stored,) = bench.pick("store", 4)
    blocks, slots = (torch.tensor(ids) for ids in stored[1:])
    layers = bench.area.view(-1, AREA_BYTES // max(BLOCK_BYTES, page), page)
    arena = bench.arena.view(-1, BLOCK_BYTES)
    blocks = blocks.to(bench.device)

    def content() -> torch.Tensor:
        return layers[:, blocks].transpose(0, 1).reshape(len(slots), -1).cpu()

    wanted = content()
    jobs.run([stored])
    good = torch.equal(arena[slots], wanted)
    jobs.run([BlockCopy("load", stored.blocks[::-1], stored.slots)])
    if not good or not torch.equal(content().flip(0), wanted):
        raise SystemExit(f"wrong bytes with pages of {page}")


def measure_page(bench: CudaBench, name: str, rounds: int) -> dict[str, float]:
    page, count = PAGES[name], SAMPLE_BYTES // BLOCK_BYTES
    progress(f"pages of {name}: checking bytes, then {rounds} rounds")
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        jobs = {key: stack.enter_context(closing(one)) for key, one in bench.jobs(page).items()}
        for one in jobs.values():
            check_bytes(bench, page, one)
        for direction in DIRECTIONS:
            copies, used = bench.pick(direction, count), list[float]()

            def ours(copies: list[BlockCopy] = copies, used: list[float] = used) -> None:
                began = time.process_time()
                jobs["ours"].run(copies)
                used.append(time.process_time() - began)

            variants = {
                "ours": ours,
                "batch": partial(jobs["batch"].run, copies),
                "limit": partial(bench.run, direction, bench.large(SAMPLE_BYTES)),
                "torch": partial(bench.run, direction, bench.indexed(page, SAMPLE_BYTES)),
            }
            seconds = medians(interleave(variants, rounds))
            for key in ("limit", "batch", "torch"):
                figures[f"ratio_{key}_{direction}_{name}"] = seconds[key] / seconds["ours"]
            moved = SAMPLE_BYTES * len(copies)
            figures[f"gbps_{direction}_{name}"] = moved / seconds["ours"] / 1e9
            cpu_ms = statistics.median(used) * 1e3 * (1 << 30) / moved
            figures[f"cpu_ms_per_gib_{direction}_{name}"] = cpu_ms
    return figures


def measure_sizes(bench: CudaBench, rounds: int) -> dict[str, float]:
    figures = {}
    jobs = bench.jobs(PAGES[SIZE_PAGE])
    with closing(jobs["batch"]), closing(jobs["ours"]) as ours:
        for name, nbytes in SIZES.items():
            progress(f"transfers of {name}: {rounds} rounds")
            for direction in ("store", "load"):
                variants = {
                    "ours": partial(ours.run, bench.pick(direction, nbytes // BLOCK_BYTES)),
                    "limit": partial(bench.run, direction, bench.large(nbytes)),
                }
                seconds = medians(interleave(variants, rounds))
                figures[f"gbps_{direction}_{SIZE_PAGE}_{name}"] = nbytes / seconds["ours"] / 1e9
                figures[f"ratio_limit_{direction}_{SIZE_PAGE}_{name}"] = (
                    seconds["limit"] / seconds["ours"]
                )
    return figures


def measure_digests(bench: CudaBench, rounds: int) -> dict[str, float]:
    """Time digests alone, of blocks anywhere in the KV cache; no figures without kernels."""
    figures = {}
    for name, page in PAGES.items():
        progress(f"digests of blocks of {name}: {rounds} rounds")
        everything, count = range(AREA_BYTES // page), DIGESTED_BYTES // page
        blocks = array("q", bench.random.sample(everything, count))
        geometry = Geometry((GroupGeometry((ByteRun(0, page, page),), len(everything)),))
        driver = open_driver(bench.device)
        copier = CudaCopier(bench.area, bench.arena, geometry, driver, DMA_ONLY)
        if not copier.hashes(0):
            return {}
        digest = partial(copier.enqueue_digests, 0, blocks)
        kind, fence = _KINDS["store"], bench.streams.fence()
        seconds = [bench.streams.run(kind, fence, digest) for _ in range(rounds)]
        figures[f"gbps_digest_{name}"] = DIGESTED_BYTES / statistics.median(seconds) / 1e9
    return figures


def measure_ways(bench: CudaBench, rounds: int) -> dict[str, float]:
    """Measure stores beside matrix products by the way they take, as ``copy_beside.py`` says."""
    products = make_products(bench.device, MATRIX, PRODUCTS)
    return copy_beside.sweep(bench, open_driver(bench.device), products, max(rounds // 3, 3))


def measure_executor(bench: CudaBench, rounds: int) -> dict[str, float]:
    """Measure the executor, as ``copy_executor.py`` says."""

    def make(store: HostArena, geometry: Geometry) -> CopyJobs:
        copier = make_copier(bench.area, store.tensor(), geometry)
        return CopyJobs(copier, store, geometry, bench.streams)

    return copy_executor.sweep(bench, make, max(rounds // 3, 3))


def measure_all(seed: int, rounds: int) -> dict[str, object]:
    """Return every figure of a CUDA device; ends the process if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: use --device cpu")
    bench = CudaBench(seed)
    figures: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    for name in PAGES:
        figures |= measure_page(bench, name, rounds)
    figures |= measure_sizes(bench, max(rounds // 3, 3))
    figures |= measure_digests(bench, rounds)
    figures |= measure_ways(bench, rounds)
    figures |= measure_executor(bench, rounds)
    return figures
