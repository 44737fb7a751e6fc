"""How fast plain sockets are on the same way: what a transport could reach at best.

A source and a reader with as many connections as a transport has, one large buffer each, nothing
but ``sendall`` and ``recv_into``. For one measurement at a time.
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
from kvconnect.doctor.messages import WORD_BYTES

PATIENCE_S = 10.0
"""How long any call on a socket may take."""

_BUFFER_BYTES = 1 << 20
_GO = b"g"


class LinkServer:
    """The source's side: sends ``nbytes`` on each connection whenever it is asked to.

    Only who says ``word`` first is served. ``close`` may be called from any thread, once.

    Raises:
        OSError: no port can be had at ``host``.
    """

    def __init__(self, host: str, connections: int, nbytes: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=connections)
        self._listener.settimeout(PATIENCE_S)
        self.port: int = self._listener.getsockname()[1]
        self.word = secrets.token_bytes(WORD_BYTES)
        self._nbytes = nbytes
        self._open: list[socket.socket] = []
        self._threads = [
            threads.make(threads.ThreadKind.DOCTOR, "kvconnect-doctor-link", self._serve)
            for _ in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End every connection and thread."""
        for sock in (self._listener, *self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected any more
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()

    def _serve(self) -> None:
        try:
            sock, _ = self._listener.accept()
            self._open.append(sock)
            with sock:
                sock.settimeout(PATIENCE_S)
                if not secrets.compare_digest(_exactly(sock, WORD_BYTES), self.word):
                    return
                while sock.recv(1) == _GO:
                    self._send(sock)
        except OSError:
            return  # the reader is gone; it says what went wrong

    def _send(self, sock: socket.socket) -> None:
        buffer = memoryview(bytes(_BUFFER_BYTES))
        for start in range(0, self._nbytes, _BUFFER_BYTES):
            sock.sendall(buffer[: self._nbytes - start])


def measure_link(address: tuple[str, int], word: bytes, sizes: Sequence[int], rounds: int) -> float:
    """Return the bytes per second of one connection for each of ``sizes``, all at a time.

    ``sizes`` are the bytes that each carries in a round; the median of ``rounds`` after one that
    is not counted.

    Raises:
        OSError: no connection, or one that broke or came to a halt.
    """
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in sizes
        ]
        threads = stack.enter_context(ThreadPoolExecutor(len(sizes)))
        for sock in sockets:
            sock.sendall(word)
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            list(threads.map(_receive, sockets, sizes))
            seconds.append(time.perf_counter() - started)
    return sum(sizes) / statistics.median(seconds[1:])


def _receive(sock: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    sock.sendall(_GO)
    while nbytes:
        count = sock.recv_into(buffer[:nbytes])
        if not count:
            raise ConnectionError("the other half closed the connection")
        nbytes -= count


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("closed before it said the word")
        data += part
    return data
