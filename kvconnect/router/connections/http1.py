"""HTTP/1.1 client connections to engines, one request at a time each. Event loop only.

The router sends two requests for each that it receives and forwards every token, so this path is
its hottest. It supports only what engines need: a JSON body out, a whole response or a stream in.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from kvconnect.errors import KVConnectError
from kvconnect.router.connections.relay import NO_MEMORY, Passage, RelayedStream, Returned

READ_BYTES = 16 * 1024
"""Received at a time, and kept until reading from the engine pauses. The loop itself would read 256
KiB, of which a client that does not read leaves several copies in memory: received, parsed, sent.
Larger pieces take no less CPU time."""
_ONE_WRITE = 256 * 1024  # shorter bodies are sent with their head
_LINE_END = b"\r\n"
_MOST_HEAD = 64 * 1024  # bytes of a response's headers


class Unreachable(KVConnectError):
    """No connection to the engine could be opened."""


class Exhausted(Unreachable):
    """This process cannot open more connections (file limit); the engine is not at fault."""


class ConnectionLost(KVConnectError):
    """A connection broke, or the engine sent something that is not HTTP."""


class ClosedByEngine(ConnectionLost):
    """The engine closed the connection, or its process ended."""


class ClosedEarly(ClosedByEngine):
    """The engine closed the connection before any byte of the response."""


class Interrupted(KVConnectError):
    """A read was given up; the connection is good."""


class BaseUrl(NamedTuple):
    """A parsed base URL."""

    host: str
    port: int
    tls: bool
    path: str
    name: str  # value of the Host header

    @classmethod
    def of(cls, url: str) -> BaseUrl:
        """Parse ``url``, which has been validated."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, parts.path, parts.netloc)


class IncomingResponse:
    """A response as far as it has been received; the callbacks of the HTTP parser."""

    def __init__(self) -> None:
        self.any_bytes = False  # whether any byte was received
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.began = False  # the head is complete
        self.any_body = False  # whether a byte of the body was received
        self.ended = False  # the body is complete
        self.chunks: deque[bytes] = deque()
        self.keep = False  # the connection can be reused
        self.too_many = False  # a second response followed
        self.between_chunks = False  # all that was received are whole chunks
        self.relayable = True  # the relay has not given it back at once
        self._head = 0  # bytes of headers
        self.parser = httptools.HttpResponseParser(self)

    @property
    def may_be_computing(self) -> bool:
        """Whether the engine may compute it yet: no part of the head, or no byte after it."""
        return not self.any_bytes or (self.began and not self.any_body)

    def cut_off(self) -> None:
        """Note an orderly close, which ends a response without a length."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self.ended = self.ended or (self.began and not framed)

    def body(self) -> bytes:
        """Return the buffered part of the body."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)

    def on_message_begin(self) -> None:
        """httptools: a response begins (the first, one after an interim one, or a surplus one)."""
        self.too_many = self.ended
        if not self.ended:
            self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        self._head += len(name) + len(value)
        if self._head > _MOST_HEAD:
            raise ValueError(f"the response head has more than {_MOST_HEAD} bytes")
        if self.ended:
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """httptools: the head is complete."""
        if self.ended:
            return
        self.status = self.parser.get_status_code()
        self.began = self.status >= 200  # an interim response (1xx) precedes the real one

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body."""
        if self.began and not self.ended:
            self.any_body = True
            self.chunks.append(body)

    def on_chunk_header(self) -> None:
        """httptools: the size of a chunk is known."""
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        """httptools: a chunk is complete, but for what follows in the same data."""
        self.between_chunks = True

    def on_message_complete(self) -> None:
        """httptools: the response is complete."""
        if not self.ended:
            self.ended = self.began
            self.keep = self.ended and bool(self.parser.should_keep_alive())


class Connection(asyncio.BufferedProtocol):
    """One connection to an engine; carries one request at a time. ``buffer``: ``READ_BYTES`` that
    all connections of one loop may share. ``healthy``: whether the engine answers others."""

    def __init__(self, buffer: memoryview, healthy: Callable[[], bool]) -> None:
        self.used_at = 0.0
        self._buffer = buffer
        self._healthy = healthy
        self._transport: asyncio.Transport
        self.response = IncomingResponse()  # the response to the last request
        self.response.ended = True  # no request was sent yet
        self._waiting: asyncio.Future[None] | None = None
        self._interrupted = False
        self._passage: Passage | None = None
        self._relayed: RelayedStream | None = None
        self._whole_lines = False  # the last data ended a line
        self._broken: ConnectionLost | None = None
        self._paused = False
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """asyncio: where to read data to. :meth:`buffer_updated` follows before any other call."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: data was received."""
        self.receive(bytes(self._buffer[:nbytes]))

    def receive(self, data: bytes) -> None:
        """Take data of the engine."""
        response, self._heard = self.response, time.monotonic()
        self._whole_lines = data.endswith(_LINE_END)
        if response.ended:
            self._break("sent data without a request")
            return
        response.any_bytes = True
        try:
            response.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"sent an invalid HTTP response: {error}")
        if response.too_many:
            self._break("sent more than one response")
        passage = self._passage
        # The last piece goes to the task in any case, which sends it and the end at once.
        going_on = passage is not None and response.chunks and not response.ended
        if passage is not None and going_on and passage.forward(response.body()):
            response.chunks.clear()
            self._relay(passage)
            return
        if not self._paused and sum(map(len, response.chunks)) > READ_BYTES:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._stop_relaying()
        if error is None and self._broken is None:  # the engine closed it
            self.response.cut_off()
        kind = ClosedByEngine if self.response.any_bytes else ClosedEarly
        self._broken = self._broken or kind(str(error or "closed the connection"))
        self._wake()

    # Called by the owner of the request

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._broken is None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, silence_s: float) -> None:
        """Send a request. The connection counts as lost when the engine sends nothing for
        ``silence_s`` seconds before the response is complete. A healthy engine that has sent
        nothing of the body yet is not silent: it computes a long prompt or a whole answer."""
        self.response = IncomingResponse()
        self._interrupted = False
        self._heard = time.monotonic()
        if self._timer is None:
            self._listen(silence_s)
        if len(body) < _ONE_WRITE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def wait_for_head(self) -> None:
        """Wait for the response's head.

        Raises:
            ConnectionLost: the connection broke first.
        """
        while not self.response.began:
            await self._wait_for_data()

    async def readany(self, passage: Passage | None = None) -> bytes:
        """Return the received part of the body, at least one byte; empty at its end.

        While this waits, data goes to ``passage`` directly from the callback, without waking a
        task: waking one for each token took a fifth of a stream's CPU time. Whole chunks go through
        the relay, if it has one. Data that it does not forward is returned here.

        Raises:
            ConnectionLost: the connection broke.
            Interrupted: :meth:`interrupt` was called.
        """
        response = self.response
        while not response.chunks:
            if response.ended:
                return b""
            if self._interrupted:
                self._interrupted = False
                raise Interrupted
            self._passage = passage
            try:
                if passage is not None and self._broken is None:
                    self._relay(passage)
                await self._wait_for_data()
            finally:
                self._passage = None
                self._stop_relaying()
        data = response.body()
        response.chunks.clear()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def interrupt(self) -> None:
        """Have :meth:`readany` end once, though more will come."""
        self._interrupted = True
        self._wake()

    def end_silent(self, since: float) -> None:
        """Give the request up if the engine has sent nothing since a time."""
        self._ask_relay()
        if self._heard < since and not (self._paused or self.response.ended):
            self._break("sent nothing since it went down")

    def finish(self) -> bool:
        """End the request; return whether the connection can be reused. If not, close it; the
        engine then aborts an unfinished request."""
        keep = self.usable and self.response.keep and not self.response.chunks
        if not keep:
            self.close()
        return keep

    def close(self) -> None:
        """Close the connection at once."""
        self._stop_relaying()
        self._transport.abort()

    def _listen(self, silence_s: float) -> None:
        """Check for silence, and set the next check. The timer outlives requests: most end long
        before it fires, so setting one per request would be waste."""
        now = time.monotonic()
        self._ask_relay()
        if self._paused or self.response.ended:  # the router is not reading, or has no request open
            self._heard = now
        if now >= self._heard + silence_s and self.response.may_be_computing and self._healthy():
            self._heard = now
        left = self._heard + silence_s - now
        if left <= 0:
            self._break(f"sent nothing for {silence_s:g} seconds")
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(left, self._listen, silence_s)

    def _break(self, why: str) -> None:
        self._broken = self._broken or ConnectionLost(why)
        self._stop_relaying()
        self._transport.abort()

    def _relay(self, passage: Passage) -> None:
        """Leave the stream to the relay, if it is where the relay can go on."""
        response = self.response
        if not (response.between_chunks and self._whole_lines and response.relayable):
            return
        if not (self._paused or response.chunks or self._transport.is_closing()):
            self._relayed = passage.relay(self._transport, self._came_back)

    def _stop_relaying(self) -> None:
        if self._relayed is not None:
            self._relayed.stop()

    def _ask_relay(self) -> None:
        if self._relayed is not None:
            self._heard = max(self._heard, self._relayed.heard)

    def _came_back(self, returned: Returned) -> None:
        """Go on where the relay ended."""
        self._relayed = None
        self._heard = max(self._heard, returned.heard)
        self.response.relayable = returned.chunks > 0  # else it would go to and fro
        if self._broken is not None or self._transport.is_closing():
            return
        self._transport.resume_reading()
        if returned.reason == NO_MEMORY:
            self._break("there was no memory for what it sent")
        elif returned.rest:
            self.receive(returned.rest)

    async def _wait_for_data(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


async def read(
    connection: Connection, most: float = inf, take: Callable[[int], None] = lambda _: None
) -> bytes:
    """Return the rest of a response body, of at most ``most`` bytes. ``take`` is told of each
    piece's bytes before it is kept, and may raise.

    Raises:
        ConnectionLost: the connection broke, or the body is longer.
    """
    chunks = []
    while chunk := await connection.readany():
        take(len(chunk))
        chunks.append(chunk)
        most -= len(chunk)
        if most < 0:
            raise ConnectionLost("sent a response over the size limit")
    return b"".join(chunks)


def request_head(
    base: BaseUrl, method: str, path: str, headers: Mapping[str, str], length: int | None = None
) -> bytes:
    """Return the head of a request; ``length`` is that of its JSON body, None without one. Header
    values come from an HTTP parser, so they contain no line ends."""
    lines = [f"{method} {base.path}{path} HTTP/1.1", f"Host: {base.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")
