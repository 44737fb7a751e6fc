"""HTTP/1.1 to engines: one request at a time on a connection. Everything runs on the event loop.

A router sends two requests for each that it gets and passes on every token; with a general client
that is most of its time. This one does what engines need: JSON out, an answer or a stream in.
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

_HIGH = 256 * 1024  # bytes of an answer that wait here before the engine has to
_MOST_HEAD = 64 * 1024  # bytes of an answer's headers


class Unreachable(KVConnectError):
    """No connection to the engine."""


class Exhausted(Unreachable):
    """This process may open no more connections, which is not the engine's fault."""


class ConnectionLost(KVConnectError):
    """A connection broke, or what came over it is no HTTP."""


class ClosedEarly(ConnectionLost):
    """The peer closed a connection before any of an answer came."""


class BaseUrl(NamedTuple):
    """A base URL taken apart."""

    host: str
    port: int
    tls: bool
    path: str
    name: str  # as the Host header has it

    @classmethod
    def of(cls, url: str) -> BaseUrl:
        """Take ``url`` apart; it has been checked."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, parts.path, parts.netloc)


class IncomingResponse:
    """An answer as far as it has come. The parser calls it."""

    def __init__(self) -> None:
        self.any_bytes = False  # any byte of it
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.began = False  # the head is whole
        self.ended = False  # all of it is there
        self.chunks: deque[bytes] = deque()
        self.keep = False  # the connection can be used again
        self.too_many = False  # more came than was asked for
        self._head = 0  # bytes of headers
        self.parser = httptools.HttpResponseParser(self)

    def cut_off(self) -> None:
        """The connection was closed in order: the end of an answer that does not say its length."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self.ended = self.ended or (self.began and not framed)

    def body(self) -> bytes:
        """Return what waits of the body."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)

    def on_message_begin(self) -> None:
        """httptools: an answer begins: the first, the one after an interim one, or one too many."""
        self.too_many = self.ended
        if not self.ended:
            self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header came."""
        self._head += len(name) + len(value)
        if self._head > _MOST_HEAD:
            raise ValueError(f"a head of more than {_MOST_HEAD} bytes")
        if self.ended:
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """httptools: the head is whole."""
        if self.ended:
            return
        self.status = self.parser.get_status_code()
        self.began = self.status >= 200  # else the real one follows

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body."""
        if self.began and not self.ended:
            self.chunks.append(body)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        if not self.ended:
            self.ended = self.began
            self.keep = self.ended and bool(self.parser.should_keep_alive())


class Connection(asyncio.Protocol):
    """One connection; carries one request at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self._transport: asyncio.Transport
        self.response = IncomingResponse()  # to the last request
        self.response.ended = True  # there was none
        self._waiting: asyncio.Future[None] | None = None
        self._forward: Callable[[bytes], bool] | None = None
        self._broken: ConnectionLost | None = None
        self._paused = False
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: a piece came."""
        response, self._heard = self.response, time.monotonic()
        if response.ended:
            self._break("spoke without being asked")
            return
        response.any_bytes = True
        try:
            response.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"sent what is no HTTP answer: {error}")
        if response.too_many:
            self._break("sent more than one answer")
        if self._forward is not None and response.chunks and self._forward(response.body()):
            response.chunks.clear()
            if not response.ended:
                return
        if not self._paused and sum(map(len, response.chunks)) > _HIGH:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: it is gone."""
        if self._timer is not None:
            self._timer.cancel()
        if error is None and self._broken is None:  # it was the engine that closed it
            self.response.cut_off()
        kind = ConnectionLost if self.response.any_bytes else ClosedEarly
        self._broken = self._broken or kind(str(error or "closed the connection"))
        self._wake()

    # the user's side

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._broken is None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, silence_s: float) -> None:
        """Begin a request. If the engine sends nothing for ``silence_s`` while the answer is
        awaited, the connection is lost."""
        self.response = IncomingResponse()
        self._heard = time.monotonic()
        if self._timer is None:
            self._listen(silence_s)
        if len(body) < _HIGH:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def wait_for_head(self) -> None:
        """Wait for the answer's head.

        Raises:
            Lost: it does not come.
        """
        while not self.response.began:
            await self._wait_for_data()

    async def readany(self, forward: Callable[[bytes], bool] | None = None) -> bytes:
        """Return what is there of the body, at least a byte; nothing: it is whole.

        While nothing is there, ``forward`` gets what comes, at once where it arrives; what it
        returns False for is returned here. To wake a task for each token took a fifth of a
        stream's CPU time.

        Raises:
            Lost: it breaks off.
        """
        response = self.response
        while not response.chunks:
            if response.ended:
                return b""
            self._forward = forward
            try:
                await self._wait_for_data()
            finally:
                self._forward = None
        data = response.body()
        response.chunks.clear()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def finish(self) -> bool:
        """The user is done; return whether it can be kept. Else it is closed, upon which the
        engine drops the request."""
        keep = self.usable and self.response.keep and not self.response.chunks
        if not keep:
            self.close()
        return keep

    def close(self) -> None:
        """Close it at once."""
        self._transport.abort()

    def _listen(self, silence_s: float) -> None:
        """Look again when the engine could have been silent for so long. The timer outlives
        requests, since most are over long before it fires."""
        now = time.monotonic()
        if self._paused or self.response.ended:  # it is we who do not read, or do not ask
            self._heard = now
        left = self._heard + silence_s - now
        if left <= 0:
            self._break(f"sent nothing for {silence_s:g} seconds")
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(left, self._listen, silence_s)

    def _break(self, why: str) -> None:
        self._broken = self._broken or ConnectionLost(why)
        self._transport.abort()

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


async def read(connection: Connection, most: float = inf) -> bytes:
    """Return the rest of an answer, of at most so many bytes.

    Raises:
        Lost: it breaks off, or is longer.
    """
    chunks = []
    while chunk := await connection.readany():
        chunks.append(chunk)
        most -= len(chunk)
        if most < 0:
            raise ConnectionLost("sent a longer answer than could be meant")
    return b"".join(chunks)


def request_head(
    base: BaseUrl, method: str, path: str, headers: Mapping[str, str], length: int | None = None
) -> bytes:
    """Return the head of a request; ``length`` is that of its JSON body.

    Header values have come through an HTTP parser, which lets no line end pass.
    """
    lines = [f"{method} {base.path}{path} HTTP/1.1", f"Host: {base.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")
