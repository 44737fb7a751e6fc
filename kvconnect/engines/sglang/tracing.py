"""Spans of hand-offs in SGLang's scheduler processes, children of SGLang's request spans."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvconnect.disaggregation.messages import NoticeKind, Receive, ReceiveReport, TransferEvent
from kvconnect.engines.sglang.prompts import prompt_identity
from kvconnect.engines.sglang.rooms import contain_room_errors, room_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


def make_spans() -> RoomSpans | None:
    """Return a maker of spans if SGLang makes them too (``--enable-trace``), else None."""
    from sglang.srt.runtime_context import get_observability

    return RoomSpans() if get_observability().enable_trace else None


class RoomSpans:
    """Spans of one rank's hand-offs, by room. For the scheduler's thread."""

    def __init__(self) -> None:
        from kvconnect.observability.tracing import otel

        self._otel = otel
        self._tracer = otel.Tracer()
        self._open: dict[int, Span] = {}
        self._served: set[int] = set()

    def begin(self, name: str, room: int, parent: Context | None, blocks: int | None) -> None:
        """Begin the span of a hand-off below the request's, which is in ``parent``, if any."""
        if parent is not None:
            about: dict[str, str | int] = {
                "kvconnect.room": str(room)
            }  # a string, as OpenTelemetry's integers are signed
            if blocks is not None:
                about["kvconnect.blocks"] = blocks
            self._open[room] = self._tracer.start(name, parent, self._otel.INTERNAL, None, about)

    def take(
        self, finished: Sequence[tuple[ReceiveReport, Receive]], notices: Sequence[TransferEvent]
    ) -> None:
        """End the spans of finished receives, and record sends that are done."""
        for report, job in finished:
            span = self._open.pop(int(job.req_id), None)
            if span is not None:
                self._otel.end_job(self._tracer, span, [report])
        for notice in notices:
            room = room_of(notice.transfer)
            span = self._open.get(room)
            if span is not None and notice.kind is NoticeKind.DONE:
                self._served.add(room)
                if notice.moved is not None:
                    self._otel.record_send(self._tracer, span, notice.moved)

    def end(self, room: int) -> None:
        """End the span of a prefill request."""
        span = self._open.pop(room, None)
        if span is not None:
            span.set_attribute("kvconnect.served", room in self._served)
            span.end()
        self._served.discard(room)


def context_of(req: Any) -> Context | None:
    """Return the context with SGLang's own span of a request, if it has one."""
    return getattr(req.time_stats.trace_ctx, "root_span_context", None)


# SGLang gives its backend only the room of a request. Two hooks read more from the requests for
# which SGLang makes senders and receivers.


_SCHEDULER = "sglang.srt.managers.scheduler"
_SEND = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_RECEIVE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"


def watch() -> None:
    """Register the hooks if this is a scheduler's process. The plugin calls this when loaded."""
    if _SCHEDULER not in sys.modules:
        return  # other processes have no senders and receivers
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SEND, _after_sender, HookType.AFTER)
    HookRegistry.register(_RECEIVE, _after_receiver, HookType.AFTER)


def _after_sender(_result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    manager = queue.kv_manager
    prefill_rooms = getattr(manager, "prefill_rooms", None)  # other backends have none
    if prefill_rooms is None or getattr(req, "disagg_kv_sender", None) is None:
        return
    manager.streams.forward = queue.scheduler.forward_stream
    manager.overlaps = queue.scheduler.enable_overlap
    with contain_room_errors(manager.agent, req.bootstrap_room, manager.fail):
        prompt = prompt_identity(req, queue.scheduler, manager.adapters)
        req.disagg_kv_sender.open(prompt)
    room = prefill_rooms.find(req.bootstrap_room)
    if room is not None:
        room.prompt_blocks = len(req.origin_input_ids) // manager.kv_args.page_size
    if manager.spans is not None:
        manager.spans.begin("kvconnect.hold", req.bootstrap_room, context_of(req), None)


def _after_receiver(made: Any, queue: Any, *_: Any, **__: Any) -> None:
    manager = queue.kv_manager
    if getattr(manager, "decode_rooms", None) is not None:
        manager.streams.forward = queue.scheduler.forward_stream
        made.kv_receiver.parent = context_of(made.req)
        with contain_room_errors(manager.agent, made.req.bootstrap_room, manager.fail):
            prompt = prompt_identity(made.req, queue.scheduler, manager.adapters)
            made.kv_receiver.prompt = prompt
