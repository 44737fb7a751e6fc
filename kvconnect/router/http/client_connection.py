"""One client's connection: HTTP/1.0 and 1.1, one request after the other. Event loop only.

Servers of others were measured: a small request took 35 us of CPU time with aiohttp's, 28 with
uvicorn's httptools protocol, and 10 with such a protocol alone. uvicorn's neither limits heads nor
gives its transport to a relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from kvconnect.router.http.connection_limits import BUSY, ConnectionLimits
from kvconnect.router.http.http_parser import HttpParser
from kvconnect.router.http.http_request import HELD_BYTES, HttpError, HttpRequest
from kvconnect.router.http.http_response import HttpResponse, ResponseHeads, error_response
from kvconnect.router.http.queued_requests import QueuedRequests
from kvconnect.router.http.response_writer import ResponseWriter
from kvconnect.router.http.tenants import network_of

logger = logging.getLogger(__name__)

LINGER_S = 10.0
"""Time for the rest of a body that was refused: who closes earlier loses the answer to it."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Handler = Callable[[HttpRequest], Awaitable[HttpResponse | None]]
"""Returns the response to a request; None: it has begun a stream and ended it."""


class ClientConnections:
    """What the connections of one listener share. ``idle_s``: seconds without a complete head."""

    def __init__(self, handle: Handler, limits: ConnectionLimits, idle_s: float) -> None:
        self.handle, self.limits, self.idle_s = handle, limits, idle_s
        self.open: set[ClientConnection] = set()
        self.heads = ResponseHeads()
        self._empty: asyncio.Event | None = None

    def left(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""
        self.open.discard(connection)
        if self._empty is not None and not self.open:
            self._empty.set()

    async def end(self, drain_s: float) -> None:
        """End all: those that serve a request have ``drain_s`` seconds until they are cut."""
        self._empty = asyncio.Event()
        for connection in list(self.open):
            connection.end_soon()
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), drain_s)
        tasks = [connection.end() for connection in list(self.open)]
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)


class ClientConnection(asyncio.Protocol):
    """The asyncio protocol of a connection. Its disconnect cancels the request that it serves."""

    def __init__(self, shared: ClientConnections) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._writer: ResponseWriter
        self._parser = HttpParser(self._take, self._whole, self._wanted)
        self._address, self._secure = "", False
        self._timer: asyncio.TimerHandle
        self._idle_since = self._loop.time()
        self._reading = True
        self._deaf = False  # what is received is ignored
        self._taking = True  # further requests are taken
        self._lingers = False  # the client has its last answer, and may still send
        self._queued = QueuedRequests(partial(shared.limits.waits, self))
        self._serving: HttpRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._continues = False  # the client waits for leave to send its body

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        self._transport = cast(asyncio.Transport, transport)
        self._writer = ResponseWriter(self._transport, self._shared.heads)
        peer = transport.get_extra_info("peername") or ("",)
        self._address, self._secure = peer[0], transport.get_extra_info("sslcontext") is not None
        self._shared.open.add(self)
        self._timer = self._loop.call_later(self._shared.idle_s, self._check_idle)
        if not self._shared.limits.opened(self, network_of(self._address)):
            self._transport.write(BUSY)
            self._close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """asyncio: the connection is closed."""
        self._deaf = True
        self._parser.close()
        self._timer.cancel()
        self._shared.limits.closed(self)
        self._shared.left(self)
        self._queued.clear()
        self._writer.resume()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """asyncio: the client does not read what was sent."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """asyncio: it does again."""
        self._writer.resume()

    def data_received(self, data: bytes) -> None:
        """asyncio: data was received."""
        if self._deaf:
            return
        parser = self._parser
        parser.feed(data)
        if parser.upgraded:
            self._deaf = True
            self._take_no_more()
        elif parser.bad:
            self._refuse()
        self._queued.count(parser.held)
        held = parser.incoming is not None and parser.incoming.content.held > HELD_BYTES
        if held or self._queued.full:
            self._pause()

    # Called by the parser

    def _take(self, request: HttpRequest) -> bool:
        """Take a request whose head is complete; return whether its body is wanted."""
        if not self._taking:
            return False
        request.writer = self._writer
        request.remote, request.secure = self._address, self._secure
        if self._serving is None:
            self._start(request)
        elif not self._queued.add(request):  # its client may send it again on a new connection
            self._take_no_more()
            return False
        return True

    def _whole(self) -> None:
        """Note that a request has arrived whole."""
        if self._lingers:
            self._close()

    # Called by the listener

    def end_soon(self) -> None:
        """Take no more requests; end when those that have come are answered."""
        self._take_no_more()
        if self._serving is None and not self._lingers:
            self._close()

    def end(self) -> asyncio.Task[None] | None:
        """End now; return the task that ends with it."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task

    # One request after the other

    def _start(self, request: HttpRequest) -> None:
        self._serving, self._writer.stream = request, None
        self._continues = "expect" in request.headers and not request.old
        self._task = self._loop.create_task(self._serve(request))
        self._task.add_done_callback(self._served)

    async def _serve(self, request: HttpRequest) -> None:
        try:
            response = await self._answer(request)
            if response is not None:
                await self._writer.respond(request, response)
            elif self._writer.stream is not None:
                self._writer.stream.finish()
        except ConnectionError:  # the client disconnected
            self._transport.abort()
        except asyncio.CancelledError:  # nobody waits; a task keeps what it raises, and its frames
            self._transport.abort()

    async def _answer(self, request: HttpRequest) -> HttpResponse | None:
        try:
            if self._continues and request.headers["expect"].lower() != "100-continue":
                raise HttpError(417, "the header Expect may say 100-continue, and nothing else")
            return await self._shared.handle(request)
        except HttpError as error:
            return error_response(request.path, error.status, str(error))

    def _served(self, task: asyncio.Task[None]) -> None:
        """Go on when a request has been answered. A defect is an error of one request."""
        request, self._task = self._serving, None
        assert request is not None, "it was served"
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a request of %s failed", request.path, exc_info=error)
            if self._writer.stream is None:
                self._writer.write_last(500, "the router failed; its log says why")
            self._close()
        self._answered(request)

    def _answered(self, request: HttpRequest) -> None:
        """Go on with the next request, or end the connection."""
        self._serving = None
        self._idle_since = self._loop.time()
        if self._transport.is_closing():
            return
        if not request.content.complete:
            self._linger(request)
        elif not request.keep_alive:
            self._close()
        elif self._queued:
            self._start(self._queued.take())
            self._queued.count(self._parser.held)
            self._resume()
        elif self._parser.bad:
            self._reject()
        elif not self._taking:
            self._close()

    def _linger(self, request: HttpRequest) -> None:
        """Let the client send the rest of a body that nobody wants, so that it gets its answer."""
        if self._parser.bad:
            self._hang_up()
            return
        self._lingers, self._taking, self._continues = True, False, False
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._close)
        request.content.discard()

    def _hang_up(self) -> None:
        """Close the connection when the client has closed its end, or soon: who still sends would
        lose what it has been sent."""
        self._deaf, self._taking, self._lingers = True, False, True
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._close)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # TLS
            self._close()

    def _take_no_more(self) -> None:
        """Take no further request. The last answer says that the connection ends with it."""
        self._taking = False
        last = self._queued.last or self._serving
        if last is not None:
            last.keep_alive = False

    def _refuse(self) -> None:
        """Read nothing that follows: it is no HTTP. Requests before it are answered."""
        self._deaf = True
        logger.debug("not an HTTP request: %s", self._parser.bad)
        if self._lingers:
            self._close()
        elif self._serving is None:
            self._reject()

    def _reject(self) -> None:
        self._writer.write_last(400, f"this is no HTTP request: {self._parser.bad}")
        self._hang_up()

    def _check_idle(self) -> None:
        """Close a connection that has sent no complete head for too long, and look again later."""
        idle_s = self._shared.idle_s
        since = self._loop.time() - self._idle_since if self._serving is None else 0.0
        if since >= idle_s:
            self._close()
        else:
            self._timer = self._loop.call_later(idle_s - since, self._check_idle)

    def _wanted(self) -> None:
        """Receive more of a body; give leave to send it to a client that waits for that."""
        if self._continues:
            self._continues = False
            self._transport.write(_CONTINUE)
        self._resume()

    def _resume(self) -> None:
        if not self._reading and not self._queued.full:
            self._reading = True
            self._transport.resume_reading()

    def _pause(self) -> None:
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _close(self) -> None:
        self._deaf, self._taking = True, False
        self._transport.close()
