"""One client request: from its body to the last byte of its response, within one deadline.

Until the first byte goes to the client, a failed attempt is aborted on both engines, and another
pair is tried. After it, a failure ends the stream with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from kvconnect.errors import Refused
from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.fleet.receipts import OwedReceipts
from kvconnect.router.freed_frames import FreedFrames
from kvconnect.router.handoff_bodies import bodies, mooncake_ticket
from kvconnect.router.http.admission import Admission, BodyMemory, Busy, ClientConcurrency
from kvconnect.router.http.draining import DrainingPrefills
from kvconnect.router.http.engine_call import (
    EngineCall,
    EngineFailed,
    EngineResponse,
    Overhead,
    Rejected,
)
from kvconnect.router.http.receipt_stream import ReceiptStream
from kvconnect.router.http.renamed_stream import RenamedStream
from kvconnect.router.http.reply import Reply
from kvconnect.router.http.request_reader import ParsedRequest, RequestReader
from kvconnect.router.http.tenants import Tenant
from kvconnect.router.metrics import RequestOutcome, RouterMetrics
from kvconnect.router.options import RouterOptions
from kvconnect.router.outgoing import OutgoingRequest
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.choice import (
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingChoice,
    RoutingReason,
    RoutingRules,
    TargetChoice,
    Unserved,
    choose,
    explain_no_choice,
)
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.apis import Api
from kvconnect.router.requests.logprobs import wants_prompt_logprobs, with_prompt_logprobs
from kvconnect.router.requests.retries import REFUSED_S, Retries, Withheld, digest_of
from kvconnect.router.tracing import RouterSpans

logger = logging.getLogger(__name__)

_SESSION = "X-Session-Id"
_DEADLY = (
    "two engines crashed within a minute while they worked on this request: it is refused for "
    f"{REFUSED_S / 60:.0f} minutes"
)
_NO_PATH = (404, 405)  # status of an engine that does not serve the path


class Services(NamedTuple):
    """Services that all exchanges of a router share."""

    options: RouterOptions
    rules: RoutingRules
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
    receipts: Mapping[Engine, OwedReceipts]
    retries: Retries


class _Prefilled(NamedTuple):
    """A prefill engine's whole response, and the ticket in it."""

    answer: bytes = b""
    ticket: dict[str, Any] | None = None


class _Attempt(NamedTuple):
    """The decode request, the first bytes of its response, and what passes the rest on if the
    response is a stream."""

    request: EngineCall
    first: bytes
    passing: Reply | ReceiptStream | RenamedStream


class Exchange:
    """Serves one request in the request's own task. Event loop only."""

    def __init__(
        self, services: Services, request: web.Request, api: Api, tenant: Tenant, turn: int
    ) -> None:
        self._services = services
        self._request = request
        self._api = api
        self._tenant = tenant
        listening = services.options.listening
        named_events, hits = api.named_events, listening.hit_headers
        self._reply = Reply(request, named_events=named_events, show_hits=hits)
        self._spans = services.spans.of(request)
        self._turn = turn  # number of the request; each retry adds one
        self._received_at = time.monotonic()
        self._hints: dict[str, float] = {}  # for engines, on the prompt's blocks
        self._streams_receipt = False  # the answer is a stream that can have a receipt
        dropped = partial(services.metrics.count, "dropped_fields")
        self._outgoing = OutgoingRequest(request, api, tenant, listening, dropped)
        self._outcome = RequestOutcome.CANCELLED  # until another outcome is known

    async def serve(self) -> web.StreamResponse:
        """Answer the request. The client's disconnect cancels this and both requests to engines."""
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
            self._spans.end(self._outcome, self._reply.status, choice)

    async def _answer(self) -> web.StreamResponse:
        try:
            client, services = self._tenant.name, self._services
            with (
                FreedFrames(),
                services.in_flight.enter(client),
                services.retries.opened(),
                services.bodies.allocation(client) as allocation,
            ):
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
        except EngineFailed as error:
            self._outcome = RequestOutcome.FAILED
            if error.role is Role.DECODE and error.answer is not None:
                choice = self._reply.choice
                if choice is not None and choice.reason is RoutingReason.PUSH_FAILED:
                    return self._reply.whole(_explained(error.answer))
                return self._reply.whole(error.answer)
            return self._reply.error(502, str(error))

    async def _attempts(self, asked: ParsedRequest) -> web.StreamResponse:
        digest = partial(digest_of, self._api.path, asked.body)
        if self._services.retries.refuses(digest, time.monotonic()):
            self._outcome = RequestOutcome.FAILED
            self._services.metrics.count("withheld_retries", Withheld.DEADLY.value)
            return self._reply.error(502, _DEADLY)
        retain_s = min(asked.prompt.retention_s, self._services.options.listening.retention_s)
        self._hints = {CacheHint.RETAIN.value: retain_s} if retain_s else {}
        self._streams_receipt = self._api.streams_receipts(asked.prompt)
        return await self._try_pairs(asked, digest)

    async def _try_pairs(
        self, asked: ParsedRequest, digest: Callable[[], bytes]
    ) -> web.StreamResponse:
        """Try pairs of engines until one answers.

        Raises:
            EngineFailed: the last attempt failed, and there is nothing left to try.
            Rejected: an engine rejects the request.
        """
        routing_request, failed_targets = self._routing_request(asked), FailedTargets()
        failure: EngineFailed | Rejected | None = None
        losses = 0
        try:
            while True:
                fleet_view = self._services.fleet.view()
                choice = choose(fleet_view, routing_request, failed_targets, self._services.rules)
                self._spans.chosen(choice)
                if choice is None:
                    if failure is not None:
                        raise failure
                    self._outcome = RequestOutcome.FAILED
                    return self._reply.error(503, explain_no_choice(fleet_view, routing_request))
                if isinstance(failure, EngineFailed):
                    self._services.metrics.retry(failure.role, failure.cause)
                self._reply.choice = choice
                self._services.metrics.chosen(choice)
                self._services.caches.sent(choice.targets, asked.prefix)
                try:
                    with FreedFrames():
                        async with self._attempt(choice, asked.body) as attempt:
                            return await self._relay(attempt, choice.mode, digest)
                except Rejected as error:
                    elsewhere = self._api.decode_only and error.answer.status in _NO_PATH
                    if not (elsewhere and failed_targets.add_unserved(fleet_view, choice)):
                        raise
                    failure = error
                except EngineFailed as error:
                    # As text: who keeps log records must not keep the error's frames.
                    logger.warning("attempt to %s failed: %s", choice.mode.value, str(error))
                    self._services.fleet.recheck(choice)
                    losses += error.cause == "lost"
                    again = self._try_again(error, losses, digest)
                    if not (again and failed_targets.add(choice, error.role, error.cause)):
                        raise
                    failure = error
                    keep = choice.decode.target.engine if error.role is Role.PREFILL else None
                    turn = routing_request.turn + 1
                    routing_request = routing_request._replace(turn=turn, keep=keep)
        finally:
            failure = None  # its traceback holds this frame, and that the body

    def _try_again(self, failed: EngineFailed, losses: int, digest: Callable[[], bytes]) -> bool:
        """Note how an engine was lost; return whether the request may go to another one."""
        if failed.cause != "lost":
            return True
        retries, now = self._services.retries, time.monotonic()
        if failed.crashed:
            retries.crashed(digest(), failed.crashed, now)
        withheld = retries.again(losses, digest, now)
        if withheld is not None:
            self._services.metrics.count("withheld_retries", withheld.value)
        return withheld is None

    def _routing_request(self, asked: ParsedRequest) -> RoutedRequest:
        services, prompt = self._services, asked.prompt
        session = self._request.headers.get(_SESSION, "") or prompt.session
        base = asked.prefix is not None and services.fleet.is_base(prompt.model)
        hits = services.caches.hits(asked.prefix, base=base)
        return RoutedRequest(
            self._turn,
            prompt.tokens,
            prompt.model,
            single=prompt.single,
            sampled=prompt.sampled,
            kinds=self._api.engines,
            decode_only=self._api.decode_only,
            draw=random.random(),
            session=session,
            hits=hits,
        )

    @asynccontextmanager
    async def _attempt(
        self, choice: RoutingChoice, body: Mapping[str, Any]
    ) -> AsyncIterator[_Attempt]:
        """Yield the beginning of decode's response.

        Leaving the block ends both requests to engines, but lets prefill finish if the response is
        complete.
        """
        overhead = Overhead()
        decode = self._services.fleet.get(Role.DECODE, choice.decode.target.engine)
        body = self._outgoing.body(decode.spec.kind, body)
        prefill: asyncio.Task[_Prefilled] | None = None
        async with AsyncExitStack() as ends:
            merges = False
            if choice.prefill is not None:
                engine = self._services.fleet.get(Role.PREFILL, choice.prefill.target.engine)
                asked, body = self._prefill_body(choice, choice.prefill, engine, body)
                if choice.mode is Mode.PULL:
                    with decode.awaited():
                        found = await self._prefill(engine, choice.prefill, asked, overhead)
                    overhead.answered()
                    rank = choice.prefill.target.rank
                    ticket = found.ticket or mooncake_ticket(engine, rank, asked)
                    if ticket is None:
                        plain = choice._replace(mode=Mode.PLAIN, reason=RoutingReason.NO_TICKET)
                        self._reply.choice = plain
                    else:
                        body = engine_bodies.pull_body(body, ticket)
                else:
                    merges = choice.mode is Mode.BOOTSTRAP and wants_prompt_logprobs(
                        self._api.path, body
                    )
                    computed = self._prefill(engine, choice.prefill, asked, overhead)
                    prefill = asyncio.create_task(computed)
                    ends.push_async_callback(self._end_prefill, prefill)
            passing: Reply | ReceiptStream | RenamedStream = self._reply
            if self._outgoing.client_ids is not None:
                passing = RenamedStream(self._reply, self._outgoing.client_ids)
            receipt: bool | str = self._services.options.listening.receipts
            if self._streams_receipt and (owed := self._services.receipts.get(decode)):
                awaited = ends.enter_context(owed.awaited())
                passing, receipt = ReceiptStream(self._reply, awaited), awaited.nonce
            hints = {**self._hints, **choice.decode.options}
            body = self._api.with_options(decode.spec.kind, body, hints, receipt=receipt)
            call = await ends.enter_async_context(self._engine_call(decode, choice.decode))
            beginning = self._begin(call, body, overhead)
            first = await (beginning if prefill is None else _beginning(prefill, beginning))
            if merges and prefill is not None:
                first = _with_logprobs(call, first, (await prefill).answer)
            self._services.metrics.added(choice.mode, overhead.seconds)
            yield _Attempt(call, first, passing)

    async def _end_prefill(self, prefill: asyncio.Task[Any]) -> None:
        if self._outcome is RequestOutcome.OK:
            self._services.draining_prefills.add(prefill)
        else:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill(
        self, engine: Engine, chosen: TargetChoice, body: Mapping[str, Any], overhead: Overhead
    ) -> _Prefilled:
        """Have a prompt computed; return the response, and the ticket for its KV in pull mode."""
        async with self._engine_call(engine, chosen) as call:
            await call.open(self._outgoing.request(body, chosen), overhead.written)
            if call.streams:
                await call.first_event()
                await call.read()
                return _Prefilled()
            answer = await call.read()
            if self._services.caches.indexes:
                self._services.metrics.hit(chosen.hit, engine_bodies.cached_tokens_of(answer))
            if engine.native:  # its answer may be a list, and has no ticket
                return _Prefilled(answer)
            try:
                return _Prefilled(answer, engine_bodies.ticket_of(answer))
            except Refused as error:
                raise call.fail(str(error)) from error

    def _prefill_body(
        self,
        choice: RoutingChoice,
        chosen: TargetChoice,
        engine: Engine,
        body: Mapping[str, Any],
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the bodies for prefill and decode, see :func:`bodies`."""
        asked, body = bodies(choice, chosen, engine, body, self._api.one_token)
        hints = {**self._hints, **chosen.options}
        asked = self._api.with_options(engine.spec.kind, asked, hints, receipt=False)
        if choice.mode is Mode.PULL and self._api.takes_token_ids:
            asked = engine_bodies.token_ids_too(asked)
        return asked, body

    async def _begin(self, call: EngineCall, body: Mapping[str, Any], overhead: Overhead) -> bytes:
        """Return the first bytes of decode's response; all of them if it is not a stream."""
        await call.open(self._outgoing.request(body, call.target_choice), overhead.written)
        return await (call.first_event() if call.streams else call.read())

    async def _relay(
        self, attempt: _Attempt, mode: Mode, digest: Callable[[], bytes]
    ) -> web.StreamResponse:
        """Pass the response on to the client."""
        call, first, passing = attempt
        if not call.streams:
            self._outcome = RequestOutcome.OK
            if self._services.options.listening.receipts:
                self._spans.answered(first)
            if self._outgoing.client_ids is not None:
                first = self._outgoing.client_ids.shown(first)
            return self._reply.whole(EngineResponse(200, call.content_type, first))
        self._services.metrics.first_byte(mode, time.monotonic() - self._received_at)
        self._spans.first_byte()
        stream = await self._reply.begin(call.content_type)
        try:
            await passing.write(first)
            async for chunk in call.chunks(passing.forward):
                await passing.write(chunk)
            if isinstance(passing, ReceiptStream):
                self._spans.receipt(await passing.end())
            elif isinstance(passing, RenamedStream):
                await passing.end()
            await stream.write_eof()
            self._outcome = RequestOutcome.OK
        except EngineFailed as error:
            self._outcome = RequestOutcome.BROKEN
            if error.crashed:
                self._services.retries.crashed(digest(), error.crashed, time.monotonic())
            await self._reply.break_off(str(error))
        except ConnectionError:  # the client disconnected
            logger.debug("a client of %s left", self._request.path)
        return stream

    def _engine_call(self, engine: Engine, chosen: TargetChoice) -> EngineCall:
        span = self._spans.call(engine, chosen)
        return EngineCall(self._services.client, self._services.metrics, engine, chosen, span)


def _explained(answer: EngineResponse) -> EngineResponse:
    why = "the hand-off failed by push and by pull; the decode engine's log says why"
    return replace(answer, body=engine_bodies.explained(answer.status, answer.body, why))


def _with_logprobs(request: EngineCall, answer: bytes, prefilled: bytes) -> bytes:
    try:
        return with_prompt_logprobs(answer, prefilled)
    except Refused as error:
        raise request.fail(str(error)) from error


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
