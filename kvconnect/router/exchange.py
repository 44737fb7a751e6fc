"""One client request: from its body to the last byte of its response, within one deadline.

Until the first byte goes to the client, a failed attempt is aborted on both engines, and another
pair is tried. After it, a failure ends the stream with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from aiohttp import web

from kvconnect.errors import Refused
from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.router.apis import Api
from kvconnect.router.fleet.upstreams import Fleet, Upstream
from kvconnect.router.http import engine_bodies
from kvconnect.router.http.admission import Admission, BodyMemory, Busy, ClientConcurrency, Tenant
from kvconnect.router.http.client_side import ParsedRequest, Reply, RequestReader
from kvconnect.router.http.pool import ConnectionPool
from kvconnect.router.http.receipts import OwedReceipts, ReceiptStream
from kvconnect.router.http.upstream_request import (
    DrainingPrefills,
    EngineRequest,
    EngineResponse,
    Overhead,
    Rejected,
    UpstreamFailed,
    UpstreamRequest,
)
from kvconnect.router.metrics import RequestOutcome, RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy.choice import (
    FailedTargets,
    Mode,
    RoutingChoice,
    RoutingReason,
    RoutingRequest,
    TargetChoice,
    Unserved,
    choose,
    explain_no_choice,
)
from kvconnect.router.policy.loads import Engine, Role
from kvconnect.router.policy.prefixes import Caches
from kvconnect.router.tracing import RouterSpans

logger = logging.getLogger(__name__)

_FORWARDED = ("X-Request-Id", "Authorization", "traceparent", "tracestate")
_SESSION = "X-Session-Id"
_NO_PATH = (404, 405)  # status of an engine that does not serve the path


class Services(NamedTuple):
    """Services that all exchanges of a router share."""

    options: RouterOptions
    fleet: Fleet
    metrics: RouterMetrics
    client: ConnectionPool
    admission: Admission
    in_flight: ClientConcurrency
    bodies: BodyMemory
    intake: RequestReader
    caches: Caches
    spans: RouterSpans
    draining_prefills: DrainingPrefills
    receipts: Mapping[Upstream, OwedReceipts]


class _Attempt(NamedTuple):
    """The decode request, the first bytes of its response, and what passes the rest on if the
    response is a stream."""

    request: UpstreamRequest
    first: bytes
    passing: Reply | ReceiptStream


class Exchange:
    """Serves one request in the request's own task. Event loop only."""

    def __init__(
        self, services: Services, request: web.Request, api: Api, tenant: Tenant, turn: int
    ) -> None:
        self._services = services
        self._request = request
        self._api = api
        self._tenant = tenant
        hits = services.options.listening.hit_headers
        self._reply = Reply(request, named_events=api.named_events, show_hits=hits)
        self._spans = services.spans.of(request)
        self._turn = turn  # number of the request; each retry adds one
        self._received_at = time.monotonic()
        self._hints: dict[str, float] = {}  # for engines, on the prompt's blocks
        self._streams_receipt = False  # the answer is a stream that can have a receipt
        self._outcome = RequestOutcome.CANCELLED  # until another outcome is known

    async def serve(self) -> web.StreamResponse:
        """Answer the request. The client's disconnect cancels this and both upstream requests."""
        timeout_s = self._services.options.limits.timeout_s
        try:
            return await asyncio.wait_for(self._answer(), timeout_s)
        except asyncio.TimeoutError:
            self._outcome = RequestOutcome.TIMEOUT
            message = f"not done within {timeout_s:g} seconds"
            if self._reply.stream is None:
                return self._reply.error(504, message)
            await self._reply.break_off(message)
            return self._reply.stream
        except web.HTTPException:  # the body is encoded, too large, or too slow
            self._outcome = RequestOutcome.REJECTED
            raise
        finally:
            choice = self._reply.choice
            chosen = None if choice is None else (choice.mode, choice.reason)
            self._services.metrics.request(chosen, self._outcome)
            self._spans.end(self._outcome, self._reply)

    async def _answer(self) -> web.StreamResponse:
        try:
            client, services = self._tenant.name, self._services
            with services.in_flight.enter(client), services.bodies.allocation(client) as allocation:
                asked = await services.intake.read(
                    self._request, self._api, self._tenant, allocation
                )
                async with self._spans.queue_wait(services.admission.enter()):
                    return await self._attempts(asked)
        except Busy as error:
            self._outcome = RequestOutcome.REJECTED
            return self._reply.error(429, str(error), {"Retry-After": str(error.retry_s)})
        except Refused as error:
            self._outcome = RequestOutcome.REJECTED
            return self._reply.error(400, str(error))
        except Unserved as error:
            self._outcome = RequestOutcome.REJECTED
            return self._reply.error(404, str(error))
        except Rejected as error:
            self._outcome = RequestOutcome.REJECTED
            return self._reply.whole(error.answer)
        except UpstreamFailed as error:
            self._outcome = RequestOutcome.FAILED
            if error.role is Role.DECODE and error.answer is not None:
                choice = self._reply.choice
                if choice is not None and choice.reason is RoutingReason.PUSH_FAILED:
                    return self._reply.whole(_explained(error.answer))
                return self._reply.whole(error.answer)
            return self._reply.error(502, str(error))

    async def _attempts(self, asked: ParsedRequest) -> web.StreamResponse:
        """Try pairs of engines until one answers.

        Raises:
            UpstreamFailed: the last attempt failed, and there is nothing left to try.
            Rejected: an engine rejects the request.
        """
        routing_request, failed_targets = self._routing_request(asked), FailedTargets()
        body = asked.body
        retain_s = min(asked.prompt.retention_s, self._services.options.listening.retention_s)
        self._hints = {CacheHint.RETAIN.value: retain_s} if retain_s else {}
        self._streams_receipt = self._api.streams_receipts(asked.prompt)
        failure: UpstreamFailed | Rejected | None = None
        while True:
            fleet_view = self._services.fleet.view()
            choice = choose(fleet_view, routing_request, failed_targets, self._services.options)
            self._spans.chosen(choice)
            if choice is None:
                if failure is not None:
                    raise failure
                self._outcome = RequestOutcome.FAILED
                return self._reply.error(503, explain_no_choice(fleet_view, routing_request))
            if isinstance(failure, UpstreamFailed):
                self._services.metrics.retry(failure.role, failure.cause)
            self._reply.choice = choice
            self._services.metrics.chosen(choice)
            self._services.caches.sent(choice.targets, asked.prefix)
            try:
                async with self._attempt(choice, body) as attempt:
                    return await self._relay(attempt, choice.mode)
            except Rejected as error:
                elsewhere = self._api.decode_only and error.answer.status in _NO_PATH
                if not (elsewhere and failed_targets.add_unserved(fleet_view, choice)):
                    raise
                failure = error
            except UpstreamFailed as error:
                logger.warning("attempt to %s failed: %s", choice.mode.value, error)
                self._services.fleet.recheck(choice)
                if not failed_targets.add(choice, error.role, error.cause):
                    raise
                failure = error
                # SGLang accepts an id once, and may not have noticed the abort of its request yet.
                body.pop(engine_bodies.REQUEST_ID, None)
                keep = choice.decode.target.worker if error.role is Role.PREFILL else None
                routing_request = routing_request._replace(turn=routing_request.turn + 1, keep=keep)

    def _routing_request(self, asked: ParsedRequest) -> RoutingRequest:
        services, prompt = self._services, asked.prompt
        session = self._request.headers.get(_SESSION, "") or prompt.session
        base = asked.prefix is not None and services.fleet.is_base(prompt.model)
        hits = services.caches.hits(asked.prefix, base=base)
        return RoutingRequest(prompt, self._turn, random.random(), session, self._api, hits)

    @asynccontextmanager
    async def _attempt(
        self, choice: RoutingChoice, body: Mapping[str, Any]
    ) -> AsyncIterator[_Attempt]:
        """Yield the beginning of decode's response.

        Leaving the block ends both upstream requests, but lets prefill finish if the response is
        complete.
        """
        overhead = Overhead()
        decode = self._services.fleet.get(Role.DECODE, choice.decode.target.worker)
        prefill: asyncio.Task[Any] | None = None
        async with AsyncExitStack() as ends:
            if choice.prefill is not None:
                prefill_engine = self._services.fleet.get(
                    Role.PREFILL, choice.prefill.target.worker
                )
                one_token = self._api.one_token
                asked, body = bodies(choice, choice.prefill, prefill_engine, body, one_token)
                kind = prefill_engine.worker.engine
                hints = {**self._hints, **choice.prefill.options}
                asked = self._api.with_options(kind, asked, hints, receipt=False)
                if choice.mode is Mode.PULL and self._api.takes_token_ids:
                    asked = engine_bodies.token_ids_too(asked)
                computed = self._prefill(prefill_engine, choice.prefill, asked, overhead)
                if choice.mode is Mode.PULL:
                    with decode.awaited():
                        ticket = await computed
                    overhead.answered()
                    rank = choice.prefill.target.rank
                    pulled = _pulled(body, ticket or mooncake_ticket(prefill_engine, rank, asked))
                    if pulled is body:
                        plain = choice._replace(mode=Mode.PLAIN, reason=RoutingReason.NO_TICKET)
                        self._reply.choice = plain
                    body = pulled
                else:
                    prefill = asyncio.create_task(computed)
                    ends.push_async_callback(self._end_prefill, prefill)
            passing: Reply | ReceiptStream = self._reply
            receipt: bool | str = self._services.options.listening.receipts
            if self._streams_receipt and (owed := self._services.receipts.get(decode)):
                awaited = ends.enter_context(owed.awaited())
                passing, receipt = ReceiptStream(self._reply, awaited), awaited.nonce
            hints = {**self._hints, **choice.decode.options}
            body = self._api.with_options(decode.worker.engine, body, hints, receipt=receipt)
            upstream_request = await ends.enter_async_context(
                self._upstream_request(decode, choice.decode)
            )
            beginning = self._begin(upstream_request, body, overhead)
            first = await (beginning if prefill is None else _beginning(prefill, beginning))
            self._services.metrics.added(choice.mode, overhead.seconds)
            yield _Attempt(upstream_request, first, passing)

    async def _end_prefill(self, prefill: asyncio.Task[Any]) -> None:
        if self._outcome is RequestOutcome.OK:
            self._services.draining_prefills.add(prefill)
        else:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill(
        self, upstream: Upstream, chosen: TargetChoice, body: Mapping[str, Any], overhead: Overhead
    ) -> dict[str, Any] | None:
        """Have a prompt computed; return the ticket for its KV, None if the response has none."""
        async with self._upstream_request(upstream, chosen) as upstream_request:
            await upstream_request.open(self._engine_request(body, chosen), overhead.written)
            if upstream_request.streams:
                await upstream_request.first_event()
                await upstream_request.read()
                return None
            answer = await upstream_request.read()
            try:
                if self._services.caches.indexes:
                    self._services.metrics.hit(chosen.hit, engine_bodies.cached_tokens_of(answer))
                return engine_bodies.ticket_of(answer)
            except Refused as error:
                raise upstream_request.fail(str(error)) from error

    async def _begin(
        self, upstream_request: UpstreamRequest, body: Mapping[str, Any], overhead: Overhead
    ) -> bytes:
        """Return the first bytes of decode's response; all of them if it is not a stream."""
        await upstream_request.open(
            self._engine_request(body, upstream_request.target_choice), overhead.written
        )
        return await (
            upstream_request.first_event() if upstream_request.streams else upstream_request.read()
        )

    async def _relay(self, attempt: _Attempt, mode: Mode) -> web.StreamResponse:
        """Pass the response on to the client."""
        upstream_request, first, passing = attempt
        if not upstream_request.streams:
            self._outcome = RequestOutcome.OK
            if self._services.options.listening.receipts:
                self._spans.answered(first)
            return self._reply.whole(EngineResponse(200, upstream_request.content_type, first))
        self._services.metrics.first_byte(mode, time.monotonic() - self._received_at)
        self._spans.first_byte()
        stream = await self._reply.begin(upstream_request.content_type)
        try:
            await passing.write(first)
            async for chunk in upstream_request.chunks(passing.forward):
                await passing.write(chunk)
            if isinstance(passing, ReceiptStream):
                self._spans.receipt(await passing.end())
            await stream.write_eof()
            self._outcome = RequestOutcome.OK
        except UpstreamFailed as error:
            self._outcome = RequestOutcome.BROKEN
            await self._reply.break_off(str(error))
        except ConnectionError:  # the client disconnected
            logger.debug("a client of %s left", self._request.path)
        return stream

    def _engine_request(self, body: Mapping[str, Any], chosen: TargetChoice) -> EngineRequest:
        headers_in = self._request.headers
        headers = {name: headers_in[name] for name in _FORWARDED if name in headers_in}
        if chosen.target.rank is not None:
            headers[engine_bodies.RANK_HEADER] = str(chosen.target.rank)
        raw = engine_bodies.encoded(body) if self._api.method == "POST" else None
        return EngineRequest(self._api.method, self._api.path, headers, raw)

    def _upstream_request(self, upstream: Upstream, chosen: TargetChoice) -> UpstreamRequest:
        span = self._spans.upstream_request(upstream, chosen)
        return UpstreamRequest(
            self._services.client, self._services.metrics, upstream, chosen, span
        )


def bodies(
    choice: RoutingChoice,
    chosen: TargetChoice,
    prefill: Upstream,
    body: Mapping[str, Any],
    one_token: Mapping[str, Any] = engine_bodies.ONE_TOKEN,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the bodies for prefill and decode; in pull mode, decode's still lacks the ticket."""
    if choice.mode is Mode.BOOTSTRAP:
        worker, room = prefill.worker, secrets.randbelow(engine_bodies.ROOMS)
        meeting = engine_bodies.BootstrapRoom(
            worker.host, worker.bootstrap, room, chosen.target.rank
        )
        return (
            engine_bodies.bootstrap_body(body, meeting, chosen.target.rank),
            engine_bodies.bootstrap_body(body, meeting, choice.decode.target.rank),
        )
    transfer = secrets.token_hex(16)
    asked = engine_bodies.prefill_body(body, transfer, one_token)
    if choice.mode is Mode.PUSH:
        return asked, engine_bodies.push_body(body, transfer, choice.standing_ticket)
    return asked, body


def mooncake_ticket(
    prefill: Upstream, rank: int | None, asked: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the ticket of vLLM's MooncakeConnector, whose responses have none; else None."""
    engine_id = prefill.info.engine_ids.get(rank or 0)
    if prefill.worker.engine is not Engine.MOONCAKE or engine_id is None:
        return None
    return engine_bodies.mooncake_ticket(
        engine_bodies.transfer_of(asked), engine_id, prefill.worker.bootstrap_url
    )


def _explained(answer: EngineResponse) -> EngineResponse:
    why = "the hand-off failed by push and by pull; the decode engine's log says why"
    return replace(answer, body=engine_bodies.explained(answer.status, answer.body, why))


def _pulled(body: Mapping[str, Any], ticket: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return body if ticket is None else engine_bodies.pull_body(body, ticket)


async def _beginning(prefill: asyncio.Task[Any], decoding: Coroutine[Any, Any, bytes]) -> bytes:
    """Return the first bytes of decode's response; a failure of ``prefill`` ends the wait."""
    decode = asyncio.create_task(decoding)
    try:
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        arrived = decode.done() and decode.exception() is None
        if prefill.done() and not arrived:
            prefill.result()
        return await decode
    finally:
        if decode.cancel():
            await asyncio.gather(decode, return_exceptions=True)
