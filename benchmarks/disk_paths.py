"""Ways to read and write a disk past the page cache: threads, and io_uring and AIO through NIXL.

All move the same blocks of one file, in order, with ``O_DIRECT``, without keys and digests:

- ``raw``: one block per system call from four threads, as ``fio --direct=1 --numjobs=4`` does it;
- ``threads``: up to 4 MiB per system call from four threads, as the disk tier does it;
- ``nixl_aio``, ``nixl_uring``: all blocks in one transfer of NIXL's POSIX plugin.

``ratio_<way>_<read|write>_<size>`` is the throughput over that of ``threads``, without a size the
median over all sizes; ``gb_per_s_...`` is the throughput itself.
``python -m benchmarks.disk_paths [DIR]`` uses a folder on another disk.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.common import emit, interleave, medians, progress
from kvconnect.transport.nixl.agent import find_package

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"32k": 32 * KIB, "128k": 128 * KIB, "512k": 512 * KIB, "1m": MIB, "4m": 4 * MIB}
ROUND_BYTES = 64 * MIB
CALL_BYTES = 4 * MIB
THREADS = 4
ROUNDS = 31
POLL_S = 50e-6

Move = Callable[[bool, int], None]
"""Writes (or reads) all blocks of some bytes, and returns when the last one is there."""


class Threads:
    """System calls of ``call_bytes``, or of one block if that is more."""

    def __init__(self, file: int, memory: mmap.mmap, call_bytes: int) -> None:
        self._file = file
        self._view = memoryview(memory)
        self._call_bytes = call_bytes
        self._threads = ThreadPoolExecutor(THREADS)

    def move(self, write: bool, size: int) -> None:
        call = os.pwritev if write else os.preadv
        step = max(self._call_bytes, size)

        def share(start: int) -> None:
            views = [self._view[at : at + size] for at in range(start, start + step, size)]
            assert call(self._file, views, start) == step

        list(self._threads.map(share, range(0, ROUND_BYTES, step)))


class Nixl:
    """``queue``: what the plugin gives its work to, ``use_aio`` or ``use_uring``."""

    def __init__(self, file: int, memory: mmap.mmap, queue: str) -> None:
        self._nixl = nixl = importlib.import_module(f"{find_package(None, False)}._bindings")
        self._name = queue
        self._agent = nixl.nixlAgent(queue, nixl.nixlAgentConfig())
        self._agent.createBackend("POSIX", {queue: "true"})
        self._file = file
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for kind, area in (
            (nixl.DRAM_SEG, (self._address, ROUND_BYTES, 0, "")),
            (nixl.FILE_SEG, (0, ROUND_BYTES, file, "")),
        ):
            self._agent.registerMem(nixl.nixlRegDList(kind, [area]), [])

    def move(self, write: bool, size: int) -> None:
        nixl, starts = self._nixl, range(0, ROUND_BYTES, size)
        held = [(self._address + start, size, 0) for start in starts]
        kept = [(start, size, self._file) for start in starts]
        handle = self._agent.createXferReq(
            nixl.NIXL_WRITE if write else nixl.NIXL_READ,
            nixl.nixlXferDList(nixl.DRAM_SEG, held),
            nixl.nixlXferDList(nixl.FILE_SEG, kept),
            self._name,
        )
        state = self._agent.postXferReq(handle)
        while state == nixl.NIXL_IN_PROG:
            time.sleep(POLL_S)
            state = self._agent.getXferStatus(handle)
        assert state == nixl.NIXL_SUCCESS
        self._agent.releaseXferReq(handle)


def check(name: str, move: Move, memory: mmap.mmap) -> None:
    """Write and read back every byte, so that only ways that work are timed."""
    size = SIZES["512k"]
    content = memory[:] = os.urandom(ROUND_BYTES)
    move(True, size)
    memory[:] = bytes(ROUND_BYTES)
    move(False, size)
    if memory[:] != content:
        raise SystemExit(f"{name} reads other bytes than it wrote")


def figures(path: Path) -> dict[str, float]:
    """Return throughput and ratios of every way, size and direction."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    memory = mmap.mmap(-1, ROUND_BYTES)
    ways: dict[str, Move] = {
        "raw": Threads(file, memory, 0).move,
        "threads": Threads(file, memory, CALL_BYTES).move,
        "nixl_aio": Nixl(file, memory, "use_aio").move,
        "nixl_uring": Nixl(file, memory, "use_uring").move,
    }
    for name, move in ways.items():
        check(name, move, memory)
    found: dict[str, float] = {}
    for size_name, size in SIZES.items():
        progress(f"{size_name} blocks")
        for direction in ("write", "read"):
            variants = {
                name: partial(move, direction == "write", size) for name, move in ways.items()
            }
            seconds = medians(interleave(variants, ROUNDS))
            for name, taken in seconds.items():
                key = f"{name}_{direction}_{size_name}"
                found[f"gb_per_s_{key}"] = ROUND_BYTES / taken / 1e9
                found[f"ratio_{key}"] = seconds["threads"] / taken
    os.close(file)
    return found | {
        f"ratio_{name}_{direction}": statistics.median(
            found[f"ratio_{name}_{direction}_{size}"] for size in SIZES
        )
        for name in ways
        for direction in ("write", "read")
    }


def main() -> None:
    """Measure everything; print one line of JSON."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        emit("disk_paths", figures(Path(name) / "file"))


if __name__ == "__main__":
    main()
