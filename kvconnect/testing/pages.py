"""Memory with pages in it, and how to read it the slow and obvious way."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Generator, Iterator, Sequence

from kvconnect.transport.base import Area, Piece, Unit


class Pages:
    """``nbytes`` of memory that serves as a KV cache, registered with a transport as it is.

    ``data`` is its contents. ``seed`` fills it with random bytes; without one it is zero.
    """

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        filling = bytes(nbytes) if seed is None else random.Random(seed).randbytes(nbytes)
        self.data = bytearray(filling)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def areas(self) -> tuple[Area, ...]:
        return (Area(self.address, len(self.data)),)

    def area_of(self, unit: Unit) -> Area:  # noqa: ARG002 - there is one
        return self.areas()[0]

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[Piece, None, None]:
        yield Piece(self.address, len(self.data), unit, ids)

    incoming = outgoing

    def runs(self, unit: Unit, ids: Sequence[int]) -> Iterator[slice]:
        """Yield where in ``data`` the byte runs of wire blocks are, in wire order."""
        triples = len(unit.segments) // unit.phases
        for number in ids:
            page, phase = divmod(number, unit.phases)
            for i in range(phase * triples, (phase + 1) * triples, 3):
                offset, stride, length = unit.segments[i : i + 3]
                yield slice(offset + page * stride, offset + page * stride + length)

    def read(self, unit: Unit, ids: Sequence[int]) -> bytes:
        """Return the bytes of wire blocks in wire order."""
        return b"".join(self.data[run] for run in self.runs(unit, ids))

    def write(self, unit: Unit, ids: Sequence[int], content: bytes) -> None:
        """Put ``content`` where wire blocks are."""
        start = 0
        for run in self.runs(unit, ids):
            end = start + run.stop - run.start
            self.data[run] = content[start:end]
            start = end


def plain_unit(block_bytes: int, offset: int = 0) -> Unit:
    """Wire blocks that lie one after the other."""
    return Unit(array("q", [offset, block_bytes, block_bytes]), 1, block_bytes)


def split_unit(run_bytes: int, runs: int, pages: int, offset: int = 0) -> Unit:
    """Wire blocks of several runs that lie far apart, as those of several layers do."""
    layer_bytes = run_bytes * pages
    triples = [(offset + i * layer_bytes, run_bytes, run_bytes) for i in range(runs)]
    return Unit(array("q", [n for triple in triples for n in triple]), 1, run_bytes * runs)


def phased_unit(run_bytes: int, runs: int, phases: int, offset: int = 0) -> Unit:
    """Wire blocks that are a part of a page: ``phases`` of them in each, their runs interleaved."""
    page_bytes = run_bytes * runs * phases
    triples = [
        (offset + (i * phases + phase) * run_bytes, page_bytes, run_bytes)
        for phase in range(phases)
        for i in range(runs)
    ]
    return Unit(array("q", [n for triple in triples for n in triple]), phases, run_bytes * runs)
