"""Memory of the host tier: an arena of equal slots that belongs to this process alone."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.cuda import CudaContext
from kvconnect.errors import ConfigError, Corrupt, Misuse, TransferFailed
from kvconnect.settings import DigestMode

if TYPE_CHECKING:
    import torch

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
    """``num_slots`` slots of ``slot_bytes`` bytes in one anonymous, private, populated mapping.

    The kernel frees the mapping with the process, even after ``kill -9``. A shared-memory file
    would survive, and most systems switch off huge pages for it.

    The constructor touches every page: a lack of memory shows at start, and no transfer waits for
    a page fault. It blocks for a tenth of a second per GiB (a few seconds in a virtual machine that
    does not have the memory yet) and logs its progress. It does not check how much memory is free;
    the configuration does.

    ``node`` is the preferred NUMA node, that of the device which the slots are copied to.

    Threads: any thread may call ``seal``, ``verify``, ``view`` and ``digests``, one thread at a
    time per slot. ``pin`` and ``close`` are for the owner. The arena does not check who may write
    a slot; the states in :mod:`kvconnect.offload.index` decide that.

    Raises:
        Misuse: a size is not positive, or a slot is not whole pages.
        ConfigError: the digest mode cannot be used.
        OSError: the kernel refuses the memory.
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
        return f"HostArena({self.num_slots} x {self.slot_bytes} bytes, {state})"

    def tensor(self) -> torch.Tensor:
        """Return the arena as a uint8 tensor ``[nbytes]``, without copying.

        The tensor keeps the memory mapped, even after ``close``.
        """
        import torch

        return torch.frombuffer(self._mapping(), dtype=torch.uint8)

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


def _map_private(nbytes: int) -> mmap.mmap:
    arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in _ADVICE:
        try:
            arena.madvise(advice)
        except OSError as error:  # the kernel lacks the feature: slower, still correct
            logger.debug("host tier: madvise(%d) refused: %s", advice, error)
    return arena


def _populate(arena: mmap.mmap, address: int) -> None:
    """Have the kernel allocate every page now: in pieces, to log the progress, and by several
    threads, since one clears a GiB in a tenth of a second."""
    started, progress = time.monotonic(), _Progress("ready", len(arena))

    def populate(start: int) -> int:
        nbytes = min(_POPULATE_PIECE_BYTES, len(arena) - start)
        _populate_piece(arena, address, start, nbytes)
        return nbytes

    threads = min(_POPULATE_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "kvconnect-populate") as pool:
        done = 0
        for nbytes in pool.map(populate, range(0, len(arena), _POPULATE_PIECE_BYTES)):
            done += nbytes
            progress.show(done)
    logger.info(
        "host tier: %.1f GiB ready in %.1f s", len(arena) / _GIB, time.monotonic() - started
    )


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


# NUMA: copies between sockets run at half the speed.

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the mbind system call; the C library has no function for it."""
_PREFERRED = 1  # memory of other nodes is used when this node is full
_MAX_NODES = 1024
_PCI = Path("/sys/bus/pci/devices")


def device_node(device: torch.device) -> int | None:
    """Return the NUMA node of a CUDA device; None for other devices or if unknown."""
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, number = numbers
    return pci_node(f"{domain:04x}:{bus:02x}:{number:02x}.0")


def pci_node(address: str) -> int | None:
    """Return the NUMA node of a PCI device; None if the system has one node or does not say."""
    try:
        node = int((_PCI / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer a NUMA node for memory that was not touched yet; return whether the kernel accepted.

    A refusal (missing permission in a container, another processor) only costs speed.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    status: int = library.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_MAX_NODES),
        ctypes.c_uint(0),
    )
    if status:
        logger.info("host tier: NUMA node %d refused (errno %d)", node, ctypes.get_errno())
    return status == 0


# Digests: XXH3-64 is not cryptographic. It detects accidents (bit flips, stray writes, swapped
# slots), the only danger to memory that only this process writes. On uncached 1 MiB blocks and one
# core, it reads at 2.3 times the speed of memcpy; blake3 reaches 0.8, zlib.crc32 0.34 and
# hashlib.blake2b 0.13 of memcpy. ``kvconnect.copy.native`` copies faster than memcpy, so digests of
# every block still halve the bytes that one core can store (``digest_full_cost``).

_PERIOD: dict[DigestMode, int] = {"off": 0, "sampled": 16, "full": 1}
"""Slots per digest; 0 for no digests."""


class SlotDigests:
    """One digest per slot, which proves that the bytes loaded are the bytes stored.

    Call ``begin`` and ``seal`` after a store, ``is_sealed`` and ``verify`` before a load. ``begin``
    and ``is_sealed`` cost one byte's access, and slots without a digest need no more.

    ``sampled`` picks slots by slot number plus number of stores to the slot. So at any time a
    sixteenth of the slots has digests, and each slot has a digest in one of 16 uses.

    Threads: different slots may be sealed and verified at the same time; hashing releases the GIL.
    Raises :class:`ConfigError` if the mode is unknown or the hash library is missing.
    """

    def __init__(self, num_slots: int, mode: DigestMode) -> None:
        if mode not in _PERIOD:
            raise ConfigError("digest", mode, f"use one of {', '.join(_PERIOD)}")
        self._period = _PERIOD[mode]
        self._turn = bytearray(num_slots)  # stores so far, modulo the period
        self._digest = array("Q", bytes(8 * num_slots))
        self._sealed = bytearray(num_slots)
        fix = "install xxhash, or set it to 'off'"
        self._hash = load_hash("digest", mode, fix) if self._period else _no_hash

    def begin(self, slot: int) -> bool:
        """Record a store to a slot; return whether :meth:`seal` must follow."""
        if not self._period:
            return False
        self._sealed[slot] = 0
        self._turn[slot] = (self._turn[slot] + 1) % self._period
        return (slot + self._turn[slot]) % self._period == 0

    def seal(self, slot: int, content: memoryview) -> None:
        """Compute and record the digest of a slot's content."""
        self.put(slot, self._hash(content))

    def put(self, slot: int, digest: int) -> None:
        """Record a digest of a slot's content that was computed elsewhere, as on the device."""
        self._digest[slot] = digest
        self._sealed[slot] = 1

    def is_sealed(self, slot: int) -> bool:
        """Return whether a slot has a digest.

        Raises:
            Misuse: the slot has none, although ``full`` mode requires one.
        """
        if self.required and not self._sealed[slot]:
            raise Misuse(f"slot {slot} was never sealed, nothing can be loaded from it")
        return bool(self._sealed[slot])

    @property
    def required(self) -> bool:
        """Whether each block has a digest."""
        return self._period == 1

    def known(self, slot: int) -> int | None:
        """Return the digest of a slot; None if it has none."""
        return self._digest[slot] if self._sealed[slot] else None

    def matches(self, content: memoryview, digest: int) -> bool:
        """Return whether content has a digest; True if this process computes none."""
        return not self._period or self._hash(content) == digest

    def verify(self, slot: int, content: memoryview) -> None:
        """Raise :class:`Corrupt` if the content differs from what was sealed."""
        self.compare(slot, self._hash(content))

    def compare(self, slot: int, found: int) -> None:
        """Raise :class:`Corrupt` if a digest of the content differs from the recorded one."""
        if found != self._digest[slot]:
            raise Corrupt(
                f"slot {slot}: the digest of its block is {found:016x}, "
                f"was {self._digest[slot]:016x} when stored"
            )


def _no_hash(content: memoryview) -> int:
    raise Misuse(f"digests are off, {len(content)} bytes were not to be hashed")


def load_hash(field: str, value: object, fix: str) -> Callable[[memoryview], int]:
    """Return the digest function. Raises :class:`ConfigError` with the given text if missing."""
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError(field, value, fix) from error
    return xxhash.xxh3_64_intdigest
