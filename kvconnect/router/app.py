"""The router as one thing: routes, health, metrics, and what runs beside its requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web
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
from kvconnect.router.http.client_connection import ClientConnections, Handler
from kvconnect.router.http.connection_limits import ConnectionLimits
from kvconnect.router.http.draining import DrainingPrefills
from kvconnect.router.http.exchange import Exchange
from kvconnect.router.http.http_request import HttpRequest
from kvconnect.router.http.http_response import HttpResponse, error_response, json_response
from kvconnect.router.http.own_address import at_own_address
from kvconnect.router.http.request_reader import RequestReader
from kvconnect.router.http.services import Services
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.metrics import EngineLoads, RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.requests.apis import APIS, Api
from kvconnect.router.requests.retries import Retries
from kvconnect.router.supervisor import Supervisor, TaskKind
from kvconnect.router.tracing import RouterSpans

logger = logging.getLogger(__name__)

_PUBLIC_PATHS = ("/health", "/live", "/ready", "/metrics")
_API_PATHS = frozenset(api.path for api in APIS)
_SCRAPE_PAUSE = 9  # times as long as making the metrics took, until they are made again


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


class RouterApp:
    """One router, but for its listener. Event loop only."""

    def __init__(self, options: RouterOptions, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: that of its listener."""
        self._options = options
        self._tls = tls
        self._metrics = RouterMetrics()
        self._scraped_at, self._scrape_again_at, self._scraped = 0.0, 0.0, b""
        self._scraping: asyncio.Task[None] | None = None
        rules = options.rules
        caches = Caches(rules)
        self._fleet = Fleet(options, _FleetObserver(self._metrics, caches))
        self._turns = itertools.count()
        self._supervisor = Supervisor(self._metrics.count)
        self._client = ConnectionPool(options.limits.silence_s)
        self._membership = Membership(
            options, self._fleet, self._client, self._metrics, caches.indexes
        )
        limits = options.limits
        body_memory = _body_memory_bytes(limits.body_bytes)
        returns = partial(self._metrics.count, "relay_returns")
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
            RequestReader(limits.body_bytes, caches),
            caches,
            RouterSpans(),
            DrainingPrefills(self._supervisor),
            self._membership.receipts,
            Retries(),
        )
        self._routes = self._all_routes()

    def connections(self, idle_s: float) -> ClientConnections:
        """Return what the connections of its listener share. ``idle_s``: one without a complete
        head for this time is closed."""
        refused = partial(self._metrics.count, "refused_connections")
        waiting = _body_memory_bytes(self._options.limits.body_bytes) // 4
        relay = self._services.relay
        held = (lambda: 0) if relay is None else relay.files
        limits = ConnectionLimits(open_files.limit(), waiting, refused, held)
        return ClientConnections(self.handle, limits, idle_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all that the router does beside its requests within the block."""
        async with AsyncExitStack() as ends:
            parts = [self._running(), self._reading_again()]
            if self._options.admin.token:
                parts.append(self._administered())
            if self._options.listening.metrics_port is not None:
                parts.append(self._showing_metrics())
            for part in parts:
                await ends.enter_async_context(part)
            yield

    def _all_routes(self) -> dict[str, tuple[str, Handler]]:
        routes: dict[str, tuple[str, Handler]] = {
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/live": ("GET", self._live),
            "/ready": ("GET", self._health),
            **{api.path: (api.method, self._serving(api)) for api in APIS},
        }
        if self._options.listening.metrics_port is None:
            routes["/metrics"] = ("GET", self._show_metrics)
        return routes

    async def handle(self, request: HttpRequest) -> HttpResponse | None:
        """Answer a client's request; see :data:`Handler`. Public paths, and what browsers ask
        beforehand, need no API key, if keys are set."""
        headers, origins = request.headers, self._options.listening.allowed_origins
        if origins:
            request.more_headers = cross_origin.answer_headers(headers.get("origin", ""), origins)
        request.tenant = self._tenants.find(_api_key(headers), request.remote)
        if request.tenant is None and not _needs_no_key(request):
            text = "send the header Authorization: Bearer <API key>, or x-api-key: <API key>"
            return error_response(request.path, 401, text)
        if origins and request.method == "OPTIONS":
            return HttpResponse(204, headers=cross_origin.preflight_headers(headers, origins))
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            return error_response(request.path, 404, "there is nothing at this path")
        head_too = request.method == "HEAD" and request.path not in _API_PATHS
        if request.method != method and not (method == "GET" and head_too):
            text = f"this path takes {method}, not {request.method}"
            return error_response(request.path, 405, text, {"Allow": method})
        return await handler(request)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Follow the engines within the block."""
        await self._membership.start()
        roles = self._roles()
        try:
            yield
        finally:
            logger.info("stopped")
            await self._stop(roles)

    async def _stop(self, roles: asyncio.Task[None] | None) -> None:
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
        return self._supervisor.keep(TaskKind.ROLES, "the fleet", work)

    @asynccontextmanager
    async def _reading_again(self) -> AsyncIterator[None]:
        """Take changed keys, tokens and certificates within the block."""
        at, token_file, watched = self._options.listening, self._options.admin.token_file, []
        if at.api_key_file:
            watched.append(WatchedFiles((at.api_key_file,), self._take_keys))
        if token_file:
            watched.append(WatchedFiles((token_file,), self._take_token))
        if (tls := self._tls) is not None:
            files = WatchedFiles((at.cert, at.key), lambda: take_certificate(tls, at.cert, at.key))
            watched.append(files)
        keep = self._supervisor.keep
        task = keep(TaskKind.CREDENTIALS, "this router", partial(credentials.follow, watched))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _take_keys(self) -> None:
        self._tenants.take(read_api_keys(self._options.listening.api_key_file))

    def _take_token(self) -> None:
        self._admin_token = read_admin_token(self._options.admin.token_file)

    @asynccontextmanager
    async def _administered(self) -> AsyncIterator[None]:
        """Serve the admin API within the block."""
        admin, tls = self._options.admin, self._tls
        limits, indexes = self._options.limits, self._services.caches.indexes
        cache = CacheAdmin(self._fleet, self._client, self._tenants, limits.timeout_s, indexes)
        made = make_admin(
            self._fleet, self._membership, cache, lambda: self._admin_token, limits.drain_s
        )
        tls = tls if admin.tls else None
        async with at_own_address("admin API", made, admin.host, admin.port, tls):
            yield

    @asynccontextmanager
    async def _showing_metrics(self) -> AsyncIterator[None]:
        """Serve the metrics at an address of their own within the block."""
        at, made = self._options.listening, web.Application()
        assert at.metrics_port is not None, "it has one"

        async def metrics(request: web.Request) -> web.Response:  # noqa: ARG001
            headers = {"Content-Type": CONTENT_TYPE_LATEST}
            return web.Response(body=await self._metrics_text(), headers=headers)

        made.router.add_get("/metrics", metrics)
        async with at_own_address("metrics", made, at.metrics_host, at.metrics_port):
            yield

    def _serving(self, api: Api) -> Handler:
        """Return the handler of an API path that engines serve."""

        async def serve(request: HttpRequest) -> HttpResponse | None:
            return await Exchange(self._services, request, api, next(self._turns)).serve()

        return serve

    async def _models(self, request: HttpRequest) -> HttpResponse:
        """``/v1/models``: models that both a prefill and a decode engine serve now."""
        prefill, decode = (_models_of(self._fleet.all(role)) for role in Role)
        if not decode:
            return error_response(
                request.path, 503, "no decode engine that is up has listed its models yet"
            )
        served = [entry for name, entry in decode.items() if not prefill or name in prefill]
        return json_response({"object": "list", "data": served})

    async def _health(self, request: HttpRequest) -> HttpResponse:
        """200 while a prefill and a decode engine are up, else 503. Tells who needs no key, or has
        one, every engine's state, and why no two engines can hand over."""
        view = self._fleet.view()
        missing, usable = view.missing(), view.can_hand_over()
        status = "unavailable" if missing else "ok" if usable else "degraded"
        state: dict[str, Any] = {"status": status, "missing": [role.value for role in missing]}
        if request.tenant is not None:
            for role in Role:
                state[role.value] = {engine.url: engine.up for engine in self._fleet.all(role)}
            if not usable:
                state["handoffs"] = self._fleet.failed_handoffs()
        return json_response(state, status=503 if missing else 200)

    async def _live(self, request: HttpRequest) -> HttpResponse:  # noqa: ARG002
        """200 while the router runs, whatever its engines do."""
        return json_response({"status": "ok"})

    async def _show_metrics(self, request: HttpRequest) -> HttpResponse:  # noqa: ARG002
        text = await self._metrics_text()
        return HttpResponse(200, text, {"Content-Type": CONTENT_TYPE_LATEST})

    async def _metrics_text(self) -> bytes:
        """Return the router's metrics in Prometheus' text format. Whoever asks waits, so that
        making them takes a tenth of the time at most, however many ask; all who wait get the same
        text."""
        asked = time.monotonic()
        while self._scraped_at < asked:
            if self._scraping is None or self._scraping.done():
                self._scraping = self._supervisor.once(
                    TaskKind.SCRAPE, "the metrics", self._scrape()
                )
            await asyncio.shield(self._scraping)  # goes on when who asked has left
        return self._scraped

    async def _scrape(self) -> None:
        """Make the text of :meth:`_metrics_text`, after a pause."""
        await asyncio.sleep(self._scrape_again_at - time.monotonic())
        began = time.monotonic()
        loads = (EngineLoads(e.role, e.url, e.loads.at(began)) for e in self._fleet.all())
        self._metrics.tokens(loads)
        try:
            self._scraped = await asyncio.to_thread(generate_latest, self._metrics.registry)
            self._scraped_at = began
        finally:
            ended = time.monotonic()
            self._scrape_again_at = ended + _SCRAPE_PAUSE * (ended - began)


def _needs_no_key(request: HttpRequest) -> bool:
    preflight = cross_origin.is_preflight(request.method, request.headers)
    return request.path in _PUBLIC_PATHS or preflight


def _api_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, as clients of OpenAI's or Anthropic's API send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _body_memory_bytes(largest: int) -> int:
    """Return the bytes that all bodies may take: an eighth of free memory, at least one body.

    A body takes up to four times its size: as received, parsed, and as sent to two engines.
    """
    return max(largest, (memory.available_bytes() or 2**33) // 8)


def _models_of(engines: Iterable[Engine]) -> dict[str, Any]:
    """Return the models of all engines that are up: name -> entry of ``/v1/models``."""
    up = [each.info.models for each in engines if each.up]
    return {name: entry for models in up for name, entry in models.items()}
