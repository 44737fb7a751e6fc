"""Hand-off probes: short requests that check whether KV moves between two engines.

A probe is an ordinary client request, so it works with every engine: prefill computes random
tokens, and decode must receive their KV. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from kvconnect.errors import KVConnectError, Refused
from kvconnect.router.connections.engine_connection import ConnectionLost, Exhausted, Unreachable
from kvconnect.router.connections.http1 import request_head
from kvconnect.router.connections.pool import ConnectionPool, within
from kvconnect.router.decision import handoff_bodies, mooncake_ticket
from kvconnect.router.fleet import reports
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.pairing import EnginePair
from kvconnect.router.metrics import ProbeOutcome, RouterMetrics
from kvconnect.router.policy.choice import Mode, RoutingChoice, RoutingReason
from kvconnect.router.policy.fleet_view import ModelKnowledge, Role, Target
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.router.supervisor import Supervisor, TaskKind

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between two checks for probes that are due
TIMEOUT_S = 60.0  # limit of a probe, which queues behind real requests
TOKENS = 128  # length of its prompt: several blocks of most engines
_IDS = range(32, 256)  # token ids in every vocabulary
_SHOWN = 200  # bytes of an engine's error to report
_COUNTED_S = (0.0, 0.2, 0.8)  # pauses between reads of the counter, which may lag the response


class ProbeFailed(KVConnectError):
    """KV did not arrive, or the probe could not tell."""

    def __init__(self, outcome: ProbeOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Prober:
    """Probes the engines of a fleet."""

    def __init__(self, fleet: Fleet, pool: ConnectionPool, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._pool = pool
        self._metrics = metrics
        self._tasks = Supervisor(metrics.count)
        self._turn = 0  # number of probes; selects the rank, so that every rank is probed

    async def run(self) -> None:
        """Run the probes that are due, until cancelled; that cancels the open probes too."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                for pair in self._due():
                    self._fleet.pairing.began(pair)
                    prefill = self._fleet.get(Role.PREFILL, pair.prefill)
                    decode = self._fleet.get(Role.DECODE, pair.decode)
                    task = self._tasks.once(
                        TaskKind.HANDOFF, prefill.url, self._judge(pair, prefill, decode)
                    )
                    running.add(task)
                    task.add_done_callback(running.discard)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def probe(self, prefill: Engine, decode: Engine) -> None:
        """Move KV from one engine to the other.

        Raises:
            ProbeFailed: KV did not arrive, or the probe could not tell.
        """
        try:
            outcome = await within(self._probe(prefill, decode), TIMEOUT_S)
        except TimeoutError:
            error = ProbeFailed(ProbeOutcome.LATE, f"not done within {TIMEOUT_S:g} seconds")
        except (Unreachable, ConnectionLost, Refused) as cause:
            kind = ProbeOutcome.VOID if isinstance(cause, Exhausted) else ProbeOutcome.FAILED
            error = ProbeFailed(kind, str(cause))
        except ProbeFailed as known:
            error = known
        else:
            self._metrics.count("probes", outcome.value)
            return
        self._metrics.count("probes", error.outcome.value)
        raise error

    def _due(self) -> list[EnginePair]:
        pairing, view, now = self._fleet.pairing, self._fleet.view(), time.monotonic()
        told = ModelKnowledge.CONFIRMED
        prefill = [w for w in view.prefill if w.up and w.knowledge is told]
        decode = [w for w in view.decode if w.up and w.knowledge is told]
        engines = [(Role.PREFILL, w.index) for w in prefill]
        engines += [(Role.DECODE, w.index) for w in decode]
        if not pairing.may_be_due(engines, now):
            return []
        pairs = [
            EnginePair(p.index, d.index)
            for p in prefill
            for d in decode
            if p.pairs_with(d) and not p.is_same(d)
        ]
        return pairing.due(pairs, now)

    async def _judge(self, pair: EnginePair, prefill: Engine, decode: Engine) -> None:
        """Probe a pair and record the result."""
        pairing = self._fleet.pairing
        try:
            await self.probe(prefill, decode)
            if pair in pairing.broken:
                logger.info("KV gets from %s to %s again", prefill.url, decode.url)
            pairing.passed(pair, time.monotonic())
        except ProbeFailed as error:
            if error.outcome is not ProbeOutcome.VOID:
                if pair not in pairing.broken:
                    logger.warning("no KV from %s to %s: %s", prefill.url, decode.url, error)
                pairing.failed(pair, str(error), time.monotonic())
        finally:
            pairing.void(pair, time.monotonic())  # without effect after passed() or failed()

    async def _probe(self, prefill: Engine, decode: Engine) -> ProbeOutcome:
        text = await self._scrape(decode)
        before, refused = reports.vllm_received(text), reports.refused_handoffs(text)
        try:
            answer = await self._ask_both(prefill, decode)
        except ProbeFailed as error:
            why = await self._refusals(decode, refused)
            raise ProbeFailed(error.outcome, f"{error}{why}") from error
        except _Rejected as error:
            logger.debug("probe from %s to %s: %s", prefill.url, decode.url, error)
            return ProbeOutcome.REFUSED
        if not await self._has_received(decode, answer, before):
            raise ProbeFailed(ProbeOutcome.COMPUTED, "decode computed the prompt itself")
        return ProbeOutcome.OK

    async def _ask_both(self, prefill: Engine, decode: Engine) -> bytes:
        """Send the requests of a probe; return the decode engine's response."""
        self._turn += 1
        p, d = self._target(prefill), self._target(decode)
        mode = Mode.BOOTSTRAP if prefill.native else Mode.PULL
        choice = RoutingChoice(mode, RoutingReason.DEFAULT, p, d)
        shared = [name for name in prefill.info.models if name in decode.info.models]
        if not shared:
            raise Refused("answer", "they serve no model in common")
        body = engine_bodies.token_ids_body(
            shared[0], random.choices(_IDS, k=TOKENS), native=prefill.native
        )
        asked, rest = handoff_bodies(choice, prefill.spec, body, partial(secrets.token_hex, 16))
        if mode is Mode.BOOTSTRAP:
            return (await _both(self._send(prefill, p, asked), self._send(decode, d, rest)))[1]
        response = await self._send(prefill, p, asked)
        engine_id = prefill.info.engine_ids.get(p.target.rank or 0)
        ticket = engine_bodies.ticket_of(response) or mooncake_ticket(
            prefill.spec, engine_id, asked
        )
        if ticket is None:
            raise ProbeFailed(ProbeOutcome.FAILED, "prefill offers no hand-off")
        # With it, vLLM would report the tokens that prefill had cached, not those received.
        ticket.pop("remote_prefill_cached_tokens", None)
        return await self._send(decode, d, engine_bodies.pull_body(body, ticket))

    def _target(self, engine: Engine) -> TargetChoice:
        ranks = len(engine.loads.at(time.monotonic()))
        return TargetChoice(
            Target(engine.index, self._turn % ranks if ranks > 1 else None), RankingReason.TURN
        )

    async def _send(self, engine: Engine, chosen: TargetChoice, body: Mapping[str, Any]) -> bytes:
        raw = engine_bodies.encoded(body)
        rank = chosen.target.rank
        headers = {} if rank is None else {engine_bodies.RANK_HEADER: str(rank)}
        path = engine_bodies.SGLANG_GENERATE if engine.native else "/v1/completions"
        head = request_head(engine.base, "POST", path, headers, len(raw))
        status, answer = await self._pool.whole(engine.base, head, raw, TIMEOUT_S)
        if status == 200:
            return answer
        text = f"{engine.role.value} answered {status}: {answer[:_SHOWN].decode(errors='replace')}"
        if 400 <= status < 500:
            raise _Rejected(text)
        raise ProbeFailed(ProbeOutcome.FAILED, text)

    async def _has_received(self, decode: Engine, answer: bytes, before: float | None) -> bool:
        """Return whether decode received KV; SGLang's must have, as it cannot compute prompts.

        vLLM's response tells with ``--enable-prompt-tokens-details``. Otherwise the counter of
        received tokens must have risen since ``before``; other requests raise it too. Without a
        counter, the answer is yes.
        """
        if decode.native:
            return True
        cached = engine_bodies.cached_tokens_of(answer)
        if cached is not None or before is None:
            return cached != 0
        for pause in _COUNTED_S:
            await asyncio.sleep(pause)
            now = reports.vllm_received(await self._scrape(decode))
            if now is None or now > before:
                return True
        return False

    async def _refusals(self, decode: Engine, before: Mapping[str, float]) -> str:
        """Return why decode refused hand-offs since ``before``, to be appended to an error."""
        for pause in _COUNTED_S if before else ():  # else it does not report them
            await asyncio.sleep(pause)
            now = reports.refused_handoffs(await self._scrape(decode))
            fields = sorted(name for name in now if now[name] > before.get(name, 0.0))
            if fields:
                return (
                    f"; it refused the hand-off: {', '.join(fields)}, see its log for both values"
                )
        return ""

    async def _scrape(self, engine: Engine) -> str:
        """Return the engine's metrics, "" if it has none."""
        status, text = await self._pool.get(engine.base, "/metrics", TIMEOUT_S)
        return text.decode("utf-8", "replace") if status == 200 else ""


class _Rejected(KVConnectError):
    """An engine answered with 4xx."""


async def _both(*work: Coroutine[Any, Any, bytes]) -> list[bytes]:
    """Return all results; the first failure cancels the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
