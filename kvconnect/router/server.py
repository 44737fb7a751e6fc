"""The router's process: it listens, serves until it is told to stop, and lets requests end."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from prometheus_client import disable_created_metrics

from kvconnect import open_files
from kvconnect.router.app import RouterApp
from kvconnect.router.http.client_connection import ClientConnection
from kvconnect.router.options import RouterOptions

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 10_000  # new objects between two garbage collections
_BACKLOG = 1024  # connections that wait to be accepted
IDLE_S = 75.0  # an idle connection is closed after this time without a complete request head
UNREAD_S = 60.0  # a connection is closed when the client reads nothing for this time


def serve(options: RouterOptions) -> None:
    """Run a router until SIGINT or SIGTERM. Port 0 picks a free port, which the log names.

    Raises:
        OSError: the address or the certificate cannot be used.
        ConfigError: a tracing variable has a bad value.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they are a third of all series
    at, context = options.listening, None
    if at.cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(at.cert, at.key)
    open_files.raise_limit()
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    address = (at.host, at.port)
    with socket.create_server(
        address, family=family, backlog=_BACKLOG, reuse_port=at.shared
    ) as listener:
        # Accepted connections inherit this option. It also detects vanished clients.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
        host = f"[{at.host}]" if ":" in at.host else at.host
        scheme = "http" if context is None else "https"
        logger.info("router on %s://%s:%d", scheme, host, listener.getsockname()[1])
        if not (at.api_keys or _is_loopback(at.host)):
            text = "whoever reaches %s may use all engines: set --api-key-file, or --host 127.0.0.1"
            logger.warning(text, host)
        # A collection over all start-up objects would delay requests by milliseconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        uvloop.run(_serve_until_stopped(options, listener, context))


async def _serve_until_stopped(
    options: RouterOptions, listener: socket.socket, context: ssl.SSLContext | None
) -> None:
    """Serve clients until a signal comes, and then until open requests have ended."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(options, listener, options.limits.drain_s, context):
        await stop.wait()


@asynccontextmanager
async def serving(
    options: RouterOptions,
    listener: socket.socket,
    drain_s: float,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[RouterApp]:
    """Run a router within the block, and then until open requests have ended: ``drain_s`` seconds
    at most."""
    router, loop = RouterApp(options, context), asyncio.get_running_loop()
    async with router.running():
        connections = router.connections(IDLE_S)
        server = await loop.create_server(
            lambda: ClientConnection(connections), sock=listener, ssl=context, backlog=_BACKLOG
        )
        try:
            yield router
        finally:
            logger.info("stopping; open requests have %g s to end", drain_s)
            server.close()
            await connections.end(drain_s)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
