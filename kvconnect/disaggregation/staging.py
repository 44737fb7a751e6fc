"""The KV cache as a transport sees it: in place on the CPU, through staging buffers on a device."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvconnect.copy import make_block_copier
from kvconnect.copy.driver import own_stream
from kvconnect.errors import TransferFailed
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
