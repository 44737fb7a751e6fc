"""Memory that several processes of one machine share. It has no name in a file system: the kernel
frees it with the last of them, even after ``kill -9``."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from kvconnect.offload.numa import prefer_node

_NAME = "kvconnect-host-tier"  # as /proc/PID/maps shows it
_CLOEXEC, _ALLOW_SEALING = 1, 2  # of memfd_create
_ADD_SEALS = 1033  # of fcntl, of which Python 3.11 has no names
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
KEY_BYTES = 8
"""At the end of the memory, which are not for its users."""


class MemoryOffer(NamedTuple):
    """Where another process of this user finds memory: process id, file descriptor, size in bytes,
    and a number that its last bytes hold. ``NO_MEMORY``: there is none."""

    pid: int
    descriptor: int
    nbytes: int
    key: int


NO_MEMORY = MemoryOffer(0, 0, 0, 0)


class SharedMemory:
    """Memory, and the ``place`` of this process among the ``places`` that map it.

    The process at place 0 makes it and alone writes it, the others open what that one offers. Each
    of them allocates a part. Nobody can change its size. ``close`` ends the offer; the mapping
    stays. Not thread-safe.

    Raises:
        OSError: the system refuses the memory.
    """

    def __init__(self, descriptor: int, nbytes: int, place: int, places: int) -> None:
        """Map an open file. Its descriptor belongs to this object from now on."""
        self._descriptor = descriptor
        self.place = place
        self.places = places
        try:
            if not place:
                os.ftruncate(descriptor, nbytes)
                fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
            self._file = os.fstat(descriptor)
            if self._file.st_size != nbytes:
                raise OSError(f"it has {self._file.st_size} bytes, not {nbytes}")
            self.mapping = mmap.mmap(descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def make(cls, nbytes: int, places: int) -> SharedMemory:
        """Make memory for several processes, of which this is the first one."""
        return cls(_memfd_create(), nbytes, 0, places)

    @classmethod
    def open(cls, offer: MemoryOffer, nbytes: int, place: int, places: int) -> SharedMemory:
        """Map what the first process offers."""
        path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
        if offer == NO_MEMORY or not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise OSError("none is offered")
        found = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes, place, places)
        if found._key != offer.key:  # of a process of another container with the same number
            found.close()
            raise OSError("it belongs to others")
        return found

    def offer(self) -> MemoryOffer:
        """Return where the others find it, until :meth:`close`."""
        self.mapping[-KEY_BYTES:] = bytes([*os.urandom(KEY_BYTES - 1), 0])  # a signed number
        return MemoryOffer(os.getpid(), self._descriptor, len(self.mapping), self._key)

    def part(self, nbytes: int, place: int) -> tuple[int, int]:
        """Return (start, end) of the part of the first ``nbytes``, whole pages, that a process
        allocates."""
        pages = nbytes // mmap.PAGESIZE
        start, end = (pages * n // self.places for n in (place, place + 1))
        return start * mmap.PAGESIZE, end * mmap.PAGESIZE

    def prefer(self, nodes: Sequence[int], nbytes: int) -> None:
        """Prefer a NUMA node for each process's part of the first ``nbytes``, which nobody has
        touched yet; -1: none."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        for place, node in enumerate(nodes):
            start, end = self.part(nbytes, place)
            if node >= 0:
                prefer_node(address + start, end - start, node)

    def close(self) -> None:
        """Offer it no longer. Idempotent.

        A mapping of Python keeps a duplicate of the descriptor, by which any process of this user
        could open the memory, and a forked child keep it alive. So all of this process's
        descriptors of it are made others.
        """
        with contextlib.suppress(OSError):  # no files are left, or no /proc
            self._replace_descriptors()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _replace_descriptors(self) -> None:
        names = os.listdir("/proc/self/fd")
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for name in names:
            with contextlib.suppress(OSError):  # one that another thread has closed
                if os.path.samestat(os.fstat(int(name)), self._file):
                    os.dup2(nothing, int(name), inheritable=False)
        os.close(nothing)

    @property
    def _key(self) -> int:
        return int.from_bytes(self.mapping[-KEY_BYTES:], "little")


def _memfd_create() -> int:
    """Call the C library's function, which the Python of some distributions does not have."""
    try:
        function = ctypes.CDLL(None, use_errno=True).memfd_create
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this system has no memfd_create") from error
    descriptor: int = function(_NAME.encode(), ctypes.c_uint(_CLOEXEC | _ALLOW_SEALING))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor
