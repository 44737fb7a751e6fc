"""The host tier's memory: one arena of equal slots, owned by this process alone."""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from typing import TYPE_CHECKING

from kvconnect.config import DigestMode
from kvconnect.cuda import CudaContext
from kvconnect.errors import Misuse, TransferFailed
from kvconnect.store.digest import SlotDigests
from kvconnect.store.numa import prefer_node

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_POPULATE_PIECE_BYTES = _GIB
_PIN_PIECE_BYTES = 64 * _GIB
_PROGRESS_INTERVAL_S = 5.0

_ADVICE = (
    mmap.MADV_HUGEPAGE,  # a twentieth of the page faults, and few TLB misses on scattered slots
    mmap.MADV_DONTFORK,  # a child process must neither keep the memory alive nor copy it on write
    mmap.MADV_DONTDUMP,  # a core file need not hold the whole cache
)


class HostStore:
    """``num_slots`` slots of ``slot_bytes`` each in one anonymous, private, populated mapping.

    The mapping has no name and no second owner, so a killed process leaves nothing behind: the
    kernel frees it with the process. (A shared-memory file would survive ``kill -9``, and its
    huge pages are switched off on most systems.)

    The constructor touches every page, so running out of memory shows at start and no transfer
    ever waits for a page fault. It blocks for a tenth of a second per GiB (a few seconds where a
    virtual machine has yet to get the memory itself), logs its progress, and does not check what
    the machine has: that is the configuration's job.

    ``node`` is the NUMA node whose memory is preferred: that of the device the slots are copied to.

    Threads: ``seal``, ``verify`` and ``view`` may be called from any thread, for one slot by one
    at a time, and so may ``digests``, for digests that a device worked out. ``pin`` and ``close``
    belong to the owner. Who may write which slot when is decided
    by the plan, not here.

    Raises :class:`Misuse` for sizes that are not positive or slots that are not whole pages,
    :class:`ConfigError` for a digest mode that cannot be used, :class:`OSError` if the kernel
    refuses the memory.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, digest_mode: DigestMode, node: int | None = None
    ) -> None:
        if num_slots < 1 or slot_bytes < 1 or slot_bytes % mmap.PAGESIZE:
            raise Misuse(f"no arena of {num_slots} slots of {slot_bytes} bytes can be made")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.nbytes = num_slots * slot_bytes
        self.digests = SlotDigests(num_slots, digest_mode)
        self._map: mmap.mmap | None = _map_private(self.nbytes)
        self._pinned: list[int] = []  # addresses of the page-locked pieces
        self._context: CudaContext | None = None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if node is not None:
            prefer_node(self.address, self.nbytes, node)
        _populate(self._map, self.address)

    def __repr__(self) -> str:
        state = "closed" if self._map is None else "pinned" if self._pinned else "open"
        return f"HostStore({self.num_slots} x {self.slot_bytes} bytes, {state})"

    def tensor(self) -> torch.Tensor:
        """Return the arena as a uint8 tensor of shape ``[nbytes]``, without copying.

        The tensor keeps the memory mapped, even past ``close``.
        """
        import torch

        return torch.frombuffer(self._mapping(), dtype=torch.uint8)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return the first ``nbytes`` of a slot (default: all of it), writable, without copying.

        Like the tensor, it keeps the memory mapped.
        """
        size = self.slot_bytes if nbytes is None else nbytes
        if not 0 <= slot < self.num_slots or not 0 <= size <= self.slot_bytes:
            raise Misuse(f"{size} bytes of slot {slot} do not exist in {self!r}")
        start = slot * self.slot_bytes
        return memoryview(self._mapping())[start : start + size]

    def seal(self, slot: int, nbytes: int) -> None:
        """Remember the digest of a slot's first ``nbytes``; call it after each store into it."""
        if self.digests.begin(slot):
            self.digests.seal(slot, self.view(slot, nbytes))

    def verify(self, slot: int, nbytes: int) -> None:
        """Raise :class:`Corrupt` if a slot no longer holds what was sealed."""
        if self.digests.is_sealed(slot):
            self.digests.verify(slot, self.view(slot, nbytes))

    def pin(self) -> bool:
        """Page-lock the arena for the current CUDA device; return whether all of it is locked.

        Without the lock, copies work but are slow and synchronous, so the caller goes on either
        way. Call it once, in a process that uses CUDA.
        """
        import torch

        if self._pinned:
            return True
        self._context = CudaContext(torch.cuda.current_device())
        # Drivers refuse very large registrations. A copy must not span two, so cut between slots.
        piece = max(_PIN_PIECE_BYTES // self.slot_bytes, 1) * self.slot_bytes
        for start in range(0, self.nbytes, piece):
            address = self.address + start
            try:
                self._context.lock(address, min(piece, self.nbytes - start))
            except TransferFailed as error:
                logger.warning(
                    "host tier: cannot page-lock the arena (%s), copies are slower; "
                    "is the memlock limit (ulimit -l) too low?",
                    error,
                )
                self._unpin()
                return False
            self._pinned.append(address)
        return True

    def close(self) -> None:
        """Give the memory back. Idempotent.

        All transfers must have ended. Tensors and views handed out stay valid; the memory is
        unmapped when the last of them is gone.
        """
        self._unpin()
        self._map = None

    def _unpin(self) -> None:
        while self._pinned and self._context is not None:
            address = self._pinned.pop()
            try:
                self._context.unlock(address)
            except TransferFailed as error:  # a lost device has let go of it
                logger.debug("host tier: %s", error)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            raise Misuse("the host store is closed")
        return self._map


def _map_private(nbytes: int) -> mmap.mmap:
    arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in _ADVICE:
        try:
            arena.madvise(advice)
        except OSError as error:  # a kernel built without the feature: slower, not wrong
            logger.debug("host tier: madvise(%d) refused: %s", advice, error)
    return arena


def _populate(arena: mmap.mmap, address: int) -> None:
    """Have the kernel back every page now, piece by piece so that progress can be shown."""
    started = shown = time.monotonic()
    for start in range(0, len(arena), _POPULATE_PIECE_BYTES):
        _populate_piece(arena, address, start, min(_POPULATE_PIECE_BYTES, len(arena) - start))
        now = time.monotonic()
        if now - shown >= _PROGRESS_INTERVAL_S:
            shown = now
            done = min(start + _POPULATE_PIECE_BYTES, len(arena))
            logger.info("host tier: %.0f of %.0f GiB ready", done / _GIB, len(arena) / _GIB)
    logger.info(
        "host tier: %.1f GiB ready in %.1f s", len(arena) / _GIB, time.monotonic() - started
    )


def _populate_piece(arena: mmap.mmap, address: int, start: int, nbytes: int) -> None:
    try:
        from kvconnect import _native
    except ImportError:  # pure wheel: same effect, but other threads wait for each piece
        view = memoryview(arena)[start : start + nbytes]
        view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    else:
        _native.populate(address + start, nbytes)
