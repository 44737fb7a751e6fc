"""Streams that another engine can continue. Event loop only."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

from kvconnect.router.connections.engine_connection import ConnectionLost, Unreachable
from kvconnect.router.connections.http1 import request_head
from kvconnect.router.connections.relay import RelayedStream, Returned
from kvconnect.router.decision import ClientRequest, Decision
from kvconnect.router.http.engine_call import EngineFailed
from kvconnect.router.http.reply import Reply
from kvconnect.router.http.services import Services
from kvconnect.router.policy.choice import RoutingChoice
from kvconnect.router.policy.fleet_view import EngineKind, Role
from kvconnect.router.policy.leaving import after_drain
from kvconnect.router.requests import text_ends
from kvconnect.router.requests.body import Body, prefix_of, prompt_of
from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.journals import Journaled

_MOST_DOUBTS = 4  # questions about where text ends
_ENDS_S = 2.0  # for an answer


class StreamCut(EngineFailed):
    """The decode engine of a journaled stream was lost, after the stream's first event."""


class StreamLeft(StreamCut):
    """A journaled stream leaves its decode engine, which is drained. That is no failure."""

    def __init__(self, url: str) -> None:
        super().__init__(Role.DECODE, "error", f"decode engine {url} is drained")


class JournaledStream:
    """Passes a stream on to a client, from one engine after another.

    Attributes:
        journal: what the client has got.
        continued: engines that have continued it.
        chunk_hashes: of the prompt of the engine that continues it; empty if no policy uses them.
    """

    def __init__(
        self, services: Services, reply: Reply, request: ClientRequest, journaled: Journaled
    ) -> None:
        self._services, self._reply = services, reply
        self._request, self._api = request, journaled.api
        self._left = services.options.continuations  # after losses
        self._drained = False  # the last engine was not lost
        self._sent = 0  # so much, when the last engine began
        self.journal = journaled.journal
        self.continued = 0
        self.chunk_hashes: Sequence[int] = ()

    async def write(self, chunk: bytes, *, last: bool = False) -> None:
        """See :meth:`Reply.write`. What ends before its last event has no end yet."""
        if passed := self.journal.feed(chunk):
            whole = last and not self.unusable(ended=True)
            await self._reply.write(passed, last=whole)

    def forward(self, chunk: bytes) -> bool:
        """See :meth:`Reply.forward`."""
        if not self._reply.ready:
            return False
        passed = self.journal.feed(chunk)
        if passed:
            self._reply.forward(passed)
        return not self.journal.broken  # what follows it is left to the request's task

    def relay(
        self, engine: asyncio.Transport, back: Callable[[Returned], None]
    ) -> RelayedStream | None:
        """See :meth:`Reply.relay`: native code notes the tokens of events like those before."""
        form = self.journal.next_form()
        if form is None:
            return None

        def returned(stream: Returned) -> None:
            self.journal.relayed(stream.notes)
            back(stream)

        return self._reply.relay(engine, returned, form=form)

    def unusable(self, *, ended: bool) -> str:
        """Return why the engine's stream is no good so far, or at its end; empty if it is."""
        journal = self.journal
        if journal.prevented is None and ended and not journal.done:
            return "ended its stream before the last event"
        return journal.broken

    async def settle(self, choice: RoutingChoice) -> None:
        """Where it is in doubt at which token the client's text ends, ask an engine other than the
        lost one of a choice. Without an answer, the stream is continued further back."""
        for _ in range(_MOST_DOUBTS):
            tail = self.journal.doubtful()
            text = await self._text_of(tail, choice) if tail else None
            if text is None:
                return
            self.journal.settle(text)

    async def _text_of(self, tail: array[int], choice: RoutingChoice) -> str | None:
        """Return the text of tokens; None if no engine says it."""
        model, fleet = self._request.prompt.model, self._services.fleet
        number = choice.decode.target.engine
        # It may have been removed meanwhile.
        lost = {e.url for e in fleet.all(Role.DECODE) if e.index == number}
        others = (e for e in fleet.all() if e.up and e.url not in lost)
        serving = (e for e in others if not (model and e.info.models) or model in e.info.models)
        engine = next((e for e in serving if e.spec.kind is not EngineKind.SGLANG), None)
        if engine is None:
            return None
        body = text_ends.asked(model, tail)
        head = request_head(engine.base, "POST", text_ends.PATH, self._request.headers, len(body))
        try:
            status, said = await self._services.client.whole(engine.base, head, body, _ENDS_S)
        except (Unreachable, ConnectionLost, TimeoutError):
            return None
        return text_ends.told(said) if status == 200 else None

    async def may_leave(self, decision: Decision, choice: RoutingChoice) -> bool:
        """Return whether the stream can go on elsewhere than at the decode engine of a choice,
        which is drained. If not, it does so there."""
        asked = self._request._replace(api=self._api)
        if not decision.may_leave(self._services.fleet.view(), choice, asked):
            return False
        await self.settle(choice)
        return self.journal.can_leave(asked.body)

    def goes_on_at(self, choice: RoutingChoice) -> None:
        """Count that the stream goes on at the engines of a choice."""
        self.continued += 1
        count = self._services.metrics.count
        if self._drained:
            count("drained_streams", after_drain(choice).value)
        else:
            count("lost_streams", AfterLoss.CONTINUED.value)

    def go_on(
        self, decision: Decision, choice: RoutingChoice, *, drained: bool
    ) -> AfterLoss | None:
        """Have a decision's next attempts continue the stream, whose engine was lost, or is
        ``drained``; return why that cannot be."""
        journal, self._drained = self.journal, drained
        further, self._sent = journal.sent > self._sent, journal.sent
        body = journal.rest(self._request.body)
        if isinstance(body, AfterLoss):
            return body
        if not drained and (reason := self._lost(decision, choice, further=further)) is not None:
            return reason
        decision.go_on(self._rest(body), choice, drained=drained)
        return None

    def _lost(
        self, decision: Decision, choice: RoutingChoice, *, further: bool
    ) -> AfterLoss | None:
        """Count a loss; return why no other engine goes on after it."""
        if not self._left:
            return AfterLoss.LIMIT
        self._left -= 1
        retry = decision.cut(choice, further=further, now=time.monotonic())
        if retry.withheld is None:
            return None
        self._services.metrics.count("withheld_retries", retry.withheld.value)
        return AfterLoss.WITHHELD

    def _rest(self, body: Body) -> ClientRequest:
        """Return the request for the rest of the stream."""
        services, prompt = self._services, prompt_of(body)
        caches = services.caches
        prefix = prefix_of(body, ids=caches.by_ids) if caches.indexes else None
        self.chunk_hashes = prefix.chunk_hashes if prefix else ()
        base = prefix is not None and services.fleet.is_base(prompt.model)
        hits = caches.hits(prefix, prompt.tokens, base=base)
        return self._request._replace(api=self._api, body=body, prompt=prompt, hits=hits)
