"""One client request: from its body to the last byte of its response, within one deadline.

Until the first byte goes to the client, a failed attempt is aborted on both engines, and another
pair is tried. After it, another pair continues a stream that is journaled, also if its engine is
drained; any other one ends with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial

from kvconnect.errors import Refused
from kvconnect.router.connections.engine_connection import Interrupted
from kvconnect.router.decision import ClientRequest, Decision
from kvconnect.router.freed_frames import FreedFrames
from kvconnect.router.http.admission import BodyAllocation, Busy
from kvconnect.router.http.attempt import Answer, Attempt, Passing
from kvconnect.router.http.client_request import client_request
from kvconnect.router.http.engine_call import (
    EngineCall,
    EngineFailed,
    EngineResponse,
    NotOffered,
    Rejected,
)
from kvconnect.router.http.http_request import HttpError, HttpRequest
from kvconnect.router.http.http_response import HttpResponse
from kvconnect.router.http.journaled_stream import JournaledStream, StreamCut, StreamLeft
from kvconnect.router.http.receipt_stream import ReceiptStream
from kvconnect.router.http.refusals import refusal
from kvconnect.router.http.renamed_stream import RenamedStream
from kvconnect.router.http.reply import Reply
from kvconnect.router.http.response_writer import ResponseStream
from kvconnect.router.http.services import Services
from kvconnect.router.metrics import RequestOutcome
from kvconnect.router.policy.choice import RoutingChoice
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.leaving import AfterDrain, stays
from kvconnect.router.policy.no_choice import Unserved
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.apis import Api
from kvconnect.router.requests.continuation import AfterLoss, context_of
from kvconnect.router.requests.journals import Journaled, journal_of
from kvconnect.router.requests.retries import REFUSED_S, Withheld

logger = logging.getLogger(__name__)

_DEADLY = (
    "two engines crashed within a minute while they worked on this request: it is refused for "
    f"{REFUSED_S / 60:.0f} minutes"
)
_NO_FAILURE = (NotOffered, StreamLeft)
_new_id = partial(secrets.token_hex, 16)


class Exchange:
    """Serves one request in the request's own task. Event loop only."""

    def __init__(self, services: Services, request: HttpRequest, api: Api, turn: int) -> None:
        """``request``: of a known tenant."""
        assert request.tenant is not None, "who asks is known"
        self._services = services
        self._request = request
        self._api = api
        self._tenant = request.tenant
        named_events, hits = api.named_events, services.options.listening.hit_headers
        self._reply = Reply(
            request, named_events=named_events, show_hits=hits, relay=services.relay
        )
        self._spans = services.spans.of(request)
        self._turn = turn  # number of the request
        self._received_at = time.monotonic()
        self._outcome = RequestOutcome.CANCELLED  # until another outcome is known
        self._deadline = asyncio.timeout(services.options.limits.timeout_s)
        self._chunk_hashes: Sequence[int] = ()  # of what the engines are asked
        self._journaled: JournaledStream | None = None
        self._unjournaled: AfterLoss | None = None  # why a stream is not, where others are
        self._left = contextlib.ExitStack()  # keeps a drained engine until another one goes on

    async def serve(self) -> HttpResponse | None:
        """Return the response; None: it has been sent. The client's disconnect cancels this and
        both requests to engines."""
        timeout_s = self._services.options.limits.timeout_s
        try:
            async with self._deadline:
                return await self._told(await self._answer())
        except TimeoutError:
            self._outcome = RequestOutcome.TIMEOUT
            message = f"not done within {timeout_s:g} seconds"
            if not self._reply.began:
                return await self._told(self._reply.error(504, message))
            reason = None if self._journaled is None else AfterLoss.FAILED
            await self._break_off(message, RequestOutcome.TIMEOUT, reason)
            return None
        finally:
            self._reply.close()
            self._left.close()
            choice = self._reply.choice
            chosen = None if choice is None else (choice.mode, choice.reason)
            self._services.metrics.request(chosen, self._outcome)
            self._spans.end(self._outcome, self._reply.status, choice)

    async def _answer(self) -> HttpResponse | None:
        try:
            client, services = self._tenant.name, self._services
            with (
                FreedFrames(),
                services.in_flight.enter(client),
                services.retries.opened(),
                services.bodies.allocation(client) as allocation,
                services.answers.allocation(client) as room,
            ):
                asked = await services.intake.read(
                    self._request, self._api, self._tenant, allocation
                )
                turn = services.admission.enter(client, self._tenant.weight)
                async with self._spans.queue_wait(turn):
                    request = client_request(services, self._request, asked, self._api, self._turn)
                    self._chunk_hashes = asked.prefix.chunk_hashes if asked.prefix else ()
                    del asked  # token ids are kept no longer
                    decision = Decision(request, services.rules, services.retries, _new_id)
                    if request.prompt.streamed and not self._api.decode_only:
                        self._reply.comment_after(services.options.limits.comment_s)
                    return await self._attempts(request, decision, room)
        except (Busy, HttpError, Refused, Unserved, Rejected, EngineFailed) as error:
            if not self._reply.began:
                response, self._outcome = refusal(self._reply, error)
                return response
            message = f"the decode engine was lost, and no other one went on: {error}"
            await self._break_off(message, RequestOutcome.BROKEN, AfterLoss.FAILED)
            return None

    async def _told(self, response: HttpResponse | None) -> HttpResponse | None:
        """Return a response that is still to be sent. Comments have begun a stream already, which
        then ends with what the response says."""
        if response is None or self._reply.stream is None:
            return response
        await self._reply.break_off(engine_bodies.message_of(response.body))
        return None

    def _journal(self, request: ClientRequest, choice: RoutingChoice, room: BodyAllocation) -> None:
        """Have the answer of a choice's engines journaled, if it is a stream that others can
        continue, and does not do so already."""
        services = self._services
        if self._reply.began or not (services.options.continuations and request.prompt.streamed):
            return
        self._journaled = self._unjournaled = None
        engine = services.fleet.get(Role.DECODE, choice.decode.target.engine)
        found: Journaled | AfterLoss = AfterLoss.RECEIPT
        if not services.options.listening.receipts:
            found = journal_of(
                engine.spec.kind,
                request.api,
                request.body,
                request.prompt,
                room.try_take,
                context=context_of(engine.info.models),
            )
        if isinstance(found, AfterLoss):
            self._unjournaled = found
        else:
            self._journaled = JournaledStream(services, self._reply, request, found)

    async def _attempts(
        self, request: ClientRequest, decision: Decision, room: BodyAllocation
    ) -> HttpResponse | None:
        """Try pairs of engines until one answers; return an answer that is still to be sent.

        Raises:
            Busy: there is no memory for the answer.
            EngineFailed: the last attempt failed, and there is nothing left to try.
            Rejected: an engine rejects the request.
        """
        services = self._services
        if decision.refused(time.monotonic()):
            self._outcome = RequestOutcome.FAILED
            services.metrics.count("withheld_retries", Withheld.DEADLY.value)
            return self._reply.error(502, _DEADLY)
        failure: EngineFailed | Rejected | None = None
        try:
            while True:
                view = services.fleet.view(timed=decision.by_times)
                choice = decision.choose(view)
                self._spans.chosen(choice)
                if choice is None:
                    if failure is not None:
                        raise failure
                    self._outcome = RequestOutcome.FAILED
                    return self._reply.error(503, decision.explain(view))
                if isinstance(failure, EngineFailed) and not isinstance(failure, _NO_FAILURE):
                    services.metrics.retry(failure.role, failure.cause)
                self._journal(request, choice, room)
                self._reply.choice = choice
                services.metrics.chosen(choice)
                try:
                    with FreedFrames():
                        await self._attempt(decision, choice, room)
                        return None
                except Rejected as error:
                    if not decision.rejected(view, choice, error.answer.status):
                        raise
                    failure = error
                except EngineFailed as error:
                    going_on = isinstance(error, StreamCut)
                    if not (going_on or self._try_again(error, decision, choice)):
                        raise
                    failure = error
        finally:
            failure = None  # its traceback holds this frame, and that the body

    async def _attempt(
        self, decision: Decision, choice: RoutingChoice, room: BodyAllocation
    ) -> None:
        attempt = Attempt(
            self._services, self._spans, self._reply, decision, choice, room, self._journaled
        )
        self._services.caches.sent(choice.targets, self._chunk_hashes)
        try:
            async with attempt.answer() as answer:
                response: HttpResponse | None = None
                if self._reply.stream is not None and not answer.call.streams:
                    raise answer.call.fail("answered without a stream")
                if answer.call.streams or not answer.call.ended:
                    await self._stream(answer, choice, decision)
                else:
                    response = self._whole(answer, attempt)
                attempt.completed = self._outcome in (RequestOutcome.OK, RequestOutcome.CONTINUED)
        except StreamCut as cut:
            if await self._goes_on(cut, decision, choice):
                raise
            return
        if response is not None:
            await self._send(response)

    def _try_again(self, error: EngineFailed, decision: Decision, choice: RoutingChoice) -> bool:
        """Note how an attempt failed; return whether another one follows."""
        if not isinstance(error, NotOffered):
            # As text: who keeps log records must not keep the error's frames.
            logger.warning("attempt to %s failed: %s", choice.mode.value, str(error))
            self._services.fleet.recheck(choice)
        retry = decision.failed(
            choice, error.role, error.cause, crashed=error.crashed, now=time.monotonic()
        )
        if retry.withheld is not None:
            self._services.metrics.count("withheld_retries", retry.withheld.value)
        return retry.follows

    def _whole(self, answer: Answer, attempt: Attempt) -> HttpResponse:
        """Return an answer that is not a stream."""
        call, body = answer.call, answer.first
        self._outcome = RequestOutcome.OK
        if self._services.options.listening.receipts:
            self._spans.answered(body)
        if attempt.legs.client_ids is not None:
            body = attempt.legs.client_ids.shown(body)
        return self._reply.whole(EngineResponse(200, call.content_type, body, call.headers))

    async def _send(self, response: HttpResponse) -> None:
        """Send a whole answer. Its memory is in the account until the client has read it, but for
        what the system has taken; the engines are free already."""
        self._no_deadline()
        self._reply.close()
        with contextlib.suppress(ConnectionError):  # the client disconnected
            await self._request.writer.respond(self._request, response)

    def _no_deadline(self) -> None:
        """The rest may take as long as client and engine make progress."""
        if not self._deadline.expired():
            self._deadline.reschedule(None)

    async def _stream(self, answer: Answer, choice: RoutingChoice, decision: Decision) -> None:
        """Pass a stream, or a long answer, on as it arrives.

        Raises:
            StreamCut: its engine was lost or is drained, and it is journaled.
        """
        call, first, passing = answer
        stream = self._begun(call, choice)
        self._no_deadline()
        try:
            await passing.write(first)
            _check(passing, call, ended=False)
            if isinstance(passing, JournaledStream):
                await self._journaled_rest(call, passing, choice, decision)
            else:
                await self._rest(call, passing)
            if isinstance(passing, ReceiptStream):
                self._spans.receipt(await passing.end())
            elif isinstance(passing, RenamedStream):
                await passing.end()
            _check(passing, call, ended=True)
            await stream.end()
            going_on = self._journaled is not None and self._journaled.continued
            self._outcome = RequestOutcome.CONTINUED if going_on else RequestOutcome.OK
        except StreamLeft:
            raise
        except EngineFailed as error:
            if error.crashed:
                decision.crashed(error.crashed, time.monotonic())
            if isinstance(passing, JournaledStream):
                raise StreamCut(error.role, error.cause, str(error)) from None
            await self._break_off(str(error), RequestOutcome.BROKEN, self._unjournaled)
        except ConnectionError:  # the client disconnected
            logger.debug("a client of %s left", self._request.path)

    async def _rest(self, call: EngineCall, passing: Passing) -> None:
        """Pass the rest of a stream on."""
        async for chunk in call.chunks(passing):
            if isinstance(passing, Reply | JournaledStream):
                await passing.write(chunk, last=call.ended)
            else:  # something may follow
                await passing.write(chunk)
            _check(passing, call, ended=False)

    async def _journaled_rest(
        self, call: EngineCall, passing: JournaledStream, choice: RoutingChoice, decision: Decision
    ) -> None:
        """Pass the rest of a journaled stream on, which leaves an engine that is drained.

        Raises:
            StreamLeft: it does.
        """
        with contextlib.ExitStack() as told:
            if not stays(choice):
                told.enter_context(call.engine.told_of_drain(call.interrupt))
            while True:
                try:
                    return await self._rest(call, passing)
                except Interrupted:
                    if await passing.may_leave(decision, choice):
                        self._left.enter_context(call.engine.awaited())
                        raise StreamLeft(call.engine.url) from None
                    self._services.metrics.count("drained_streams", AfterDrain.STAYED.value)

    def _begun(self, call: EngineCall, choice: RoutingChoice) -> ResponseStream:
        """Return the client's stream, which begins with the first engine's."""
        if self._reply.began:
            assert self._reply.stream is not None, "it has begun"
            assert self._journaled is not None, "only such a stream has a further engine"
            self._left.close()
            self._journaled.goes_on_at(choice)
            self._spans.continued()
            return self._reply.stream
        if call.streams:
            self._services.metrics.first_byte(choice.mode, time.monotonic() - self._received_at)
        self._spans.first_byte()
        return self._reply.begin(call.content_type, call.headers)

    async def _goes_on(
        self, error: EngineFailed, decision: Decision, choice: RoutingChoice
    ) -> bool:
        """Return whether attempts shall continue a stream that was cut; if not, it has ended."""
        journaled, limits = self._journaled, self._services.options.limits
        assert journaled is not None and self._reply.stream is not None, "it has been cut"
        drained = isinstance(error, StreamLeft)
        if not drained:
            logger.warning("a stream of %s was cut: %s", self._request.path, str(error))
            self._services.fleet.recheck(choice)
        if (ending := journaled.journal.ending()) is not None:
            self._services.metrics.count("lost_streams", AfterLoss.CONTINUED.value)
            with contextlib.suppress(ConnectionError):
                await self._reply.write(ending)
                await self._reply.stream.end()
                self._outcome = RequestOutcome.CONTINUED
            return False
        if not self._deadline.expired():
            now = asyncio.get_running_loop().time()
            self._deadline.reschedule(now + limits.timeout_s)
        await journaled.settle(choice)
        if (reason := journaled.go_on(decision, choice, drained=drained)) is not None:
            await self._break_off(str(error), RequestOutcome.BROKEN, reason)
            return False
        self._chunk_hashes = journaled.chunk_hashes
        return True

    async def _break_off(
        self, message: str, outcome: RequestOutcome, reason: AfterLoss | None
    ) -> None:
        """End the stream with an error event. ``reason``: why no other engine goes on, where that
        is counted."""
        assert self._reply.stream is not None, "it has begun"
        self._outcome = outcome
        if reason is not None:
            self._services.metrics.count("lost_streams", reason.value)
        await self._reply.break_off(message)


def _check(passing: Passing, call: EngineCall, *, ended: bool) -> None:
    """Raise :class:`EngineFailed` if what an engine has sent is no stream to continue with."""
    if isinstance(passing, JournaledStream) and (why := passing.unusable(ended=ended)):
        raise call.fail(why)
