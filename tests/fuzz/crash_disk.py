"""Kill a process that writes to the disk tier, look at what it left, and start again.

``python -m tests.fuzz.crash_disk --runs 1000`` prints one line of JSON and fails if a block that
was acknowledged last is gone, if other bytes come back, or if a torn record is found. Nothing here
depends on time: a process is killed when it has acknowledged a random number of blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import sys
import tempfile
import threading
from pathlib import Path

from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.backends.disk import DiskOptions, DiskStore

FINGERPRINT = b"crash test"
CAPACITY = 64 << 20
THREADS = 4
SIZES = (1, 4096, 30_000, 65_536, 200_000)
_ACK = struct.Struct("<I")
MOST_KEPT = 100  # blocks acknowledged last that must be there: 20 MB at most, of 64


def content(number: int) -> bytes:
    """Return the bytes of block ``number``."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice(SIZES))


def key_of(number: int) -> bytes:
    """Return the key of block ``number``."""
    return b"block-%d" % number


def open_store(folder: Path) -> DiskStore:
    """Return the store that is killed again and again."""
    return DiskStore(DiskOptions(path=str(folder), capacity=CAPACITY, min_free=0), FINGERPRINT)


def write_forever(folder: Path, first: int, acks: int) -> None:
    """Put blocks from some threads; write each one's number to ``acks`` when it is stored."""
    store = open_store(folder)

    def work(thread: int) -> None:
        number = first + thread
        while True:
            numbers = range(number, number + 3 * THREADS, THREADS)
            payloads = [content(n) for n in numbers]
            outcomes = store.put([key_of(n) for n in numbers], [memoryview(p) for p in payloads])
            if any(outcome is not BlockOutcome.OK for outcome in outcomes):
                os._exit(3)
            os.write(acks, b"".join(_ACK.pack(n) for n in numbers))
            number += 3 * THREADS

    for thread in range(1, THREADS):
        threading.Thread(target=work, args=(thread,), daemon=True).start()
    work(0)


def run_and_kill(folder: Path, first: int, acknowledged: int) -> list[int]:
    """Let a process write until it has acknowledged so many blocks, kill it; return their numbers.

    More may be acknowledged than was waited for.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            write_forever(folder, first, writer)
        finally:
            os._exit(4)
    os.close(writer)
    data = b""
    while len(data) < acknowledged * _ACK.size:
        part = os.read(reader, 65_536)
        if not part:
            break
        data += part
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise AssertionError(f"the writer ended by itself: {status}")
    while part := os.read(reader, 65_536):
        data += part
    os.close(reader)
    return [number for (number,) in _ACK.iter_unpack(data)]


def look(folder: Path, numbers: list[int], figures: dict[str, int]) -> None:
    """Read blocks that were acknowledged, oldest first, and count what is found."""
    store = open_store(folder)
    for age, number in enumerate(reversed(numbers)):
        expected = content(number)
        buffer = bytearray(len(expected))
        outcome = store.get([key_of(number)], [memoryview(buffer)])[0]
        figures["read"] += 1
        figures["wrong"] += outcome is BlockOutcome.OK and buffer != expected
        figures["torn"] += outcome not in (BlockOutcome.OK, BlockOutcome.ABSENT)
        figures["lost"] += outcome is not BlockOutcome.OK and age < MOST_KEPT
    usage = store.usage()
    figures["too_large"] += usage.nbytes > usage.capacity_bytes
    store.close()


def crash_loop(folder: Path, runs: int, seed: int) -> dict[str, int]:
    """Kill a writer ``runs`` times; every third time a start follows that is not looked at."""
    rng = random.Random(seed)
    figures = dict.fromkeys(("runs", "read", "wrong", "torn", "lost", "too_large"), 0)
    numbers: list[int] = []
    for run in range(runs):
        figures["runs"] += 1
        numbers += run_and_kill(folder, run * 1_000_000, rng.randrange(30))
        numbers = numbers[-2 * MOST_KEPT :]
        if run % 3:
            look(folder, numbers, figures)
    look(folder, numbers, figures)
    return figures


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="file system to do it on")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = crash_loop(Path(folder), arguments.runs, arguments.seed)
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(any(figures[name] for name in ("wrong", "torn", "lost", "too_large")))


if __name__ == "__main__":
    sys.exit(main())
