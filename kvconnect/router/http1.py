"""HTTP/1.1 to engines: requests on connections that are kept. Everything runs on the event loop.

A router sends two requests for each that it gets and passes on every token; with a general client
that is most of its time. This one does what engines need: JSON out, an answer or a stream in.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from kvconnect.errors import KVConnectError

CONNECT_S = 5.0
IDLE_S = 2.0  # a connection is used again this long; engines (uvicorn) close theirs after 5
_T = TypeVar("_T")
_HIGH = 256 * 1024  # bytes of an answer that wait here before the engine has to
_IDLE_MOST = 256  # connections kept per engine


class Unreachable(KVConnectError):
    """No connection to the engine."""


class Exhausted(Unreachable):
    """This process may open no more connections, which is not the engine's fault."""


class Lost(KVConnectError):
    """A connection broke, or what came over it is no HTTP."""


class Closed(Lost):
    """The peer closed a connection before any of an answer came."""


class Base(NamedTuple):
    """A base URL taken apart."""

    host: str
    port: int
    tls: bool
    path: str
    name: str  # as the Host header has it

    @classmethod
    def of(cls, url: str) -> Base:
        """Take ``url`` apart; it has been checked."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, parts.path, parts.netloc)


class Arriving:
    """An answer as far as it has come. The parser calls it."""

    def __init__(self) -> None:
        self.came = False  # any byte of it
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.began = False  # the head is whole
        self.ended = False  # all of it is there
        self.chunks: deque[bytes] = deque()
        self.keep = False  # the connection can be used again
        self.parser = httptools.HttpResponseParser(self)

    def cut_off(self) -> None:
        """The connection was closed in order: the end of an answer that does not say its length."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self.ended = self.ended or (self.began and not framed)

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header came."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """httptools: the head is whole."""
        self.status = self.parser.get_status_code()
        self.began = self.status >= 200  # else the real one follows

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body."""
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        self.ended = self.began
        self.keep = self.ended and bool(self.parser.should_keep_alive())


class Connection(asyncio.Protocol):
    """One connection; carries one request at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self._transport: asyncio.Transport
        self.answer = Arriving()  # to the last request
        self.answer.ended = True  # there was none
        self._waiting: asyncio.Future[None] | None = None
        self._broken: Lost | None = None
        self._paused = False
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: a piece came."""
        answer, self._heard = self.answer, time.monotonic()
        if answer.ended:
            self._break("spoke without being asked")
            return
        answer.came = True
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"sent what is no HTTP answer: {error}")
        if not self._paused and sum(map(len, answer.chunks)) > _HIGH:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: it is gone."""
        if error is None:
            self.answer.cut_off()
        kind = Lost if self.answer.came else Closed
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
        self.answer = Arriving()
        self._heard = time.monotonic()
        self._listen(silence_s)
        if len(body) < _HIGH:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def begun(self) -> None:
        """Wait for the answer's head.

        Raises:
            Lost: it does not come.
        """
        while not self.answer.began:
            await self._news()

    async def readany(self) -> bytes:
        """Return what is there of the body, at least a byte; nothing: it is whole.

        Raises:
            Lost: it breaks off.
        """
        answer = self.answer
        while not answer.chunks:
            if answer.ended:
                return b""
            await self._news()
        data = answer.chunks[0] if len(answer.chunks) == 1 else b"".join(answer.chunks)
        answer.chunks.clear()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def done(self) -> bool:
        """The user is done; return whether it can be kept. Else it is closed, upon which the
        engine drops the request."""
        self._unwatch()
        keep = self.usable and self.answer.keep and not self.answer.chunks
        if not keep:
            self._transport.abort()
        return keep

    def close(self) -> None:
        """Close it at once."""
        self._unwatch()
        self._transport.abort()

    def _listen(self, silence_s: float) -> None:
        """Look again when the engine could have been silent for so long."""
        now = time.monotonic()
        if self._paused:  # it is we who do not read
            self._heard = now
        left = self._heard + silence_s - now
        if left <= 0:
            self._break(f"sent nothing for {silence_s:g} seconds")
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(left, self._listen, silence_s)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _break(self, why: str) -> None:
        self._broken = self._broken or Lost(why)
        self._transport.abort()

    async def _news(self) -> None:
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


class Client:
    """Connections to all engines of a router."""

    def __init__(self, silence_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._silence_s = silence_s
        self._idle: dict[Base, list[Connection]] = {}
        self._tls = tls  # made when first needed: reading the authorities takes a while

    async def open(
        self,
        base: Base,
        head: bytes,
        body: bytes = b"",
        written: Callable[[], None] | None = None,
    ) -> Connection:
        """Send a request; return its connection with the head of the answer.

        A kept connection may have been closed by the engine just now: if none of an answer comes
        before that, the request goes out once more, on a new one.

        Raises:
            Unreachable: no connection within ``CONNECT_S``.
            Lost: the answer does not begin.
        """
        kept = self._take(base)
        if kept is not None:
            try:
                return await self._ask(kept, head, body, written)
            except Closed:
                pass
        return await self._ask(await self._connect(base), head, body, written)

    def release(self, base: Base, connection: Connection) -> None:
        """Give a connection back; closed unless the answer is whole."""
        idle = self._idle.setdefault(base, [])
        if connection.done():
            connection.used_at = time.monotonic()
            idle.append(connection)
            if len(idle) > _IDLE_MOST:
                idle.pop(0).close()

    def forget(self, base: Base) -> None:
        """Close what is kept of an engine."""
        for connection in self._idle.pop(base, ()):
            connection.close()

    def close(self) -> None:
        """Close what is kept."""
        for base in list(self._idle):
            self.forget(base)

    async def get(self, base: Base, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of a GET.

        Raises:
            Unreachable, Lost, asyncio.TimeoutError: no answer.
        """
        return await self.whole(base, head_of(base, "GET", path, {}), b"", timeout_s)

    async def whole(
        self, base: Base, head: bytes, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Return status and body of a whole answer.

        Raises:
            Unreachable, Lost, asyncio.TimeoutError: no answer.
        """
        return await within(self._whole(base, head, body), timeout_s)

    async def _whole(self, base: Base, head: bytes, body: bytes) -> tuple[int, bytes]:
        """On a connection of its own: what looks after engines must not see old ones break."""
        connection = await self._ask(await self._connect(base), head, body, None)
        try:
            return connection.answer.status, await read(connection)
        finally:
            connection.close()

    async def _ask(
        self,
        connection: Connection,
        head: bytes,
        body: bytes,
        written: Callable[[], None] | None,
    ) -> Connection:
        begun = False
        try:
            connection.send(head, body, self._silence_s)
            if written is not None:
                written()
            await connection.begun()
            begun = True
        finally:
            if not begun:
                connection.close()
        return connection

    async def _connect(self, base: Base) -> Connection:
        loop = asyncio.get_running_loop()
        if base.tls:
            self._tls = self._tls or ssl.create_default_context()
        tls = self._tls if base.tls else None
        connecting = loop.create_connection(Connection, base.host, base.port, ssl=tls)
        try:
            return (await within(connecting, CONNECT_S))[1]
        except (OSError, asyncio.TimeoutError) as error:
            full = getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE)
            kind = Exhausted if full else Unreachable
            raise kind(f"{base.name}: {error or 'no connection in time'}") from error

    def _take(self, base: Base) -> Connection | None:
        idle = self._idle.get(base)
        now = time.monotonic()
        while idle:
            connection = idle.pop()
            if connection.usable and now - connection.used_at < IDLE_S:
                return connection
            connection.close()
        return None


async def within(work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    """Return what ``work`` returns. Unlike ``asyncio.wait_for`` of Python 3.11 and before, it
    never swallows a cancellation that comes with the result.

    Raises:
        asyncio.TimeoutError: not within ``timeout_s`` seconds.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
    finally:
        if task.cancel():
            await asyncio.wait({task})
    raise asyncio.TimeoutError


async def read(connection: Connection) -> bytes:
    """Return the rest of an answer.

    Raises:
        Lost: it breaks off.
    """
    chunks = []
    while chunk := await connection.readany():
        chunks.append(chunk)
    return b"".join(chunks)


def head_of(
    base: Base, method: str, path: str, headers: Mapping[str, str], length: int | None = None
) -> bytes:
    """Return the head of a request; ``length`` is that of its JSON body.

    Header values have come through an HTTP parser, which lets no line end pass.
    """
    lines = [f"{method} {base.path}{path} HTTP/1.1", f"Host: {base.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")
