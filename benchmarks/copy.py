"""Copy of scattered KV pages against one large memcpy of the same number of bytes.

    python benchmarks/copy.py --device cpu
    python benchmarks/copy.py --device cuda      # copy_cuda.py says what that measures

Each sample moves 256 MiB: pages picked and paired at random out of 768 MiB on either side, so
that caches hold little of them. ``ratio_<page>_store`` and ``_load`` are throughput over that of
``memmove`` in the same direction between the same two areas, one thread, medians.
``digest_full_cost`` is the throughput of storing and sealing 1 MiB blocks over storing alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this file's folder is searched first and would hide the standard module "copy".
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import ctypes
import random

import torch

from benchmarks.common import emit, interleave, medians, progress
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy import make_copier, native_unavailable_reason
from kvconnect.copy.base import Copier
from kvconnect.offload.host_arena import HostArena

MIB = 1 << 20
AREA_BYTES = 768 * MIB
SAMPLE_BYTES = 256 * MIB
PAGES = {
    "4k": 4 << 10,
    "16k": 16 << 10,
    "64k": 64 << 10,
    "256k": 256 << 10,
    "1m": MIB,
    "2m": 2 * MIB,
}
DIGEST_PAGE = "1m"


class Bench:
    """One KV area, one arena, and the ways to move a sample between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.area = torch.empty(AREA_BYTES, dtype=torch.uint8).random_()
        self.store = HostArena(AREA_BYTES // PAGES["2m"], PAGES["2m"], "off")
        self.arena = self.store.tensor()

    def copier(self, page: int) -> Copier:
        blocks = GroupGeometry((ByteRun(0, page, page),), AREA_BYTES // page)
        return make_copier(self.area, self.arena, Geometry((blocks,)))

    def pick(self, page: int) -> tuple[list[int], list[int]]:
        """Return random blocks and slots, as many as a sample has pages."""
        everything, count = range(AREA_BYTES // page), SAMPLE_BYTES // page
        return self.random.sample(everything, count), self.random.sample(everything, count)

    def memcpy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Move a sample in one piece, from and to a random 2 MiB boundary."""
        last = (AREA_BYTES - SAMPLE_BYTES) // PAGES["2m"]
        to, at = (self.random.randint(0, last) * PAGES["2m"] for _ in range(2))
        ctypes.memmove(target.data_ptr() + to, source.data_ptr() + at, SAMPLE_BYTES)


def check_bytes(bench: Bench, page: int) -> None:
    """Store and load one sample and compare every page, so that only right copies are timed."""
    copier, (blocks, slots) = bench.copier(page), bench.pick(page)
    area, arena = bench.area.view(-1, page), bench.arena.view(-1, page)
    copier.store(0, blocks, slots)
    stored = all(torch.equal(area[b], arena[s]) for b, s in zip(blocks, slots, strict=True))
    copier.load(0, blocks[::-1], slots)
    loaded = all(torch.equal(area[b], arena[s]) for b, s in zip(blocks[::-1], slots, strict=True))
    if not (stored and loaded):
        raise SystemExit(f"wrong bytes with pages of {page}")


def measure_page(bench: Bench, name: str, rounds: int) -> dict[str, float]:
    page = PAGES[name]
    progress(f"pages of {name}: checking bytes, then {rounds} rounds")
    check_bytes(bench, page)
    copier = bench.copier(page)
    # Numbers are drawn outside the timed calls, anew for every sample.
    picks = iter([bench.pick(page) for _ in range(2 * (rounds + 1))])
    seconds = medians(
        interleave(
            {
                "memcpy_store": lambda: bench.memcpy(bench.arena, bench.area),
                "store": lambda: copier.store(0, *next(picks)),
                "memcpy_load": lambda: bench.memcpy(bench.area, bench.arena),
                "load": lambda: copier.load(0, *next(picks)),
            },
            rounds,
        )
    )
    return {
        f"ratio_{name}_store": seconds["memcpy_store"] / seconds["store"],
        f"ratio_{name}_load": seconds["memcpy_load"] / seconds["load"],
        f"gbps_{name}_store": SAMPLE_BYTES / seconds["store"] / 1e9,
        f"gbps_{name}_load": SAMPLE_BYTES / seconds["load"] / 1e9,
        f"gbps_{name}_memcpy": SAMPLE_BYTES / seconds["memcpy_store"] / 1e9,
    }


def measure_digest(bench: Bench, rounds: int) -> dict[str, float]:
    """Store with and without a seal after each block, as a worker does it."""
    page = PAGES[DIGEST_PAGE]
    progress(f"digests of {DIGEST_PAGE} blocks: {rounds} rounds")
    sealed = HostArena(AREA_BYTES // page, page, "full")
    blocks = GroupGeometry((ByteRun(0, page, page),), AREA_BYTES // page)
    copier = make_copier(bench.area, sealed.tensor(), Geometry((blocks,)))
    picks = iter([bench.pick(page) for _ in range(2 * (rounds + 1))])

    def store(seal: bool) -> None:
        for block, slot in zip(*next(picks), strict=True):
            copier.store(0, [block], [slot])
            if seal:
                sealed.seal(slot, page)

    seconds = medians(
        interleave({"plain": lambda: store(False), "sealed": lambda: store(True)}, rounds)
    )
    return {"digest_full_cost": seconds["plain"] / seconds["sealed"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    if options.device == "cuda":
        from benchmarks.copy_cuda import measure_all

        emit("copy_cuda", measure_all(options.seed, options.rounds))
        return
    torch.set_num_threads(1)
    figures: dict[str, object] = {"native": native_unavailable_reason() is None}
    bench = Bench(options.seed)
    for name in PAGES:
        figures |= measure_page(bench, name, options.rounds)
    figures |= measure_digest(bench, options.rounds)
    emit(f"copy_{options.device}", figures)


if __name__ == "__main__":
    main()
