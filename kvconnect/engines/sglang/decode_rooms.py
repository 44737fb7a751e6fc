"""Decode side of the hand-offs of one SGLang rank, by bootstrap room; see ``rooms.py``."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    Drop,
    Keep,
    PrefillSource,
    Receive,
    ReceiveReport,
)
from kvconnect.engines.sglang.rooms import contain_room_errors, transfer_of
from kvconnect.offload.messages import JobReport
from kvconnect.protocol.prompts import NO_PROMPT, PromptIdentity
from kvconnect.protocol.topology import sources_for
from kvconnect.types import Endpoint, FailureCause, JobId, Rank, Span


class RoomRequest(NamedTuple):
    """Blocks that a decode rank requests: KV blocks ``first ...`` into pages ``ids``, and other
    groups' spans. ``workers``: the prefill ranks that SGLang pairs it with. ``tp``, ``pp``: sizes
    of the prefill engine. ``prompt``: the request's; prefill's must be the same."""

    first: int
    ids: array[int]
    rest: tuple[Span, ...]
    workers: tuple[Endpoint, ...]
    tp: int
    pp: int
    prompt: PromptIdentity = NO_PROMPT


class DecodeRooms:
    """The decode side. For the scheduler's thread.

    :meth:`take` calls ``arrived(room)`` and ``failed(room, why)``. A room is over when none of its
    pages can be written any more.
    """

    def __init__(
        self,
        agent: HandoffAgent,
        rank: Rank,
        groups: Sequence[tuple[int, int]],
        deadline_s: float,
        arrived: Callable[[int], None],
        failed: Callable[[int, str], None],
    ) -> None:
        """``groups``: tokens per block and KV heads over all ranks, by group."""
        self._agent = agent
        self._rank = rank
        self._groups = tuple(groups)
        self._deadline_s = deadline_s
        self._arrived, self._failed = arrived, failed
        self._requested_at: dict[JobId, float] = {}  # monotonic seconds, of unfinished jobs
        self._jobs: dict[int, set[JobId]] = {}  # by room; clients may give a room to two requests
        self._dropped: set[JobId] = set()  # unfinished jobs whose outcome nobody waits for
        self._last = 0

    def request(self, room: int, request: RoomRequest) -> None:
        """Request a room's blocks.

        Raises:
            Refused: this rank and that engine cannot share the heads evenly.
        """
        source = PrefillSource("", 0, request.workers, request.tp, request.pp)
        spans = (Span(0, request.first, request.ids), *request.rest)
        spans = tuple(span for span in spans if span.block_ids)
        refusals = self._refusals(room, source, spans)
        self._last += 1
        job = JobId(self._last)
        self._requested_at[job] = time.monotonic()
        self._jobs.setdefault(room, set()).add(job)
        receive = Receive(
            job=job,
            req_id=str(room),
            transfer=transfer_of(room),
            source=source,
            spans=spans,
            tokens=tuple(self._tokens(span) for span in spans),
            early=True,
            deadline_s=self._deadline_s,
            prompt=request.prompt,
            held=request.first * self._groups[0][0],
        )
        self._agent.run(DisaggregationInstructions(receives=[receive], keeps=refusals))

    def decline(self, room: int, workers: Sequence[Endpoint], tp: int, pp: int) -> None:
        """Tell workers of a prefill engine with ``tp`` x ``pp`` ranks that nobody will read a room:
        the request ended before its blocks were requested."""
        declines = _declines(room, PrefillSource("", 0, tuple(workers), tp, pp), workers)
        self._agent.run(DisaggregationInstructions(keeps=declines))

    def drop(self, room: int) -> None:
        """Stop receiving a room; :meth:`is_over` says when that is done. The outcome is not told:
        the next request of this room may be here by then."""
        jobs = self._jobs.get(room, set()) - self._dropped
        if jobs:
            self._dropped |= jobs
            self._agent.run(DisaggregationInstructions(drops=[Drop(job) for job in jobs]))

    def is_over(self, room: int) -> bool:
        """Return whether no page of a room can be written any more."""
        return room not in self._jobs

    def take(self, finished: Sequence[tuple[ReceiveReport, Receive]]) -> None:
        """Process receives that ended."""
        for report, job in finished:
            room = int(job.req_id)
            with contain_room_errors(self._agent, room, self._failed):
                self._jobs[room].discard(job.job)
                if not self._jobs[room]:
                    del self._jobs[room]
                self._count(time.monotonic() - self._requested_at.pop(job.job), report)
                if job.job in self._dropped:
                    self._dropped.discard(job.job)
                elif report.failures:
                    self._failed(room, self._why(report, job))
                else:
                    self._arrived(room)

    def _count(self, seconds: float, report: JobReport) -> None:
        with self._agent.stats() as stats:
            if not report.failures:
                stats.observe("handoff_latency_seconds", seconds)
                stats.count("handoff_received_requests", label="done")
            elif report.failures[0].cause is FailureCause.SKIPPED:  # the request was aborted
                stats.count("handoff_received_requests", label="aborted")
            else:
                stats.count("handoff_received_requests", label="failed")
                stats.count("handoff_failures", label=report.failures[0].cause.value)

    def _why(self, report: ReceiveReport, job: Receive) -> str:
        """Return why a receive failed, for the client."""
        causes = Counter(failure.cause for failure in report.failures)
        found = ", ".join(f"{count} x {cause.value}" for cause, count in causes.items())
        if report.detail:
            return f"blocks did not arrive ({found}): {report.detail}"
        for endpoint in job.source.endpoints if job.source else ():
            refusal = self._agent.ended.refusals.get(endpoint)
            if FailureCause.REFUSED in causes and refusal:
                return f"blocks did not arrive ({found}): {refusal}"
        return f"blocks did not arrive ({found})"

    def _tokens(self, span: Span) -> tuple[int, int]:
        size, _ = self._groups[span.group]
        return span.first * size, (span.first + len(span.block_ids)) * size

    def _refusals(self, room: int, source: PrefillSource, spans: Sequence[Span]) -> list[Keep]:
        """Return declines for workers that SGLang pairs with this one but from which it reads none
        of ``spans``, so that they do not wait for it. If decode has the whole prompt, that is all
        but the one that has the row."""
        heads = [self._groups[span.group][1] for span in spans]
        needed = set(sources_for(self._rank, source.tp, source.pp, heads))
        idle = [e for e in source.endpoints if (e.pp_rank, e.tp_rank) not in needed]
        return _declines(room, source, idle)


def _declines(room: int, source: PrefillSource, workers: Sequence[Endpoint]) -> list[Keep]:
    sources = (PrefillSource("", 0, (worker,), source.tp, source.pp) for worker in workers)
    return [Keep(transfer_of(room), each) for each in sources]
