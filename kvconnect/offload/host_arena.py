"""Memory of the host tier: an arena of equal slots."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvconnect.cuda import CudaContext
from kvconnect.errors import Misuse, TransferFailed
from kvconnect.offload.numa import prefer_node
from kvconnect.offload.shared_memory import KEY_BYTES
from kvconnect.offload.slot_digests import TABLE_BYTES, SlotDigests
from kvconnect.settings import DigestMode

if TYPE_CHECKING:
    import torch

    from kvconnect.offload.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_POPULATE_PIECE_BYTES = _GIB
_POPULATE_THREADS = 8
_PIN_PIECE_BYTES = _GIB
"""A call holds locks of the driver, for up to a second, and other engines of the machine wait."""
_LEAST_PIN_BYTES = 64 << 20
"""Linux 6.11 to 6.13 refuse long pieces (TensorRT-LLM's pull request 17773), so that a refused one
is tried again in halves down to this."""
_PROGRESS_INTERVAL_S = 5.0

_ADVICE = (
    mmap.MADV_HUGEPAGE,  # a twentieth of the page faults, and few TLB misses on scattered slots
    mmap.MADV_DONTFORK,  # a child process must neither keep the memory alive nor copy it on write
    mmap.MADV_DONTDUMP,  # keeps the cache out of core files
)


class HostArena:
    """``num_slots`` slots of ``slot_bytes`` bytes in one anonymous, populated mapping.

    The kernel frees the mapping with the process, even after ``kill -9``. A file in ``/dev/shm``
    would survive. The mapping is private, since most systems have no huge pages for shared memory;
    with ``shared``, it is that, which has :func:`arena_bytes` bytes, and digests are in it as well.

    The constructor touches every page, or this process's part of them: a lack of memory shows at
    start, and no transfer waits for a page fault. It blocks for a tenth of a second per GiB (a few
    seconds in a virtual machine that does not have the memory yet) and logs its progress. It does
    not check how much memory is free; the configuration does.

    ``node`` is the preferred NUMA node of a private mapping, that of the device which the slots are
    copied to.

    Threads: any thread may call ``seal``, ``verify``, ``view`` and ``digests``, one thread at a
    time per slot. ``pin`` and ``close`` are for the owner. The arena does not check who may write
    a slot; the states in :mod:`kvconnect.offload.index` decide that.

    Raises:
        Misuse: a size is not positive, or a slot is not whole pages.
        ConfigError: the digest mode cannot be used.
        OSError: the kernel refuses the memory.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        digest_mode: DigestMode,
        node: int | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        if num_slots < 1 or slot_bytes < 1 or slot_bytes % mmap.PAGESIZE:
            raise Misuse(f"no arena of {num_slots} slots of {slot_bytes} bytes can be made")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.nbytes = num_slots * slot_bytes
        table = memoryview(shared.mapping)[self.nbytes : -KEY_BYTES] if shared else None
        self.digests = SlotDigests(num_slots, digest_mode, table)
        self._map: mmap.mmap | None = shared.mapping if shared else _map_private(self.nbytes)
        _advise(self._map)
        self._pinned: list[int] = []  # addresses of the page-locked pieces
        self._context: CudaContext | None = None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if node is not None and shared is None:
            prefer_node(self.address, self.nbytes, node)
        part = shared.part(self.nbytes, shared.place) if shared else (0, self.nbytes)
        _populate(self._map, self.address, part)

    def __repr__(self) -> str:
        state = "closed" if self._map is None else "pinned" if self._pinned else "open"
        return f"HostArena({self.num_slots} x {self.slot_bytes} bytes, {state})"

    def tensor(self) -> torch.Tensor:
        """Return the arena as a uint8 tensor ``[nbytes]``, without copying.

        The tensor keeps the memory mapped, even after ``close``.
        """
        import torch

        return torch.frombuffer(self._mapping(), dtype=torch.uint8, count=self.nbytes)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return the first ``nbytes`` of a slot (default: all), writable, without copying.

        The view keeps the memory mapped, even after ``close``.
        """
        size = self.slot_bytes if nbytes is None else nbytes
        if not 0 <= slot < self.num_slots or not 0 <= size <= self.slot_bytes:
            raise Misuse(f"{size} bytes of slot {slot} do not exist in {self!r}")
        start = slot * self.slot_bytes
        return memoryview(self._mapping())[start : start + size]

    def seal(self, slot: int, nbytes: int) -> None:
        """Record the digest of a slot's first ``nbytes``. Call this after each store to a slot."""
        if self.digests.begin(slot):
            self.digests.seal(slot, self.view(slot, nbytes))

    def verify(self, slot: int, nbytes: int) -> None:
        """Raise :class:`Corrupt` if a slot's bytes changed since :meth:`seal`."""
        if self.digests.is_sealed(slot):
            self.digests.verify(slot, self.view(slot, nbytes))

    def pin(self) -> bool:
        """Page-lock the arena for the current CUDA device; return whether all of it is locked.

        Without the lock, copies work but are slow and synchronous. Call this once, in a process
        that uses CUDA.
        """
        import torch

        if self._pinned:
            return True
        self._context = CudaContext(torch.cuda.current_device())
        try:
            if not self._context.reaches_host_addresses:
                logger.warning(
                    "host tier: the device reaches page-locked memory at other addresses (WSL2, "
                    "some virtual GPUs), so none is page-locked, and copies are slower"
                )
                return False
            self._pin_pieces(self._context)
        except TransferFailed as error:
            logger.warning(
                "host tier: cannot page-lock the arena (%s), copies are slower; "
                "is the memlock limit (ulimit -l) too low?",
                error,
            )
            self._unpin()
            return False
        return True

    def close(self) -> None:
        """Release the memory. Idempotent. All transfers must have ended.

        Tensors and views of the arena stay valid; the last one unmaps the memory.
        """
        self._unpin()
        self._map = None

    def _pin_pieces(self, context: CudaContext) -> None:
        """Page-lock piece by piece. A copy must not span two, so they are cut between slots."""
        progress, start = _Progress("page-locked", self.nbytes), 0
        slots = min(max(_PIN_PIECE_BYTES // self.slot_bytes, 1), self.num_slots)
        while start < self.nbytes:
            nbytes = min(slots * self.slot_bytes, self.nbytes - start)
            try:
                context.lock(self.address + start, nbytes)
            except TransferFailed:
                if slots == 1 or nbytes <= _LEAST_PIN_BYTES:
                    raise
                slots = max(slots // 2, 1)
                continue
            self._pinned.append(self.address + start)
            start += nbytes
            progress.show(start)

    def _unpin(self) -> None:
        while self._pinned and self._context is not None:
            address = self._pinned.pop()
            try:
                self._context.unlock(address)
            except TransferFailed as error:  # a lost device no longer holds the lock
                logger.debug("host tier: %s", error)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            raise Misuse("the host store is closed")
        return self._map


def arena_bytes(num_slots: int, slot_bytes: int) -> int:
    """Return the bytes of memory that processes share for an arena."""
    return num_slots * (slot_bytes + TABLE_BYTES) + KEY_BYTES


def _map_private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(arena: mmap.mmap) -> None:
    for advice in _ADVICE:
        try:
            arena.madvise(advice)
        except OSError as error:  # the kernel lacks the feature: slower, still correct
            logger.debug("host tier: madvise(%d) refused: %s", advice, error)


def _populate(arena: mmap.mmap, address: int, part: tuple[int, int]) -> None:
    """Have the kernel allocate every page of a part (start, end) now: in pieces, to log the
    progress, and by several threads, since one clears a GiB in a tenth of a second."""
    begin, end = part
    started, progress = time.monotonic(), _Progress("ready", end - begin)

    def populate(start: int) -> int:
        nbytes = min(_POPULATE_PIECE_BYTES, end - start)
        _populate_piece(arena, address, start, nbytes)
        return nbytes

    threads = min(_POPULATE_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "kvconnect-populate") as pool:
        done = 0
        for nbytes in pool.map(populate, range(begin, end, _POPULATE_PIECE_BYTES)):
            done += nbytes
            progress.show(done)
    gib, seconds = (end - begin) / _GIB, time.monotonic() - started
    logger.info("host tier: %.1f GiB ready in %.1f s", gib, seconds)


class _Progress:
    """Logs how much of something long is done, every few seconds."""

    def __init__(self, what: str, nbytes: int) -> None:
        self._what, self._nbytes = what, nbytes
        self._shown = time.monotonic()

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now - self._shown >= _PROGRESS_INTERVAL_S:
            self._shown = now
            gib, of = done / _GIB, self._nbytes / _GIB
            logger.info("host tier: %.0f of %.0f GiB %s", gib, of, self._what)


def _populate_piece(arena: mmap.mmap, address: int, start: int, nbytes: int) -> None:
    try:
        from kvconnect import _native
    except ImportError:  # no C extension: same effect, but this holds the GIL for each piece
        view = memoryview(arena)[start : start + nbytes]
        view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    else:
        _native.populate(address + start, nbytes)
