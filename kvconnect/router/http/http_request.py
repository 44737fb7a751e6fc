"""A client's request as it arrives. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvconnect.errors import KVConnectError

if TYPE_CHECKING:
    from kvconnect.router.http.response_writer import ResponseWriter
    from kvconnect.router.http.tenants import Tenant

HELD_BYTES = 64 * 1024
"""Received bytes of a body that nobody has read, from which on no more are received."""


class HttpError(KVConnectError):
    """The router refuses a request. ``status``: of its answer, whose message says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestContent:
    """The body of a request.

    Attributes:
        complete: all of it has been received.
    """

    def __init__(self, wanted: Callable[[], None]) -> None:
        """``wanted``: is called when more is to be received."""
        self.complete = False
        self._wanted = wanted
        self._received: bytes | bytearray = b""
        self._broken = ""
        self._discarded = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def held(self) -> int:
        """Bytes that were received and not read."""
        return len(self._received)

    def is_eof(self) -> bool:
        """Return whether reading the rest needs no wait."""
        return self.complete

    def take(self) -> bytes | bytearray:
        """Return what has been received and not read."""
        received, self._received = self._received, b""
        return received

    async def readany(self) -> bytes | bytearray:
        """Return what has been received, at least one byte; empty at the end.

        Raises:
            HttpError: the rest is not HTTP.
        """
        while not self._received:
            if self._broken:
                raise HttpError(400, self._broken)
            if self.complete:
                return b""
            self._wanted()
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        received = self.take()
        if not self.complete:
            self._wanted()
        return received

    def feed(self, piece: bytes) -> None:
        """Take a piece that was received."""
        if self._discarded:
            return
        if not self._received:
            self._received = piece
        else:  # objects of their own for pieces of two bytes would take twenty times their bytes
            if isinstance(self._received, bytes):
                self._received = bytearray(self._received)
            self._received += piece
        self._wake()

    def end(self) -> None:
        """Note that all has been received."""
        self.complete = True
        self._wake()

    def fail(self, why: str) -> None:
        """Note that the rest cannot be read."""
        self._broken = why
        self._wake()

    def discard(self) -> None:
        """Forget what was received, and what follows."""
        self._discarded = True
        self._received = b""
        self._wanted()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class HttpRequest:
    """One request: its head, and what has come of its body.

    Attributes:
        path: without query; as it was sent, so nothing is decoded.
        headers: names in lower case; values of one that came several times are joined by commas.
        head_bytes: that the head had, without line ends.
        old: HTTP/1.0.
        keep_alive: the connection may be used again after the answer.
        remote: the client's address.
        secure: it came through TLS.
        more_headers: of the answer, whatever it is.
        tenant: who asks; None until known.
        writer: sends the answer.
    """

    __slots__ = (
        *("content", "head_bytes", "headers", "keep_alive", "method", "more_headers", "old"),
        *("path", "remote", "secure", "tenant", "writer"),
    )

    def __init__(
        self, method: str, target: str, headers: Mapping[str, str], content: RequestContent
    ) -> None:
        self.method = method
        self.path = target.partition("?")[0] if target.startswith("/") else _path_of(target)
        self.headers = headers
        self.content = content
        self.writer: ResponseWriter
        self.head_bytes = 0
        self.old = False
        self.keep_alive = True
        self.remote, self.secure = "", False
        self.more_headers: dict[str, str] = {}
        self.tenant: Tenant | None = None

    @property
    def held(self) -> int:
        """Bytes that the request takes until its body is read."""
        return self.head_bytes + self.content.held

    @property
    def content_length(self) -> int:
        """What the request says of its body's length; 0: nothing."""
        return int(self.headers.get("content-length") or 0)


def _path_of(target: str) -> str:
    """Return the path of a target in absolute form, as proxies get it."""
    try:
        return urlsplit(target).path
    except ValueError:
        return target
