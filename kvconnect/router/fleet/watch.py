"""Background tasks of each engine: health, models and version, load, tickets.

Event loop only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvconnect.errors import Refused
from kvconnect.router.connections.engine_connection import (
    BaseUrl,
    ConnectionLost,
    Exhausted,
    Unreachable,
)
from kvconnect.router.connections.http1 import request_head
from kvconnect.router.connections.pool import ConnectionPool, within
from kvconnect.router.fleet import reports
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.metrics import InputKind, RouterMetrics
from kvconnect.router.policy.fleet_view import EngineKind, Role
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.engine_bodies import TicketKind
from kvconnect.router.supervisor import Supervisor, TaskKind

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 2.0
PROBE_FIRST_S = 0.5  # first pause after an engine went down; doubles
PROBE_SELDOM_S = 8.0  # longest pause: an engine is never given up
LEARN_EVERY_S = 30.0  # adapters are loaded and unloaded while an engine runs
FIRST_LEARN_S = 2.0  # an engine that does not say so soon what it is counts as up all the same
RETRY_S = 5.0
PROBE_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 30.0  # a request for a standing ticket queues behind real prefills
_RENEW_AT = 0.5  # part of its lifetime after which a ticket is renewed
RENEW_LEAST_S = 0.5  # to the next one, whatever an engine says: each is a request to it
_NO_SUCH_PATH = range(300, 500)  # statuses
_NOT_GENERATING = (400, 404, 405, 501)  # statuses of completions, as of a model that embeds
NOT_SHARED_S = 120.0  # an engine that offered no share ticket is asked again in half that time

FAILED = (Unreachable, ConnectionLost, TimeoutError, Refused)
"""Errors of a request to an engine."""

_T = TypeVar("_T")


class Watcher:
    """The background tasks of one engine. ``shares``: vLLM's is asked for share tickets."""

    def __init__(
        self, engine: Engine, pool: ConnectionPool, metrics: RouterMetrics, *, shares: bool
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._metrics = metrics
        wanted = {TicketKind.STANDING: engine.role is Role.PREFILL, TicketKind.SHARE: shares}
        self._kinds = [kind for kind, is_wanted in wanted.items() if is_wanted]
        self._late = 0  # probes in a row that were not answered in time
        self._probed = False
        self._polled = asyncio.Event()  # the number of ranks is known, if reported
        self._selects = True  # the engine serves metrics by name, as far as is known
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, load_interval_s: float) -> None:
        """Start the background tasks."""
        engine = self._engine
        work: dict[TaskKind, Callable[[], Coroutine[Any, Any, None]]] = {
            TaskKind.PROBE: self._probe_for_ever,
            TaskKind.LEARN: self._learn_for_ever,
            TaskKind.LOAD: partial(self._poll_for_ever, load_interval_s),
        }
        if self._kinds and engine.spec.kind is EngineKind.VLLM:
            work[TaskKind.TICKETS] = self._keep_tickets
        keep = Supervisor(self._metrics.count).keep
        self._tasks = [keep(kind, engine.url, each) for kind, each in work.items()]

    async def stop(self) -> None:
        """End the background tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def probe(self) -> None:
        """Check the engine's health, and mark it up or down."""
        engine, late = self._engine, self._late
        self._late = 0
        try:
            status, _ = await self._pool.get(engine.base, "/health", PROBE_TIMEOUT_S)
            up, reason = status == 200, f"/health answers with {status}"
        except Exhausted as error:  # the router is at fault, not the engine
            logger.warning("probe of %s: %s", engine.url, error)
            return
        except TimeoutError:  # a busy engine may be late once
            self._late = late + 1
            logger.debug("probe of %s: late", engine.url)
            up, reason = engine.up and not late, f"no answer within {PROBE_TIMEOUT_S:g} s"
        except FAILED as error:
            logger.debug("probe of %s: %r", engine.url, error)
            up, reason = False, str(error) or repr(error)
        if not (up or self._probed):  # later, Engine.mark tells of changes
            text = "%s engine %s is not up yet: %s; it is probed until it is"
            logger.warning(text, engine.role.value, engine.url, reason)
        self._probed = True
        if up and not engine.up:  # it may serve other models than before
            with suppress(*FAILED):
                await within(self._learn(), FIRST_LEARN_S)
        engine.mark(up=up)
        self._pool.mark(engine.base, up=up)

    async def get(self, path: str, base: BaseUrl | None = None) -> bytes:
        """Return the body of a GET response.

        Raises:
            Refused: the status is not 200.
            Unreachable, ConnectionLost, TimeoutError: no response.
        """
        at = base or self._engine.base
        status, body = await self._pool.get(at, path, ASK_TIMEOUT_S)
        return _body_of(path, status, body)

    async def _probe_for_ever(self) -> None:
        engine, back_off = self._engine, PROBE_FIRST_S
        while True:
            if engine.up:
                pause, back_off = PROBE_EVERY_S, PROBE_FIRST_S
            else:
                pause, back_off = back_off, min(2 * back_off, PROBE_SELDOM_S)
            await wait(engine.signals.suspected, pause)
            engine.signals.suspected.clear()
            await self.probe()

    async def _learn_for_ever(self) -> None:
        """Ask for models and version when the engine comes up, and periodically."""
        engine = self._engine
        while True:
            await engine.signals.up.wait()
            learned = False
            try:
                learned = await self._learn()
            except FAILED as error:
                logger.warning("%s does not say what it is: %s", engine.url, error or "late")
            await wait(engine.signals.down, LEARN_EVERY_S if learned else RETRY_S)

    async def _learn(self) -> bool:
        """Ask for each fact separately; a missing or unusable answer leaves the last value.
        Return whether every fact that routing needs was answered."""
        spec, info = self._engine.spec, self._engine.info
        models = await self._ask(InputKind.MODELS, reports.models_of, "/v1/models")
        if models:
            info.models, info.confirmed = models, True
        path = "/server_info" if spec.kind is EngineKind.SGLANG else "/version"
        # An engine of unknown version pairs with any other.
        info.version = await self._ask(InputKind.VERSION, reports.version_of, path) or info.version
        if spec.kind is not EngineKind.MOONCAKE or self._engine.role is Role.DECODE:
            return models is not None
        at = BaseUrl.of(spec.bootstrap_url)
        ids = await self._ask(InputKind.REGISTRY, reports.engine_ids_of, "/query", at)
        info.engine_ids = ids or info.engine_ids
        return models is not None and ids is not None

    async def _ask(
        self, what: InputKind, read: Callable[[bytes], _T], path: str, base: BaseUrl | None = None
    ) -> _T | None:
        """Return the decoded response, None if it is unusable.

        Raises:
            Unreachable, ConnectionLost, TimeoutError: no response.
        """
        at = base or self._engine.base
        status, answer = await self._pool.get(at, path, ASK_TIMEOUT_S)
        try:
            return self._read(what, read, _body_of(path, status, answer))
        except Refused as error:
            level = logging.DEBUG if status == 404 else logging.WARNING
            logger.log(level, "%s does not say what it is: %s", self._engine.url, error)
            return None

    def _read(self, what: InputKind, read: Callable[[bytes], _T], answer: bytes) -> _T:
        try:
            return read(answer)
        except Refused:
            self._metrics.count("refused_answers", what.value)
            raise

    async def _poll_for_ever(self, interval_s: float) -> None:
        """Query load and number of ranks; with interval 0, once whenever the engine comes up."""
        engine = self._engine
        while True:
            if not engine.up:  # it may come back with other ranks
                self._polled.clear()
                self._selects = True
            await engine.signals.up.wait()
            asked, used = engine.loads.ask(time.monotonic()), False
            try:
                used = engine.loads.report(asked, await self._tokens())
            except FAILED as error:
                logger.debug("load of %s: %r", engine.url, error)
                self._count_report("failed")
            else:
                outcome = "ok" if used else "discarded"
                self._count_report(outcome)
            self._polled.set()
            pause = interval_s or (0.0 if used else RETRY_S)
            await (wait(engine.signals.down, pause) if pause else engine.signals.down.wait())

    def _count_report(self, outcome: str) -> None:
        engine = self._engine
        self._metrics.count("load_reports", engine.role.value, engine.url, outcome)

    async def _tokens(self) -> dict[int, float]:
        if self._engine.spec.kind is not EngineKind.SGLANG:
            return await self._vllm_tokens()
        status, answer = await self._pool.get(
            self._engine.base, "/v1/loads?include=core", ASK_TIMEOUT_S
        )
        if status == 404:  # SGLang before 0.5.6
            read, answer = _text_of(reports.sglang_metric_tokens), await self.get("/metrics")
            return self._read(InputKind.LOAD, read, answer)
        good = _body_of("/v1/loads", status, answer)
        return self._read(InputKind.LOAD, reports.sglang_tokens, good)

    async def _vllm_tokens(self) -> dict[int, float]:
        """Ask for two metrics: all take an engine many milliseconds, in the process that sends its
        tokens. Where several processes serve the API, vLLM finds none by name, so all are asked
        for."""
        read, path = _text_of(reports.vllm_tokens), reports.VLLM_LOAD
        if self._selects:
            status, answer = await self._pool.get(self._engine.base, path, ASK_TIMEOUT_S)
            if status not in _NO_SUCH_PATH:
                found = self._read(InputKind.LOAD, read, _body_of(path, status, answer))
                if found:
                    return found
        found = self._read(InputKind.LOAD, read, await self.get("/metrics"))
        self._selects = self._selects and not found
        return found

    async def _keep_tickets(self) -> None:
        """Renew tickets early, and at once when the engine comes back."""
        engine = self._engine
        while True:
            await engine.signals.up.wait()
            await self._polled.wait()
            ranks = len(engine.loads.at(time.monotonic()))
            pause = RETRY_S
            try:
                pause = min([await self._fetch_tickets(rank, ranks) for rank in range(ranks)])
            except FAILED as error:
                logger.warning("no tickets from %s: %s", engine.url, error or "late")
                if TicketKind.STANDING in self._kinds:  # until there is one, its KV is pulled
                    self._metrics.count("standing_ticket_fetches", engine.url, "failed")
            await wait(engine.signals.down, pause)

    async def _fetch_tickets(self, rank: int, ranks: int) -> float:
        """Fetch a rank's tickets; return the seconds until the next fetch."""
        asked = time.monotonic()
        base = self._engine.base
        model = next(iter(reports.models_of(await self.get("/v1/models"))))
        body = json.dumps(
            engine_bodies.tickets_body(model, rank if ranks > 1 else None, self._kinds)
        ).encode()
        headers = {engine_bodies.RANK_HEADER: str(rank)} if ranks > 1 else {}
        head = request_head(base, "POST", "/v1/completions", headers, len(body))
        status, response = await self._pool.whole(base, head, body, ASK_TIMEOUT_S)
        if status in _NOT_GENERATING and TicketKind.STANDING not in self._kinds:
            logger.debug("%s completes nothing: %s", self._engine.url, status)
            return NOT_SHARED_S * _RENEW_AT
        answer = _body_of("/v1/completions", status, response)
        what, lifetime_s = InputKind.TICKET, NOT_SHARED_S
        if TicketKind.SHARE in self._kinds:
            share = self._read(what, engine_bodies.share_ticket_of, answer)
            if share is not None:
                self._engine.hold_ticket(TicketKind.SHARE, rank, share, asked)
                lifetime_s = share.lifetime_s
        if TicketKind.STANDING in self._kinds:
            standing = self._read(what, engine_bodies.standing_ticket_of, answer)
            self._metrics.count("standing_ticket_fetches", self._engine.url, "ok")
            self._engine.hold_ticket(TicketKind.STANDING, rank, standing, asked)
            lifetime_s = min(lifetime_s, standing.lifetime_s)
        return max(lifetime_s * _RENEW_AT, RENEW_LEAST_S)


def _text_of(read: Callable[[str], _T]) -> Callable[[bytes], _T]:
    return lambda answer: read(answer.decode("utf-8", "replace"))


def _body_of(path: str, status: int, body: bytes) -> bytes:
    if status != 200:
        raise Refused("answer", f"{path} answered {status}")
    return body


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for ``event``, at most ``timeout_s`` seconds; return whether it came. Unlike
    ``asyncio.wait_for`` before Python 3.12, this never swallows a cancellation that comes with the
    event."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        came, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        return bool(came)
    finally:
        waiting.cancel()
