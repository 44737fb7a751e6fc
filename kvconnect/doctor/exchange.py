"""What the two peers of ``doctor transport`` exchange.

Messages travel over the transport as msgpack. The *reader* connects and asks, the *source* listens
and answers::

    DoctorHello -> DoctorHello             version, buffer and device of each side
    TransferRequest -> pages               no message: the pages are the answer
    CpuRequest -> CpuSeconds               CPU seconds of the source so far
    SocketTestRequest -> SocketTestPort    where to measure plain sockets
    anything -> SourceClosed               the source closes the connection

No message holds an address or a path, and every number has a range.

The socket test moves bytes over plain sockets between the same hosts: the most that a transport
could reach. It uses as many connections as a transport, one large buffer each, and only ``sendall``
and ``recv_into``.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnect import threads
from kvconnect.doctor.buffers import MAX_DEVICE
from kvconnect.errors import ProtocolError
from kvconnect.protocol.codec import decode_struct
from kvconnect.transport.base import MAX_MESSAGE_BYTES

VERSION = 1
WORD_BYTES = 16

_Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
_Page = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
_Word = Annotated[bytes, Meta(min_length=WORD_BYTES, max_length=WORD_BYTES)]


class DoctorHello(msgspec.Struct, tag="doctor"):
    """First message in both directions. ``area_bytes``: size of the test buffer on ``device``."""

    area_bytes: _Bytes
    device: Annotated[str, Meta(max_length=MAX_DEVICE)]
    version: Annotated[int, Meta(ge=1, le=0xFFFF)] = VERSION


class TransferRequest(msgspec.Struct, tag="ask"):
    """Reader: send these pages of your test buffer under this read number."""

    want: Annotated[int, Meta(ge=1, lt=1 << 62)]
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 24)]
    ids: Annotated[list[_Page], Meta(min_length=1, max_length=1 << 16)]


class CpuRequest(msgspec.Struct, tag="get_cpu"):
    """Reader: report your CPU time."""


class CpuSeconds(msgspec.Struct, tag="cpu"):
    """Source: user and system CPU seconds of its process."""

    seconds: Annotated[float, Meta(ge=0)]


class SocketTestRequest(msgspec.Struct, tag="get_link"):
    """Reader: open this many plain sockets, and send ``nbytes`` on each when told to."""

    connections: Annotated[int, Meta(ge=1, le=16)]
    nbytes: Annotated[int, Meta(ge=1, le=1 << 32)]


class SocketTestPort(msgspec.Struct, tag="link"):
    """Source: connect to this port of my host, and send ``word`` first."""

    port: _Port
    word: _Word


class SourceClosed(msgspec.Struct, tag="no"):
    """Source: the connection closes, and why; the last message."""

    reason: Annotated[str, Meta(max_length=1024)]


DoctorMessage = (
    DoctorHello
    | TransferRequest
    | CpuRequest
    | CpuSeconds
    | SocketTestRequest
    | SocketTestPort
    | SourceClosed
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(DoctorMessage)


def encode(message: DoctorMessage) -> bytes:
    """Return the payload of a message."""
    return _encoder.encode(message)


def decode(payload: bytes) -> DoctorMessage:
    """Return the message of a payload.

    Raises:
        ProtocolError: the payload is too long or malformed, or a number is out of range.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(payload)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    message: DoctorMessage = decode_struct(_decoder, payload)
    return message


# Socket test -------------------------------------------------------------------------------------

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
