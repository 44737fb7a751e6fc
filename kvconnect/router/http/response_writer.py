"""Sends responses on a client's connection. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvconnect.router.http.http_request import HttpRequest
from kvconnect.router.http.http_response import (
    Framing,
    HttpResponse,
    ResponseHeads,
    error_response,
)

_ONE_WRITE = 64 * 1024  # shorter bodies are sent with their head
_LAST_CHUNK = b"0\r\n\r\n"


class ResponseWriter:
    """Sends the responses of one connection.

    Attributes:
        transport: what is sent through it goes to the client as it is.
        stream: what answers the present request; None: it is no stream, or has not begun.
    """

    def __init__(self, transport: asyncio.Transport, heads: ResponseHeads) -> None:
        self.transport = transport
        self.stream: ResponseStream | None = None
        self._heads = heads
        self._writable: asyncio.Future[None] | None = None  # set while the client does not read

    def begin(self, request: HttpRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Return the stream that answers ``request``."""
        if request.old:
            request.keep_alive = False  # the end of the connection is that of the stream
        head = self._head(request, 200, headers, None)
        kind, chunked = headers["Content-Type"], not request.old
        self.stream = ResponseStream(self, head, 200, kind, chunked=chunked)
        return self.stream

    async def respond(self, request: HttpRequest, response: HttpResponse) -> None:
        """Send a whole response; wait until the client has read all but what the system takes.

        Raises:
            ConnectionError: the client has disconnected.
            ValueError: a header has a line end in it; nothing is sent.
        """
        body = response.body
        head = self._head(request, response.status, response.headers, len(body))
        if request.method == "HEAD":
            body = b""
        if len(body) < _ONE_WRITE:
            self.send(head + body)
        else:
            self.send(head)
            self.send(body)
        await self.drain()

    def write_last(self, status: int, message: str) -> None:
        """Send an error, after which the connection ends."""
        response = error_response("", status, message)
        framing = Framing(len(response.body), keep_alive=False)
        head = self._heads.head(status, response.headers, framing)
        self.transport.write(head + response.body)

    def send(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            ConnectionError: the client has disconnected.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait while the client does not read.

        Raises:
            ConnectionError: the client has disconnected.
        """
        if self._writable is not None:
            await self._writable
            if self.transport.is_closing():
                raise ConnectionResetError("the client has disconnected")

    def pause(self) -> None:
        """Note that the client does not read what was sent."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Note that it does again, or has disconnected."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _head(
        self, request: HttpRequest, status: int, headers: Mapping[str, str], length: int | None
    ) -> bytes:
        """Return the head of a response. A client that still sends its body is told to close."""
        if not request.content.complete:
            request.keep_alive = False
        if request.more_headers:
            headers = {**headers, **request.more_headers}
        framing = Framing(length, keep_alive=request.keep_alive, old=request.old)
        return self._heads.head(status, headers, framing)


class ResponseStream:
    """A response whose body is sent in pieces; its head goes with the first one.

    Attributes:
        status: HTTP status.
        content_type: of the body.
        chunked: pieces are chunks of HTTP/1.1; else the connection ends with the stream.
        ended: its last byte has been sent.
    """

    def __init__(
        self, writer: ResponseWriter, head: bytes, status: int, content_type: str, *, chunked: bool
    ) -> None:
        self.status, self.content_type, self.chunked = status, content_type, chunked
        self.ended = False
        self._writer, self._head = writer, head

    async def write(self, piece: bytes) -> None:
        """Send a piece; wait while the client does not read.

        Raises:
            ConnectionError: the client has disconnected; also raised by :meth:`end`.
        """
        if piece:
            self.send(piece)
            await self._writer.drain()

    def send(self, piece: bytes) -> None:
        """Send a piece without a wait.

        Raises:
            ConnectionError: the client has disconnected.
        """
        self._writer.send(self._framed(piece))

    async def end(self, piece: bytes = b"") -> None:
        """Send the last piece, if any, and the end."""
        self.finish(piece)
        await self._writer.drain()

    def finish(self, piece: bytes = b"") -> None:
        """Send the last piece, if any, and the end, without a wait."""
        if not self.ended:
            self.ended = True
            framed = self._framed(piece)
            self._writer.send(framed + _LAST_CHUNK if self.chunked else framed)

    def _framed(self, piece: bytes) -> bytes:
        head, self._head = self._head, b""
        if self.chunked and piece:
            return b"%b%x\r\n%b\r\n" % (head, len(piece), piece)
        return head + piece
