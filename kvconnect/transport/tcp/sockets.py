"""Non-blocking sockets: options, reads and writes.

Every socket of this transport is non-blocking. Threads wait in ``poll`` only, where they notice a
shutdown by another thread.
"""

from __future__ import annotations

import select
import socket
import ssl

_KEEPALIVE_PROBES = 3
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def prepare(sock: socket.socket, silence_s: float) -> None:
    """Set a new socket's options; for ``silence_s`` see :func:`allow_silence`."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    allow_silence(sock, silence_s)


def allow_silence(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel drop a connection whose other side is silent for so long."""
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, max(1, round(silence_s * 1000)))
    probe_s = max(1, round(silence_s / _KEEPALIVE_PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def read_some(sock: socket.socket, view: memoryview) -> int | None:
    """Read available bytes into ``view``; None if there are none yet, 0 at the end."""
    try:
        return sock.recv_into(view)
    except _WOULD_BLOCK:
        return None


def write_some(sock: socket.socket, data: bytes | bytearray | memoryview) -> int:
    """Write as much as fits; return the number of bytes."""
    try:
        return sock.send(data)
    except _WOULD_BLOCK:
        return 0


def read_exact(sock: socket.socket, view: memoryview, stall_s: float | None) -> None:
    """Fill ``view``; wait up to ``stall_s`` for each next byte, or for ever.

    Raises:
        TimeoutError: nothing came for ``stall_s``.
        EOFError: the other side closed the connection; the text says whether inside ``view``.
        OSError: the connection broke.
    """
    done = 0
    while done < len(view):
        count = read_some(sock, view[done:])
        if count is None:
            _wait(sock, select.POLLIN, stall_s)
        elif count == 0:
            raise EOFError("the other side closed it" + (" inside a message" if done else ""))
        else:
            done += count


def write_all(sock: socket.socket, data: bytes, stall_s: float) -> None:
    """Write all of ``data``; raises as :func:`read_exact` does."""
    view = memoryview(data)
    while view:
        count = write_some(sock, view)
        if count == 0:
            _wait(sock, select.POLLOUT, stall_s)
        view = view[count:]


def shut(sock: socket.socket) -> None:
    """Shut down both directions, so that threads waiting in the socket leave it.

    Calls the plain socket's method even for TLS: with ssl's own, a thread that is still reading
    would take encrypted bytes for plain ones.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # the other side was first


def _wait(sock: socket.socket, events: int, stall_s: float | None) -> None:
    poller = select.poll()
    poller.register(sock.fileno(), events)
    if not poller.poll(None if stall_s is None else stall_s * 1000):
        raise TimeoutError(f"no progress for {stall_s:g} s")
