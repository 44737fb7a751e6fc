"""What connections to engines have in common, whatever they speak. Event loop only."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple
from urllib.parse import urlsplit

from kvconnect.errors import KVConnectError
from kvconnect.router.connections.relay import Passage

EVENT_STREAM, JSON = "text/event-stream", "application/json"
READ_BYTES = 16 * 1024
"""Received at a time, and kept until reading from the engine pauses. The loop itself would read 256
KiB, of which a client that does not read leaves several copies in memory: received, parsed, sent.
Larger pieces take no less CPU time."""


class Unreachable(KVConnectError):
    """No connection to the engine could be opened."""


class Exhausted(Unreachable):
    """This process cannot open more connections; the engine is not at fault."""


class ConnectionLost(KVConnectError):
    """A connection broke, or the engine sent something that is not its protocol."""


class TooLong(ConnectionLost):
    """The engine sent more than a limit."""


class ClosedByEngine(ConnectionLost):
    """The engine closed the connection, or its process ended."""


class ClosedEarly(ClosedByEngine):
    """The engine closed the connection before any byte of the response."""


class NotTaken(KVConnectError):
    """The engine's API has nothing for a request, which was not sent. ``status``: what an engine
    would answer over HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(KVConnectError):
    """A read was given up; the connection is good."""


class BaseUrl(NamedTuple):
    """A parsed base URL."""

    host: str
    port: int
    tls: bool
    path: str
    name: str  # value of the Host header
    grpc: bool  # SGLang's gRPC API, which has no TLS

    @classmethod
    def of(cls, url: str) -> BaseUrl:
        """Parse ``url``, which has been validated."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        grpc = parts.scheme == "grpc"
        return cls(parts.hostname or "", port, tls, parts.path, parts.netloc, grpc)


class Response:
    """A response as far as it has been received."""

    def __init__(self) -> None:
        self.any_bytes = False  # whether any byte was received
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.began = False  # the head is complete
        self.any_body = False  # whether a byte of the body was received
        self.ended = False  # the body is complete
        self.chunks: deque[bytes] = deque()

    @property
    def may_be_computing(self) -> bool:
        """Whether the engine may compute it yet: no part of the head, or no byte after it."""
        return not self.any_bytes or (self.began and not self.any_body)

    @property
    def is_much(self) -> bool:
        """Whether so much waits to be read that reading from the engine should pause."""
        return sum(map(len, self.chunks)) > READ_BYTES

    def body(self) -> bytes:
        """Return the buffered part of the body."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)


class EngineConnection(ABC):
    """A connection that carries one request at a time. ``healthy``: whether the engine answers
    others."""

    used_at = 0.0
    response: Response  # to the last request

    def __init__(self, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._waiting: asyncio.Future[None] | None = None
        self._interrupted = False
        self._broken: ConnectionLost | Unreachable | None = None
        self._paused = False
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def send(self, head: bytes, body: bytes, silence_s: float) -> None:
        """Send a request in HTTP. The connection counts as lost when the engine sends nothing for
        ``silence_s`` seconds before the response is complete. A healthy engine that has sent
        nothing of the body yet is not silent: it computes a long prompt or a whole answer.

        Raises:
            NotTaken: the engine's API has nothing for it.
        """

    @abstractmethod
    def finish(self) -> bool:
        """End the request; return whether the connection can be reused. If not, close it; the
        engine then aborts an unfinished request."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""

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
            try:
                self._pass_to(passage)
                await self._wait_for_data()
            finally:
                self._pass_to(None)
        data = response.body()
        response.chunks.clear()
        if self._paused:
            self._paused = False
            self._resume()
        return data

    def interrupt(self) -> None:
        """Have :meth:`readany` end once, though more will come."""
        self._interrupted = True
        self._wake()

    def end_silent(self, since: float) -> None:
        """Give the request up if the engine has sent nothing since a time."""
        if self._last_heard() < since and not (self._paused or self.response.ended):
            self._break("sent nothing since it went down")

    def _pass_to(self, passage: Passage | None) -> None:  # noqa: B027  # not all can
        """Pass what arrives to ``passage`` directly, while :meth:`readany` waits."""

    @abstractmethod
    def _resume(self) -> None:
        """Read from the engine again; what had been received was read."""

    @abstractmethod
    def _abort(self) -> None:
        """Close the connection, which is broken."""

    def _last_heard(self) -> float:
        return self._heard

    def _begin(self, response: Response, silence_s: float) -> None:
        """Begin a request."""
        self.response = response
        self._interrupted = False
        self._heard = time.monotonic()
        if self._timer is None:
            self._listen(silence_s)

    def _listen(self, silence_s: float) -> None:
        """Check for silence, and set the next check. The timer outlives requests: most end long
        before it fires, so setting one per request would be waste."""
        now = time.monotonic()
        self._heard = self._last_heard()
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
        self._abort()

    def _end(self, error: ConnectionLost) -> None:
        """Note that the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._broken = self._broken or error
        self._wake()

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
    connection: EngineConnection, most: float = inf, take: Callable[[int], None] = lambda _: None
) -> bytes:
    """Return the rest of a response body, of at most ``most`` bytes. ``take`` is told of each
    piece's bytes before it is kept, and may raise.

    Raises:
        ConnectionLost: the connection broke.
        TooLong: the body is longer.
    """
    chunks = []
    while chunk := await connection.readany():
        take(len(chunk))
        chunks.append(chunk)
        most -= len(chunk)
        if most < 0:
            raise TooLong("sent a response over the size limit")
    return b"".join(chunks)
