"""Events of streams of SGLang's own ``/generate``: each has the whole answer so far. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.router.requests import stream_events
from kvconnect.router.requests.chunk_events import error_reading
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


class _FinishReason(msgspec.Struct):
    type: str = ""


class _MetaInfo(msgspec.Struct):
    id: str = ""
    completion_tokens: int = 0
    finish_reason: _FinishReason | None = None


class _GenerateEvent(msgspec.Struct):
    text: str | None = None
    output_ids: list[int] = []
    meta_info: _MetaInfo | None = None
    error: Raw = Raw(b"null")


_EVENT = msgspec.json.Decoder(_GenerateEvent)


class GenerateEvents:
    """See :class:`EventFormat`. Without a tokenizer, the answer's token ids are compared.

    Where a server sends only what is new (``--incremental-streaming-output``), text and ids of an
    event cannot be cut at the same place: such a stream is not replayed.
    """

    def __init__(self) -> None:
        self._chars = self._ids = 0  # of the answer, in the events so far

    def read(self, event: bytes) -> Reading:
        """Return what an event is."""
        if event == stream_events.DONE:
            return Reading(ends="done", last=True)
        try:
            found = _EVENT.decode(data_of(event) or b"")
        except BROKEN:
            return Reading(prevented=AfterLoss.PARSER)
        if bytes(found.error) != b"null":
            return error_reading(found.error)
        meta = found.meta_info
        if meta is None:
            return Reading(prevented=AfterLoss.PARSER)
        if meta.finish_reason is not None and meta.finish_reason.type == "abort":
            return Reading(broken="ended the request")
        if len(found.output_ids) < max(self._ids, meta.completion_tokens):
            return Reading(prevented=AfterLoss.IDS)
        ends = "" if meta.finish_reason is None else meta.finish_reason.type
        return Reading(self._new(found), ends=ends, names=StreamNames(meta.id))

    def changed(self, event: bytes, change: EventChange) -> bytes:
        """Return an event that was read as one of the first stream."""
        if event == stream_events.DONE:
            return event
        fields = fields_of(event)
        fields["meta_info"] = object_of(fields["meta_info"]) | {"id": change.ours.id}
        return with_fields(event, fields)

    def asked_again(self, names: StreamNames) -> dict[str, Any]:  # noqa: ARG002
        """Return no field: the client's are all."""
        return {}

    def _new(self, found: _GenerateEvent) -> str:
        """Return what an event adds to the answer."""
        new, self._ids = found.output_ids[self._ids :], len(found.output_ids)
        if found.text is None:
            return "".join(f"{token} " for token in new)
        text, self._chars = found.text[self._chars :], len(found.text)
        return text
