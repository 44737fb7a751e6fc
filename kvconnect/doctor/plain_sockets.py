"""The socket test of ``doctor transport``: bytes over plain sockets between the same hosts.

It shows the most that a transport could reach. It uses as many connections as a transport, one
large buffer each, and only ``sendall`` and ``recv_into``.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvconnect import threads
from kvconnect.doctor.exchange import WORD_BYTES

SOCKET_TIMEOUT_S = 10.0
"""Limit of any call on a socket of the socket test."""

_BUFFER_BYTES = 1 << 20
_GO = b"g"


class SocketTestServer:
    """Source's side of the socket test: sends ``nbytes`` on a connection whenever told to.

    A connection must send ``word`` first. ``close`` may be called once, from any thread.

    Raises:
        OSError: no port is available at ``host``.
    """

    def __init__(self, host: str, connections: int, nbytes: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=connections)
        self._listener.settimeout(SOCKET_TIMEOUT_S)
        self.port: int = self._listener.getsockname()[1]
        self.word = secrets.token_bytes(WORD_BYTES)
        self._nbytes = nbytes
        self._sockets: list[socket.socket] = []
        self._threads = [
            threads.make(threads.ThreadKind.DOCTOR, "kvconnect-doctor-sockets", self._serve)
            for _ in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Close every connection and end every thread."""
        for sock in (self._listener, *self._sockets):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected
        for thread in self._threads:
            thread.join(SOCKET_TIMEOUT_S)
        self._listener.close()

    def _serve(self) -> None:
        try:
            sock, _ = self._listener.accept()
            self._sockets.append(sock)
            with sock:
                sock.settimeout(SOCKET_TIMEOUT_S)
                if not secrets.compare_digest(_exactly(sock, WORD_BYTES), self.word):
                    return
                while sock.recv(1) == _GO:
                    self._send(sock)
        except OSError:
            return  # the reader is gone, and reports why

    def _send(self, sock: socket.socket) -> None:
        buffer = memoryview(bytes(_BUFFER_BYTES))
        for start in range(0, self._nbytes, _BUFFER_BYTES):
            sock.sendall(buffer[: self._nbytes - start])


def measure_sockets(
    address: tuple[str, int], word: bytes, sizes: Sequence[int], rounds: int
) -> float:
    """Return the total bytes per second of one connection per entry of ``sizes``, in parallel.

    An entry is the bytes of its connection in a round. The result is the median of ``rounds``
    rounds, after one warm-up round.

    Raises:
        OSError: a connection failed, broke or stalled.
    """
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection(address, SOCKET_TIMEOUT_S)) for _ in sizes
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(sizes)))
        for sock in sockets:
            sock.sendall(word)
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            list(pool.map(_receive, sockets, sizes))
            seconds.append(time.perf_counter() - started)
    return sum(sizes) / statistics.median(seconds[1:])


def _receive(sock: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    sock.sendall(_GO)
    while nbytes:
        count = sock.recv_into(buffer[:nbytes])
        if not count:
            raise ConnectionError("the source closed the connection")
        nbytes -= count


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the reader closed the connection before it authenticated")
        data += part
    return data
