"""Spans of pages that moved, below that of the request's part in it: the same in every engine."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.observability.tracing.otel import Attributes, Context, Span, Tracer, fail, within
from kvconnect.offload.messages import JobReport, PeerTransfer


def end_job(tracer: Tracer, span: Span, reports: Sequence[JobReport]) -> None:
    """Every worker has said what became of a receive, or of a load."""
    for moved in (moved for report in reports for moved in report.moved):
        about = _bytes(moved) | {"kvconnect.transport": moved.path}
        _record(tracer, span, "kvconnect.wait", (moved.asked, moved.first), moved)
        _record(tracer, span, "kvconnect.wire", (moved.first, moved.ended), moved, about)
        if moved.ready:
            _record(tracer, span, "kvconnect.exposed", (moved.ready, moved.ended), moved)
    failures = [failure for report in reports for failure in report.failures]
    if failures:
        fail(span, failures[0].cause.value)
    span.end()


def record_send(tracer: Tracer, hold: Span, moved: PeerTransfer) -> None:
    """A reader has everything."""
    began = min((chunk.began for chunk in moved.chunks), default=moved.first)
    times = began, moved.ended
    send = _record(tracer, hold, "kvconnect.send", times, moved, _bytes(moved))
    for chunk in moved.chunks:
        about = {
            "kvconnect.worker": moved.worker,
            "kvconnect.first_block": chunk.first,
            "kvconnect.blocks": chunk.blocks,
            "kvconnect.bytes": chunk.nbytes,
        }
        tracer.record("kvconnect.send.chunk", send, _ns(chunk.began, chunk.ended), about)


def _record(
    tracer: Tracer,
    parent: Span,
    name: str,
    times: tuple[float, float],
    moved: PeerTransfer,
    attributes: Attributes | None = None,
) -> Context:
    about = {"kvconnect.worker": moved.worker, **(attributes or {})}
    return tracer.record(name, within(parent), _ns(*times), about)


def _bytes(moved: PeerTransfer) -> dict[str, str | int | float | bool]:
    return {"kvconnect.bytes": moved.nbytes, "kvconnect.wire_seconds": moved.seconds}


def _ns(*seconds: float) -> tuple[int, int]:
    began, ended = seconds
    return int(began * 1e9), int(ended * 1e9)
