"""The router's HTTP application: routes, health and metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvconnect import memory, open_files
from kvconnect.router import credentials, cross_origin
from kvconnect.router.admin import make_admin
from kvconnect.router.cache_admin import CacheAdmin
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.connections.relay import make_relay
from kvconnect.router.credentials import (
    WatchedFiles,
    read_admin_token,
    read_api_keys,
    take_certificate,
)
from kvconnect.router.fleet.auto_roles import AutoRoles
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.membership import Membership
from kvconnect.router.fleet.role_switch import RoleSwitch
from kvconnect.router.http.admission import Admission, BodyMemory, ClientConcurrency
from kvconnect.router.http.client_connections import ClientConnections
from kvconnect.router.http.draining import DrainingPrefills
from kvconnect.router.http.exchange import Exchange
from kvconnect.router.http.request_reader import RequestReader
from kvconnect.router.http.services import Services
from kvconnect.router.http.tenants import Tenant, Tenants
from kvconnect.router.metrics import EngineLoads, RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.requests.apis import APIS, Api
from kvconnect.router.requests.errors import error_body
from kvconnect.router.requests.retries import Retries
from kvconnect.router.supervisor import Supervisor, TaskKind
from kvconnect.router.tracing import RouterSpans

logger = logging.getLogger(__name__)

_PUBLIC_PATHS = ("/health", "/live", "/ready", "/metrics")
_SCRAPE_PAUSE = 9  # times as long as making the metrics took, until they are made again

SERVER_OPTIONS: dict[str, Any] = {
    "auto_decompress": False,
    "handler_cancellation": True,
    "max_line_size": 16 * 1024,
    "max_field_size": 32 * 1024,
    "max_headers": 64,
}
"""Server options: bodies are not decompressed; a client's disconnect cancels its handler; tokens
with many groups and cookies make headers long."""

CONNECTIONS = web.AppKey("connections", ClientConnections)
_TENANT = web.RequestKey("tenant", Tenant)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _FleetObserver:
    """Tells metrics and caches about changes in the fleet."""

    def __init__(self, metrics: RouterMetrics, caches: Caches) -> None:
        self.add_engine, self.remove_engine = metrics.add_engine, metrics.remove_engine
        self._metrics, self._caches = metrics, caches

    def up(self, engine: Engine) -> None:
        """Record an engine's new state; forget the cache of one that went down."""
        self._metrics.up(engine.role, engine.url, up=engine.up)
        if not engine.up:
            self._caches.forget(engine.role, engine.index, len(engine.loads.own))


class RouterHandlers:
    """HTTP handlers of one router. Event loop only. ``tls``: that of its listener."""

    def __init__(self, options: RouterOptions, tls: ssl.SSLContext | None) -> None:
        self._options = options
        self._tls = tls
        self._metrics = RouterMetrics()
        self._scraped_at, self._scrape_again_at, self._scraped = 0.0, 0.0, b""
        self._scraping = asyncio.Lock()
        rules = options.rules
        caches = Caches(rules)
        self._fleet = Fleet(options, _FleetObserver(self._metrics, caches))
        self._turns = itertools.count()
        self._client = ConnectionPool(options.limits.silence_s)
        self._membership = Membership(
            options, self._fleet, self._client, self._metrics, caches.indexes
        )
        limits = options.limits
        body_memory = _body_memory_bytes(limits.body_bytes)
        returns = partial(self._metrics.count, "relay_returns")
        refused = partial(self._metrics.count, "refused_connections")
        self.connections = ClientConnections(open_files.limit(), refused)
        self._tenants = Tenants(options.listening.api_keys, isolate=options.listening.isolate)
        self._admin_token = options.admin.token
        self._services = Services(
            options,
            rules,
            self._fleet,
            self._metrics,
            self._client,
            make_relay(returns) if options.listening.relay else None,
            Admission(limits, self._metrics.queued),
            ClientConcurrency(limits.client_concurrent),
            BodyMemory("request bodies", body_memory, max(body_memory // 2, limits.body_bytes)),
            BodyMemory("answers", body_memory, body_memory // 2),
            RequestReader(limits.body_bytes, prefix=bool(caches.indexes)),
            caches,
            RouterSpans(),
            DrainingPrefills(Supervisor(self._metrics.count)),
            self._membership.receipts,
            Retries(),
        )

    async def run(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Run the background tasks while the application runs."""
        await self._membership.start()
        roles = self._roles()
        yield
        logger.info("stopped")
        if roles is not None:
            roles.cancel()
            await asyncio.gather(roles, return_exceptions=True)
        await self._membership.stop()
        await self._services.draining_prefills.close()
        self._services.intake.close()
        self._client.close()
        if self._services.relay is not None:
            self._services.relay.close()
        await asyncio.to_thread(self._services.spans.close)

    def _roles(self) -> asyncio.Task[None] | None:
        """Start to change roles as the load asks for it, where that is wanted."""
        if not self._options.auto_roles:
            return None
        switch = RoleSwitch(self._membership, self._fleet)
        drain_s = self._options.limits.drain_s
        work = AutoRoles(self._fleet, switch, self._metrics, drain_s).run
        return Supervisor(self._metrics.count).keep(TaskKind.ROLES, "the fleet", work)

    async def stopping(self, app: web.Application) -> None:  # noqa: ARG002
        """Say that no new request is taken."""
        logger.info("stopping; open requests have %g s to end", self._options.limits.drain_s)

    async def read_again(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Take changed keys, tokens and certificates while the application runs."""
        at, token_file, watched = self._options.listening, self._options.admin.token_file, []
        if at.api_key_file:
            watched.append(WatchedFiles((at.api_key_file,), self._take_keys))
        if token_file:
            watched.append(WatchedFiles((token_file,), self._take_token))
        if (tls := self._tls) is not None:
            files = WatchedFiles((at.cert, at.key), lambda: take_certificate(tls, at.cert, at.key))
            watched.append(files)
        keep = Supervisor(self._metrics.count).keep
        task = keep(TaskKind.CREDENTIALS, "this router", partial(credentials.follow, watched))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _take_keys(self) -> None:
        self._tenants.take(read_api_keys(self._options.listening.api_key_file))

    def _take_token(self) -> None:
        self._admin_token = read_admin_token(self._options.admin.token_file)

    async def administer(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Serve the admin API while the application runs."""
        admin, tls = self._options.admin, self._tls
        limits, indexes = self._options.limits, self._services.caches.indexes
        cache = CacheAdmin(self._fleet, self._client, self._tenants, limits.timeout_s, indexes)
        made = make_admin(
            self._fleet, self._membership, cache, lambda: self._admin_token, limits.drain_s
        )
        tls = tls if admin.tls else None
        async with _at_own_address("admin API", made, admin.host, admin.port, tls):
            yield

    async def serve_metrics(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        """Serve the metrics at an address of their own while the application runs."""
        at, made = self._options.listening, web.Application()
        assert at.metrics_port is not None, "it has one"
        made.router.add_get("/metrics", self.metrics)
        async with _at_own_address("metrics", made, at.metrics_host, at.metrics_port):
            yield

    def authenticate(self) -> Middleware:
        """Return what rejects requests without a known API key, if keys are set. Public paths, and
        what browsers ask beforehand, need none."""

        @web.middleware
        async def known(request: web.Request, handler: _Handler) -> web.StreamResponse:
            tenant = self._tenants.find(_api_key(request.headers), request.remote or "")
            if tenant is not None:
                request[_TENANT] = tenant
            elif not (request.path in _PUBLIC_PATHS or cross_origin.is_preflight(request)):
                text = "send the header Authorization: Bearer <API key>, or x-api-key: <API key>"
                return error_response(request.path, 401, text)
            return await handler(request)

        return known

    def serving(self, api: Api) -> _Handler:
        """Return the handler of an API path that engines serve."""

        async def serve(request: web.Request) -> web.StreamResponse:
            tenant = request[_TENANT]
            return await Exchange(self._services, request, api, tenant, next(self._turns)).serve()

        return serve

    async def models(self, request: web.Request) -> web.StreamResponse:
        """``/v1/models``: models that both a prefill and a decode engine serve now."""
        prefill, decode = (_models(self._fleet.all(role)) for role in Role)
        if not decode:
            return error_response(
                request.path, 503, "no decode engine that is up has listed its models yet"
            )
        served = [entry for name, entry in decode.items() if not prefill or name in prefill]
        return web.json_response({"object": "list", "data": served})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while a prefill and a decode engine are up, else 503. Tells who needs no key, or has
        one, every engine's state, and why no two engines can hand over."""
        view = self._fleet.view()
        missing, usable = view.missing(), view.can_hand_over()
        status = "unavailable" if missing else "ok" if usable else "degraded"
        state: dict[str, Any] = {"status": status, "missing": [role.value for role in missing]}
        if _TENANT in request:
            for role in Role:
                state[role.value] = {engine.url: engine.up for engine in self._fleet.all(role)}
            if not usable:
                state["handoffs"] = self._fleet.failed_handoffs()
        return web.json_response(state, status=503 if missing else 200)

    async def live(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """200 while the router runs, whatever its engines do."""
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        """The router's metrics in Prometheus' text format. Whoever asks waits, so that making them
        takes a tenth of the time at most, however many ask; all who wait get the same text."""
        asked = time.monotonic()
        async with self._scraping:
            if self._scraped_at < asked:
                await asyncio.sleep(self._scrape_again_at - asked)
                self._scraped_at = now = time.monotonic()
                loads = (EngineLoads(e.role, e.url, e.loads.at(now)) for e in self._fleet.all())
                self._metrics.tokens(loads)
                self._scraped = await asyncio.to_thread(generate_latest, self._metrics.registry)
                ended = time.monotonic()
                self._scrape_again_at = ended + _SCRAPE_PAUSE * (ended - now)
            body = self._scraped
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def make_app(options: RouterOptions, tls: ssl.SSLContext | None = None) -> web.Application:
    """Return the application. Serve it with :data:`SERVER_OPTIONS`, and with ``tls`` if any; have
    its :data:`CONNECTIONS` watch the server."""
    edge = RouterHandlers(options, tls)
    app = web.Application(middlewares=[edge.authenticate(), _own_errors])
    app[CONNECTIONS] = edge.connections
    app.cleanup_ctx.extend((edge.run, edge.read_again))
    app.on_shutdown.append(edge.stopping)
    if options.admin.token:
        app.cleanup_ctx.append(edge.administer)
    for api in APIS:
        app.router.add_route(api.method, api.path, edge.serving(api))
    app.router.add_get("/v1/models", edge.models)
    app.router.add_get("/health", edge.health)
    app.router.add_get("/live", edge.live)
    app.router.add_get("/ready", edge.health)
    if options.listening.metrics_port is None:
        app.router.add_get("/metrics", edge.metrics)
    else:
        app.cleanup_ctx.append(edge.serve_metrics)
    if origins := options.listening.allowed_origins:
        cross_origin.allow(app, origins)
    return app


@asynccontextmanager
async def _at_own_address(
    what: str, made: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve another application within the block."""
    runner = web.AppRunner(made)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        logger.info("%s on %s", what, runner.addresses[0])
        yield
    finally:
        await runner.cleanup()


def _api_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, as clients of OpenAI's or Anthropic's API send it."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def _body_memory_bytes(largest: int) -> int:
    """Return the bytes that all bodies may take: an eighth of free memory, at least one body.

    A body takes up to four times its size: as received, parsed, and as sent to two engines.
    """
    return max(largest, (memory.available_bytes() or 2**33) // 8)


def _models(engines: Iterable[Engine]) -> dict[str, Any]:
    """Return the models of all engines that are up: name -> entry of ``/v1/models``."""
    up = [each.info.models for each in engines if each.up]
    return {name: entry for models in up for name, entry in models.items()}


def error_response(path: str, status: int, message: str) -> web.Response:
    """Return an error in the format of the path's API."""
    body = error_body(path, status, message)
    return web.Response(status=status, body=body, content_type="application/json")


@web.middleware
async def _own_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such route or method, body too large
        return error_response(request.path, error.status, error.reason)
    except ConnectionResetError:  # the client disconnected before its body was complete
        return error_response(request.path, 400, "the request body is incomplete")
