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
from kvconnect.transport.base import Memory, MemoryRegion, PageChunk, PageUser, PeerId, Unit

if TYPE_CHECKING:
    from kvconnect.copy.wire_blocks import BlockCopier

RING_BYTES = 80 << 20
"""Page-locked staging memory of one worker, half for sending and half for receiving."""

BUFFERS = 5
"""Staging buffers per direction: for four transfers at a time, and for a peer that has none."""

_POLL_S = 0.05
"""How often a transfer that waits for a buffer looks whether it is still wanted, in seconds."""

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

    def outgoing(
        self,
        unit: Unit,
        ids: array[int],
        user: PageUser | None = None,  # noqa: ARG002 - there is nothing to wait for
    ) -> Generator[PageChunk, None, None]:
        yield PageChunk(self._cache.data_ptr(), self._cache.nbytes, unit, ids)

    incoming = outgoing


class StagedMemory:
    """A KV cache on a device, through staging buffers in page-locked memory.

    Pages of one chunk lie back to back in a buffer, which grows if a single wire block is larger;
    so up to ``2 * BUFFERS`` times the largest wire block is used beyond ``ring_bytes``.

    Each direction has its own buffers. A sender keeps its buffer from its first chunk to its last,
    so it has one for the whole frame before the peer sees the header; a receiver has one for a
    chunk at a time. So a receiver with a buffer never waits for a sender without one: workers that
    send to each other cannot deadlock.

    ``cache``: uint8 ``[bytes]``; a CPU tensor takes the same path without streams, for tests.
    ``copier`` packs and unpacks a buffer in one launch; without it every byte run is a copy of its
    own. ``pieces``: as for :class:`HostMemory`.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        ring_bytes: int = RING_BYTES,
        copier: BlockCopier | None = None,
        pieces: tuple[MemoryRegion, ...] = (),
    ) -> None:
        self._cache = cache
        self._pieces = pieces or (whole_region(cache),)
        self._copier = copier
        buffer_bytes = ring_bytes // (2 * BUFFERS)
        self._sending = _Ring(cache.device, buffer_bytes)
        self._receiving = _Ring(cache.device, buffer_bytes)

    def regions(self) -> tuple[MemoryRegion, ...]:
        return self._pieces

    def region_of(self, unit: Unit) -> MemoryRegion:  # noqa: ARG002 - there is one region
        return whole_region(self._cache)

    def outgoing(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        with self._sending.buffer(unit.block_bytes, user) as buffer:
            if buffer is None:
                return
            step = buffer.nbytes // unit.block_bytes
            for start in range(0, len(ids), step):
                part = ids[start : start + step]
                self._sending.run(partial(self._pack, buffer, unit, part))
                yield _staged_chunk(buffer, unit, len(part))

    def incoming(
        self, unit: Unit, ids: array[int], user: PageUser | None = None
    ) -> Generator[PageChunk, None, None]:
        start = 0
        while start < len(ids):
            with self._receiving.buffer(unit.block_bytes, user) as buffer:
                if buffer is None:
                    return
                part = ids[start : start + buffer.nbytes // unit.block_bytes]
                yield _staged_chunk(buffer, unit, len(part))
                self._receiving.run(partial(self._unpack, buffer, unit, part))
            start += len(part)

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
    """The staging buffers of one direction, and the stream of their copies. Thread-safe.

    Who came first gets the next buffer, but a peer that has one does not get the last one: a slow
    peer keeps its buffers for long, and others must not wait for it. Peers of one engine count each
    for itself: as many slow ones as there are buffers take them all.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._pinned = device.type == "cuda"
        self._stream = own_stream(device) if self._pinned else None
        self._free = [self._make(buffer_bytes) for _ in range(BUFFERS)]
        self._holders: list[PeerId | None] = []  # of the others, by peer
        self._waiting: dict[object, PeerId | None] = {}  # in the order in which they came
        self._room = threading.Condition()

    @contextmanager
    def buffer(
        self, block_bytes: int, user: PageUser | None = None
    ) -> Iterator[torch.Tensor | None]:
        """Hold a buffer with room for at least one wire block, uint8 ``[bytes]``; None if ``user``
        is gone before there is one.

        Raises:
            TransferFailed: there is no memory for a larger one.
        """
        buffer = self._take(user)
        if buffer is None:
            yield None
            return
        try:
            if buffer.nbytes < block_bytes:
                buffer = self._make(block_bytes)
            yield buffer
        finally:
            with self._room:
                self._free.append(buffer)
                self._holders.remove(user.peer if user else None)
                self._room.notify_all()

    def _take(self, user: PageUser | None) -> torch.Tensor | None:
        me, peer = object(), user.peer if user else None
        with self._room:
            self._waiting[me] = peer
            try:
                while not self._room.wait_for(lambda: self._next() is me, _POLL_S):
                    if user and user.gone():
                        return None
                self._holders.append(peer)
                return self._free.pop()
            finally:
                del self._waiting[me]
                self._room.notify_all()

    def _next(self) -> object:
        """Return who of those that wait gets a buffer now; None if nobody does."""
        for one, peer in self._waiting.items():
            kept = 1 if peer is not None and peer in self._holders else 0
            if len(self._free) > kept:
                return one
        return None

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
    ring_bytes: int = RING_BYTES,
    pieces: tuple[MemoryRegion, ...] = (),
) -> Memory:
    """Return how a transport reaches a KV cache, uint8 ``[bytes]``, or the ``pieces`` of it that
    belong to the cache."""
    if cache.device.type == "cpu":
        return HostMemory(cache, pieces)
    return StagedMemory(cache, ring_bytes, make_block_copier(cache), pieces)
