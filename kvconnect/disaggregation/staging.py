"""The KV cache as a transport sees it: in place in CPU memory, through a ring for other devices."""

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
    from kvconnect.copy.cuda import BlockCopier

RING_BYTES = 64 << 20
"""Page-locked memory of one worker, half of it for sending and half for receiving."""

BUFFERS = 4
"""Transfers in each direction that find room at a time."""

BUFFER_TIMEOUT_S = 30.0
"""How long a transfer waits for room before it fails."""

_Run = tuple[torch.Tensor, torch.Tensor]
"""A byte run of a page in the cache, and its place in the ring."""


class HostMemory:
    """A KV cache in CPU memory: pages are sent from and received into where they are.

    ``pieces``: which parts of ``area`` are its own; none: all of it.
    """

    def __init__(self, area: torch.Tensor, pieces: tuple[MemoryRegion, ...] = ()) -> None:
        self._area = area  # keeps the address valid
        self._pieces = pieces or (whole_area(area),)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return self._pieces

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one
        return whole_area(self._area)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        yield PageChunk(self._area.data_ptr(), self._area.nbytes, unit, ids)

    incoming = outgoing


class StagedMemory:
    """A KV cache on a device, through bounded rings of page-locked memory.

    Pages of one piece lie back to back in a share of a ring, which grows if a single wire block
    is larger; so up to ``2 * SHARES`` times the largest wire block is taken beyond ``ring_bytes``.

    A call keeps its share from its first piece to its last, and each direction has a ring of its
    own. Whoever sends has room for the whole frame before the other side sees its header, so a
    receiver that holds a share never waits for a sender that waits for one, and no circle of
    waiting can form, however many workers send to one another at the same time.

    ``area`` is the whole cache, uint8 ``[bytes]``; a CPU tensor takes the same path (without
    streams), which is how it is tested without a GPU. ``copier`` packs and unpacks a share in one
    launch; without it every run is a copy of its own. ``pieces``: as for :class:`HostMemory`.
    """

    def __init__(
        self,
        area: torch.Tensor,
        ring_bytes: int = RING_BYTES,
        timeout_s: float = BUFFER_TIMEOUT_S,
        copier: BlockCopier | None = None,
        pieces: tuple[MemoryRegion, ...] = (),
    ) -> None:
        self._area = area
        self._pieces = pieces or (whole_area(area),)
        self._copier = copier
        share_bytes = ring_bytes // (2 * BUFFERS)
        self._sending = _Ring(area.device, share_bytes, timeout_s)
        self._receiving = _Ring(area.device, share_bytes, timeout_s)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return self._pieces

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one
        return whole_area(self._area)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        with self._sending.share(unit.block_bytes) as share:
            for part in _parts(share, unit, ids):
                self._sending.run(partial(self._pack, share, unit, part))
                yield _piece(share, unit, len(part))

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[PageChunk, None, None]:
        with self._receiving.share(unit.block_bytes) as share:
            for part in _parts(share, unit, ids):
                yield _piece(share, unit, len(part))
                self._receiving.run(partial(self._unpack, share, unit, part))

    def _pack(self, share: torch.Tensor, unit: Unit, ids: array[int]) -> None:
        if self._copier is not None:
            self._copier.pack(unit.segments, unit.phases, ids, share.data_ptr())
            return
        for page, staged in self._runs(share, unit, ids):
            staged.copy_(page, non_blocking=True)

    def _unpack(self, share: torch.Tensor, unit: Unit, ids: array[int]) -> None:
        if self._copier is not None:
            self._copier.unpack(unit.segments, unit.phases, ids, share.data_ptr())
            return
        for page, staged in self._runs(share, unit, ids):
            page.copy_(staged, non_blocking=True)

    def _runs(self, share: torch.Tensor, unit: Unit, ids: array[int]) -> Iterator[_Run]:
        at = 0
        count = len(unit.segments) // unit.phases
        for number in ids:
            page, phase = divmod(number, unit.phases)
            for i in range(phase * count, (phase + 1) * count, 3):
                offset, stride, length = unit.segments[i : i + 3]
                run = self._area.narrow(0, offset + page * stride, length)
                yield run, share.narrow(0, at, length)
                at += length


class _Ring:
    """One direction's shares, and the stream its copies run on. Thread-safe."""

    def __init__(self, device: torch.device, share_bytes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pinned = device.type == "cuda"
        self._stream = own_stream(device) if self._pinned else None
        self._free = [self._make(share_bytes) for _ in range(BUFFERS)]
        self._room = threading.Condition()

    @contextmanager
    def share(self, block_bytes: int) -> Iterator[torch.Tensor]:
        """Hold a share that has room for at least one wire block, uint8 ``[bytes]``.

        Raises:
            TransferFailed: none is free in time, or there is no memory for one so large.
        """
        with self._room:
            if not self._room.wait_for(lambda: self._free, self._timeout_s):
                raise TransferFailed(f"no room in the staging ring for {self._timeout_s:g} s")
            share = self._free.pop()
        try:
            if share.nbytes < block_bytes:
                share = self._make(block_bytes)
            yield share
        finally:
            with self._room:
                self._free.append(share)
                self._room.notify()

    def run(self, copies: Callable[[], None]) -> None:
        """Run what starts copies; they are there when this returns.

        Raises:
            TransferFailed: the device could not do it.
        """
        try:
            if self._stream is None:
                copies()
                return
            use_device(self._stream.device)  # transports call from threads of theirs
            with draining(self._stream):
                copies()
                done = torch.cuda.Event(blocking=True)  # whoever waits must not spin on a core
                done.record()
            done.synchronize()  # blocks this thread only, never the device
        except RuntimeError as error:
            raise TransferFailed("a copy to or from the staging ring failed") from error

    def _make(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise TransferFailed(f"no memory for {nbytes} bytes of a staging ring") from error


def _parts(share: torch.Tensor, unit: Unit, ids: array[int]) -> Iterator[array[int]]:
    """Cut wire blocks into as many as a share has room for."""
    step = share.nbytes // unit.block_bytes
    return (ids[start : start + step] for start in range(0, len(ids), step))


def _piece(share: torch.Tensor, unit: Unit, count: int) -> PageChunk:
    """The staged pages, one after the other from the start of the share."""
    size = unit.block_bytes
    staged = Unit(array("q", [0, size, size]), 1, size)
    return PageChunk(share.data_ptr(), share.nbytes, staged, array("q", range(count)))


def whole_area(area: torch.Tensor) -> MemoryRegion:
    """Return where all bytes of a dense tensor are."""
    device = area.device.index or 0 if area.device.type == "cuda" else -1
    return MemoryRegion(area.data_ptr(), area.nbytes, device)


def make_memory(
    area: torch.Tensor,
    timeout_s: float = BUFFER_TIMEOUT_S,
    ring_bytes: int = RING_BYTES,
    pieces: tuple[MemoryRegion, ...] = (),
) -> Memory:
    """Return how a transport reaches the KV cache ``area``, uint8 ``[bytes]``, or those
    ``pieces`` of it that are the cache's own.

    Where pages have to be staged, a transfer that finds no room for ``timeout_s`` fails.
    """
    if area.device.type == "cpu":
        return HostMemory(area, pieces)
    return StagedMemory(area, ring_bytes, timeout_s, make_block_copier(area), pieces)


# Caches that lie in several pieces of memory, for code that takes one backing area.
#
# Copies, geometries and transports address a cache by offsets from one start. Where an engine keeps
# a tensor per layer, or K apart from V, the *span* from the lowest to the highest of these bytes
# takes the area's place. What lies between the pieces belongs to others and is never touched,
# because no page is there.


_ALIGNMENT = 4096


def area_of(tensor: torch.Tensor) -> MemoryRegion:
    """Return where a tensor's own bytes are.

    Raises:
        Misuse: there are gaps between its elements, which may belong to others.
    """
    if not tensor.is_contiguous():
        raise Misuse(f"a tensor of shape {tuple(tensor.shape)} with gaps is no area")
    return whole_area(tensor)


def spanning_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one uint8 view ``[bytes]`` from the first to the last byte of contiguous tensors on
    one device. It does not keep them alive.

    Raises:
        Misuse: no tensors, gaps in one of them, or several devices.
    """
    return span(tuple(area_of(tensor) for tensor in tensors))


def span(areas: Sequence[MemoryRegion]) -> torch.Tensor:
    """As :func:`spanning_view`, of areas."""
    if not areas or len({area.device for area in areas}) != 1:
        raise Misuse(f"no span of {len(areas)} areas on {sorted({a.device for a in areas})}")
    start = min(area.address for area in areas)
    nbytes = max(area.address + area.nbytes for area in areas) - start
    if areas[0].device < 0:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)
    return torch.as_tensor(_OnDevice(start, nbytes), device=torch.device("cuda", areas[0].device))


class _OnDevice:
    """Bytes on a CUDA device, in the words of Numba's array interface, which torch reads."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class PiecewiseMemory:
    """A cache in pieces, maybe on several devices, as a transport sees it.

    Each device's span takes a range of one space of offsets; :meth:`offset` says where an address
    is in it. The pieces must live as long as this.
    """

    def __init__(self, areas: Sequence[MemoryRegion], timeout_s: float) -> None:
        """Raises :class:`Misuse` if there are none."""
        if not areas:
            raise Misuse("a cache without memory")
        self._starts: list[int] = []
        self._spans: list[torch.Tensor] = []
        self._parts: list[Memory] = []
        start = 0
        # Devices first: what is first is not shifted on every transfer.
        ordered = sorted(set(areas), key=lambda area: (area.device < 0, area.device, area.address))
        for _, group in groupby(ordered, key=lambda area: area.device):
            pieces = _merge_adjacent(tuple(group))
            whole = span(pieces)
            self._starts.append(start)
            self._spans.append(whole)
            self._parts.append(make_memory(whole, timeout_s, pieces=pieces))
            start += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def device(self) -> torch.device:
        """Where the pages are; for pages on a device beside some in CPU memory, the device."""
        return self._spans[0].device

    def offset(self, area: MemoryRegion) -> int:
        """Return the offset of an area's first byte.

        Raises:
            Misuse: it is none of those this was made of.
        """
        for start, whole in zip(self._starts, self._spans, strict=True):
            index = whole.device.index if whole.device.type == "cuda" else -1
            at = int(area.address - whole.data_ptr())
            if index == area.device and 0 <= at <= whole.nbytes - area.nbytes:
                return start + at
        raise Misuse(f"{area} is not part of this cache")

    def regions(self) -> tuple[MemoryRegion, ...]:
        return tuple(area for part in self._parts for area in part.regions())

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
        """Return whose pages these are, and the unit with offsets from that part's start."""
        number = bisect_right(self._starts, unit.segments[0]) - 1
        start = self._starts[number]
        if not start:
            return self._parts[number], unit
        segments = array("q", unit.segments)
        for place in range(0, len(segments), 3):
            segments[place] -= start
        return self._parts[number], Unit(segments, unit.phases, unit.block_bytes)


def _merge_adjacent(areas: Sequence[MemoryRegion]) -> tuple[MemoryRegion, ...]:
    """Return areas, sorted by address, with those that touch or overlap made one: pages that
    follow one another are written as one, which must not cross a border."""
    joined = [areas[0]]
    for area in areas[1:]:
        last = joined[-1]
        end = max(last.address + last.nbytes, area.address + area.nbytes)
        if area.address <= last.address + last.nbytes:
            joined[-1] = MemoryRegion(last.address, end - last.address, last.device)
        else:
            joined.append(area)
    return tuple(joined)
