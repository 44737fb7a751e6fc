"""Which process holds the other end of a TCP connection within this machine, as the kernel says."""

from __future__ import annotations

import errno
import ipaddress
import os
import struct
from contextlib import suppress

from kvconnect.transport.base import Ends

_MAPPED = bytes(10) + b"\xff\xff"  # before an IPv4 address in an IPv6 socket
_INODE = 9  # column of /proc/net/tcp


def check_other_end(pid: int, ends: Ends | None) -> None:
    """Check that process ``pid`` is of this user and holds the other end of a connection.

    A peer may name any process. This one did not have the number from elsewhere: it is connected.
    ``ends``: None if it is no TCP connection.

    Raises:
        OSError: the process is another one, or the system does not say which it is.
    """
    if ends is None:
        raise OSError(errno.ENOTCONN, "it is no TCP connection")
    if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
        raise OSError(errno.EPERM, "the process is another user's")
    socket, folder = f"socket:[{_inode_there(ends)}]", f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):  # it was closed in between
            if os.readlink(f"{folder}/{number}") == socket:
                return
    raise OSError(errno.ESRCH, "the process does not hold the other end of the connection")


def _inode_there(ends: Ends) -> str:
    """Return the inode of the other end's socket."""
    here, there = ends
    for name in ("tcp", "tcp6"):
        row = f" {_column(name, there)} {_column(name, here)} "
        with open(f"/proc/net/{name}", encoding="ascii") as table:
            for line in table:
                if row in line:
                    return line.split()[_INODE]
    raise OSError(errno.ENOTCONN, "the connection's other end is not in this network namespace")


def _column(name: str, end: tuple[str, int]) -> str:
    """Return an address and port as the kernel's table shows them: words in the machine's order."""
    packed = ipaddress.ip_address(end[0]).packed.removeprefix(_MAPPED)
    if name == "tcp6" and len(packed) == 4:
        packed = _MAPPED + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "{}:{:04X}".format("".join(f"{word:08X}" for word in words), end[1])
