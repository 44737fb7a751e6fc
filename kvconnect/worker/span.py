"""Caches that lie in several pieces of memory, for code that takes one backing area.

Copies, geometries and transports address a cache by offsets from one start. Where an engine keeps
a tensor per layer, or K apart from V, the *span* from the lowest to the highest of these bytes
takes the area's place. What lies between the pieces belongs to others and is never touched,
because no page is there.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Generator, Sequence
from itertools import groupby

import torch

from kvconnect.errors import Misuse
from kvconnect.transport.base import Area, Memory, Piece, Unit
from kvconnect.worker.staging import make_memory, whole_area

_ALIGNMENT = 4096


def area_of(tensor: torch.Tensor) -> Area:
    """Return where a tensor's own bytes are.

    Raises:
        Misuse: there are gaps between its elements, which may belong to others.
    """
    if not tensor.is_contiguous():
        raise Misuse(f"a tensor of shape {tuple(tensor.shape)} with gaps is no area")
    return whole_area(tensor)


def spanning(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one uint8 view ``[bytes]`` from the first to the last byte of contiguous tensors on
    one device. It does not keep them alive.

    Raises:
        Misuse: no tensors, gaps in one of them, or several devices.
    """
    return span(tuple(area_of(tensor) for tensor in tensors))


def span(areas: Sequence[Area]) -> torch.Tensor:
    """As :func:`spanning`, of areas."""
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


class Regions:
    """A cache in pieces, maybe on several devices, as a transport sees it.

    Each device's span takes a range of one space of offsets; :meth:`offset` says where an address
    is in it. The pieces must live as long as this.
    """

    def __init__(self, areas: Sequence[Area], timeout_s: float) -> None:
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
            pieces = _joined(tuple(group))
            whole = span(pieces)
            self._starts.append(start)
            self._spans.append(whole)
            self._parts.append(make_memory(whole, timeout_s, pieces=pieces))
            start += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def device(self) -> torch.device:
        """Where the pages are; for pages on a device beside some in CPU memory, the device."""
        return self._spans[0].device

    def offset(self, area: Area) -> int:
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

    def areas(self) -> tuple[Area, ...]:
        return tuple(area for part in self._parts for area in part.areas())

    def area_of(self, unit: Unit) -> Area:
        part, own = self._part(unit)
        return part.area_of(own)

    def outgoing(self, unit: Unit, ids: array[int]) -> Generator[Piece, None, None]:
        part, own = self._part(unit)
        return part.outgoing(own, ids)

    def incoming(self, unit: Unit, ids: array[int]) -> Generator[Piece, None, None]:
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


def _joined(areas: Sequence[Area]) -> tuple[Area, ...]:
    """Return areas, sorted by address, with those that touch or overlap made one: pages that
    follow one another are written as one, which must not cross a border."""
    joined = [areas[0]]
    for area in areas[1:]:
        last = joined[-1]
        end = max(last.address + last.nbytes, area.address + area.nbytes)
        if area.address <= last.address + last.nbytes:
            joined[-1] = Area(last.address, end - last.address, last.device)
        else:
            joined.append(area)
    return tuple(joined)
