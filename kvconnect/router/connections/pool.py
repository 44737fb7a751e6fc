"""Connections to engines, kept for the next request. Event loop only."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvconnect import open_files
from kvconnect.router.connections.engine_connection import (
    READ_BYTES,
    BaseUrl,
    ClosedEarly,
    EngineConnection,
    Exhausted,
    NotTaken,
    Unreachable,
    read,
)
from kvconnect.router.connections.http1 import Connection, request_head

if TYPE_CHECKING:
    from grpc.aio import Channel

CONNECT_S = 5.0
ANSWER_BYTES = 64 * 2**20  # limit of a response that is read as a whole
IDLE_S = 2.0  # idle connections are reused this long; engines (uvicorn) close theirs after 5
_AT_ONCE_S = 1.0  # within which an engine closes a kept connection that it had given up
END_SILENT_S = 10.0  # an engine may be down this long until what it has not answered is given up
_IDLE_MOST = 256  # connections kept per engine
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
"""This machine has no file, port or memory left for a connection."""
_T = TypeVar("_T")


class ConnectionPool:
    """Connections to all engines of one router."""

    def __init__(self, silence_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._silence_s = silence_s
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._idle: dict[BaseUrl, list[EngineConnection]] = {}
        self._channels: dict[BaseUrl, Channel] = {}  # of engines that speak gRPC
        self._asking: dict[BaseUrl, set[EngineConnection]] = {}
        self._down_since: dict[BaseUrl, float] = {}
        self._tls = tls  # created on first use: loading certificate authorities is slow

    async def open(
        self,
        base: BaseUrl,
        head: bytes,
        body: bytes = b"",
        written: Callable[[], None] | None = None,
    ) -> EngineConnection:
        """Send a request; return its connection once the response's head has been received.

        The engine may close a kept connection at any time. If it does so at once, before the first
        byte of the response, the request is sent again on a new connection. An engine that closes
        it later, or takes no new one, has ended while it had the request.

        Raises:
            Unreachable: no connection within ``CONNECT_S`` seconds.
            ConnectionLost: the connection broke before the response began.
            NotTaken: the engine's API has nothing for the request.
        """
        kept = self._take(base)
        if kept is None:
            return await self._ask(base, await self._connect(base), head, body, written)
        sent = time.monotonic()
        try:
            return await self._ask(base, kept, head, body, written)
        except ClosedEarly as closed:
            if time.monotonic() - sent > _AT_ONCE_S:
                raise
            try:
                connection = await self._connect(base)
            except Exhausted:
                raise
            except Unreachable:
                raise closed from None
        return await self._ask(base, connection, head, body, written)

    def release(self, base: BaseUrl, connection: EngineConnection) -> None:
        """Give a connection back; it is closed unless its response is complete."""
        idle = self._idle.setdefault(base, [])
        self._answered(base, connection)
        if connection.finish():
            connection.used_at = time.monotonic()
            idle.append(connection)
            if len(idle) > _IDLE_MOST:
                idle.pop(0).close()

    def mark(self, base: BaseUrl, *, up: bool) -> None:
        """Take what a probe of an engine found. An engine that froze closes no connection, so
        requests that it has not answered for a while are given up here."""
        if up:
            self._down_since.pop(base, None)
            return
        self._channels.pop(base, None)  # its connection may be dead without a sign of it
        now = time.monotonic()
        since = self._down_since.setdefault(base, now)
        if now - since >= END_SILENT_S:
            for connection in list(self._asking.get(base, ())):
                connection.end_silent(since)

    def forget(self, base: BaseUrl) -> None:
        """Close the kept connections to one engine."""
        self._down_since.pop(base, None)
        self._channels.pop(base, None)
        for connection in self._idle.pop(base, ()):
            connection.close()

    def close(self) -> None:
        """Close all kept connections."""
        for base in [*self._idle, *self._channels]:
            self.forget(base)

    async def get(self, base: BaseUrl, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of a GET.

        Raises:
            Unreachable, ConnectionLost, TimeoutError: no response.
        """
        return await self.whole(base, request_head(base, "GET", path, {}), b"", timeout_s)

    async def whole(
        self, base: BaseUrl, head: bytes, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a request on a new connection; return status and body.

        Raises:
            Unreachable, ConnectionLost, TimeoutError: no response.
        """
        return await within(self._whole(base, head, body), timeout_s)

    async def _whole(self, base: BaseUrl, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Use a new connection, so that background checks never see a kept one break."""
        try:
            connection = await self._ask(base, await self._connect(base), head, body, None)
        except NotTaken as error:
            return error.status, str(error).encode()
        try:
            return connection.response.status, await read(connection, ANSWER_BYTES)
        finally:
            self._answered(base, connection)
            connection.close()

    async def _ask(
        self,
        base: BaseUrl,
        connection: EngineConnection,
        head: bytes,
        body: bytes,
        written: Callable[[], None] | None,
    ) -> EngineConnection:
        begun = False
        self._asking.setdefault(base, set()).add(connection)
        try:
            connection.send(head, body, self._silence_s)
            if written is not None:
                written()
            await connection.wait_for_head()
            begun = True
        finally:
            if not begun:
                self._answered(base, connection)
                connection.close()
        return connection

    def _answered(self, base: BaseUrl, connection: EngineConnection) -> None:
        asking = self._asking.get(base, set())
        asking.discard(connection)
        if not asking:
            self._asking.pop(base, None)

    async def _connect(self, base: BaseUrl) -> EngineConnection:
        return await (self._connect_grpc(base) if base.grpc else self._connect_http(base))

    async def _connect_grpc(self, base: BaseUrl) -> EngineConnection:
        # An optional package.
        from kvconnect.router.connections import grpc_connection

        if base not in self._channels:
            self._channels[base] = grpc_connection.make_channel(base)
        channel = self._channels[base]
        try:
            if not grpc_connection.is_connected(channel):
                await within(grpc_connection.connect(channel), CONNECT_S)
        except TimeoutError as error:
            raise Unreachable(f"{base.name}: no connection in time") from error
        except Unreachable as error:
            raise type(error)(f"{base.name}: {error}") from error
        return grpc_connection.GrpcConnection(channel, lambda: base not in self._down_since)

    async def _connect_http(self, base: BaseUrl) -> EngineConnection:
        loop = asyncio.get_running_loop()
        if base.tls:
            self._tls = self._tls or ssl.create_default_context()
        tls = self._tls if base.tls else None
        connecting = asyncio.ensure_future(
            loop.create_connection(
                lambda: Connection(self._buffer, lambda: base not in self._down_since),
                base.host,
                base.port,
                ssl=tls,
            )
        )
        taken = False
        try:
            _, connection = await within(connecting, CONNECT_S)
            taken = True
            return connection
        except (TimeoutError, OSError) as error:
            # Looking a name up says in other words that there are no files.
            none_left = getattr(error, "errno", 0) in _NONE_LEFT or open_files.none_left()
            kind = Exhausted if none_left else Unreachable
            raise kind(f"{base.name}: {error or 'no connection in time'}") from error
        finally:
            if not taken:  # the connection may still open, without an owner
                connecting.add_done_callback(_abandon)

    def _take(self, base: BaseUrl) -> EngineConnection | None:
        idle = self._idle.get(base)
        now = time.monotonic()
        while idle:
            connection = idle.pop()
            if connection.usable and now - connection.used_at < IDLE_S:
                return connection
            connection.close()
        return None


def _abandon(connecting: asyncio.Future[tuple[asyncio.Transport, Connection]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].abort()


async def within(work: Awaitable[_T], timeout_s: float) -> _T:
    """Return what ``work`` returns. Unlike ``asyncio.wait_for`` of Python 3.11 and before, it
    never swallows a cancellation that comes with the result.

    Raises:
        TimeoutError: not within ``timeout_s`` seconds.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
    finally:
        if task.cancel():
            await asyncio.wait({task})
    raise TimeoutError
