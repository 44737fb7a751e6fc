"""The part of ``copy.py`` for CUDA devices: our copier against the hardware and two others.

- ``ratio_limit_<dir>_<page>``: throughput of scattered pages over one large ``cudaMemcpyAsync`` of
  the same bytes, page-locked; ``ratio_batch_`` over ``cuMemcpyBatchAsync`` of the same pages,
  ``ratio_torch_`` over torch indexing. ``dir`` is ``store``, ``load`` or ``both`` at once.
- ``gbps_<dir>_<page>_<size>``: for transfers of 64 MiB to 4 GiB.
- ``gbps_digest_<page>``: digests on the device of blocks of one page.
- ``interference``: by how much a bf16 matrix product slows down while stores run.
- ``launch_us_1000``: CPU time to start a load of 1,000 pages of 16 KiB.
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
from functools import partial

import torch

from benchmarks import copy_beside, copy_executor
from benchmarks.common import interleave, medians, progress, timed
from benchmarks.copy_beside import make_products
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy import make_copier, open_driver
from kvconnect.copy.base import Copier
from kvconnect.copy.calibration import CopyThreshold
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
SAMPLE_BYTES = 256 * MIB
SIZES = {"64m": 64 * MIB, "256m": 256 * MIB, "1g": 1024 * MIB, "4g": 4096 * MIB}
SIZE_PAGE = "64k"
AREA_BYTES = max(SIZES.values())
MATRIX = 8192
PRODUCTS = 40
ENDED_S = 0.0001  # a wait that took less found nothing to wait for
DIRECTIONS = ("store", "load", "both")
_KINDS = {"store": TransferType.GPU_TO_CPU, "load": TransferType.CPU_TO_GPU}


class CudaBench:
    """A KV area on the device, a page-locked arena, and the ways to move a sample."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.area = torch.empty(AREA_BYTES, dtype=torch.uint8, device=self.device).random_()
        self.store = self.make_arena(AREA_BYTES // PAGES["4m"], PAGES["4m"])
        self.arena = self.store.tensor()
        self.streams: Streams = make_streams(self.device)

    def make_arena(self, num_slots: int, slot_bytes: int) -> HostArena:
        """Return a page-locked arena; end the process if it cannot be locked."""
        arena = HostArena(num_slots, slot_bytes, "off")
        if not arena.pin():
            raise SystemExit("the arena cannot be page-locked: raise ulimit -l")
        return arena

    def geometry(self, page: int) -> Geometry:
        return Geometry((GroupGeometry((ByteRun(0, page, page),), AREA_BYTES // page),))

    def copiers(self, page: int) -> dict[str, Copier]:
        geometry = self.geometry(page)
        batch = CudaCopier(
            self.area, self.arena, geometry, open_driver(self.device), CopyThreshold(0, 0)
        )
        return {"ours": make_copier(self.area, self.arena, geometry), "batch": batch}

    def pick(self, page: int, nbytes: int) -> tuple[array[int], array[int]]:
        """Return random blocks and slots, as the plan hands them over."""
        everything, count = range(AREA_BYTES // page), nbytes // page
        blocks, slots = (array("q", self.random.sample(everything, count)) for _ in range(2))
        return blocks, slots

    def run(self, direction: str, copies: dict[str, Callable[[], None]]) -> None:
        """Start the copies of a direction and wait for them."""
        fence = self.streams.fence()
        names = ("store", "load") if direction == "both" else (direction,)
        flights = [self.streams.launch(_KINDS[name], fence, copies[name]) for name in names]
        for flight in flights:
            flight.wait()

    def large(self, nbytes: int) -> dict[str, Callable[[], None]]:
        """One copy of all bytes; the two directions do not touch the same."""
        half = AREA_BYTES // 2 if 2 * nbytes <= AREA_BYTES else 0
        area, arena = self.area[:nbytes], self.arena[:nbytes]
        other, there = self.area[half : half + nbytes], self.arena[half : half + nbytes]
        return {
            "store": lambda: arena.copy_(area, non_blocking=True),
            "load": lambda: other.copy_(there, non_blocking=True),
        }

    def scattered(self, copier: Copier, page: int, nbytes: int) -> dict[str, Callable[[], None]]:
        """Random pages, drawn here, so that this is not timed; no page in both directions."""
        blocks, slots = self.pick(page, min(2 * nbytes, AREA_BYTES))
        count = nbytes // page
        stored, loaded = (blocks[:count], slots[:count]), (blocks[-count:], slots[-count:])
        return {
            "store": lambda: copier.enqueue_store(0, *stored),
            "load": lambda: copier.enqueue_load(0, *loaded),
        }

    def indexed(self, page: int, nbytes: int) -> dict[str, Callable[[], None]]:
        """What plain torch does: pages gathered into one tensor on either side."""
        blocks, slots = (torch.tensor(ids) for ids in self.pick(page, nbytes))
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


def check_bytes(bench: CudaBench, page: int, copier: Copier) -> None:
    """Store and load a sample and compare every page, so that only right copies are timed."""
    blocks, slots = bench.pick(page, 16 * MIB)
    area, arena = bench.area.view(-1, page), bench.arena.view(-1, page)
    copier.store(0, blocks, slots)
    wanted = area[torch.tensor(blocks, device=bench.device)].cpu()
    stored = torch.equal(arena[torch.tensor(slots)], wanted)
    copier.load(0, blocks[::-1], slots)
    found = area[torch.tensor(blocks[::-1], device=bench.device)].cpu()
    if not stored or not torch.equal(found, wanted):
        raise SystemExit(f"wrong bytes with pages of {page}")


def measure_page(bench: CudaBench, name: str, rounds: int) -> dict[str, float]:
    page = PAGES[name]
    progress(f"pages of {name}: checking bytes, then {rounds} rounds")
    copiers = bench.copiers(page)
    for copier in copiers.values():
        check_bytes(bench, page, copier)
    figures = {}
    for direction in DIRECTIONS:
        ways = {key: bench.scattered(c, page, SAMPLE_BYTES) for key, c in copiers.items()}
        ways |= {"limit": bench.large(SAMPLE_BYTES), "torch": bench.indexed(page, SAMPLE_BYTES)}
        variants = {key: _bound(bench, direction, copies) for key, copies in ways.items()}
        seconds = medians(interleave(variants, rounds))
        for key in ("limit", "batch", "torch"):
            figures[f"ratio_{key}_{direction}_{name}"] = seconds[key] / seconds["ours"]
        moved = SAMPLE_BYTES * (2 if direction == "both" else 1)
        figures[f"gbps_{direction}_{name}"] = moved / seconds["ours"] / 1e9
    return figures


def _bound(
    bench: CudaBench, direction: str, copies: dict[str, Callable[[], None]]
) -> Callable[[], None]:
    return lambda: bench.run(direction, copies)


def measure_sizes(bench: CudaBench, rounds: int) -> dict[str, float]:
    page = PAGES[SIZE_PAGE]
    copier = bench.copiers(page)["ours"]
    figures = {}
    for name, nbytes in SIZES.items():
        progress(f"transfers of {name}: {rounds} rounds")
        for direction in ("store", "load"):
            copies = bench.scattered(copier, page, nbytes)
            variants = {
                "ours": _bound(bench, direction, copies),
                "limit": _bound(bench, direction, bench.large(nbytes)),
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
        blocks, _ = bench.pick(page, SAMPLE_BYTES)
        copier = bench.copiers(page)["batch"]
        if not copier.hashes(0):
            return {}
        digest = partial(copier.enqueue_digests, 0, blocks)
        kind, fence = _KINDS["store"], bench.streams.fence()
        seconds = [bench.streams.run(kind, fence, digest) for _ in range(rounds)]
        figures[f"gbps_digest_{name}"] = SAMPLE_BYTES / statistics.median(seconds) / 1e9
    return figures


def measure_interference(bench: CudaBench, rounds: int) -> dict[str, float]:
    """Time matrix products alone and while more stores are queued than they last."""
    progress(f"matrix products beside stores: {rounds} rounds")
    products = make_products(bench.device, MATRIX, PRODUCTS)
    page = PAGES[SIZE_PAGE]
    copier = bench.copiers(page)["ours"]
    copies = bench.scattered(copier, page, SIZES["1g"])

    alone, beside = [], []
    for _ in range(rounds):
        alone.append(products())
        fence = bench.streams.fence()
        flights = [bench.streams.launch(_KINDS["store"], fence, copies["store"]) for _ in range(16)]
        beside.append(products())
        waited = timed(flights[-1].wait)
        if waited < ENDED_S:
            progress("the stores ended before the products: interference reads too low")
        for flight in flights:
            flight.wait()
    return {"interference": statistics.median(beside) / statistics.median(alone) - 1}


def measure_ways(bench: CudaBench, rounds: int) -> dict[str, float]:
    """Measure stores beside matrix products by the way they take, as ``copy_beside.py`` says."""
    products = make_products(bench.device, MATRIX, PRODUCTS)
    return copy_beside.sweep(bench, open_driver(bench.device), products, max(rounds // 3, 3))


def measure_launch(bench: CudaBench, rounds: int) -> dict[str, float]:
    page = PAGES["16k"]
    copier = bench.copiers(page)["ours"]
    blocks, slots = bench.pick(page, 1000 * page)
    taken: list[float] = []

    def start() -> None:
        started = time.perf_counter()
        copier.enqueue_load(0, blocks, slots)
        taken.append(time.perf_counter() - started)

    for _ in range(10 * rounds):
        bench.streams.run(_KINDS["load"], bench.streams.fence(), start)
    return {"launch_us_1000": statistics.median(taken) * 1e6}


def measure_executor(bench: CudaBench, rounds: int) -> dict[str, float]:
    """Measure the executor, as ``copy_executor.py`` says."""

    def make(store: HostArena, geometry: Geometry) -> Copier:
        return make_copier(bench.area, store.tensor(), geometry)

    return copy_executor.sweep(bench, make, max(rounds // 3, 3))


def measure_all(seed: int, rounds: int) -> dict[str, object]:
    """Return every figure of a CUDA device; ends the process if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: use --device cpu")
    bench = CudaBench(seed)
    figures: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "copier": type(bench.copiers(PAGES["64k"])["ours"]).__name__,
    }
    for name in PAGES:
        figures |= measure_page(bench, name, rounds)
    figures |= measure_sizes(bench, max(rounds // 3, 3))
    figures |= measure_digests(bench, rounds)
    figures |= measure_interference(bench, rounds)
    figures |= measure_ways(bench, rounds)
    figures |= measure_launch(bench, rounds)
    figures |= measure_executor(bench, rounds)
    return figures
