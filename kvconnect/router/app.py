"""The router's HTTP edge: routes, health, metrics, and the server itself."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest

from kvconnect import memory
from kvconnect.router.admin import make_admin
from kvconnect.router.apis import APIS, Api
from kvconnect.router.exchange import Exchange, Services
from kvconnect.router.fleet.membership import Membership
from kvconnect.router.fleet.upstreams import Fleet, Upstream
from kvconnect.router.http import upstream_requests
from kvconnect.router.http.admission import Admission, BodyMemory, ClientConcurrency
from kvconnect.router.http.client import DrainingPrefills
from kvconnect.router.http.pool import ConnectionPool
from kvconnect.router.http.requests import RequestReader
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.loads import Role
from kvconnect.router.policy.tenants import Tenant, Tenants
from kvconnect.router.supervisor import Supervisor
from kvconnect.router.tracing import RouterSpans

logger = logging.getLogger(__name__)

_OPEN = ("/health", "/metrics")
_GARBAGE = 10_000  # new objects between two looks for unreachable ones
_BACKLOG = 1024  # connections that wait to be accepted
IDLE_S = 75.0  # a connection may wait so long for a request, until the end of its head
_SHOWN = 200  # characters of what a client sent
UNREAD_S = 60.0  # a client may take nothing of what waits for it so long

SERVER_OPTIONS: dict[str, Any] = {"auto_decompress": False, "handler_cancellation": True}
"""How to serve the application: no body grows, and a client that leaves cancels what it caused."""

_TENANT = "kvconnect.tenant"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Notices:
    """Passes on what becomes of engines."""

    def __init__(self, metrics: RouterMetrics, caches: Caches) -> None:
        self.add_upstream, self.remove_upstream = metrics.add_upstream, metrics.remove_upstream
        self._metrics, self._caches = metrics, caches

    def up(self, upstream: Upstream) -> None:
        """One was found up or down."""
        self._metrics.up(upstream)
        if not upstream.up:
            self._caches.forget(upstream.role, upstream.index, len(upstream.loads.own))


class RouterHandlers:
    """The handlers of one router. Runs on the event loop."""

    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self._metrics = RouterMetrics()
        caches = Caches(options)
        self._fleet = Fleet(options, _Notices(self._metrics, caches))
        self._turns = itertools.count()
        self._client = ConnectionPool(options.limits.silence_s)
        self._membership = Membership(
            options, self._fleet, self._client, self._metrics, caches.indexes
        )
        limits = options.limits
        room = _room_for_bodies(limits.body_bytes)
        self.tenants = Tenants(options.listening.api_keys, isolate=options.listening.isolate)
        self._services = Services(
            options,
            self._fleet,
            self._metrics,
            self._client,
            Admission(limits, self._metrics.queued),
            ClientConcurrency(limits.client_concurrent),
            BodyMemory(room, max(room // 2, limits.body_bytes)),
            RequestReader(limits.body_bytes, prefix=bool(caches.indexes)),
            caches,
            RouterSpans(),
            DrainingPrefills(Supervisor(self._metrics.count)),
        )

    async def run(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Look after the engines while the application runs."""
        await self._membership.start()
        yield
        await self._membership.stop()
        await self._services.draining_prefills.close()
        self._services.intake.close()
        self._client.close()
        await asyncio.to_thread(self._services.spans.close)

    async def administer(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Serve the administrators' API while the application runs."""
        admin = self._options.admin
        drain_s = self._options.limits.drain_s
        runner = web.AppRunner(make_admin(self._fleet, self._membership, admin.token, drain_s))
        await runner.setup()
        await web.TCPSite(runner, admin.host, admin.port).start()
        logger.info("admin API on %s", runner.addresses[0])
        yield
        await runner.cleanup()

    def serving(self, api: Api) -> _Handler:
        """Return the handler of what engines serve."""

        async def serve(request: web.Request) -> web.StreamResponse:
            tenant: Tenant = request[_TENANT]
            return await Exchange(self._services, request, api, tenant, next(self._turns)).serve()

        return serve

    async def models(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """``/v1/models``: what prefill and decode engines that are up both serve."""
        prefill, decode = (_models(self._fleet.all(role)) for role in Role)
        if not decode:
            return error_response(503, "no decode engine that is up has said what it serves")
        served = [said for name, said in decode.items() if not prefill or name in prefill]
        return web.json_response({"object": "list", "data": served})

    async def health(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """200 while a prefill and a decode engine are up, else 503; says which are."""
        missing = self._fleet.view().missing()
        said = {
            "status": "unavailable" if missing else "ok",
            "missing": [role.value for role in missing],
            "prefill": {upstream.url: upstream.up for upstream in self._fleet.all(Role.PREFILL)},
            "decode": {upstream.url: upstream.up for upstream in self._fleet.all(Role.DECODE)},
        }
        return web.json_response(said, status=503 if missing else 200)

    async def metrics(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """The router's metrics, for Prometheus."""
        self._metrics.tokens(self._fleet.all(), time.monotonic())
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def make_app(options: RouterOptions) -> web.Application:
    """Return the application. Serve it with :data:`SERVER_OPTIONS`."""
    edge = RouterHandlers(options)
    app = web.Application(middlewares=[_known_clients(edge.tenants), _openai_errors])
    app.cleanup_ctx.append(edge.run)
    if options.admin.token:
        app.cleanup_ctx.append(edge.administer)
    for api in APIS:
        app.router.add_route(api.method, api.path, edge.serving(api))
    app.router.add_get("/v1/models", edge.models)
    app.router.add_get("/health", edge.health)
    app.router.add_get("/metrics", edge.metrics)
    return app


def serve(options: RouterOptions) -> None:
    """Run a router until SIGINT or SIGTERM; port 0 picks a free one, which the log names.

    Raises:
        OSError: the address cannot be listened on, or the certificate cannot be used.
        ConfigError: a variable of tracing cannot be used.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of all series
    at, context = options.listening, None
    if at.cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(at.cert, at.key)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file for each connection
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    address = (at.host, at.port)
    with socket.create_server(
        address, family=family, backlog=_BACKLOG, reuse_port=at.shared
    ) as listener:
        # Accepted connections inherit it. It also finds clients that vanished.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
        host = f"[{at.host}]" if ":" in at.host else at.host
        scheme = "http" if context is None else "https"
        logger.info("router on %s://%s:%d", scheme, host, listener.getsockname()[1])
        # To look through all that start-up made holds up every request for milliseconds.
        logging.getLogger("aiohttp.server").addFilter(_OneLine())
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GARBAGE)
        web.run_app(
            make_app(options),
            sock=listener,
            ssl_context=context,
            shutdown_timeout=options.limits.drain_s,
            keepalive_timeout=IDLE_S,
            backlog=_BACKLOG,
            access_log=None,
            print=None,
            loop=uvloop.new_event_loop(),
            **SERVER_OPTIONS,
        )


def _known_clients(tenants: Tenants) -> Middleware:
    """Turn away who names no key, where there are keys; health and metrics are for all."""

    @web.middleware
    async def known(request: web.Request, handler: _Handler) -> web.StreamResponse:
        named = request.headers.get("Authorization", "")
        tenant = tenants.find(named, request.remote or "")
        if tenant is None and request.path not in _OPEN:
            return error_response(401, "send Authorization: Bearer and an API key")
        request[_TENANT] = tenant
        return await handler(request)

    return known


class _OneLine(logging.Filter):
    """Has a request that is no HTTP, which anybody can send, leave one line and no traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """logging: whether to write a record."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            text = " ".join(str(error.message).split())[:_SHOWN]
            record.msg, record.args = "not an HTTP request: %s", (text,)
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


def _room_for_bodies(one: int) -> int:
    """An eighth of free memory, and room for one: with what goes to the two engines, and what is
    read of it, a body takes up to four times its bytes."""
    return max(one, (memory.available_bytes() or 2**33) // 8)


def _models(upstreams: Iterable[Upstream]) -> dict[str, Any]:
    """Return what engines that are up serve."""
    return {name: said for each in upstreams if each.up for name, said in each.info.models.items()}


def error_response(status: int, message: str) -> web.Response:
    """Return an error as OpenAI clients expect it."""
    body = upstream_requests.error_body(status, message)
    return web.Response(status=status, body=body, content_type="application/json")


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such route or method, body too large
        return error_response(error.status, error.reason)
    except ConnectionResetError:  # the client left while it was still asking
        return error_response(400, "the request was cut off")
