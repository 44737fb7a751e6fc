"""Reads blocks from the host memory of an engine on the same machine, without its help.

The system call ``process_vm_readv`` copies memory of another process of the same user. A block
costs one copy then, and none of the source's time. Three things show that its bytes are right:

- The process that is read is the one that spoke: it is of the same user, it holds the other end of
  this very connection (:mod:`kvconnect.tiers.peers.connection_owner`), and it shows the nonce of
  the reader's hello.
- Nothing was written into the slot since the source's answer: its version is still the same.
- The digest matches that of the source, which is part of the answer. A reader that wants all
  digests uses no block without one.

Versions are read after the block, and the nonce after them. What cannot be read so comes over the
network.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from kvconnect.bounded import remember
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.cache_messages import NONCE_BYTES, HostTierAddresses, Place
from kvconnect.tiers.peers.served import ServedBlock, ServedBlocks
from kvconnect.transport.base import PeerId

_MOST_RUNS = 512  # of one call; the kernel takes 1024
_MOST_REMEMBERED = 1 << 16
_VERSION_BYTES = 8


class MemoryAccess(NamedTuple):
    """This worker's host tier; whether it reads the memory of others, and others that of it."""

    host: HostArena
    reads: bool
    gives: bool


class OwnMemory:
    """This worker's host tier, as readers on this machine know it. For one thread."""

    def __init__(self, host: HostArena, served: ServedBlocks) -> None:
        self._host = host
        self._served = served
        self._nonces: dict[PeerId, ctypes.Array[ctypes.c_char]] = {}

    def tell(self, peer: PeerId, nonce: bytes) -> HostTierAddresses:
        """Return where everything is. The nonce shows that it is there, until the reader is gone
        or this object is closed."""
        shown = self._nonces[peer] = ctypes.create_string_buffer(nonce, NONCE_BYTES)
        return HostTierAddresses(
            pid=os.getpid(),
            nonce=ctypes.addressof(shown),
            slots=self._host.address,
            slot_bytes=self._host.slot_bytes,
            versions=self._served.versions_address,
        )

    def places(self, peer: PeerId, blocks: Sequence[ServedBlock | None]) -> list[Place]:
        """Return where blocks are, for a reader that was told; else nothing."""
        if peer not in self._nonces:
            return []
        known = self._host.digests.known
        return [Place(it.slot, it.version, known(it.slot)) for it in blocks if it is not None]

    def forget(self, peer: PeerId) -> None:
        """A reader is gone. If it does not know yet, it uses nothing that it reads after this."""
        shown = self._nonces.pop(peer, None)
        if shown is not None:
            shown.raw = bytes(NONCE_BYTES)  # memory that is freed keeps its bytes for a while

    def close(self) -> None:
        """The slots will be freed: what is read after this is not used."""
        for peer in list(self._nonces):
            self.forget(peer)


class SourceMemory:
    """The host tier of a source on this machine. For any thread, but the caller of :meth:`learn`
    and :meth:`take` holds a lock.

    Raises:
        OSError: it cannot be read, or it is not the source's.
    """

    def __init__(self, told: HostTierAddresses, nonce: bytes, host: HostArena) -> None:
        self._told = told
        self._nonce = nonce
        self._host = host
        self._places: dict[bytes, Place] = {}
        self._versions([])

    def learn(self, key: bytes, place: Place) -> None:
        """Note where a block was when the source was asked. If each block needs a digest here, one
        without comes over the network, which adds one."""
        if place.digest is None and self._host.digests.required:
            return
        remember(self._places, key, place, _MOST_REMEMBERED)

    def take(self, key: bytes) -> Place | None:
        """Return where a block was, once."""
        return self._places.pop(key, None)

    def read(self, blocks: Sequence[tuple[Place, int]], nbytes: int) -> list[bool]:
        """Copy ``nbytes`` of each (place, own slot). Return which of them are the right bytes.

        Raises:
            OSError: the source's memory cannot be read any more.
        """
        told, host = self._told, self._host
        runs = []
        for place, slot in blocks:
            there = told.slots + place.slot * told.slot_bytes
            runs.append((there, host.address + slot * host.slot_bytes, nbytes))
        read_process(told.pid, runs)
        versions = self._versions([place.slot for place, _ in blocks])
        return [
            version == place.version and self._matches(place, slot, nbytes)
            for (place, slot), version in zip(blocks, versions, strict=True)
        ]

    def _matches(self, place: Place, slot: int, nbytes: int) -> bool:
        view = self._host.view(slot, nbytes)
        return place.digest is None or self._host.digests.matches(view, place.digest)

    def _versions(self, slots: Sequence[int]) -> array[int]:
        """Return the versions of slots, read from a process that still shows the nonce."""
        found = array("Q", bytes(_VERSION_BYTES * len(slots) + NONCE_BYTES))
        to, _ = found.buffer_info()
        runs = []
        for slot in slots:
            runs.append((self._told.versions + _VERSION_BYTES * slot, to, _VERSION_BYTES))
            to += _VERSION_BYTES
        read_process(self._told.pid, [*runs, (self._told.nonce, to, NONCE_BYTES)])
        if found[len(slots) :].tobytes() != self._nonce:
            raise OSError(errno.ESRCH, "this is not the memory of the source")
        return found[: len(slots)]


def read_process(pid: int, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy runs (address there, address here, bytes) of another process's memory.

    Raises:
        OSError: the process or the memory is not there, or this process may not read it.
    """
    for start in range(0, len(runs), _MOST_RUNS):
        some = runs[start : start + _MOST_RUNS]
        here = array("Q", chain.from_iterable((to, nbytes) for _, to, nbytes in some))
        there = array("Q", chain.from_iterable((place, nbytes) for place, _, nbytes in some))
        ctypes.set_errno(0)
        copied = _process_vm_readv()(
            pid, here.buffer_info()[0], len(some), there.buffer_info()[0], len(some), 0
        )
        if copied != sum(nbytes for _, _, nbytes in some):
            number = ctypes.get_errno() or errno.EFAULT  # a part of it is not mapped
            raise OSError(number, os.strerror(number))


def is_this_machine(host: str) -> bool:
    """Return whether an IP address is one of this machine's."""
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as found:
            found.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


@cache
def _process_vm_readv() -> Callable[..., int]:
    """Return the C library's function. Raises :class:`OSError` where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv") from error
    function.restype = ctypes.c_ssize_t
    address, number = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, address, number, address, number, number]
    found: Callable[..., int] = function
    return found
