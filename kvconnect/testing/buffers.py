"""Guarded buffers, block payloads and a KV cache in CPU memory, for conformance checks."""

from __future__ import annotations

import ctypes
import mmap
import random
from array import array
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from kvconnect.tiers.backends.base import BlockOutcome, Store
from kvconnect.transport.base import MemoryRegion, PageChunk, Unit

_PAGE = mmap.PAGESIZE
_GUARD = 0x5A


def require(condition: object, text: str) -> None:
    """Raise :class:`AssertionError` with ``text`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(text)


class GuardedBuffer:
    """A buffer between guard bytes. ``shift``: offset of its start within a page, in bytes."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self._map = mmap.mmap(-1, _PAGE + shift + nbytes + _PAGE)
        self._map[:] = bytes([_GUARD]) * len(self._map)
        self._start = _PAGE + shift
        self.view = memoryview(self._map)[self._start : self._start + nbytes]

    def content(self) -> bytes:
        """Return the buffer's bytes; raise :class:`AssertionError` if a guard byte was written."""
        end = self._start + self.view.nbytes
        around = self._map[: self._start] + self._map[end:]
        if around.count(_GUARD) != len(around):
            raise AssertionError("bytes beside the buffer were written")
        return bytes(self.view)


def payload_of(key: bytes, nbytes: int, version: int = 0) -> bytes:
    """Return pseudorandom bytes, the same for the same arguments."""
    return random.Random(f"{key.hex()}/{version}").randbytes(nbytes)


def put(store: Store, blocks: dict[bytes, bytes]) -> list[BlockOutcome]:
    """Put blocks from buffers of different alignment; check that the buffers do not change."""
    places = []
    for number, payload in enumerate(blocks.values()):
        place = GuardedBuffer(len(payload), (0, 1, 512)[number % 3])
        place.view[:] = payload
        places.append(place)
    outcomes = store.put(list(blocks), [place.view for place in places])
    for place, payload in zip(places, blocks.values(), strict=True):
        if place.content() != payload:
            raise AssertionError("put changed its source")
    return outcomes


def get(store: Store, sizes: dict[bytes, int], shift: int = 0) -> list[bytes | BlockOutcome]:
    """Get blocks; for each return its bytes, or its outcome if that is not OK."""
    places = [GuardedBuffer(nbytes, shift) for nbytes in sizes.values()]
    outcomes = store.get(list(sizes), [place.view for place in places])
    if len(outcomes) != len(sizes):
        raise AssertionError("one outcome per key is needed")
    contents = [place.content() for place in places]
    return [
        content if outcome is BlockOutcome.OK else outcome
        for content, outcome in zip(contents, outcomes, strict=True)
    ]


def spoil_files(folder: Path, payload: bytes) -> int:
    """Flip a bit in every copy of a payload in a folder's files; return the number of copies."""
    found = 0
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        data = bytearray(path.read_bytes())
        at = data.find(payload)
        while at >= 0:
            found += 1
            data[at + len(payload) // 2] ^= 1
            path.write_bytes(data)
            at = data.find(payload)
    return found


# Pages in memory, with a plain reference for reading and writing them.


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

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
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
