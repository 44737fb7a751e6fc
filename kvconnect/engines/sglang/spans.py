"""Spans of hand-offs in SGLang's scheduler processes, below SGLang's own span of the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvconnect.engines.sglang.rooms import room_of
from kvconnect.plan.instructions import Notice, NoticeKind, Receive, Report

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


def make_spans() -> RoomSpans | None:
    """Return what makes spans if SGLang does (``--enable-trace``)."""
    from sglang.srt.runtime_context import get_observability

    return RoomSpans() if get_observability().enable_trace else None


class RoomSpans:
    """Spans of one rank's hand-offs, by room. For the scheduler's thread."""

    def __init__(self) -> None:
        from kvconnect.tracing import handoff, otel

        self._otel, self._handoff = otel, handoff
        self._tracer = otel.Tracer()
        self._open: dict[int, Span] = {}
        self._served: set[int] = set()

    def begin(self, name: str, room: int, parent: Context | None, blocks: int | None) -> None:
        """A hand-off begins for a request whose span is in ``parent``; None: it has none."""
        if parent is not None:
            about: dict[str, str | int] = {
                "kvconnect.room": str(room)
            }  # OpenTelemetry's integers have a sign
            if blocks is not None:
                about["kvconnect.blocks"] = blocks
            self._open[room] = self._tracer.start(name, parent, self._otel.INTERNAL, None, about)

    def take(self, finished: Sequence[tuple[Report, Receive]], notices: Sequence[Notice]) -> None:
        """Take what the agent has seen."""
        for report, job in finished:
            span = self._open.pop(int(job.req_id), None)
            if span is not None:
                self._handoff.end_job(self._tracer, span, [report])
        for notice in notices:
            room = room_of(notice.transfer)
            span = self._open.get(room)
            if span is not None and notice.kind is NoticeKind.DONE:
                self._served.add(room)
                if notice.moved is not None:
                    self._handoff.record_send(self._tracer, span, notice.moved)

    def end(self, room: int) -> None:
        """A prefill request is over."""
        span = self._open.pop(room, None)
        if span is not None:
            span.set_attribute("kvconnect.served", room in self._served)
            span.end()
        self._served.discard(room)


def context_of(req: Any) -> Context | None:
    """Return SGLang's own span of a request, if it has one."""
    return getattr(req.time_stats.trace_ctx, "root_span_context", None)
