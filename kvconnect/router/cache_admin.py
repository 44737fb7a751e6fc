"""Cache control for operators: sends a prompt with hints to engines, and says what their caches
hold. Event loop only.

``GET /cache`` reports on all engines, or on those that ``model`` or ``url`` in the query name, from
their metrics (:func:`~kvconnect.router.fleet.cache_reports.cache_stats`).

``POST /cache/stats`` takes a completion or chat request with ``model``, and reports how much of its
prompt each engine has, from their KV events. ``tokens``, ``api_key`` and ``url`` are as below.

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
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvconnect.errors import Refused
from kvconnect.protocol.cache_hints import TOKENS, CacheHint, read_hints
from kvconnect.protocol.options import OPTIONS_KEY, RECEIPT
from kvconnect.router.connections.engine_connection import ConnectionLost, Exhausted, Unreachable
from kvconnect.router.connections.http1 import request_head
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.fleet.cache_reports import cache_stats
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.policy.fleet_view import EngineKind, Role, Target
from kvconnect.router.policy.prefixes import PrefixIndex
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.body import SALT, read_body, token_ids_of

PREWARM = "prewarm"
CACHE_HINTS = (PREWARM, *(hint.value for hint in CacheHint))
_TIMED = (CacheHint.PIN.value, CacheHint.RETAIN.value)
_NO_ANSWER = (ConnectionLost, Exhausted, Unreachable, Refused, TimeoutError)
_REPORT_S = 10.0  # limit of an engine's answer to /metrics
_SHOWN = 200  # bytes of an engine's error to report
_ADAPTER = ("extra_key", "lora_path")  # of SGLang's requests
_FIX = "name it with events=PORT; give its role the policy cache_aware, or use --disaggregate auto"


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class CacheAdmin:
    """Handlers of ``/cache``. ``timeout_s``: limit of each engine's answer to a prompt.
    ``indexes``: blocks by KV events, of the roles whose cached prefixes count."""

    def __init__(
        self,
        fleet: Fleet,
        pool: ConnectionPool,
        tenants: Tenants,
        timeout_s: float,
        indexes: Mapping[Role, PrefixIndex],
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._tenants = tenants
        self._timeout_s = timeout_s
        self._indexes = indexes

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
            engine
            for engine in self._fleet.all()
            if engine.up and engine.spec.kind is EngineKind.VLLM and model in engine.info.models
            if not url or engine.url == url.rstrip("/")
        ]
        if not engines:
            raise Refused("model", f"model {model!r}: no such vLLM engine is up and serves it")
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        asked = engine_bodies.options_body(
            {**body, "max_tokens": 1, "stream": False}, {**hints, RECEIPT: True}
        )
        raw = engine_bodies.encoded(asked)
        ranks = ((engine, rank) for engine in engines for rank in _ranks(engine))
        work = [self._ask(engine, rank, path, raw) for engine, rank in ranks]
        return web.json_response({"engines": await asyncio.gather(*work)})

    async def stats(self, request: web.Request) -> web.Response:
        """Report what the engines' caches hold and did.

        Raises:
            Refused: no engine has the model or the URL.
        """
        model, url = (request.query.get(name, "") for name in ("model", "url"))
        engines = self._named(model, url)
        return web.json_response({"engines": await asyncio.gather(*map(self._report, engines))})

    async def find(self, request: web.Request) -> web.Response:
        """Report how many tokens of a prompt each rank has, and in which tiers.

        Raises:
            Refused: a field is missing or wrong, no engine has the model or the URL, none tells
                what it has, or none tokenizes the prompt.
        """
        body = read_body(await request.read())
        url, most = _taken(body, "url", str, ""), _taken(body, TOKENS, int, None)
        self._salt(body, _taken(body, "api_key", str, ""))
        salt = _taken_salt(body)
        model = body["model"] = _taken(body, "model", str, "")
        if not model:
            raise Refused("model", "model: name the one that the prompt is for")
        if most is not None and most < 1:
            raise Refused(TOKENS, f"tokens {most}: use 1 or more")
        engines = self._named(model, url)
        if not self._fleet.is_base(model) or any(name in body for name in _ADAPTER):
            fix = f"name a base model, without {' and '.join(_ADAPTER)}"
            raise Refused("model", f"model {model!r}: the blocks of adapters are unknown: {fix}")
        if not any(self._tells(engine) for engine in engines):
            raise Refused("events", f"events: no engine of {model!r} reports its blocks: {_FIX}")
        ids = (token_ids_of(body) or await self._tokenized(body, engines))[:most]
        ranks = ((engine, rank) for engine in engines for rank in _ranks(engine))
        found = [self._found(engine, rank, ids, salt) for engine, rank in ranks]
        return web.json_response({"engines": found})

    def _named(self, model: str, url: str) -> list[Engine]:
        """Return the engines of a model and at a URL, each if given. Raises :class:`Refused`."""
        engines = [
            engine
            for engine in self._fleet.all()
            if not model or model in engine.info.models
            if not url or engine.url == url.rstrip("/")
        ]
        if not engines and (model or url):
            raise Refused("model", f"model {model!r}, url {url!r}: there is no such engine")
        return engines

    def _tells(self, engine: Engine) -> bool:
        return engine.role in self._indexes and bool(engine.spec.events)

    def _found(self, engine: Engine, rank: int | None, ids: list[int], salt: str) -> dict[str, Any]:
        named = {"role": engine.role.value, "url": engine.url, "rank": rank}
        if not engine.up:
            return {**named, "error": "it is down"}
        if not self._tells(engine):
            return {**named, "error": f"it does not report its blocks: {_FIX}"}
        held = self._indexes[engine.role].held(Target(engine.index, rank), ids, salt)
        tiers = {tier.name.lower(): count for tier, count in sorted(held.tiers.items())}
        return {**named, "prompt_tokens": len(ids), "tokens": held.tokens, "tiers": tiers}

    async def _tokenized(self, body: dict[str, Any], engines: list[Engine]) -> list[int]:
        """Return the token ids of a prompt, as one of its engines says. Raises :class:`Refused`."""
        raw = engine_bodies.encoded(body)
        why = "no engine is up"
        for engine in engines:
            if not engine.up:
                continue
            head = request_head(engine.base, "POST", "/tokenize", {}, len(raw))
            try:
                status, answer = await self._pool.whole(engine.base, head, raw, _REPORT_S)
                if status == 200:
                    return msgspec.json.decode(answer, type=_Tokenized).tokens
                why = f"{engine.url} answered {status}: {answer[:_SHOWN].decode(errors='replace')}"
            except (*_NO_ANSWER, msgspec.DecodeError) as error:
                why = f"{engine.url}: {error or 'no answer'}"
        raise Refused("prompt", f"prompt: /tokenize gives no token ids of it, so send them: {why}")

    async def _report(self, engine: Engine) -> dict[str, Any]:
        """Return what an engine's metrics say of its caches, or why they do not."""
        named = {
            "role": engine.role.value,
            "url": engine.url,
            "engine": engine.spec.kind.value,
            "models": list(engine.info.models),
            "up": engine.up,
            "draining": engine.draining,
        }
        if not engine.up:
            return {**named, "error": "it is down"}
        try:
            status, answer = await self._pool.get(engine.base, "/metrics", _REPORT_S)
        except _NO_ANSWER as error:
            return {**named, "error": str(error) or "no answer"}
        if status != 200:
            return {**named, "error": f"/metrics answered {status}"}
        return {**named, **cache_stats(answer.decode("utf-8", "replace"))}

    def _salt(self, body: dict[str, Any], api_key: str) -> None:
        if not api_key:
            return
        tenant = self._tenants.find(api_key, "")
        if tenant is None:
            raise Refused("api_key", "api_key: the router does not know it")
        if tenant.secret:
            body[SALT] = tenant.salt(bytes(body.get(SALT, b"")))

    async def _ask(self, engine: Engine, rank: int | None, path: str, raw: bytes) -> dict[str, Any]:
        """Return what a rank says: its receipt and hints, or why there are none."""
        named = {"role": engine.role.value, "url": engine.url, "rank": rank}
        headers = {} if rank is None else {engine_bodies.RANK_HEADER: str(rank)}
        head = request_head(engine.base, "POST", path, headers, len(raw))
        try:
            status, answer = await self._pool.whole(engine.base, head, raw, self._timeout_s)
        except _NO_ANSWER as error:
            return {**named, "error": str(error) or "no answer"}
        if status != 200:
            text = answer[:_SHOWN].decode(errors="replace")
            return {**named, "error": f"{status}: {text}"}
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


def _taken_salt(body: dict[str, Any]) -> str:
    """Take the cache salt out of a body: the router's own, or the one sent."""
    if isinstance(body.get(SALT), str):
        return str(body.pop(SALT))
    return _taken(body, SALT, str | None, None) or ""


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


def _ranks(engine: Engine) -> list[int | None]:
    ranks = len(engine.loads.at(time.monotonic()))
    return [None] if ranks <= 1 else list(range(ranks))
