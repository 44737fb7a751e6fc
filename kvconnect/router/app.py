"""The router's HTTP edge: routes, health, metrics, and the server itself."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvconnect.errors import Refused
from kvconnect.router import legs
from kvconnect.router.client import make_session
from kvconnect.router.exchange import Exchange, Services
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.options import Options
from kvconnect.router.policy import round_robin
from kvconnect.router.upstreams import Fleet

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
_BACKLOG = 1024  # connections that wait to be accepted

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Edge:
    """The handlers of one router. Runs on the event loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._metrics = RouterMetrics(options)
        self._fleet = Fleet(options, self._metrics)
        self._turns = itertools.count()
        self._session: aiohttp.ClientSession  # opened by run(), on the loop it is used on

    async def run(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Open the session and watch the engines while the application runs."""
        async with make_session() as self._session:
            await self._fleet.start(self._session)
            yield
            await self._fleet.stop()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """``/v1/completions`` and ``/v1/chat/completions``."""
        services = Services(self._options, self._fleet, self._metrics, self._session)
        return await Exchange(services, request, next(self._turns)).serve()

    async def models(self, request: web.Request) -> web.StreamResponse:
        """``/v1/models``, as a decode engine that is up answers it."""
        chosen = round_robin(self._fleet.view().decode, next(self._turns), ())
        if chosen is None:
            return error_response(503, "no decode engine is up")
        decode = self._fleet.decode[chosen.index]
        try:
            body = await decode.get(self._session, request.path)
        except (aiohttp.ClientError, asyncio.TimeoutError, Refused) as error:
            logger.warning("%s of %s: %r", request.path, decode.url, error)
            decode.suspect()
            return error_response(502, f"decode engine {decode.index} does not list its models")
        return web.Response(body=body, content_type="application/json")

    async def health(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """200 while a prefill and a decode engine are up, else 503; says which are."""
        missing = self._fleet.view().missing()
        said = {
            "status": "unavailable" if missing else "ok",
            "missing": [role.value for role in missing],
            "prefill": {upstream.url: upstream.up for upstream in self._fleet.prefill},
            "decode": {upstream.url: upstream.up for upstream in self._fleet.decode},
        }
        return web.json_response(said, status=503 if missing else 200)

    async def metrics(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """The router's metrics, for Prometheus."""
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def make_app(options: Options) -> web.Application:
    """Return the application. Serve it with ``handler_cancellation=True``: a client that
    disconnects must cancel what runs for it."""
    edge = Edge(options)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_openai_errors])
    app.cleanup_ctx.append(edge.run)
    app.router.add_post("/v1/completions", edge.complete)
    app.router.add_post("/v1/chat/completions", edge.complete)
    app.router.add_get("/v1/models", edge.models)
    app.router.add_get("/health", edge.health)
    app.router.add_get("/metrics", edge.metrics)
    return app


def serve(options: Options, host: str, port: int) -> None:
    """Run a router until SIGINT or SIGTERM; port 0 picks a free one, which the log names.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        at = f"[{host}]" if ":" in host else host
        logger.info("router on http://%s:%d", at, listener.getsockname()[1])
        web.run_app(
            make_app(options),
            sock=listener,
            handler_cancellation=True,
            access_log=None,
            print=None,
            loop=uvloop.new_event_loop(),
        )


def error_response(status: int, message: str) -> web.Response:
    """Return an error as OpenAI clients expect it."""
    body = legs.error_body(status, message)
    return web.Response(status=status, body=body, content_type="application/json")


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such route or method, body too large
        return error_response(error.status, error.reason)
    except ConnectionResetError:  # the client left while it was still asking
        return error_response(400, "the request was cut off")
