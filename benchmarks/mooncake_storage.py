"""Mooncake's storage benchmark, unmodified, as a judge of the secondary tiers.

    python -m benchmarks.mooncake_storage --mooncake DIR [--rounds N] [--requests N] [--folder DIR]

``DIR`` is a checkout of https://github.com/kvcache-ai/Mooncake, whose
``benchmarks/storage_benchmark_v1`` replays a trace of conversations on one thread, as fast as it
can: it reads a page that is there and writes one that is not. Its own storage, one file, is
``file``, and ``file_synced`` with ``--fsync-mode always``. ``disk``, ``valkey`` and ``mooncake``
are KVConnect's tiers in its place (:class:`Tier`); the servers of the last two
run on this machine, and are left out where they are not installed. A page is one block of
Kimi-K2.6 with 16 tokens: 1.1 MB. All variants take turns and begin empty; none evicts.

``*_read_over_file``, ``*_write_over_file``: the median time of a read or a write over that of their
file. Reads and writes of ``file`` end in the page cache; the disk tier goes past it, and every tier
checks digests. ``*_over_file_synced`` is the same with each write on the disk before it ends.
``*_requests_over_file``: requests per second, with the questions what is there.
A page of KVConnect's that is not read as it was written ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.util
import mmap
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.serve.__main__ import TRACE
from benchmarks.valkey_server import start_server
from kvconnect.tiers.backends import BlockOutcome, Store, make_store
from tests.mooncake import Mooncake

MODEL = "kimi-k2.6"
PAGE_TOKENS = 16
CAPACITY = 4 << 30
OURS = ("disk", "valkey", "mooncake")
THEIRS = {"file": "none", "file_synced": "always"}
"""Their storage, by how it is synchronised (``--fsync-mode``)."""


class Tier:
    """Stands in for the benchmark's storage; a mixin before it, whose bookkeeping it uses."""

    make: Callable[[], Store]
    page_size: int
    stats: dict[str, Any]
    _written_pages: set[int]

    def _allocate_file(self) -> None:
        self._store = self.make()
        self._page = memoryview(mmap.mmap(-1, self.page_size))
        self._page[:] = bytes(range(256)) * (self.page_size // 256)

    def read(self, page_id: int, **place: int) -> float:
        self._page[:8] = bytes(8)
        seconds = self._time(self._store.get, page_id, place)
        if self._page[:8] != page_id.to_bytes(8, "little"):
            raise SystemExit(f"{self._store!r}: page {page_id} was read as another one")
        return self._count("read", seconds)

    def write(self, page_id: int, **place: int) -> float:
        self._page[:8] = page_id.to_bytes(8, "little")
        self._written_pages.add(page_id)
        return self._count("write", self._time(self._store.put, page_id, place))

    def exists(self, page_id: int) -> bool:
        return self._store.exists([_key(page_id)]) == [self.page_size]

    def close(self, **_: bool) -> None:
        self._store.remove([_key(page_id) for page_id in self._written_pages])
        self._store.close()

    def _time(
        self,
        call: Callable[[list[bytes], list[memoryview]], list[BlockOutcome]],
        page_id: int,
        place: dict[str, int],
    ) -> float:
        if place != {"offset_in_page": 0, "length": self.page_size}:
            raise SystemExit(f"a tier has only whole pages, not {place}")
        start = time.perf_counter()
        outcomes = call([_key(page_id)], [self._page])
        seconds = time.perf_counter() - start
        if outcomes != [BlockOutcome.OK]:
            raise SystemExit(f"{self._store!r}: page {page_id}: {outcomes[0].value}")
        return seconds

    def _count(self, what: str, seconds: float) -> float:
        self.stats[f"{what}_count"] += 1
        self.stats[f"{what}_bytes"] += self.page_size
        self.stats[f"{what}_time_s"] += seconds
        self.stats[f"{what}_latencies_ms"].append(seconds * 1e3)
        return seconds * 1e3


def _key(page_id: int) -> bytes:
    return page_id.to_bytes(33, "little")  # as long as an engine's block hash and a group


@contextmanager
def makers(folder: Path) -> Iterator[dict[str, Callable[[], Store]]]:
    """Start the servers that are installed; yield what makes an empty store, by tier."""
    disk = {"path": str(folder / "tier"), "capacity": CAPACITY, "min_free": 0}
    settings: dict[str, dict[str, Any]] = {"disk": disk}
    with ExitStack() as stack:
        if (found := start_server(stack, folder)) and importlib.util.find_spec("valkey"):
            settings["valkey"] = {"address": found["address"]}
        try:
            package = importlib.import_module("mooncake.store")
        except ImportError as error:
            progress(f"mooncake is left out: {error}")
        else:
            server = Mooncake(Path(str(package.__file__)).parent, f"{CAPACITY}")
            stack.callback(server.kill)
            server.start()
            settings["mooncake"] = server.settings()
        yield {
            name: partial(make_store, name, each, b"benchmark") for name, each in settings.items()
        }


class Judge:
    """Their benchmark, with a trace and a folder for its files."""

    def __init__(self, checkout: Path, folder: Path, requests: int) -> None:
        program = checkout / "benchmarks" / "storage_benchmark_v1"
        if not (program / "benchmark.py").exists():
            raise SystemExit(f"--mooncake {checkout}: has no benchmarks/storage_benchmark_v1")
        sys.path.insert(0, str(program))
        self._module: Any = importlib.import_module("benchmark")
        self._storage = self._module.DiskHashTable
        self._folder = folder
        self._trace = folder / "conversation_trace.jsonl"
        self._trace.write_bytes(gzip.decompress(TRACE.read_bytes()))
        self._requests = requests

    def run(self, name: str, makers: dict[str, Callable[[], Store]]) -> dict[str, Any]:
        """Replay the trace once with an empty storage; return what they measure."""
        place = self._folder / name
        theirs = THEIRS.get(name)
        if theirs:
            self._module.DiskHashTable = self._storage
        else:
            made = {"make": staticmethod(makers[name])}
            self._module.DiskHashTable = type("Tier", (Tier, self._storage), made)
        with redirect_stdout(sys.stderr):
            found: dict[str, Any] = self._module.run_benchmark(
                str(self._trace),
                str(place),
                self._module.get_model_config(MODEL),
                max_requests=self._requests,
                page_size_tokens=PAGE_TOKENS,
                fsync_mode=theirs or "none",
                progress_interval=0,
            )
        shutil.rmtree(place, ignore_errors=True)
        return found


def figures(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return medians over rounds, and ratios of them to those of their own storage."""
    counts = {(run["read_pages"], run["write_pages"]) for each in runs.values() for run in each}
    if len(counts) != 1:
        raise SystemExit(f"the variants read and wrote different numbers of pages: {counts}")
    read, written = counts.pop()
    found: dict[str, float] = {"pages_read": read, "pages_written": written}
    medians: dict[str, dict[str, float]] = {}
    for name, each in runs.items():
        medians[name] = {
            "read": statistics.median(run["storage"]["read"]["p50_ms"] for run in each),
            "write": statistics.median(run["storage"]["write"]["p50_ms"] for run in each),
            "requests": statistics.median(run["requests_per_second"] for run in each),
        }
        found |= {f"{name}_{what}_ms": medians[name][what] for what in ("read", "write")}
        found[f"{name}_requests_per_s"] = medians[name]["requests"]
    for name in filter(medians.__contains__, OURS):
        for peer in THEIRS:
            for what, value in medians[name].items():
                found[f"{name}_{what}_over_{peer}"] = value / medians[peer][what]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mooncake", type=Path, required=True, help="checkout of Mooncake")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: system's)")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        judge = Judge(options.mooncake, Path(name), options.requests)
        with makers(Path(name)) as ours:
            for number in range(options.rounds + 1):  # the first does not count
                for variant in [*THEIRS, *ours][:: -1 if number % 2 else 1]:
                    progress(f"round {number} of {options.rounds}: {variant}")
                    found = judge.run(variant, ours)
                    if number:
                        runs.setdefault(variant, []).append(found)
    emit("mooncake_storage", figures(runs))


if __name__ == "__main__":
    main()
