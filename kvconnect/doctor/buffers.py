"""Test buffers: memory in which every page contains its own number."""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
from array import array
from collections.abc import Generator, Sequence
from typing import Protocol

from kvconnect.errors import ConfigError
from kvconnect.transport.base import Memory, MemoryRegion, PageChunk, PageUser, Unit

GRAIN_BYTES = 4 << 10
"""Every this many bytes stands a running number, so no two pages are equal."""

MAX_DEVICE = 64
"""Maximum length of a device's name, in characters."""

_TILE_BYTES = 1 << 20
_NUMBER = struct.Struct("<Q")


def pattern(nbytes: int) -> bytearray:
    """Return the contents of a test buffer, the same on every machine."""
    tile = random.Random(0).randbytes(min(nbytes, _TILE_BYTES))
    content = bytearray(tile * (nbytes // len(tile) + 1))[:nbytes]
    for number, start in enumerate(range(0, nbytes - _NUMBER.size + 1, GRAIN_BYTES)):
        _NUMBER.pack_into(content, start, number)
    return content


def page_unit(page_bytes: int) -> Unit:
    """Return the unit whose wire blocks are consecutive pages."""
    return Unit(array("q", [0, page_bytes, page_bytes]), 1, page_bytes)


def differing(
    found: bytes, expected: bytearray, page_bytes: int, pages: Sequence[tuple[int, int]]
) -> int:
    """Return how many of the pages ``(here, there)`` differ between ``found`` and ``expected``."""
    view = memoryview(expected)
    return sum(
        found[here * page_bytes : (here + 1) * page_bytes]
        != bytes(view[there * page_bytes : (there + 1) * page_bytes])
        for here, there in pages
    )


class PatternBuffer(Protocol):
    """Memory with pages. A transport reaches it through ``memory``; ``device`` is a name."""

    device: str
    nbytes: int
    memory: Memory

    def fill(self, content: bytes | bytearray) -> None:
        """Write ``content``, of ``nbytes``, to the whole buffer."""

    def snapshot(self) -> bytes:
        """Return a copy of the contents."""


class HostBuffer:
    """Test buffer in CPU memory, used in place like the cache of an engine on a CPU."""

    device = "cpu"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory: Memory = self

    def fill(self, content: bytes | bytearray) -> None:
        self._map[:] = bytes(content)

    def snapshot(self) -> bytes:
        return self._map[:]

    def regions(self) -> tuple[MemoryRegion, ...]:
        return (MemoryRegion(self._address, self.nbytes),)

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002
        return self.regions()[0]

    def outgoing(
        self,
        unit: Unit,
        ids: array[int],
        user: PageUser | None = None,  # noqa: ARG002
    ) -> Generator[PageChunk, None, None]:
        yield PageChunk(self._address, self.nbytes, unit, ids)

    incoming = outgoing


class DeviceBuffer:
    """Test buffer on the first CUDA device, staged like the cache of an engine there."""

    def __init__(self, nbytes: int) -> None:
        import torch

        from kvconnect.disaggregation.staging import make_memory

        self.nbytes = nbytes
        self.device = str(torch.cuda.get_device_name(0))[:MAX_DEVICE]
        self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        self.memory: Memory = make_memory(self._tensor)

    def fill(self, content: bytes | bytearray) -> None:
        import torch

        self._tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.cuda.synchronize(self._tensor.device)

    def snapshot(self) -> bytes:
        host = self._tensor.cpu()
        return ctypes.string_at(host.data_ptr(), self.nbytes)


def make_buffer(device: str, nbytes: int) -> PatternBuffer:
    """Return a zeroed test buffer on ``cpu`` or ``cuda``.

    Raises:
        ConfigError: torch can use no CUDA device.
    """
    if device == "cpu":
        return HostBuffer(nbytes)
    reason = cuda_unavailable_reason()
    if reason:
        raise ConfigError("device", device, f"{reason}; use --device cpu")
    return DeviceBuffer(nbytes)


def cuda_unavailable_reason() -> str:
    """Return why torch can use no CUDA device; empty if it can. Imports torch."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch does not load ({error})"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"
