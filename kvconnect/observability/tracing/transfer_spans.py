"""Spans of transfers, as every engine shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span

from kvconnect.disaggregation.messages import PeerTransfer, ReceiveReport
from kvconnect.observability.tracing.otel import Attributes, Tracer, fail, within

if TYPE_CHECKING:
    from kvconnect.offload.messages import JobReport


def end_job(tracer: Tracer, span: Span, reports: Sequence[JobReport]) -> None:
    """Record the transfers of a finished receive or load under ``span``, then end ``span``."""
    for moved in (moved for r in reports if isinstance(r, ReceiveReport) for moved in r.moved):
        about = _bytes(moved) | {"kvconnect.transport": moved.path}
        _record(tracer, span, "kvconnect.wait", moved.asked, moved.first, moved)
        _record(tracer, span, "kvconnect.wire", moved.first, moved.ended, moved, about)
        if moved.ready:
            _record(tracer, span, "kvconnect.exposed", moved.ready, moved.ended, moved)
    failures = [failure for report in reports for failure in report.failures]
    if failures:
        fail(span, failures[0].cause.value)
    span.end()


def record_send(tracer: Tracer, hold: Span, moved: PeerTransfer) -> None:
    """Record a finished send and its chunks under ``hold``, the span of the request's lease."""
    began = min((chunk.began for chunk in moved.chunks), default=moved.first)
    send = _record(tracer, hold, "kvconnect.send", began, moved.ended, moved, _bytes(moved))
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
    began: float,
    ended: float,
    moved: PeerTransfer,
    attributes: Attributes | None = None,
) -> Context:
    about = {"kvconnect.worker": moved.worker, **(attributes or {})}
    return tracer.record(name, within(parent), _ns(began, ended), about)


def _bytes(moved: PeerTransfer) -> dict[str, str | int | float | bool]:
    return {"kvconnect.bytes": moved.nbytes, "kvconnect.wire_seconds": moved.seconds}


def _ns(began: float, ended: float) -> tuple[int, int]:
    return int(began * 1e9), int(ended * 1e9)
