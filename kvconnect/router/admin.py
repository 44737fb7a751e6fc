"""Adding, draining and removing engines while the router runs: an API on a port of its own, for
those who have the token.

``GET /workers`` lists them. ``POST /workers`` adds one: ``{"role": "prefill", "worker": "URL"}``.
``POST /workers/drain``, ``POST /workers/switch`` (to the other role) and ``DELETE /workers`` name
one by ``role`` and ``url``.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kvconnect.errors import ConfigError, KVConnectError, Refused
from kvconnect.router.fleet.membership import ADMIN, Membership, switch
from kvconnect.router.fleet.upstreams import Fleet, Upstream
from kvconnect.router.options import worker_of
from kvconnect.router.policy.loads import Role

_MAX_BODY_BYTES = 64 * 1024
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """The handlers of the API. Runs on the event loop."""

    def __init__(self, fleet: Fleet, membership: Membership, drain_s: float) -> None:
        self._fleet = fleet
        self._membership = membership
        self._drain_s = drain_s

    async def workers(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """List all engines, with their state and load."""
        now = time.monotonic()
        return web.json_response([self._described(upstream, now) for upstream in self._fleet.all()])

    async def add(self, request: web.Request) -> web.Response:
        """Add one."""
        role, text = await _asked(request, "worker")
        try:
            upstream = self._membership.add(role, worker_of("worker", text), ADMIN)
        except ConfigError as error:
            return _refused(400, str(error))
        except Refused as error:
            return _refused(409, str(error))
        return web.json_response(self._described(upstream, time.monotonic()), status=201)

    async def drain(self, request: web.Request) -> web.Response:
        """Send no more requests to one."""
        return await self._end(request, self._membership.drain)

    async def remove(self, request: web.Request) -> web.Response:
        """Drain one and forget it."""
        return await self._end(request, self._membership.remove)

    async def switch(self, request: web.Request) -> web.Response:
        """Have one change its role; answered when it has, or goes on as before."""
        upstream = await self._named(request)
        try:
            new = await switch(self._membership, self._fleet, upstream, self._drain_s)
        except Refused as error:
            return _refused(409, str(error))
        return web.json_response(self._described(new, time.monotonic()))

    async def _end(self, request: web.Request, end: Callable[[Upstream], None]) -> web.Response:
        upstream = await self._named(request)
        end(upstream)
        return web.json_response(self._described(upstream, time.monotonic()))

    async def _named(self, request: web.Request) -> Upstream:
        """Return the engine that a body names.

        Raises:
            _Unknown: there is none.
            Refused: it names none.
        """
        role, url = await _asked(request, "url")
        upstream = self._membership.find(role, url.rstrip("/"))
        if upstream is None:
            raise _Unknown(f"there is no {role.value} engine {url}")
        return upstream

    def _described(self, upstream: Upstream, now: float) -> dict[str, Any]:
        ranks = upstream.loads.at(now)
        return {
            "role": upstream.role.value,
            "number": upstream.index,
            "url": upstream.url,
            "engine": upstream.worker.engine.value,
            "version": upstream.worker.version or upstream.info.version,
            "models": list(upstream.info.models),
            "up": upstream.up,
            "draining": upstream.draining,
            "trusted": upstream.breaker.allows(now),
            "proven": self._fleet.pairing.proven((upstream.role, upstream.index)),
            "broken": self._fleet.broken(upstream),
            "requests": upstream.open,
            "ranks": [{"own": load.own, "foreign": load.foreign} for load in ranks],
        }


class _Unknown(KVConnectError):
    """No such engine."""


def make_admin(fleet: Fleet, membership: Membership, token: str, drain_s: float) -> web.Application:
    """Return the application; every request needs ``Authorization: Bearer <token>``. An engine
    that changes its role is drained within ``drain_s`` seconds."""
    want = f"Bearer {token}".encode()

    @web.middleware
    async def authorised(request: web.Request, handler: _Handler) -> web.StreamResponse:
        came = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(came, want):
            return _refused(401, "send Authorization: Bearer and the token")
        try:
            return await handler(request)
        except _Unknown as error:
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
    return app


async def _asked(request: web.Request, key: str) -> tuple[Role, str]:
    """Return the role and one more text of a body.

    Raises:
        Refused: they are not there.
    """
    try:
        body = json.loads(await request.read())
        role, text = Role(body["role"]), body[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("body", f'send JSON such as {{"role": "prefill", "{key}": ...}}') from error
    if not isinstance(text, str):
        raise Refused("body", f"{key} is no text")
    return role, text


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
