"""Caches in several pieces of memory.

Copies, layouts and transports address a cache by offsets from one start. If an engine keeps one
tensor per layer, or K apart from V, one view from the lowest to the highest byte takes the place of
a single tensor. Memory between the pieces is never touched, since no page is there.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Generator, Sequence
from itertools import groupby

import torch

from kvconnect.disaggregation.staging import make_memory, whole_region
from kvconnect.errors import Misuse
from kvconnect.transport.base import Memory, MemoryRegion, PageChunk, PageUser, Unit

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

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
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
            self._parts.append(make_memory(whole, pieces=pieces))
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

    def outgoing(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        part, own = self._part(unit)
        return part.outgoing(own, ids, user)

    def incoming(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        part, own = self._part(unit)
        return part.incoming(own, ids, user)

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
