"""Spans of traced requests in vLLM's scheduler, made from the events of its connector.

vLLM creates a request's own span when the request ends. So these spans are its siblings: children
of the span that the request's headers name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvconnect.disaggregation.messages import NoticeKind, Receive, TransferEvent
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.messages import StepInstructions, StepReports
from kvconnect.observability.tracing.otel import INTERNAL, Attributes, Context, Span, Tracer, fail
from kvconnect.observability.tracing.transfer_spans import end_job, record_send
from kvconnect.offload.messages import JobReport, LoadBlocks
from kvconnect.types import JobId, PromptSource, Tier, TransferId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _TracedRequest:
    """Spans of one request. ``parent``: context from its headers. Times: ns of the wall clock."""

    def __init__(self, tracer: Tracer, parent: Context, request: Request) -> None:
        self._tracer, self._parent, self._request = tracer, parent, request
        self._admitted = False
        self._looked = (0, 0)  # start and end of its last lookup
        self._fetch = [0, 0]  # start and end of its wait for a secondary tier
        self._prefill: Span | None = None  # while its prompt is computed
        self._stored_at = 0  # when its first store was planned
        self._stored_blocks = 0
        self._storing = 0  # store jobs that have not ended
        self._over = False

    def start(self, name: str, attributes: Attributes) -> Span:
        """Start a span."""
        return self._tracer.start(name, self._parent, INTERNAL, None, attributes)

    def looked_up(self, began: int, waits: bool) -> None:
        """Record a lookup; if the request ``waits``, the lookup is repeated later."""
        now = time.time_ns()
        self._looked = began, now
        if waits:
            self._fetch = [self._fetch[0] or began, 0]
        elif self._fetch[0]:
            self._fetch[1] = self._fetch[1] or now

    def admitted(self, found: int, brought: Mapping[Tier, int], handoff: bool) -> None:
        """Record that the request has device blocks, for ``found`` tokens that are loaded, or
        received in a ``handoff``. ``brought``: tokens by the tier that they come from."""
        if not self._admitted:
            came = int(self._request.arrival_time * 1e9)
            self._record("kvconnect.queue", (came, time.time_ns()), {})
        self._admitted = True
        if handoff:
            return
        if self._fetch[1]:
            below = {tier: n for tier, n in brought.items() if tier is not Tier.HOST}
            tokens = {f"kvconnect.{tier.value}_tokens": n for tier, n in below.items()}
            self._record("kvconnect.fetch", (self._fetch[0], self._fetch[1]), tokens)
        self._fetch = [0, 0]
        self._record("kvconnect.lookup", self._looked, {"kvconnect.found_tokens": found})

    def computes(self, tokens: int) -> None:
        """Record a step that computes prompt tokens."""
        if self._prefill is None:
            prompt = self._request.num_prompt_tokens
            self._prefill = self.start("kvconnect.prefill", {"kvconnect.prompt_tokens": prompt})
        self._prefill.add_event("step", {"kvconnect.tokens": tokens})

    @property
    def has_output(self) -> bool:
        """Whether the prompt has been computed."""
        return bool(self._request.num_output_tokens)

    def computed(self, sources: Mapping[PromptSource, int]) -> None:
        """End the prefill span: the request has its first token, or will never have one.
        ``sources``: tokens of its prompt by where their KV came from."""
        if self._prefill is not None:
            for source, tokens in sources.items():
                self._prefill.set_attribute(f"kvconnect.{source.value}_tokens", tokens)
            if not (self.has_output or translate.ended_well(self._request)):
                fail(self._prefill, self._request.status.name)
            self._prefill.end()
            self._prefill = None

    def stores(self, blocks: int) -> None:
        """Count a store job with blocks of this request."""
        self._stored_at = self._stored_at or time.time_ns()
        self._stored_blocks += blocks
        self._storing += 1

    def stored(self) -> None:
        """Record that a store job has ended."""
        self._storing -= 1
        self._end_store()

    def finish(self, sources: Mapping[PromptSource, int]) -> None:
        """Record that the request is over. Its store jobs may end later."""
        self.computed(sources)
        self._over = True
        self._end_store()

    def _end_store(self) -> None:
        if self._over and self._stored_blocks and not self._storing:
            about = {"kvconnect.blocks": self._stored_blocks}
            self._record("kvconnect.store", (self._stored_at, time.time_ns()), about)

    def _record(self, name: str, times: tuple[int, int], attributes: Attributes) -> None:
        self._tracer.record(name, self._parent, times, attributes)


@dataclass(eq=False)
class _TracedJob:
    """A job that some worker has not answered. ``end`` is called with all reports."""

    end: Callable[[Sequence[JobReport]], None]
    reports: list[JobReport] = field(default_factory=list)


@dataclass(eq=False)
class _Hold:
    """Blocks of a request that are held for another engine."""

    traced: _TracedRequest
    span: Span | None = None  # set once blocks are offered
    withdrawn: int = 0  # workers that have answered the withdrawal
    served: bool = False


class RequestTracing:
    """Makes spans of requests whose headers carry a sampled trace; a
    :class:`~kvconnect.engines.vllm.observer.SchedulerObserver`. ``workers`` workers answer each
    job. ``sources`` returns the tokens of a request's prompt by where their KV came from."""

    def __init__(self, workers: int, sources: Callable[[str], Mapping[PromptSource, int]]) -> None:
        self._workers = workers
        self._sources = sources
        self._tracer = Tracer()
        self._traced: dict[str, _TracedRequest] = {}
        self._prefilling: dict[str, _TracedRequest] = {}
        self._new_blocks: dict[_TracedRequest, int] = {}  # how many this step stores
        self._jobs: dict[JobId, _TracedJob] = {}
        self._holds: dict[TransferId, _Hold] = {}

    def request_added(self, request: Request, transfer: TransferId | None) -> None:
        """See :class:`SchedulerObserver`, also for the methods below."""
        parent = self._tracer.parent(request.trace_headers)
        if parent is not None:
            traced = _TracedRequest(self._tracer, parent, request)
            self._traced[request.request_id] = self._prefilling[request.request_id] = traced
            if transfer is not None:
                self._holds[transfer] = _Hold(traced)

    def looked_up(self, req_id: str, seconds: float, waits: bool) -> None:
        traced = self._traced.get(req_id)
        if traced is not None:
            traced.looked_up(time.time_ns() - int(seconds * 1e9), waits)

    def admitted(
        self, req_id: str, loaded_tokens: int, tiers: Mapping[Tier, int], handoff: bool
    ) -> None:
        traced = self._traced.get(req_id)
        if traced is not None:
            traced.admitted(loaded_tokens, tiers, handoff)

    def store_planned(self, req_id: str, blocks: int) -> None:
        traced = self._traced.get(req_id)
        if traced is not None:
            self._new_blocks[traced] = blocks

    def step_built(self, step: StepInstructions, scheduled_tokens: Mapping[str, int]) -> None:
        for load in step.offload.loads:
            self._begin(load, "kvconnect.load")
        for receive in step.disaggregation.receives:
            self._begin(receive, "kvconnect.receive")
        for offer in step.disaggregation.offers:
            hold = self._holds.get(offer.transfer)
            if hold is not None and offer.spans:
                hold.span = hold.span or hold.traced.start("kvconnect.hold", {})
        for store in step.offload.stores if self._new_blocks else ():
            for traced, blocks in self._new_blocks.items():
                traced.stores(blocks)
            self._jobs[store.job] = _TracedJob(partial(_end_store, tuple(self._new_blocks)))
        self._new_blocks.clear()
        for req_id, traced in self._prefilling.items():
            tokens = scheduled_tokens.get(req_id)
            if tokens and not traced.has_output:
                traced.computes(tokens)

    def reports_taken(self, reports: StepReports) -> None:
        for report in (*reports.reports, *reports.arrivals):
            self._on_report(report)
        for notice in reports.notices if self._holds else ():
            self._on_notice(notice)
        for req_id in [r for r, traced in self._prefilling.items() if traced.has_output]:
            self._prefilling.pop(req_id).computed(self._sources(req_id))

    def request_finished(self, req_id: str) -> None:
        self._prefilling.pop(req_id, None)
        traced = self._traced.pop(req_id, None)
        if traced is not None:
            traced.finish(self._sources(req_id))

    def _begin(self, job: LoadBlocks | Receive, name: str) -> None:
        traced = self._traced.get(job.req_id)
        if traced is not None:
            blocks = job.parts if isinstance(job, LoadBlocks) else job.spans
            count = sum(len(part.block_ids) for part in blocks)
            span = traced.start(name, {"kvconnect.blocks": count})
            self._jobs[job.job] = _TracedJob(partial(end_job, self._tracer, span))

    def _on_report(self, report: JobReport) -> None:
        job = self._jobs.get(report.job)
        if job is not None:
            job.reports.append(report)
            if len(job.reports) == self._workers:
                del self._jobs[report.job]
                job.end(job.reports)

    def _on_notice(self, notice: TransferEvent) -> None:
        hold = self._holds.get(notice.transfer)
        if hold is None:
            return
        if notice.kind is NoticeKind.WITHDRAWN:
            hold.withdrawn += 1
            if hold.withdrawn == self._workers:
                del self._holds[notice.transfer]
                if hold.span is not None:
                    hold.span.set_attribute("kvconnect.served", hold.served)
                    hold.span.end()
        elif notice.kind is NoticeKind.DONE and hold.span is not None:
            hold.served = True
            if notice.moved is not None:
                record_send(self._tracer, hold.span, notice.moved)


def _end_store(requests: Sequence[_TracedRequest], reports: Sequence[JobReport]) -> None:  # noqa: ARG001
    for request in requests:
        request.stored()
