"""Connections to SGLang's gRPC API, which the router uses as if they spoke HTTP. Event loop only.

gRPC carries all requests to an engine over one channel; a connection here stands for one request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

import grpc
from grpc import StatusCode

from kvconnect import open_files
from kvconnect.errors import Refused
from kvconnect.router.connections import sglang_grpc
from kvconnect.router.connections.engine_connection import (
    EVENT_STREAM,
    JSON,
    BaseUrl,
    ClosedByEngine,
    ClosedEarly,
    ConnectionLost,
    EngineConnection,
    Exhausted,
    Response,
    Unreachable,
)
from kvconnect.router.connections.sglang_grpc import Call, Part
from kvconnect.router.requests.engine_bodies import error_body

_MOST_MESSAGE = 64 * 2**20  # bytes; a whole answer is one message, which a call holds at most
_SHOWN = 500  # characters of an engine's reason, which may repeat the request
_NOT_CONNECTED = ("failed to connect", "DNS resolution failed", "connections to all backends")
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # engines are never asked through a proxy
    ("grpc.max_receive_message_length", _MOST_MESSAGE),
    ("grpc.max_send_message_length", -1),  # bodies of clients have a limit of their own
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


def make_channel(base: BaseUrl) -> grpc.aio.Channel:
    """Return a channel to an engine; it ends with its last reference."""
    host = f"[{base.host}]" if ":" in base.host else base.host
    return grpc.aio.insecure_channel(f"{host}:{base.port}", options=_OPTIONS)


def is_connected(channel: grpc.aio.Channel) -> bool:
    """Return whether a request can be sent now; if not, begin to connect."""
    return channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


async def connect(channel: grpc.aio.Channel) -> None:
    """Wait until a channel is connected.

    Raises:
        Unreachable: it cannot be.
        Exhausted: the router has no file left for it.
    """
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (
            grpc.ChannelConnectivity.TRANSIENT_FAILURE,
            grpc.ChannelConnectivity.SHUTDOWN,
        ):
            raise _not_connected("no connection to its gRPC port")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


def _not_connected(why: str) -> Unreachable:
    """Return the error of a channel that cannot connect. gRPC does not tell whose fault it is."""
    return (Exhausted if open_files.none_left() else Unreachable)(why)


class GrpcConnection(EngineConnection):
    """One request over a channel."""

    usable = False  # for a second request

    def __init__(self, channel: grpc.aio.Channel, healthy: Callable[[], bool]) -> None:
        super().__init__(healthy)
        self._channel = channel
        self._task: asyncio.Task[None] | None = None
        self._read_on = asyncio.Event()
        self._answers: list[bytes] = []  # of a response that is no stream

    def send(self, head: bytes, body: bytes, silence_s: float) -> None:
        """Send a request."""
        call = sglang_grpc.call_for(head, body)
        self._begin(Response(), silence_s)
        self._task = asyncio.create_task(self._receive(call))
        self._task.add_done_callback(self._ended)

    def finish(self) -> bool:
        """End the request."""
        self.close()
        return False

    def close(self) -> None:
        """End the request at once."""
        self._abort()

    def _abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _resume(self) -> None:
        self._read_on.set()

    async def _receive(self, call: Call) -> None:
        asked = self._channel.unary_stream(sglang_grpc.SERVICE + call.name)(call.request)
        response = self.response
        try:
            while (data := await asked.read()) is not grpc.aio.EOF:
                self._heard = time.monotonic()
                self._take(call, call.read(data))
                if response.is_much:
                    self._paused = True
                    self._read_on.clear()
                    await self._read_on.wait()
            self._complete()
        except grpc.aio.AioRpcError as error:
            self._fail(error)
        except Refused as error:
            self._break(f"sent an invalid message: {error}")
        finally:
            asked.cancel()

    def _take(self, call: Call, part: Part) -> None:
        response = self.response
        response.any_bytes = True
        events = call.streams and part.status == HTTPStatus.OK
        if not response.began:
            self._head(part.status, EVENT_STREAM if events else JSON)
        elif call.streams and not events:
            raise Refused("message", "an error in mid-stream")
        if part.body:
            response.any_body = True
            if events:
                response.chunks.append(b"data: %b\n\n" % part.body)
            else:
                self._answers.append(part.body)
        self._wake()

    def _complete(self) -> None:
        response = self.response
        if not response.began:
            raise Refused("response", "it is empty")
        if response.headers["content-type"] == EVENT_STREAM:
            response.chunks.append(b"data: [DONE]\n\n")
        elif len(self._answers) == 1:
            response.chunks.append(self._answers[0])
        elif self._answers:  # to one request for several
            response.chunks.append(b"[%b]" % b",".join(self._answers))
        response.ended = True

    def _fail(self, error: grpc.aio.AioRpcError) -> None:
        code, details = error.code(), error.details() or error.code().name
        if code is StatusCode.UNAVAILABLE and details.startswith(_NOT_CONNECTED):
            self._broken = self._broken or _not_connected(details)  # the channel was lost before
        elif code is StatusCode.UNAVAILABLE:
            kind = ClosedByEngine if self.response.any_bytes else ClosedEarly
            self._broken = self._broken or kind(details)
        elif self.response.began:
            self._broken = self._broken or ConnectionLost(details)
        else:
            self._answer(sglang_grpc.status_of(code.name, details), details)

    def _answer(self, status: int, why: str) -> None:
        self._head(status, JSON)
        self.response.chunks.append(error_body(status, why[:_SHOWN]))
        self.response.any_bytes = self.response.any_body = self.response.ended = True

    def _head(self, status: int, content_type: str) -> None:
        self.response.status = status
        self.response.headers["content-type"] = content_type
        self.response.began = True

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._end(ConnectionLost(f"{error!r}" if error else "the request has ended"))
