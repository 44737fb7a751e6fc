"""Cache control for operators: sends a prompt with hints to engines, and says what their caches
hold. Event loop only.

``GET /cache`` reports on all engines, or on those that ``model`` or ``url`` in the query name, from
their metrics (:func:`~kvconnect.router.fleet.cache_reports.cache_stats`).

``POST /cache`` of the admin API takes a completion or chat request, and beside its fields:

- ``hint``: ``prewarm`` (the prompt is computed and stored), ``prefetch``, ``pin``, ``retain``,
  ``demote`` or ``drop``; ``seconds`` of ``pin`` and ``retain``; ``tokens``: only the prompt's first
  tokens.
- ``api_key``: of the client whose cache it is, where clients have caches of their own.
- ``url``: only this engine. Otherwise, every vLLM engine that is up and serves the model.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from kvconnect.errors import Refused
from kvconnect.protocol.cache_hints import TOKENS, CacheHint, read_hints
from kvconnect.protocol.options import OPTIONS_KEY, RECEIPT
from kvconnect.router.body import SALT, read_body
from kvconnect.router.fleet.cache_reports import cache_stats
from kvconnect.router.fleet.upstreams import Fleet, Upstream
from kvconnect.router.http import engine_bodies
from kvconnect.router.http.admission import Tenants
from kvconnect.router.http.http1 import ConnectionLost, Exhausted, Unreachable, request_head
from kvconnect.router.http.pool import ConnectionPool
from kvconnect.router.policy.loads import Engine

PREWARM = "prewarm"
CACHE_HINTS = (PREWARM, *(hint.value for hint in CacheHint))
_TIMED = (CacheHint.PIN.value, CacheHint.RETAIN.value)
_NO_ANSWER = (ConnectionLost, Exhausted, Unreachable, Refused, asyncio.TimeoutError)
_REPORT_S = 10.0  # limit of an engine's answer to /metrics
_SHOWN = 200  # bytes of an engine's error to report


class CacheAdmin:
    """Handlers of ``/cache``. ``timeout_s``: limit of each engine's answer to a prompt."""

    def __init__(
        self, fleet: Fleet, pool: ConnectionPool, tenants: Tenants, timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._tenants = tenants
        self._timeout_s = timeout_s

    async def apply(self, request: web.Request) -> web.Response:
        """Send a prompt with hints to engines; answer what each rank says.

        Raises:
            Refused: a field is missing or wrong, or no engine serves the model.
        """
        body = read_body(await request.read())
        hints = _taken_hints(body)
        url = _taken(body, "url", str, "")
        self._salt(body, _taken(body, "api_key", str, ""))
        model = body["model"] = _taken(body, "model", str, "")
        engines = [
            one
            for one in self._fleet.all()
            if one.up and one.worker.engine is Engine.VLLM and model in one.info.models
            if not url or one.url == url.rstrip("/")
        ]
        if not engines:
            raise Refused("model", f"model {model!r}: no such vLLM engine is up and serves it")
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        asked = engine_bodies.options_body(
            {**body, "max_tokens": 1, "stream": False}, {**hints, RECEIPT: True}
        )
        raw = engine_bodies.encoded(asked)
        ranks = ((one, rank) for one in engines for rank in _ranks(one))
        work = [self._ask(one, rank, path, raw) for one, rank in ranks]
        return web.json_response({"engines": await asyncio.gather(*work)})

    async def stats(self, request: web.Request) -> web.Response:
        """Report what the engines' caches hold and did.

        Raises:
            Refused: no engine has the model or the URL.
        """
        model, url = (request.query.get(name, "") for name in ("model", "url"))
        engines = [
            one
            for one in self._fleet.all()
            if not model or model in one.info.models
            if not url or one.url == url.rstrip("/")
        ]
        if not engines and (model or url):
            raise Refused("model", f"model {model!r}, url {url!r}: there is no such engine")
        return web.json_response({"engines": await asyncio.gather(*map(self._report, engines))})

    async def _report(self, upstream: Upstream) -> dict[str, Any]:
        """Return what an engine's metrics say of its caches, or why they do not."""
        engine = {
            "role": upstream.role.value,
            "url": upstream.url,
            "engine": upstream.worker.engine.value,
            "models": list(upstream.info.models),
            "up": upstream.up,
            "draining": upstream.draining,
        }
        if not upstream.up:
            return {**engine, "error": "it is down"}
        try:
            status, answer = await self._pool.get(upstream.base, "/metrics", _REPORT_S)
        except _NO_ANSWER as error:
            return {**engine, "error": str(error) or "no answer"}
        if status != 200:
            return {**engine, "error": f"/metrics answered {status}"}
        return {**engine, **cache_stats(answer.decode("utf-8", "replace"))}

    def _salt(self, body: dict[str, Any], api_key: str) -> None:
        if not api_key:
            return
        tenant = self._tenants.find(f"Bearer {api_key}", "")
        if tenant is None:
            raise Refused("api_key", "api_key: the router does not know it")
        if tenant.secret:
            body[SALT] = tenant.salt(bytes(body.get(SALT, b"")))

    async def _ask(
        self, upstream: Upstream, rank: int | None, path: str, raw: bytes
    ) -> dict[str, Any]:
        """Return what a rank says: its receipt and hints, or why there are none."""
        named = {"role": upstream.role.value, "url": upstream.url, "rank": rank}
        headers = {} if rank is None else {engine_bodies.RANK_HEADER: str(rank)}
        head = request_head(upstream.base, "POST", path, headers, len(raw))
        try:
            status, answer = await self._pool.whole(upstream.base, head, raw, self._timeout_s)
        except _NO_ANSWER as error:
            return {**named, "error": str(error) or "no answer"}
        if status != 200:
            said = answer[:_SHOWN].decode(errors="replace")
            return {**named, "error": f"{status}: {said}"}
        try:
            ticket = engine_bodies.ticket_of(answer) or {}
            return {**named, **_read(ticket.get(OPTIONS_KEY, b"{}"))}
        except (Refused, TypeError) as error:
            return {**named, "error": str(error)}


def _taken_hints(body: dict[str, Any]) -> dict[str, Any]:
    """Take the hint out of a body; return it as engines take it."""
    hint = _taken(body, "hint", str, "")
    seconds = _taken(body, "seconds", int | float, None)
    tokens = _taken(body, TOKENS, int, None)
    if hint not in CACHE_HINTS:
        raise Refused("hint", f"hint {hint!r}: use one of {', '.join(CACHE_HINTS)}")
    if (seconds is not None) != (hint in _TIMED):
        raise Refused("seconds", f"seconds: only {' and '.join(_TIMED)} take them, and need them")
    if hint == PREWARM:
        return {}
    hints = {hint: True if seconds is None else seconds}
    hints |= {} if tokens is None else {TOKENS: tokens}
    if read_hints(hints).ignored:
        raise Refused("hint", f"hint {hints}: use seconds up to a day, and tokens of 1 or more")
    return hints


def _taken(body: dict[str, Any], field: str, kind: Any, default: Any) -> Any:
    if field not in body:
        return default
    value = _read(body.pop(field))
    if not isinstance(value, kind):
        raise Refused(field, f"{field} {value!r} is of the wrong type")
    return value


def _read(raw: Any) -> Any:
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise Refused("body", f"it is not JSON: {error}") from error


def _ranks(upstream: Upstream) -> list[int | None]:
    ranks = len(upstream.loads.own)
    return [None] if ranks <= 1 else list(range(ranks))
