"""Serves what operators ask (metrics, the admin API) at an address of its own, by aiohttp."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from aiohttp import web

from kvconnect.router.http.connection_limits import BUSY

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
"""To one such address: more would take the files of clients and engines."""
_END_S = 1.0  # for open requests when the router ends, which has waited for its clients


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is open."""
        cast(asyncio.Transport, transport).write(BUSY)
        transport.close()


@asynccontextmanager
async def at_own_address(
    what: str, made: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve an application within the block. ``what``: its name in the log.

    Raises:
        OSError: the address cannot be used.
    """
    runner = web.AppRunner(made, shutdown_timeout=_END_S)
    await runner.setup()
    try:
        serve = runner.server
        assert serve is not None, "it is set up"

        def connection() -> asyncio.Protocol:
            full = len(serve.connections) >= MOST_CONNECTIONS
            return _Refused() if full else serve()

        loop = asyncio.get_running_loop()
        server = await loop.create_server(connection, host, port, ssl=tls)
        try:
            logger.info("%s on %s", what, server.sockets[0].getsockname())
            yield
        finally:
            server.close()
    finally:
        await runner.cleanup()
