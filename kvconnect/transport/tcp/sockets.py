"""Non-blocking sockets: options, and reads and writes that may move a part."""

from __future__ import annotations

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


def shut(sock: socket.socket) -> None:
    """Shut down both directions, so that threads waiting in the socket leave it.

    Calls the plain socket's method even for TLS: with ssl's own, a thread that is still reading
    would take encrypted bytes for plain ones.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # the other side was first
