"""The disk tier against raw direct I/O of the same sizes, and how soon a full one has started.

Raw is what ``fio`` does with ``direct=1`` and four jobs: one block per call, in order, over a file
that was written before. The store writes and reads the same blocks from as many threads, a
prompt's worth per call, with keys and digests, into a tier that is full: it has to drop what is
oldest. What a tier costs that is being filled for the first time is in ``disk_fill_ratio_*``.
``python -m benchmarks.store [DIR]`` uses a folder on another disk.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import emit, interleave, medians, progress, timed
from kvconnect.tiers.backends import BlockOutcome, Store, make_store
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"32k": 32 * KIB, "256k": 256 * KIB, "1m": MIB, "4m": 4 * MIB}
ROUND_BYTES = 64 * MIB
TIER_BYTES = 512 * MIB
THREADS = 4
BATCH_BYTES = 4 * MIB  # a prompt of a few hundred tokens
ROUNDS = 7
BLOCKS = 1_000_000
FINGERPRINT = b"benchmark"


class Raw:
    """Blocks in one file, past the page cache, without anything else."""

    def __init__(self, path: Path, memory: mmap.mmap, size: int) -> None:
        self._views = views(memory, size)
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self._file = os.open(path, flags, 0o600)
        self._threads = ThreadPoolExecutor(THREADS)
        self.write()

    def write(self) -> None:
        self._each(os.pwritev)

    def read(self) -> None:
        self._each(os.preadv)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)

    def _each(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        def share(first: int) -> None:
            for number in range(first, first + count):
                view = self._views[number]
                assert call(self._file, [view], number * view.nbytes) == view.nbytes

        count = len(self._views) // THREADS
        list(self._threads.map(share, range(0, len(self._views), count)))


class Tier:
    """The same blocks in the disk tier; every write has new keys."""

    def __init__(self, folder: Path, memory: mmap.mmap, size: int) -> None:
        options = DiskOptions(path=str(folder), capacity=TIER_BYTES, min_free=0)
        self._store = DiskStore(options, FINGERPRINT)
        self._views = views(memory, size)
        self._threads = ThreadPoolExecutor(THREADS)
        self._batch = max(1, BATCH_BYTES // size)
        self._turn = 0

    def write(self) -> None:
        self._turn += 1
        self._each(self._store.put)

    def read(self) -> None:
        self._each(self._store.get)

    def fill(self) -> list[float]:
        """Write until the tier is full; return the seconds of each round."""
        return [timed(self.write) for _ in range(TIER_BYTES // ROUND_BYTES + 1)]

    def close(self) -> None:
        self._threads.shutdown()
        self._store.close()

    def _each(self, call: Callable[[list[bytes], list[memoryview]], list[BlockOutcome]]) -> None:
        def share(start: int) -> None:
            batch = self._views[start : start + self._batch]
            keys = [key_of(self._turn << 32 | start + number) for number in range(len(batch))]
            assert set(call(keys, batch)) == {BlockOutcome.OK}

        list(self._threads.map(share, range(0, len(self._views), self._batch)))


def key_of(number: int) -> bytes:
    """Return a key as long as an engine's block hash and a group."""
    return number.to_bytes(33, "little")


def views(memory: mmap.mmap, size: int) -> list[memoryview]:
    """Return a round's blocks of one size."""
    whole = memoryview(memory)
    return [whole[start : start + size] for start in range(0, ROUND_BYTES, size)]


def transfer_figures(folder: Path) -> dict[str, float]:
    """Return bytes per second and ratios for every size."""
    memory = mmap.mmap(-1, ROUND_BYTES)
    memory[:] = os.urandom(ROUND_BYTES)
    figures: dict[str, float] = {}
    for name, size in SIZES.items():
        progress(f"{name} blocks")
        raw = Raw(folder / f"raw-{name}", memory, size)
        tier = Tier(folder / f"tier-{name}", memory, size)
        filling = statistics.median(tier.fill()[:-1])
        seconds = medians(
            interleave(
                {
                    "raw_write": raw.write,
                    "disk_write": tier.write,
                    "raw_read": raw.read,
                    "disk_read": tier.read,
                },
                ROUNDS,
            )
        )
        for what, taken in seconds.items():
            figures[f"{what}_gb_per_s_{name}"] = ROUND_BYTES / taken / 1e9
        for what in ("write", "read"):
            figures[f"disk_{what}_ratio_{name}"] = seconds[f"raw_{what}"] / seconds[f"disk_{what}"]
        figures[f"disk_fill_ratio_{name}"] = seconds["raw_write"] / filling
        raw.close()
        tier.close()
    for what in ("write", "read"):
        figures[f"disk_{what}_ratio"] = min(figures[f"disk_{what}_ratio_{n}"] for n in SIZES)
    return figures


def start_figures(folder: Path) -> dict[str, float]:
    """Return how long a store with a million blocks takes to start, and to do without indexes."""
    progress(f"{BLOCKS} blocks")
    options = DiskOptions(path=str(folder), capacity=16 * GIB, min_free=0)
    store = DiskStore(options, FINGERPRINT)
    memory = memoryview(mmap.mmap(-1, 4 * KIB))
    for start in range(0, BLOCKS, 1000):
        keys = [key_of(number) for number in range(start, start + 1000)]
        assert set(store.put(keys, [memory] * 1000)) == {BlockOutcome.OK}
    store.close()
    indexed = sorted(started(options) for _ in range(3))[1]
    indexes = sorted(folder.rglob("*.idx"))
    for index in indexes:
        index.unlink()
    scanned = started(options)
    return {
        "start_1e6_s": indexed,
        "rebuild_blocks_per_s": BLOCKS / indexed,
        "scan_1e6_s": scanned,
        "scan_blocks_per_s": BLOCKS / scanned,
    }


def started(options: DiskOptions) -> float:
    """Return the seconds until a store can be used."""
    before = time.perf_counter()
    store = DiskStore(options, FINGERPRINT)
    seconds = time.perf_counter() - before
    assert store.usage().blocks == BLOCKS
    store.close()
    return seconds


def valkey_figures(folder: Path) -> dict[str, float]:
    """Return the tier's speed on a server here over that of its client's own pipelines.

    Nothing where the server or the client is missing.
    """
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None or importlib.util.find_spec("valkey") is None:
        return {}
    import valkey

    progress("valkey")
    socket_file = folder / "valkey.sock"
    port = "46379"
    plain = ["--port", port, "--bind", "127.0.0.1", "--unixsocket", str(socket_file)]
    server = subprocess.Popen(
        [program, *plain, "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
    )
    try:
        while not socket_file.exists():
            time.sleep(0.05)
        client = valkey.Valkey("127.0.0.1", int(port))
        store = make_store("valkey", {"address": f"127.0.0.1:{port}"}, FINGERPRINT)
        return _compared(client, store)
    finally:
        server.kill()
        server.wait()


def _compared(client: Any, store: Store) -> dict[str, float]:
    memory = mmap.mmap(-1, ROUND_BYTES)
    memory[:] = os.urandom(ROUND_BYTES)
    blocks = views(memory, MIB)
    keys = [key_of(number) for number in range(len(blocks))]
    batches = [slice(start, start + 4) for start in range(0, len(blocks), 4)]

    def piped(write: bool) -> None:
        for part in batches:
            with client.pipeline(transaction=False) as pipeline:
                for key, block in zip(keys[part], blocks[part], strict=True):
                    pipeline.set(key, block) if write else pipeline.get(key)
                answers = pipeline.execute()
            if not write:  # the tier's are where the caller wants them, too
                for block, answer in zip(blocks[part], answers, strict=True):
                    block[:] = answer

    def tier(call: Callable[[list[bytes], list[memoryview]], list[BlockOutcome]]) -> None:
        for part in batches:
            assert set(call(keys[part], blocks[part])) == {BlockOutcome.OK}

    seconds = medians(
        interleave(
            {
                "plain_set": lambda: piped(write=True),
                "put": lambda: tier(store.put),
                "plain_get": lambda: piped(write=False),
                "get": lambda: tier(store.get),
            },
            ROUNDS,
        )
    )
    store.close()
    client.close()
    put, get = seconds["plain_set"] / seconds["put"], seconds["plain_get"] / seconds["get"]
    return {"valkey_put_ratio": put, "valkey_get_ratio": get, "valkey_ratio": min(put, get)}


def main() -> None:
    """Measure everything; print one line of JSON."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        folder = Path(name)
        figures = transfer_figures(folder) | start_figures(folder / "start")
        emit("store", figures | valkey_figures(folder))


if __name__ == "__main__":
    main()
