"""One attempt at a request: a call of each chosen engine, until decode's answer begins.

Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import NamedTuple

from kvconnect.errors import KVConnectError, Refused
from kvconnect.router.decision import ChosenEngines, Decision, Legs
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.fleet.receipts import AwaitedReceipt
from kvconnect.router.http.admission import BodyAllocation
from kvconnect.router.http.engine_call import EngineCall, NotOffered, Overhead, PromptWork
from kvconnect.router.http.journaled_stream import JournaledStream
from kvconnect.router.http.receipt_stream import ReceiptStream
from kvconnect.router.http.renamed_stream import RenamedStream
from kvconnect.router.http.reply import Reply
from kvconnect.router.http.services import Services
from kvconnect.router.policy.choice import Mode, RoutingChoice, RoutingReason
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.router.tracing import RequestSpans

HEAD_START_S = 1.0
"""A decode engine of a push is asked so long before prefill is expected to begin. A step of a busy
prefill engine may take as long, and more than one prompt may begin with it."""
LONGEST_WAIT_S = 30.0
"""It is asked after so long in any case: a standing ticket is valid for twice as long at least."""
_CHECK_S = 0.5  # prompts may be computed faster than expected

Passing = Reply | ReceiptStream | RenamedStream | JournaledStream
"""What passes a stream on to its client."""


class Answer(NamedTuple):
    """Decode's answer: its call, the first bytes, and what passes the rest of a stream on."""

    call: EngineCall
    first: bytes
    passing: Passing


class Attempt:
    """Calls the engines of one choice.

    Attributes:
        legs: what the engines are asked.
        completed: set it once the answer has been passed on. Prefill may then end by itself.

    Raises:
        Refused: a field of the client's may not reach the engines.
    """

    def __init__(
        self,
        services: Services,
        spans: RequestSpans,
        reply: Reply,
        decision: Decision,
        choice: RoutingChoice,
        room: BodyAllocation,
        journaled: JournaledStream | None = None,
    ) -> None:
        """``room``: where the memory of whole answers is taken. ``journaled``: passes the answer
        on, if it is a stream that another engine may continue."""
        self._overhead = Overhead()
        self._began = time.monotonic()
        self._ready_at: float | None = None  # prefill has ended, and decode its earlier prompts
        self._services, self._spans, self._reply = services, spans, reply
        self._room = room
        self._prefilling: EngineCall | None = None
        self._streams_receipt = decision.streams_receipt
        self._streamed = decision.streamed
        self._journaled = journaled
        self.legs = decision.legs(choice, self._chosen_engines(choice))
        for name in self.legs.dropped:
            services.metrics.count("dropped_fields", name)
        self.completed = False

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[Answer]:
        """Yield the beginning of decode's answer. Leaving the block ends both calls.

        Raises:
            EngineFailed: an engine fails or is lost.
            Rejected: one rejects the request.
        """
        services, legs, mode = self._services, self.legs, self.legs.choice.mode
        decode = services.fleet.get(Role.DECODE, legs.choice.decode.target.engine)
        prefill: asyncio.Task[None] | None = None
        try:
            if legs.choice.prefill is not None:
                prefill = await self._prefill_begun(legs.choice.prefill, decode)
            receipts = services.receipts.get(decode) if self._streams_receipt else None
            chosen, work = legs.choice.decode, self._decode_work()
            with nullcontext() if receipts is None else receipts.awaited() as awaited:
                async with self._call(decode, chosen, work, Role.DECODE) as call:
                    passing, receipt = self._passing(awaited)
                    if prefill is None:
                        first = await self._begin(call, receipt)
                    else:
                        first = await self._begin_beside(call, receipt, prefill)
                    if call.streams:
                        self._arrived(decode)
                    if legs.merges and prefill is not None:
                        await prefill
                        first = await _merged(legs, call, first)
                    services.metrics.added(mode, self._overhead.seconds)
                    if passing is self._journaled and not call.streams:
                        passing = self._reply
                    yield Answer(call, first, passing)
        finally:
            if prefill is not None:
                await self._end_prefill(prefill)

    async def _prefill_begun(
        self, chosen: TargetChoice, decode: Engine
    ) -> asyncio.Task[None] | None:
        """Ask prefill, and return the task; in pull mode wait for its answer, and return None."""
        prefilling, choice = self._prefill(chosen, decode), self.legs.choice
        if choice.mode is not Mode.PULL:
            return asyncio.create_task(prefilling)
        with decode.awaited(choice.decode):
            await prefilling
        choice = self.legs.choice
        if choice.mode is Mode.PLAIN and choice.prefill_role is Role.DECODE:
            what = "the drained engine offers no hand-off of its stream"
            raise NotOffered(Role.PREFILL, "error", what)
        self._overhead.answered()
        self._reply.choice = choice
        return None

    def _passing(self, awaited: AwaitedReceipt | None) -> tuple[Passing, bool | str]:
        """Return what passes the answer on, and how its receipt is asked for."""
        if awaited is not None:
            return ReceiptStream(self._reply, awaited), awaited.nonce
        receipt = self._services.options.listening.receipts
        if self.legs.client_ids is not None:
            return RenamedStream(self._reply, self.legs.client_ids), receipt
        return self._reply if self._journaled is None else self._journaled, receipt

    async def _prefill(self, chosen: TargetChoice, decode: Engine) -> None:
        """Have the prompt computed, and give the answer to the legs."""
        role = self.legs.choice.prefill_role
        engine = self._services.fleet.get(role, chosen.target.engine)
        work = PromptWork.SEEN if role is Role.PREFILL else PromptWork.NONE
        async with self._call(engine, chosen, work, Role.PREFILL) as call:
            self._prefilling = call
            await call.open(self.legs.prefill(), self._overhead.written)
            answer: bytes | None = None
            if call.streams:
                await call.first_event()
                self._prefilled(decode)
                async for _ in call.chunks(None):
                    pass
            else:
                answer = await call.read(self._room.take)
                self._prefilled(decode)
                if self._services.caches.indexes:
                    found = engine_bodies.cached_tokens_of(answer)
                    self._services.metrics.hit(chosen.hit, found)
            try:
                self.legs.prefilled(answer)
            except Refused as error:
                raise call.fail(str(error)) from error

    async def _end_prefill(self, prefill: asyncio.Task[None]) -> None:
        if self.completed:
            self._services.draining_prefills.add(prefill)
        else:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill_is_near(self, prefill: asyncio.Task[None]) -> None:
        """Wait while the prefill engine has other prompts to compute before. A decode engine holds
        blocks for a prompt from when it is asked, for which its streams may have to give way."""
        latest = time.monotonic() + LONGEST_WAIT_S
        while self._prefilling is not None and not prefill.done():
            left_s = latest - time.monotonic()
            wait_s = min(self._prefilling.starts_in_s() - HEAD_START_S, left_s)
            if wait_s <= 0:
                return
            await asyncio.wait({prefill}, timeout=min(wait_s, _CHECK_S))

    async def _begin_beside(
        self, call: EngineCall, receipt: bool | str, prefill: asyncio.Task[None]
    ) -> bytes:
        """:meth:`_begin` while prefill works; its failure ends the wait."""
        scope, waiting = asyncio.timeout(None), True  # cancels this task without another one

        def ended(task: asyncio.Task[None]) -> None:
            if waiting and _failed(task):
                scope.reschedule(0.0)

        prefill.add_done_callback(ended)
        try:
            async with scope:
                await asyncio.sleep(0)  # prefill is asked first
                if self.legs.choice.mode is Mode.PUSH:
                    await self._prefill_is_near(prefill)
                return await self._begin(call, receipt)
        except (KVConnectError, TimeoutError):
            if not _failed(prefill):
                raise
        finally:
            waiting = False
            prefill.remove_done_callback(ended)
        prefill.result()
        raise AssertionError("it has failed")

    async def _begin(self, call: EngineCall, receipt: bool | str) -> bytes:
        """Return the first bytes of decode's answer; all of them if it is no stream, and not
        long or needed whole."""
        ids = self._journaled is not None and self._journaled.journal.by_ids
        await call.open(self.legs.decode(receipt, ids=ids), self._overhead.written)
        if call.streams:
            return await call.first_event()
        needed_whole = receipt or self.legs.merges or self.legs.client_ids is not None
        return await (call.read if needed_whole else call.beginning)(self._room.take)

    def _chosen_engines(self, choice: RoutingChoice) -> ChosenEngines:
        fleet = self._services.fleet
        decode = fleet.get(Role.DECODE, choice.decode.target.engine).spec
        if choice.prefill is None:
            return ChosenEngines(decode)
        prefill = fleet.get(choice.prefill_role, choice.prefill.target.engine)
        return ChosenEngines(decode, prefill.spec, prefill.info.engine_ids)

    def _call(
        self, engine: Engine, chosen: TargetChoice, work: PromptWork, role: Role
    ) -> EngineCall:
        span, services = self._spans.call(engine, chosen), self._services
        return EngineCall(services.client, services.metrics, engine, chosen, span, work, role=role)

    def _decode_work(self) -> PromptWork:
        """Return what the decode engine does with the prompt."""
        mode, reason = self.legs.choice.mode, self.legs.choice.reason
        if mode is not Mode.PLAIN or reason is RoutingReason.API:
            return PromptWork.NONE
        several = reason is RoutingReason.MULTI
        return PromptWork.SEEN if self._streamed and not several else PromptWork.UNSEEN

    def _prefilled(self, decode: Engine) -> None:
        """Note the end of prefill. The first token then waits for prompts that the decode engine
        computes, which is no time of the hand-off."""
        now = time.monotonic()
        times = decode.timer.at(now)
        token_s = 0.0 if times.compute is None else times.compute.token_s
        self._ready_at = now + token_s * times.waiting(self.legs.choice.decode.target.rank)

    def _arrived(self, decode: Engine) -> None:
        """Measure how long the first token of a prompt that was handed off took after prefill."""
        choice, now = self.legs.choice, time.monotonic()
        if choice.mode is Mode.PLAIN:
            return
        expected = None if choice.handoff is None else choice.handoff.expected
        free_at = self._began + (0.0 if expected is None else expected.decode_free_s)
        since = max(free_at, now if self._ready_at is None else self._ready_at)
        decode.timer.arrived(choice.mode, choice.decode.tokens, now - since, now)


async def _merged(legs: Legs, call: EngineCall, answer: bytes) -> bytes:
    try:
        return await asyncio.to_thread(legs.merged, answer)  # prefill's may be long
    except Refused as error:
        raise call.fail(str(error)) from error


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
