"""Hostile arguments against the C extension: only the errors that it documents may come out.

::

    python -m tests.fuzz.fuzz_native --runs 100000 --seed 1

Every buffer lies between guards, which no call may change; `scripts/sanitize address` also has the
sanitizers look at each access. The same seed gives the same calls.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import socket
from array import array
from collections import Counter
from collections.abc import Callable

from kvconnect import _native

EXTREMES = [0, 1, -1, 63, 64, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
GUARD = bytes(range(64)) * 2
ERRORS = (ValueError, IndexError, OverflowError, MemoryError, OSError)
Calls = Callable[["Draw"], None]


class Guarded:
    """Bytes in the middle of an allocation, with a guard on both sides."""

    def __init__(self, nbytes: int) -> None:
        self._raw = ctypes.create_string_buffer(GUARD + bytes(nbytes) + GUARD, nbytes + 256)
        self.span = (ctypes.addressof(self._raw) + len(GUARD), nbytes)

    def check(self) -> None:
        """AssertionError if a guard was written to."""
        raw = self._raw.raw
        assert raw.startswith(GUARD) and raw.endswith(GUARD), "written outside the buffer"


class Draw:
    """Random arguments, mostly small and sometimes extreme."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self, small: int) -> int:
        kind = self.random.random()
        if kind < 0.7:
            return self.random.randrange(max(1, small))
        if kind < 0.85:
            near = self.random.choice(EXTREMES) + self.random.randrange(-3, 4)
            return max(-(2**63), min(2**63 - 1, near))
        return self.random.randrange(-5, max(1, small))

    def numbers(self, count: int, small: int) -> array[int]:
        return array("q", [self.number(small) for _ in range(count)])

    def buffer(self) -> Guarded:
        return Guarded(self.random.choice([1, 64, 100, 4096, 50_000]))

    def segments(self, phases: int, nbytes: int) -> array[int]:
        """Runs of all phases; now and then one number too many."""
        lengths = [self.random.randrange(1, 64) for _ in range(self.random.randrange(1, 4))]
        found = array("q")
        for _ in range(phases):
            for length in lengths:
                odd = self.random.random() < 0.05
                found.extend([self.number(nbytes), self.number(300)])
                found.append(self.number(300) if odd else length)
        if self.random.random() < 0.05:
            found.append(3)
        return found


def copy(draw: Draw) -> None:
    area, arena = draw.buffer(), draw.buffer()
    count = draw.random.randrange(5)
    segments = draw.numbers(3 * draw.random.randrange(4), 200)
    ids, slots = draw.numbers(count, 8), draw.numbers(count + (draw.random.random() < 0.05), 8)
    call = draw.random.choice([_native.gather, _native.scatter])
    try:
        call(area.span, arena.span, draw.number(arena.span[1] + 1), segments, ids, slots)
    finally:
        area.check()
        arena.check()


def digest(draw: Draw) -> None:
    memory = draw.buffer()
    phases = draw.random.choice([1, 1, 2, draw.number(5)])
    segments = draw.segments(min(max(phases, 1), 4), memory.span[1])
    ids = draw.numbers(draw.random.randrange(6), 10)
    found = _native.digest_pages(memory.span, segments, phases, ids)
    assert len(found) == 8 * len(ids)


def move(draw: Draw) -> None:
    memory = draw.buffer()
    phases = draw.random.choice([1, 1, 2, draw.number(4)])
    segments = draw.segments(min(max(phases, 1), 3), memory.span[1])
    ids = draw.numbers(draw.random.randrange(6), 6)
    period = (draw.random.choice([0, 1, 16, draw.number(20)]), draw.number(40))
    stop = bytearray([draw.random.random() < 0.1])
    stall_ms = draw.random.choice([1, 5, 0, -1])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            if draw.random.random() < 0.5:
                head = draw.random.randbytes(draw.random.randrange(70))
                if draw.random.random() < 0.1:
                    theirs.close()
                fd = ours.fileno()
                _native.send_pages(
                    fd, head, memory.span, segments, phases, ids, period, stall_ms, stop
                )
            else:
                theirs.send(draw.random.randbytes(draw.random.randrange(1, 1000)))
                theirs.shutdown(socket.SHUT_WR)
                fd = ours.fileno()
                _, landed = _native.recv_pages(
                    fd, memory.span, segments, phases, ids, period, stall_ms, stop
                )
                assert 0 <= landed <= len(ids)
        finally:
            memory.check()


def addresses(draw: Draw) -> None:
    runs, count = draw.random.randrange(4), draw.random.randrange(4)
    starts, ids = draw.numbers(runs, 300), draw.numbers(count, 8)
    strides = draw.numbers(runs + (draw.random.random() < 0.15), 300)
    limit = draw.random.choice([8, 8, draw.number(20)])
    found = array("q", _native.run_addresses(starts, strides, ids, limit))
    wanted = [a + i * s for i in ids for a, s in zip(starts, strides, strict=True)]
    assert list(found) == wanted and all(0 <= i < limit for i in ids)


CALLS: list[Calls] = [copy, digest, move, addresses]


def run(runs: int, seed: int) -> Counter[str]:
    """Make the calls; return how often each ended how. AssertionError for a finding."""
    draw, ended = Draw(seed), Counter[str]()
    for _ in range(runs):
        call = draw.random.choice(CALLS)
        try:
            call(draw)
            ended[f"{call.__name__} ok"] += 1
        except ERRORS as error:
            ended[f"{call.__name__} {type(error).__name__}"] += 1
    return ended


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for name, times in sorted(run(given.runs, given.seed).items()):
        print(f"{times:8} {name}")
