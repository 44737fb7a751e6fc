"""Events of streams of Anthropic's Messages API, as vLLM sends them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.replay_events import (
    BROKEN,
    EventChange,
    Reading,
    StreamNames,
    data_of,
    fields_of,
    object_of,
    with_fields,
)
from kvconnect.router.requests.stream_events import EngineError

_OF_TOOLS = ("tool_use", "input_json_delta")


class _MessageBlock(msgspec.Struct):
    type: str = ""
    text: str = ""


class _MessageDelta(msgspec.Struct):
    type: str = ""
    text: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _MessageEvent(msgspec.Struct):
    type: str
    index: int = 0
    content_block: _MessageBlock | None = None
    delta: _MessageDelta | None = None
    error: EngineError | None = None


_EVENT = msgspec.json.Decoder(_MessageEvent)


class MessagesEvents:
    """See :class:`EventFormat`. Only the first event names the message, so names never change."""

    def read(self, event: bytes) -> Reading:
        """Return what an event is."""
        try:
            found = _EVENT.decode(data_of(event) or b"")
        except BROKEN:
            return Reading(prevented=AfterLoss.PARSER)
        block, delta, place = found.content_block, found.delta, f"{found.type} {found.index}"
        match found.type:
            case "ping":
                return Reading()
            case "message_start":
                return Reading(begins=found.type)
            case "content_block_start" if block and block.type == "text" and not block.text:
                return Reading(begins=place)
            case "content_block_delta" if delta and delta.type == "text_delta":
                return Reading(delta.text)
            case "content_block_stop":  # comes even where the engine ends the request itself
                return Reading(ends=place, awaits=True)
            case "message_delta" if delta:
                return _end_of_message(delta)
            case "message_stop":
                return Reading(ends=found.type, last=True)
            case "error":
                message = found.error.message if found.error else ""
                return Reading(broken=message or "reported an error")
        kind = block.type if block else delta.type if delta else ""
        return Reading(prevented=AfterLoss.TOOLS if kind in _OF_TOOLS else AfterLoss.PARSER)

    def changed(self, event: bytes, change: EventChange) -> bytes:
        """Return an event that was read as one of the first stream."""
        if change.text is None:
            return event
        fields = fields_of(event)
        fields["delta"] = {**object_of(fields["delta"]), "text": change.text}
        return with_fields(event, fields)

    def asked_again(self, names: StreamNames) -> dict[str, Any]:  # noqa: ARG002
        """Return no field: the client's are all."""
        return {}


def _end_of_message(delta: _MessageDelta) -> Reading:
    if delta.stop_reason is None:  # vLLM's word for "abort"
        return Reading(broken="ended the request")
    return Reading(ends=f"{delta.stop_reason} {delta.stop_sequence}")
