"""Receives of the decode scheduler: which requests wait for blocks of a prefill engine.

A hand-off is opened when its request arrives, planned when the engine has allocated its blocks, and
settled when every worker has reported, since only workers know that no page is written any more.
Each hand-off is tried once; failed blocks are computed here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup, keeps_prefix
from kvconnect.disaggregation.limits import HandoffLimits
from kvconnect.disaggregation.messages import Drop, Keep, PrefillSource, Receive, ReceiveReport
from kvconnect.disaggregation.states import HANDOFF, Handoff
from kvconnect.errors import Misuse
from kvconnect.jobs import WorkerJobs, first_cause
from kvconnect.life_cycles import Event
from kvconnect.offload.ledger import Hold, Ledger, Owner
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, JobId, Span, TransferId, TransferType

logger = logging.getLogger(__name__)

_RENEWALS = 3  # renewals in the time of a lease, so that one may be late


class SettledReceive(NamedTuple):
    """A receive that every worker has answered. ``cause``: why it failed, or None; ``SKIPPED`` if
    only the drop ended it. ``dropped``: the request was over before. ``lost``: tokens that it was
    to bring and that are computed instead. ``cached``: tokens of the prompt that the prefill engine
    had cached; None if it was not asked."""

    req_id: str
    cause: FailureCause | None
    dropped: bool
    lost: int = 0
    cached: int | None = None


@dataclass
class _OpenHandoff:
    """A request's hand-off; it lives as long as the request."""

    req_id: str
    transfer: TransferId
    source: PrefillSource | None  # None: refused
    early: bool
    renewed: bool  # the workers renew its lease, or need not
    prompt: PromptIdentity = NO_PROMPT
    state: Handoff = HANDOFF.start
    job: JobId | None = None


@dataclass
class _ReceiveInFlight:
    """A receive that some worker has not answered."""

    handoff: _OpenHandoff
    spans: tuple[Span, ...]
    local_tokens: int
    total_tokens: int
    failures: dict[tuple[int, int], FailureCause] = field(default_factory=dict)
    detail: str = ""  # what the prefill engine said of a failure
    cached: int = 0


class Receives:
    """Hand-offs to one decode engine. Owned by the scheduler's thread; ``now`` is in seconds of
    one monotonic clock. Each step: ``on_report``, ``plan``, ``tick``, ``take``."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        stats: OffloadingConnectorStats,
        limits: HandoffLimits,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """``numbers``: see :class:`~kvconnect.jobs.WorkerJobs`."""
        self.ledger = Ledger()
        self._groups = tuple(groups)
        self._stats = stats
        self._limits = limits
        self._requests: dict[str, _OpenHandoff] = {}
        self._jobs: WorkerJobs[_ReceiveInFlight] = WorkerJobs(
            limits.workers, limits.deadline_s, numbers
        )
        self._receives: list[Receive] = []
        self._drops: list[Drop] = []
        self._keeps: list[Keep] = []

    def __repr__(self) -> str:
        return f"<Receives {len(self._requests)} requests, {len(self._jobs)} receives in flight>"

    @property
    def busy(self) -> bool:
        """Whether a receive is unanswered or an instruction is due, so that the engine must keep
        stepping. Requests that wait to be scheduled do not count: workers renew their leases
        without steps."""
        unsent = any(_needs_renewal(handoff) for handoff in self._requests.values())
        return bool(unsent or len(self._jobs) or self._keeps)

    def open(
        self,
        req_id: str,
        transfer: TransferId,
        source: PrefillSource,
        early: bool,
        prompt: PromptIdentity = NO_PROMPT,
    ) -> bool:
        """A request with this prompt arrived whose blocks another engine has, or (``early``) will
        have.

        Return False if another request receives the same transfer; this one is then an ordinary
        request. A transfer is sent once, but a client may ask for several answers.
        """
        if any(handoff.transfer == transfer for handoff in self._requests.values()):
            return False
        self._requests[req_id] = _OpenHandoff(req_id, transfer, source, early, False, prompt)
        return True

    def refuse(self, req_id: str, field: str) -> None:
        """A request arrived whose hand-off is refused; ``field`` as in
        :class:`~kvconnect.errors.Refused`. Workers report its planned blocks as failed."""
        self._stats.count("handoff_refused", label=field)
        nothing = TransferId(bytes(16))
        self._requests[req_id] = _OpenHandoff(req_id, nothing, None, early=False, renewed=True)

    def pending(self, req_id: str) -> bool:
        """Whether a request has a hand-off that is not planned yet."""
        handoff = self._requests.get(req_id)
        return handoff is not None and handoff.state is Handoff.PENDING

    def plan(
        self, req_id: str, spans: Sequence[Span], local_tokens: int, total_tokens: int, now: float
    ) -> Receive:
        """Order the receive of tokens [local, total) for a pending request; return what
        :meth:`take` will hand out. Its blocks are held from now on.

        Args:
            spans: the blocks to fill, at most one span per group, without null blocks.
            total_tokens: as many as the prefill engine offers; later tokens are computed here.

        Raises:
            Misuse: it was planned before, or a block is being received into already.
        """
        handoff = self._requests[req_id]
        handoff.state = HANDOFF.after(handoff.state, Event.PLANNED)
        in_flight = _ReceiveInFlight(handoff, tuple(spans), local_tokens, total_tokens)
        job = self._jobs.open(in_flight, now)
        handoff.job = job.number
        receive = Receive(
            job.number,
            req_id,
            handoff.transfer,
            handoff.source,
            in_flight.spans,
            tuple(_needed(self._groups[span.group], span, total_tokens) for span in spans),
            handoff.early,
            self._limits.deadline_s,
            handoff.prompt,
            counted=handoff.early,
        )
        blocks = tuple(block for span in spans for block in span.block_ids)
        self.ledger.grant(Hold(job.number, Owner.RECV, blocks, now, job.late_at))
        self._receives.append(receive)
        return receive

    def decline(self, req_id: str) -> None:
        """A pending hand-off is not needed: every block is here already."""
        handoff = self._requests[req_id]
        handoff.state = HANDOFF.after(handoff.state, Event.ABORT)
        if handoff.source is not None:
            self._keeps.append(Keep(handoff.transfer, handoff.source))

    def finish(self, req_id: str) -> None:
        """The request is over, whatever the state of its hand-off."""
        handoff = self._requests.get(req_id)
        if handoff is None:
            return
        if handoff.state is Handoff.PENDING:
            self._stats.count("handoff_received_requests", label="aborted")
            self.decline(req_id)
        elif handoff.state is Handoff.RECEIVING and handoff.job is not None:
            handoff.state = HANDOFF.after(handoff.state, Event.ABORT)
            self._drops.append(Drop(handoff.job))
        del self._requests[req_id]

    def on_report(self, report: ReceiveReport, now: float) -> SettledReceive | None:
        """Take one worker's report; return the result once the last worker has reported."""
        job = self._jobs.find(report.job)
        if job is None:
            return None
        in_flight = job.work
        for failure in report.failures:
            place = failure.group, failure.block_id
            # Any other cause replaces SKIPPED, since it says more.
            if in_flight.failures.get(place) in (None, FailureCause.SKIPPED):
                in_flight.failures[place] = failure.cause
        in_flight.detail = in_flight.detail or report.detail
        in_flight.cached = max(in_flight.cached, report.cached)
        if not self._jobs.answered(job):
            return None
        self.ledger.settle(report.job)
        handoff = in_flight.handoff
        dropped = handoff.state is Handoff.DROPPING
        handoff.state = HANDOFF.after(handoff.state, Event.ANSWERED)
        cause = first_cause(in_flight.failures.values())
        if in_flight.detail and cause is not FailureCause.SKIPPED:  # else nobody waits for it
            logger.warning("request %s: hand-off failed: %s", handoff.req_id, in_flight.detail)
        # A finished request computes nothing more.
        lost = 0 if cause is None or dropped else _lost_tokens(self._groups, in_flight)
        counted = cause is None and handoff.early
        cached = in_flight.cached if counted else None
        settled = SettledReceive(handoff.req_id, cause, dropped, lost, cached)
        _count(self._stats, settled, now - job.opened)
        return settled

    def tick(self, now: float) -> None:
        """Order renewals of pending requests' leases; count late receives. Their blocks stay held:
        only workers know that no page is written any more, and workers have a deadline."""
        for handoff in self._requests.values():
            if _needs_renewal(handoff) and handoff.source is not None:
                every_s = self._limits.lease_s / _RENEWALS
                self._keeps.append(Keep(handoff.transfer, handoff.source, every_s))
                handoff.renewed = True
        for _ in self._jobs.take_late(now):
            self._stats.count("expired_jobs", label=TransferType.RECV.value)

    def take(self) -> tuple[list[Receive], list[Drop], list[Keep]]:
        """Return the instructions since the last call, to be run in this order."""
        taken = self._receives, self._drops, self._keeps
        self._receives, self._drops, self._keeps = [], [], []
        return taken

    def gauges(self, now: float) -> Iterator[tuple[str, float, str | None]]:
        """Yield gauges as (name, value, label)."""
        yield "ledger_held_blocks", self.ledger.held, Owner.RECV.value
        yield "jobs_in_flight", len(self._jobs), TransferType.RECV.value
        yield "ledger_oldest_hold_seconds", self.ledger.oldest_age(now), None

    def check(self) -> None:
        """Check the ledger of blocks that pages may be written to.

        Raises:
            Misuse: the ledger and the unanswered receives differ.
        """
        self.ledger.check()
        self._jobs.check()
        spans = (span for job in self._jobs for span in job.work.spans)
        blocks = sum(len(span.block_ids) for span in spans)
        if blocks != self.ledger.held:
            raise Misuse(f"{blocks} blocks are received into, {self.ledger.held} are held")


def _needs_renewal(handoff: _OpenHandoff) -> bool:
    return handoff.state is Handoff.PENDING and not handoff.renewed


def _needed(group: CacheGroup, span: Span, total_tokens: int) -> tuple[int, int]:
    """Return the tokens [first, end) of a span's blocks that later tokens can still see. A state
    counts as one token."""
    if group.states is not None:
        return 0, 1
    first = span.first * group.block_tokens
    end = min(first + len(span.block_ids) * group.block_tokens, total_tokens)
    return max(first, replace(group, block_tokens=1).first_block(total_tokens)), end


def _lost_tokens(groups: Sequence[CacheGroup], in_flight: _ReceiveInFlight) -> int:
    """Return how many tokens to compute here: all, or those from the first failed block if the
    blocks before it are kept."""
    first = in_flight.local_tokens
    if keeps_prefix(groups):
        span, size = in_flight.spans[0], groups[0].block_tokens
        bad = min(span.block_ids.index(block) for _, block in in_flight.failures)
        first = max(first, (span.first + bad) * size)
    return in_flight.total_tokens - first


def _count(stats: OffloadingConnectorStats, settled: SettledReceive, seconds: float) -> None:
    # An engine may end a request because its hand-off failed, and only then pass on the report. So
    # only the cause tells whether the request or the hand-off ended first.
    if settled.dropped and settled.cause in (None, FailureCause.SKIPPED):
        stats.count("handoff_received_requests", label="aborted")
        return
    if settled.cause is None:
        stats.observe("handoff_latency_seconds", seconds)
        stats.count("handoff_received_requests", label="done")
        return
    stats.count("handoff_received_requests", label="failed")
    stats.count("handoff_failures", label=settled.cause.value)
    stats.count("recomputed_tokens", settled.lost)
