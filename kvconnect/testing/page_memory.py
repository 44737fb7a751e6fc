"""Pages in memory, with a plain reference for reading and writing them."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Generator, Iterator, Sequence

from kvconnect.transport.base import MemoryRegion, PageChunk, PageUser, Unit


class PageMemory:
    """A KV cache of ``nbytes`` in CPU memory; a transport uses it directly, without staging.

    ``data`` is its contents: random bytes from ``seed``, or zeros without a seed.
    """

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        filling = bytes(nbytes) if seed is None else random.Random(seed).randbytes(nbytes)
        self.data = bytearray(filling)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def regions(self) -> tuple[MemoryRegion, ...]:
        return (MemoryRegion(self.address, len(self.data)),)

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one region
        return self.regions()[0]

    def outgoing(
        self,
        unit: Unit,
        ids: array[int],
        user: PageUser | None = None,  # noqa: ARG002 - there is nothing to wait for
    ) -> Generator[PageChunk, None, None]:
        yield PageChunk(self.address, len(self.data), unit, ids)

    incoming = outgoing

    def runs(self, unit: Unit, ids: Sequence[int]) -> Iterator[slice]:
        """Yield the slices of ``data`` with the byte runs of wire blocks, in wire order."""
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
        """Write the bytes of wire blocks, given in wire order."""
        start = 0
        for run in self.runs(unit, ids):
            end = start + run.stop - run.start
            self.data[run] = content[start:end]
            start = end


def plain_unit(block_bytes: int, offset: int = 0) -> Unit:
    """Return a unit whose wire blocks follow one another."""
    return Unit(array("q", [offset, block_bytes, block_bytes]), 1, block_bytes)


def split_unit(run_bytes: int, runs: int, pages: int, offset: int = 0) -> Unit:
    """Return a unit whose wire blocks have several distant runs, as with several layers."""
    layer_bytes = run_bytes * pages
    triples = [(offset + i * layer_bytes, run_bytes, run_bytes) for i in range(runs)]
    return Unit(array("q", [n for triple in triples for n in triple]), 1, run_bytes * runs)


def phased_unit(run_bytes: int, runs: int, phases: int, offset: int = 0) -> Unit:
    """Return a unit with ``phases`` wire blocks in each page, their runs interleaved."""
    page_bytes = run_bytes * runs * phases
    triples = [
        (offset + (i * phases + phase) * run_bytes, page_bytes, run_bytes)
        for phase in range(phases)
        for i in range(runs)
    ]
    return Unit(array("q", [n for triple in triples for n in triple]), phases, run_bytes * runs)
