"""The KV cache as a transport sees it: in place on the CPU, through staging buffers on a device."""

from __future__ import annotations

import ctypes
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from kvconnect.copy import make_block_copier
from kvconnect.copy.driver import own_stream
from kvconnect.errors import Misuse, TransferFailed
from kvconnect.offload.streams import draining, use_device
from kvconnect.transport.base import Memory, MemoryRegion, PageChunk, Unit

if TYPE_CHECKING:
    from kvconnect.copy.wire_blocks import BlockCopier

RING_BYTES = 64 << 20
"""Page-locked staging memory of one worker, half for sending and half for receiving."""

BUFFERS = 4
"""Staging buffers per direction: as many transfers run at a time."""

BUFFER_TIMEOUT_S = 30.0
"""Seconds that a transfer waits for a buffer before it fails."""

_Run = tuple[torch.Tensor, torch.Tensor]
"""A byte run of a page in the cache, and its place in the staging buffer."""


class HostMemory:
    """A KV cache in CPU memory: pages are sent and received in place.

    ``pieces``: the parts of ``cache`` that belong to it; empty: all of it.
    """

    def __init__(self, cache: torch.Tensor, pieces: tuple[MemoryRegion, ...] = ()) -> None:
        self._cache = cache  # keeps the address valid
        self._pieces = pieces or (whole_region(cache),)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return self._pieces

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one region
        return whole_region(self._cache)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        yield PageChunk(self._cache.data_ptr(), self._cache.nbytes, unit, ids)

    incoming = outgoing


class StagedMemory:
    """A KV cache on a device, through staging buffers in page-locked memory.

    Pages of one chunk lie back to back in a buffer, which grows if a single wire block is larger;
    so up to ``2 * BUFFERS`` times the largest wire block is used beyond ``ring_bytes``.

    A call keeps its buffer from its first chunk to its last, and each direction has its own. A
    sender has a buffer for the whole frame before the peer sees the header, so a receiver with a
    buffer never waits for a sender without one: workers that send to each other cannot deadlock.

    ``cache``: uint8 ``[bytes]``; a CPU tensor takes the same path without streams, for tests.
    ``copier`` packs and unpacks a buffer in one launch; without it every byte run is a copy of its
    own. ``pieces``: as for :class:`HostMemory`.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        ring_bytes: int = RING_BYTES,
        timeout_s: float = BUFFER_TIMEOUT_S,
        copier: BlockCopier | None = None,
        pieces: tuple[MemoryRegion, ...] = (),
    ) -> None:
        self._cache = cache
        self._pieces = pieces or (whole_region(cache),)
        self._copier = copier
        buffer_bytes = ring_bytes // (2 * BUFFERS)
        self._sending = _Ring(cache.device, buffer_bytes, timeout_s)
        self._receiving = _Ring(cache.device, buffer_bytes, timeout_s)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return self._pieces

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one region
        return whole_region(self._cache)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        with self._sending.buffer(unit.block_bytes) as buffer:
            for part in _parts(buffer, unit, ids):
                self._sending.run(partial(self._pack, buffer, unit, part))
                yield _staged_chunk(buffer, unit, len(part))

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        with self._receiving.buffer(unit.block_bytes) as buffer:
            for part in _parts(buffer, unit, ids):
                yield _staged_chunk(buffer, unit, len(part))
                self._receiving.run(partial(self._unpack, buffer, unit, part))

    def _pack(self, buffer: torch.Tensor, unit: Unit, ids: array[int]) -> None:
        if self._copier is not None:
            self._copier.pack(unit.segments, unit.phases, ids, buffer.data_ptr())
            return
        for page, staged in self._runs(buffer, unit, ids):
            staged.copy_(page, non_blocking=True)

    def _unpack(self, buffer: torch.Tensor, unit: Unit, ids: array[int]) -> None:
        if self._copier is not None:
            self._copier.unpack(unit.segments, unit.phases, ids, buffer.data_ptr())
            return
        for page, staged in self._runs(buffer, unit, ids):
            page.copy_(staged, non_blocking=True)

    def _runs(self, buffer: torch.Tensor, unit: Unit, ids: array[int]) -> Iterator[_Run]:
        at = 0
        count = len(unit.segments) // unit.phases
        for number in ids:
            page, phase = divmod(number, unit.phases)
            for i in range(phase * count, (phase + 1) * count, 3):
                offset, stride, length = unit.segments[i : i + 3]
                run = self._cache.narrow(0, offset + page * stride, length)
                yield run, buffer.narrow(0, at, length)
                at += length


class _Ring:
    """The staging buffers of one direction, and the stream of their copies. Thread-safe."""

    def __init__(self, device: torch.device, buffer_bytes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pinned = device.type == "cuda"
        self._stream = own_stream(device) if self._pinned else None
        self._free = [self._make(buffer_bytes) for _ in range(BUFFERS)]
        self._room = threading.Condition()

    @contextmanager
    def buffer(self, block_bytes: int) -> Iterator[torch.Tensor]:
        """Hold a buffer with room for at least one wire block, uint8 ``[bytes]``.

        Raises:
            TransferFailed: no buffer is free in time, or there is no memory for a larger one.
        """
        with self._room:
            if not self._room.wait_for(lambda: self._free, self._timeout_s):
                raise TransferFailed(f"no room in the staging ring for {self._timeout_s:g} s")
            buffer = self._free.pop()
        try:
            if buffer.nbytes < block_bytes:
                buffer = self._make(block_bytes)
            yield buffer
        finally:
            with self._room:
                self._free.append(buffer)
                self._room.notify()

    def run(self, copies: Callable[[], None]) -> None:
        """Run ``copies``, which starts copies, and wait until they are done.

        Raises:
            TransferFailed: a copy failed.
        """
        try:
            if self._stream is None:
                copies()
                return
            use_device(self._stream.device)  # transports call from their own threads
            with draining(self._stream):
                copies()
                done = torch.cuda.Event(blocking=True)  # the wait must not spin on a core
                done.record()
            done.synchronize()  # blocks this thread only, never the device
        except RuntimeError as error:
            raise TransferFailed("a copy to or from the staging ring failed") from error

    def _make(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise TransferFailed(f"no memory for {nbytes} bytes of a staging ring") from error


def _parts(buffer: torch.Tensor, unit: Unit, ids: array[int]) -> Iterator[array[int]]:
    """Split wire blocks into parts that fit into a buffer."""
    step = buffer.nbytes // unit.block_bytes
    return (ids[start : start + step] for start in range(0, len(ids), step))


def _staged_chunk(buffer: torch.Tensor, unit: Unit, count: int) -> PageChunk:
    """Return the staged pages, back to back from the start of the buffer."""
    size = unit.block_bytes
    staged = Unit(array("q", [0, size, size]), 1, size)
    return PageChunk(buffer.data_ptr(), buffer.nbytes, staged, array("q", range(count)))


def whole_region(cache: torch.Tensor) -> MemoryRegion:
    """Return the memory region of all bytes of a dense tensor."""
    device = cache.device.index or 0 if cache.device.type == "cuda" else -1
    return MemoryRegion(cache.data_ptr(), cache.nbytes, device)


def make_memory(
    cache: torch.Tensor,
    timeout_s: float = BUFFER_TIMEOUT_S,
    ring_bytes: int = RING_BYTES,
    pieces: tuple[MemoryRegion, ...] = (),
) -> Memory:
    """Return how a transport reaches a KV cache, uint8 ``[bytes]``, or the ``pieces`` of it that
    belong to the cache.

    If pages are staged, a transfer that finds no free buffer for ``timeout_s`` fails.
    """
    if cache.device.type == "cpu":
        return HostMemory(cache, pieces)
    return StagedMemory(cache, ring_bytes, timeout_s, make_block_copier(cache), pieces)


# Caches in several pieces of memory. Copies, layouts and transports address a cache by offsets from
# one start. If an engine keeps one tensor per layer, or K apart from V, one view from the lowest to
# the highest byte takes the place of a single tensor. Memory between the pieces is never touched,
# since no page is there.


_ALIGNMENT = 4096


def tensor_region(tensor: torch.Tensor) -> MemoryRegion:
    """Return the memory region of a contiguous tensor.

    Raises:
        Misuse: the tensor has gaps, which may belong to other tensors.
    """
    if not tensor.is_contiguous():
        raise Misuse(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
    return whole_region(tensor)


def spanning_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one uint8 view ``[bytes]`` from the first to the last byte of contiguous tensors on
    one device. It does not keep them alive.

    Raises:
        Misuse: no tensors, gaps in one of them, or several devices.
    """
    return view_over(tuple(tensor_region(tensor) for tensor in tensors))


def view_over(regions: Sequence[MemoryRegion]) -> torch.Tensor:
    """As :func:`spanning_view`, for memory regions."""
    if not regions or len({region.device for region in regions}) != 1:
        raise Misuse(
            f"no view over {len(regions)} regions on {sorted({r.device for r in regions})}"
        )
    start = min(region.address for region in regions)
    nbytes = max(region.address + region.nbytes for region in regions) - start
    if regions[0].device < 0:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)
    return torch.as_tensor(_OnDevice(start, nbytes), device=torch.device("cuda", regions[0].device))


class _OnDevice:
    """Bytes on a CUDA device, as a CUDA array interface that torch reads."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class PiecewiseMemory:
    """A cache in several pieces, possibly on several devices, as a transport sees it.

    Each device has a range in one space of offsets; :meth:`offset` maps an address to it. The
    pieces must live as long as this object.
    """

    def __init__(self, regions: Sequence[MemoryRegion], timeout_s: float) -> None:
        """Raises :class:`Misuse` if ``regions`` is empty."""
        if not regions:
            raise Misuse("a cache without memory")
        self._starts: list[int] = []
        self._spans: list[torch.Tensor] = []
        self._parts: list[Memory] = []
        start = 0
        # CUDA devices first: offsets of the first range need no shift on each transfer.
        ordered = sorted(
            set(regions), key=lambda region: (region.device < 0, region.device, region.address)
        )
        for _, group in groupby(ordered, key=lambda region: region.device):
            pieces = _merge_adjacent(tuple(group))
            whole = view_over(pieces)
            self._starts.append(start)
            self._spans.append(whole)
            self._parts.append(make_memory(whole, timeout_s, pieces=pieces))
            start += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def device(self) -> torch.device:
        """The device of the pages: a CUDA device if any page is on one."""
        return self._spans[0].device

    def offset(self, region: MemoryRegion) -> int:
        """Return the offset of a region's first byte.

        Raises:
            Misuse: the region is not part of this cache.
        """
        for start, whole in zip(self._starts, self._spans, strict=True):
            index = whole.device.index if whole.device.type == "cuda" else -1
            at = int(region.address - whole.data_ptr())
            if index == region.device and 0 <= at <= whole.nbytes - region.nbytes:
                return start + at
        raise Misuse(f"{region} is not part of this cache")

    def regions(self) -> tuple[MemoryRegion, ...]:
        return tuple(region for part in self._parts for region in part.regions())

    def region_of(self, unit: Unit) -> MemoryRegion:
        part, own = self._part(unit)
        return part.region_of(own)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        part, own = self._part(unit)
        return part.outgoing(own, ids)

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        part, own = self._part(unit)
        return part.incoming(own, ids)

    def _part(self, unit: Unit) -> tuple[Memory, Unit]:
        """Return the part that has the pages, and the unit with offsets from that part's start."""
        number = bisect_right(self._starts, unit.segments[0]) - 1
        start = self._starts[number]
        if not start:
            return self._parts[number], unit
        segments = array("q", unit.segments)
        for place in range(0, len(segments), 3):
            segments[place] -= start
        return self._parts[number], Unit(segments, unit.phases, unit.block_bytes)


def _merge_adjacent(regions: Sequence[MemoryRegion]) -> tuple[MemoryRegion, ...]:
    """Merge regions, sorted by address, that touch or overlap: pages that follow one another are
    written at once, which must not cross regions."""
    joined = [regions[0]]
    for region in regions[1:]:
        last = joined[-1]
        end = max(last.address + last.nbytes, region.address + region.nbytes)
        if region.address <= last.address + last.nbytes:
            joined[-1] = MemoryRegion(last.address, end - last.address, last.device)
        else:
            joined.append(region)
    return tuple(joined)
