"""Admin API on its own port: add, drain, switch and remove engines while the router runs.

``GET /workers`` lists engines. ``POST /workers`` with ``{"role": "prefill", "worker": "URL"}`` adds
one. ``POST /workers/drain``, ``POST /workers/switch`` (to the other role) and
``DELETE /workers`` name an engine by ``role`` and ``url``. ``GET /cache`` reports on the engines'
caches, ``POST /cache/stats`` on a prompt in them, ``POST /cache`` controls them
(:mod:`kvconnect.router.cache_admin`). Every request needs the admin token.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kvconnect.errors import ConfigError, KVConnectError, Refused
from kvconnect.router.cache_admin import CacheAdmin
from kvconnect.router.engine_spec import engine_spec
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.membership import ADMIN, FLAGS, Membership
from kvconnect.router.fleet.role_switch import RoleSwitch
from kvconnect.router.policy.fleet_view import Role

_MAX_BODY_BYTES = 16 * 2**20  # of a prompt for /cache
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """Handlers of the admin API. Event loop only."""

    def __init__(self, fleet: Fleet, membership: Membership, drain_s: float) -> None:
        self._fleet = fleet
        self._membership = membership
        self._switch = RoleSwitch(membership, fleet)
        self._drain_s = drain_s

    async def workers(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """List all engines with their state and load."""
        now = time.monotonic()
        return web.json_response([self._described(engine, now) for engine in self._fleet.all()])

    async def add(self, request: web.Request) -> web.Response:
        """Add an engine."""
        role, text = await _named_in(request, "worker")
        try:
            engine = self._membership.add(role, engine_spec("worker", text), ADMIN)
        except ConfigError as error:
            return _refused(400, str(error))
        except Refused as error:
            return _refused(409, str(error))
        return web.json_response(self._described(engine, time.monotonic()), status=201)

    async def drain(self, request: web.Request) -> web.Response:
        """Send no more requests to an engine."""
        engine = await self._engine_in(request)
        self._membership.drain(engine)
        return web.json_response(self._described(engine, time.monotonic()))

    async def remove(self, request: web.Request) -> web.Response:
        """Drain an engine, then forget it. One that a source names would come back."""
        engine = await self._engine_in(request)
        source = self._membership.source_of(engine)
        if source not in (FLAGS, ADMIN, ""):
            return _refused(409, f"it is named by {source}: remove it there, or drain it")
        self._membership.remove(engine)
        return web.json_response(self._described(engine, time.monotonic()))

    async def switch(self, request: web.Request) -> web.Response:
        """Switch an engine to the other role; answers when it has switched or has been refused."""
        engine = await self._engine_in(request)
        try:
            new = await self._switch.switch(engine, self._drain_s)
        except Refused as error:
            return _refused(409, str(error))
        return web.json_response(self._described(new, time.monotonic()))

    async def _engine_in(self, request: web.Request) -> Engine:
        """Return the engine that the body names.

        Raises:
            _UnknownEngine: there is no such engine.
            Refused: the body names no engine.
        """
        role, url = await _named_in(request, "url")
        engine = self._membership.find(role, url.rstrip("/"))
        if engine is None:
            raise _UnknownEngine(f"there is no {role.value} engine {url}")
        return engine

    def _described(self, engine: Engine, now: float) -> dict[str, Any]:
        ranks = engine.loads.at(now)
        return {
            "role": engine.role.value,
            "number": engine.index,
            "url": engine.url,
            "engine": engine.spec.kind.value,
            "version": engine.spec.version or engine.info.version,
            "models": list(engine.info.models),
            "up": engine.up,
            "draining": engine.draining,
            "trusted": engine.breaker.allows(now),
            "proven": self._fleet.pairing.proven((engine.role, engine.index)),
            "broken": self._fleet.broken(engine),
            "requests": engine.open,
            "ranks": [{"own": load.own, "foreign": load.foreign} for load in ranks],
        }


class _UnknownEngine(KVConnectError):
    """The admin API was asked about an engine that does not exist."""


def make_admin(
    fleet: Fleet,
    membership: Membership,
    cache: CacheAdmin,
    token: Callable[[], str],
    drain_s: float,
) -> web.Application:
    """Return the application; every request needs ``Authorization: Bearer <token>``, the present
    one.

    An engine that switches its role has ``drain_s`` seconds to finish its requests.
    """

    @web.middleware
    async def authorised(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token()}".encode()):
            return _refused(401, "send the header Authorization: Bearer <admin token>")
        try:
            return await handler(request)
        except _UnknownEngine as error:
            return _refused(404, str(error))
        except Refused as error:
            return _refused(400, str(error))

    admin = Admin(fleet, membership, drain_s)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[authorised])
    app.router.add_get("/workers", admin.workers)
    app.router.add_post("/workers", admin.add)
    app.router.add_delete("/workers", admin.remove)
    app.router.add_post("/workers/drain", admin.drain)
    app.router.add_post("/workers/switch", admin.switch)
    app.router.add_get("/cache", cache.stats)
    app.router.add_post("/cache", cache.apply)
    app.router.add_post("/cache/stats", cache.find)
    return app


async def _named_in(request: web.Request, key: str) -> tuple[Role, str]:
    """Return the role in a body, and the text under ``key``.

    Raises:
        Refused: one of them is missing.
    """
    try:
        body = json.loads(await request.read())
        role, text = Role(body["role"]), body[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("body", f'send JSON such as {{"role": "prefill", "{key}": ...}}') from error
    if not isinstance(text, str):
        raise Refused("body", f"{key} is not a string")
    return role, text


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
