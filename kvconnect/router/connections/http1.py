"""HTTP/1.1 client connections to engines, one request at a time each. Event loop only.

The router sends two requests for each that it receives and forwards every token, so this path is
its hottest. It supports only what engines need: a JSON body out, a whole response or a stream in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import cast

import httptools

from kvconnect.router.connections.engine_connection import (
    JSON,
    READ_BYTES,
    BaseUrl,
    ClosedByEngine,
    ClosedEarly,
    EngineConnection,
    Response,
)
from kvconnect.router.connections.relay import NO_MEMORY, Passage, RelayedStream, Returned

_ONE_WRITE = 256 * 1024  # shorter bodies are sent with their head
_LINE_END = b"\r\n"
_MOST_HEAD = 64 * 1024  # bytes of a response's headers


class IncomingResponse(Response):
    """A response as far as it has been received; the callbacks of the HTTP parser."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = False  # the connection can be reused
        self.too_many = False  # a second response followed
        self.between_chunks = False  # all that was received are whole chunks
        self.relayable = True  # the relay has not given it back at once
        self.is_short = False  # nobody acts on its head before its body is complete
        self._head = 0  # bytes of headers
        self.parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take data of the engine. Raises what the parser raises."""
        self.parser.feed_data(data)
        if self.ended:
            del self.parser  # which refers to this: only the collector would free the two

    def cut_off(self) -> None:
        """Note an orderly close, which ends a response without a length."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self.ended = self.ended or (self.began and not framed)

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
        if self.began and self.headers.get("content-type", "").startswith(JSON):
            length = self.headers.get("content-length", "")
            # Python refuses to read very many digits.
            self.is_short = length.isdecimal() and len(length) < 9 and int(length) <= READ_BYTES

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


class Connection(EngineConnection, asyncio.BufferedProtocol):
    """One connection to an engine. ``buffer``: ``READ_BYTES`` that all connections of one loop may
    share."""

    response: IncomingResponse

    def __init__(self, buffer: memoryview, healthy: Callable[[], bool]) -> None:
        super().__init__(healthy)
        self._buffer = buffer
        self._transport: asyncio.Transport
        self.response = IncomingResponse()
        self.response.ended = True  # no request was sent yet
        self._passage: Passage | None = None
        self._relayed: RelayedStream | None = None
        self._whole_lines = False  # the last data ended a line

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
            response.feed(data)
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
        if not self._paused and response.is_much:
            self._paused = True
            self._transport.pause_reading()
        if response.ended or not response.is_short:  # engines send the head first: one wake-up less
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the connection is closed."""
        self._stop_relaying()
        if error is None and self._broken is None:  # the engine closed it
            self.response.cut_off()
        kind = ClosedByEngine if self.response.any_bytes else ClosedEarly
        self._end(kind(str(error or "closed the connection")))

    # Called by the owner of the request

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return self._broken is None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, silence_s: float) -> None:
        """Send a request."""
        self._begin(IncomingResponse(), silence_s)
        if len(body) < _ONE_WRITE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def finish(self) -> bool:
        """End the request, and close the connection if it cannot be reused."""
        keep = self.usable and self.response.keep and not self.response.chunks
        if not keep:
            self.close()
        return keep

    def close(self) -> None:
        """Close the connection at once."""
        self._abort()

    def _abort(self) -> None:
        self._stop_relaying()
        self._transport.abort()

    def _resume(self) -> None:
        self._transport.resume_reading()

    def _pass_to(self, passage: Passage | None) -> None:
        self._passage = passage
        if passage is None:
            self._stop_relaying()
        elif self._broken is None:
            self._relay(passage)

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

    def _last_heard(self) -> float:
        return self._heard if self._relayed is None else max(self._heard, self._relayed.heard)

    def _came_back(self, returned: Returned) -> None:
        """Go on where the relay ended."""
        self._relayed = None
        self._heard = max(self._heard, returned.heard)
        self.response.relayable = returned.goes_again  # else it would go to and fro
        if self._broken is not None or self._transport.is_closing():
            return
        self._transport.resume_reading()
        if returned.reason == NO_MEMORY:
            self._break("there was no memory for what it sent")
        elif returned.rest:
            self.receive(returned.rest)


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
