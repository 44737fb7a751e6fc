"""Spans of hand-offs in SGLang's scheduler processes, children of SGLang's request spans.

Nothing here does more than observe: no error in it reaches a request, and without it hand-offs are
the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvconnect.disaggregation.messages import NoticeKind, Receive, ReceiveReport, TransferEvent
from kvconnect.engines.sglang.rooms import room_of
from kvconnect.errors import contained

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)


def make_spans() -> RoomSpans | None:
    """Return a maker of spans if SGLang makes them too (``--enable-trace``), else None."""
    from sglang.srt.runtime_context import get_observability

    return RoomSpans() if get_observability().enable_trace else None


class RoomSpans:
    """Spans of one rank's hand-offs, by room. For the scheduler's thread."""

    def __init__(self) -> None:
        from kvconnect.observability.tracing import otel, transfer_spans

        self._otel, self._transfer_spans = otel, transfer_spans
        self._tracer = otel.Tracer()
        self._open: dict[int, Span] = {}
        self._served: set[int] = set()

    def begin(self, name: str, room: int, parent: Context | None, blocks: int | None) -> None:
        """Begin the span of a hand-off below the request's, which is in ``parent``, if any."""
        if parent is None:
            return
        # A string, as OpenTelemetry's integers are signed.
        about: dict[str, str | int] = {"kvconnect.room": str(room)}
        if blocks is not None:
            about["kvconnect.blocks"] = blocks
        with contained(_log_error):
            self._open[room] = self._tracer.start(name, parent, self._otel.INTERNAL, None, about)

    def take(
        self, finished: Sequence[tuple[ReceiveReport, Receive]], notices: Sequence[TransferEvent]
    ) -> None:
        """End the spans of finished receives, and record sends that are done."""
        with contained(_log_error):
            for report, job in finished:
                span = self._open.pop(int(job.req_id), None)
                if span is not None:
                    self._transfer_spans.end_job(self._tracer, span, [report])
            for notice in notices:
                room = room_of(notice.transfer)
                span = self._open.get(room)
                if span is not None and notice.kind is NoticeKind.DONE:
                    self._served.add(room)
                    if notice.moved is not None:
                        self._transfer_spans.record_send(self._tracer, span, notice.moved)

    def end(self, room: int) -> None:
        """End the span of a prefill request."""
        span, served = self._open.pop(room, None), room in self._served
        self._served.discard(room)
        if span is not None:
            with contained(_log_error):
                span.set_attribute("kvconnect.served", served)
                span.end()

    def context_of(self, req: Any) -> Context | None:
        """Return the context with SGLang's own span of a request, if it has one."""
        with contained(_log_error):
            return getattr(req.time_stats.trace_ctx, "root_span_context", None)
        return None


def _log_error(error: Exception) -> None:
    logger.error("a span of a hand-off was not recorded", exc_info=error)
