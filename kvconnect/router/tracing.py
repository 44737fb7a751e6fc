"""Spans of a request in the router: the request, its wait, its choices, its requests to engines.

``RequestSpans`` and ``CallSpan`` record nothing; they serve while tracing is off. Event loop
only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from kvconnect.observability import tracing
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.metrics import CallOutcome, RequestOutcome
from kvconnect.router.policy.choice import RoutingChoice
from kvconnect.router.policy.expected_ttft import HandoffDecision
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests import engine_bodies
from kvconnect.types import PromptSource

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvconnect.observability.tracing.otel import Tracer

_SUMS = ("prompt", *(source.value for source in PromptSource))  # of a receipt
_NOT_FAILED = (
    RequestOutcome.OK,
    RequestOutcome.CONTINUED,
    RequestOutcome.REJECTED,
    RequestOutcome.CANCELLED,
)
_CALL_NOT_FAILED = (CallOutcome.OK, CallOutcome.REJECTED, CallOutcome.CANCELLED)


class TracedRequest(Protocol):
    """What is told of a client's request. ``headers``: names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    secure: bool


class CallSpan:
    """Span of a request to one engine."""

    def headers(self) -> Mapping[str, str]:
        """Return the headers that make the engine's spans part of the trace."""
        return {}

    def end(self, outcome: CallOutcome) -> None:
        """End the span."""


class RequestSpans:
    """Spans of a client's request, from its head on."""

    def queue_wait(
        self, queue_wait: AbstractAsyncContextManager[None]
    ) -> AbstractAsyncContextManager[None]:
        """Return a context manager that enters ``queue_wait``, and records the wait."""
        return queue_wait

    def chosen(self, choice: RoutingChoice | None) -> None:
        """Record the choice of an attempt's engines; None: there are none."""

    def call(self, engine: Engine, target_choice: TargetChoice) -> CallSpan:  # noqa: ARG002
        """Begin and return the span of a request to an engine."""
        return _NO_CALL_SPAN

    def first_byte(self) -> None:
        """Record the first byte of a stream."""

    def continued(self) -> None:
        """Record that another engine continues the stream."""

    def answered(self, answer: bytes) -> None:
        """Record the receipt in a whole answer, if it has one."""

    def receipt(self, receipt: engine_bodies.Receipt) -> None:
        """Record where the tokens of the prompt came from."""

    def end(self, outcome: RequestOutcome, status: int, choice: RoutingChoice | None) -> None:
        """End the span of the request. ``status``: of the response, 0 before it."""


_NO_CALL_SPAN, _NO_SPANS = CallSpan(), RequestSpans()


class RouterSpans:
    """Makes the spans of one router, if the environment names an OTLP endpoint."""

    def __init__(self) -> None:
        self._tracer = tracing.of_environment("kvconnect-router")

    def of(self, request: TracedRequest) -> RequestSpans:
        """Return the spans of one request."""
        return _NO_SPANS if self._tracer is None else _TracedRequestSpans(self._tracer, request)

    def close(self) -> None:
        """Send the spans that are left; may take seconds."""
        if self._tracer is not None:
            self._tracer.close()


class _TracedRequestSpans(RequestSpans):
    def __init__(self, tracer: Tracer, request: TracedRequest) -> None:
        from kvconnect.observability.tracing import otel

        self._tracer, self._otel = tracer, otel
        self._since = time.time_ns()  # start of the next choice of engines
        self._path = request.path
        about = {"http.request.method": request.method, "http.route": self._path}
        about |= {"url.path": self._path, "url.scheme": "https" if request.secure else "http"}
        parent = tracer.continued(request.headers)
        name = f"{request.method} {self._path}"
        self._root = tracer.start(name, parent, otel.SERVER, self._since, about)
        self._context = otel.within(self._root)

    @asynccontextmanager
    async def queue_wait(
        self, queue_wait: AbstractAsyncContextManager[None]
    ) -> AsyncIterator[None]:
        began = time.time_ns()
        async with queue_wait:
            self._since = time.time_ns()
            self._tracer.record("queue", self._context, (began, self._since), {})
            yield

    def chosen(self, choice: RoutingChoice | None) -> None:
        about: dict[str, str | int | float] = {}
        if choice is not None:
            about = {"kvconnect.mode": choice.mode.value, "kvconnect.reason": choice.reason.value}
            about |= _handoff_attributes(choice.handoff)
            for role, target_choice in (("prefill", choice.prefill), ("decode", choice.decode)):
                if target_choice is not None:
                    about |= _target_attributes(target_choice, f"kvconnect.{role}")
        error = "" if choice else "no engines"
        self._tracer.record("choose", self._context, (self._since, time.time_ns()), about, error)

    def call(self, engine: Engine, target_choice: TargetChoice) -> CallSpan:
        base, name = engine.base, engine.role.value
        about = _target_attributes(target_choice, "kvconnect")
        about |= {"http.request.method": "POST", "url.full": engine.url + self._path}
        about |= {"server.address": base.host, "server.port": base.port}
        began, client = time.time_ns(), self._otel.CLIENT
        span = self._tracer.start(name, self._context, client, began, about)
        return _TracedCallSpan(span, self._otel.headers_of(span), self._ended)

    def first_byte(self) -> None:
        self._root.add_event("first_byte")

    def continued(self) -> None:
        self._root.add_event("continued")

    def answered(self, answer: bytes) -> None:
        self.receipt(engine_bodies.receipt_of(answer))

    def receipt(self, receipt: engine_bodies.Receipt) -> None:
        for name in receipt.keys() & _SUMS:
            self._root.set_attribute(f"kvconnect.{name}_tokens", receipt[name])

    def end(self, outcome: RequestOutcome, status: int, choice: RoutingChoice | None) -> None:
        self._root.set_attribute("kvconnect.outcome", outcome.value)
        if status:
            self._root.set_attribute("http.response.status_code", status)
        if choice is not None:
            self._root.set_attribute("kvconnect.mode", choice.mode.value)
            self._root.set_attribute("kvconnect.reason", choice.reason.value)
        if outcome not in _NOT_FAILED:
            self._otel.fail(self._root, outcome.value)
        self._root.end()

    def _ended(self, span: Span, outcome: CallOutcome) -> None:
        span.set_attribute("kvconnect.outcome", outcome.value)
        if outcome not in _CALL_NOT_FAILED:
            self._otel.fail(span, outcome.value)
        self._since = time.time_ns()
        span.end(self._since)


class _TracedCallSpan(CallSpan):
    def __init__(
        self, span: Span, headers: Mapping[str, str], ended: Callable[[Span, CallOutcome], None]
    ) -> None:
        self._span, self._headers, self._ended = span, headers, ended

    def headers(self) -> Mapping[str, str]:
        return self._headers

    def end(self, outcome: CallOutcome) -> None:
        self._ended(self._span, outcome)


def _handoff_attributes(made: HandoffDecision | None) -> dict[str, str | float]:
    """Return the attributes of a decision about a hand-off."""
    if made is None:
        return {}
    about: dict[str, str | float] = {
        "kvconnect.handoff.decision": made.decision,
        "kvconnect.handoff.reason": made.reason.value,
    }
    if made.expected is not None:
        about["kvconnect.handoff.expected_ttft_s"] = made.expected.handoff_s
        about["kvconnect.alone.expected_ttft_s"] = made.expected.alone_s
    return about


def _target_attributes(target_choice: TargetChoice, prefix: str) -> dict[str, str | int]:
    """Return the attributes of a chosen target."""
    about: dict[str, str | int] = {
        f"{prefix}.worker": target_choice.target.engine,
        f"{prefix}.why": target_choice.why.value,
        f"{prefix}.expected_hit_tokens": target_choice.hit,
    }
    if target_choice.target.rank is not None:
        about[f"{prefix}.rank"] = target_choice.target.rank
    return about
