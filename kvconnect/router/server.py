"""The router's process: it listens, serves until it is told to stop, and lets requests end."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import ssl

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import disable_created_metrics

from kvconnect import open_files
from kvconnect.router.app import CONNECTIONS, SERVER_OPTIONS, make_app
from kvconnect.router.options import RouterOptions

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 10_000  # new objects between two garbage collections
_BACKLOG = 1024  # connections that wait to be accepted
IDLE_S = 75.0  # an idle connection is closed after this time without a complete request head
_SHOWN = 200  # characters of a client's input that are logged
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
        logging.getLogger("aiohttp.server").addFilter(_OneLineErrors())
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        uvloop.run(_serve_until_stopped(options, listener, context))


async def _serve_until_stopped(
    options: RouterOptions, listener: socket.socket, context: ssl.SSLContext | None
) -> None:
    """Serve clients until a signal comes, and then until open requests have ended."""
    app = make_app(options, context)
    runner = web.AppRunner(
        app,
        shutdown_timeout=options.limits.drain_s,
        keepalive_timeout=IDLE_S,
        access_log=None,
        **SERVER_OPTIONS,
    )
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await runner.setup()
    try:
        assert runner.server is not None, "it is set up"
        app[CONNECTIONS].watch(runner.server)
        await web.SockSite(runner, listener, ssl_context=context, backlog=_BACKLOG).start()
        await stop.wait()
    finally:
        await runner.cleanup()


class _OneLineErrors(logging.Filter):
    """Logs input that is not HTTP as one debug line, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record (called by ``logging``)."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            text = " ".join(str(error.message).split())[:_SHOWN]
            record.msg, record.args = "not an HTTP request: %s", (text,)
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
