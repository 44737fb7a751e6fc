"""The host tier's memory: one arena of equal slots, owned by this process alone."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.config import DigestMode
from kvconnect.cuda import CudaContext
from kvconnect.errors import ConfigError, Corrupt, Misuse, TransferFailed

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


class HostArena:
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
        return f"HostArena({self.num_slots} x {self.slot_bytes} bytes, {state})"

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


# Host memory near the device: pages that cross between sockets move at half the speed.


_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call mbind; the C library has no function for it."""
_PREFERRED = 1  # other nodes serve when this one is full
_MAX_NODES = 1024
_PCI = Path("/sys/bus/pci/devices")


def device_node(device: torch.device) -> int | None:
    """Return the NUMA node of a CUDA device; None for other devices, or if it is not known."""
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
    """Return the NUMA node of a PCI device, None if the system has one node or does not say."""
    try:
        node = int((_PCI / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Ask for pages of a node for memory that was not touched yet; return whether it will be so.

    A refusal (a container without the right, another processor) costs speed and nothing else.
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


# One digest per slot: proof that the bytes loaded are the bytes stored.
#
# XXH3-64 is not cryptographic. It finds accidents (bit flips, stray writes, slots mixed up), which
# is what can happen to memory that only this process writes. On 1 MiB blocks that are in no cache
# it reads 2.3 times as fast as memcpy copies, on one core; blake3 reaches 0.8, zlib.crc32 0.34 and
# hashlib.blake2b 0.13 of memcpy. Against the faster, streaming copy of ``kvconnect.copy.native``,
# sealing every block still halves what one core can store (``digest_full_cost``).


_PERIOD: dict[DigestMode, int] = {"off": 0, "sampled": 16, "full": 1}
"""Slots per digest: none, one in 16 in turn, every slot."""


class SlotDigests:
    """Digests of the slots' present contents: ``begin`` and ``seal`` after a store, ``is_sealed``
    and ``verify`` before a load. Asking first keeps slots without a digest at one byte's cost.

    ``sampled`` picks by slot number plus how often the slot was stored into: at any time a
    sixteenth of the slots is covered, and each slot is covered once in 16 uses, whatever the
    caller does.

    Threads: different slots may be sealed and verified at the same time; hashing releases the GIL.
    Raises :class:`ConfigError` at once for an unknown mode, or if the hash library is missing.
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
        """Note that a slot was stored into; return whether :meth:`seal` must follow."""
        if not self._period:
            return False
        self._sealed[slot] = 0
        self._turn[slot] = (self._turn[slot] + 1) % self._period
        return (slot + self._turn[slot]) % self._period == 0

    def seal(self, slot: int, content: memoryview) -> None:
        """Note the digest of what the slot holds now."""
        self.put(slot, self._hash(content))

    def put(self, slot: int, digest: int) -> None:
        """Note the digest of what the slot holds now, which someone else worked out."""
        self._digest[slot] = digest
        self._sealed[slot] = 1

    def is_sealed(self, slot: int) -> bool:
        """Whether there is a digest to compare with.

        Raises:
            Misuse: there must be one, in ``full`` mode, but the slot was never sealed.
        """
        if self._period == 1 and not self._sealed[slot]:
            raise Misuse(f"slot {slot} was never sealed, nothing can be loaded from it")
        return bool(self._sealed[slot])

    def verify(self, slot: int, content: memoryview) -> None:
        """Raise :class:`Corrupt` if the content is not what was sealed."""
        self.compare(slot, self._hash(content))

    def compare(self, slot: int, found: int) -> None:
        """Raise :class:`Corrupt` if a digest of the content is not the one that was noted."""
        if found != self._digest[slot]:
            raise Corrupt(
                f"slot {slot}: the digest of its block is {found:016x}, "
                f"was {self._digest[slot]:016x} when stored"
            )


def _no_hash(content: memoryview) -> int:
    raise Misuse(f"digests are off, {len(content)} bytes were not to be hashed")


def load_hash(field: str, value: object, fix: str) -> Callable[[memoryview], int]:
    """Return the digest function; raise :class:`ConfigError` with this text if it is missing."""
    try:
        import xxhash
    except ImportError as error:
        raise ConfigError(field, value, fix) from error
    return xxhash.xxh3_64_intdigest
