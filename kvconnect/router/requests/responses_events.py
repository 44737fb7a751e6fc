"""Events of streams of OpenAI's Responses API, as vLLM sends them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

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
from kvconnect.router.requests.request_ids import RESPONSE_ID

_BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
_ENDS = ("response.output_text.done", "response.content_part.done", "response.output_item.done")
_LAST = ("response.completed", "response.incomplete")
_ERRORS = ("error", "response.failed")
_NO_TOOL = ("reasoning", "refusal", "annotation")  # in the types of other events


class _OutputItem(msgspec.Struct):
    id: str = ""
    type: str = ""


class _OutputPart(msgspec.Struct):
    type: str = ""
    annotations: list[Raw] = []


class _Failure(msgspec.Struct):
    message: str = ""


class _ResponseHead(msgspec.Struct):
    id: str = ""
    created_at: int = 0
    model: str = ""
    status: str = ""
    error: _Failure | None = None


class _ResponseEvent(msgspec.Struct):
    type: str
    sequence_number: int | None = None
    output_index: int = 0
    content_index: int = 0
    delta: str = ""
    logprobs: list[Raw] | None = None
    item: _OutputItem | None = None
    part: _OutputPart | None = None
    response: _ResponseHead | None = None
    message: str = ""

    @property
    def place(self) -> str:
        """What begins or ends."""
        return f"{self.type} {self.output_index} {self.content_index}"


_EVENT = msgspec.json.Decoder(_ResponseEvent)


class ResponsesEvents:
    """See :class:`EventFormat`. Responses have one message each."""

    def read(self, event: bytes) -> Reading:
        """Return what an event is."""
        try:
            found = _EVENT.decode(data_of(event) or b"")
        except BROKEN:
            return Reading(prevented=AfterLoss.PARSER)
        return _reading(found)._replace(names=_names(found))

    def changed(self, event: bytes, change: EventChange) -> bytes:
        """Return an event that was read as one of the first stream."""
        fields = fields_of(event)
        if "sequence_number" in fields:
            fields["sequence_number"] = change.ours.number
        if "item_id" in fields:
            fields["item_id"] = _item_id(fields["item_id"], change)
        if "item" in fields:
            fields["item"] = _item(fields["item"], change)
        if "response" in fields:
            fields["response"] = _response(object_of(fields["response"]), change)
        if change.text is not None:
            fields["delta"] = change.text
        return with_fields(event, fields)

    def asked_again(self, names: StreamNames) -> dict[str, Any]:
        """Return the response's id: an engine that stores it does so under this one."""
        return {RESPONSE_ID: names.id} if names.id else {}


def _reading(found: _ResponseEvent) -> Reading:
    kind, item, part = found.type, found.item, found.part
    if kind in _BEGINNINGS:
        return Reading(begins=kind)
    if kind == "response.output_text.delta":
        return Reading(found.delta, prevented=AfterLoss.LOGPROBS if found.logprobs else None)
    if kind in _LAST and found.response:
        if found.response.status == "cancelled":
            return Reading(broken="ended the request")
        return Reading(ends=f"{kind} {found.response.status}", last=True)
    if kind in _ERRORS:
        error = found.response.error if found.response else None
        return Reading(broken=(error.message if error else found.message) or "reported an error")
    plain = (item is None or item.type == "message") and (
        part is None or (part.type == "output_text" and not part.annotations)
    )
    if plain and (kind == "response.output_item.added" or kind == "response.content_part.added"):
        return Reading(begins=found.place)
    if plain and kind in _ENDS:
        return Reading(ends=found.place)
    what = f"{kind} {item.type if item else ''} {part.type if part else ''}"
    no_tool = part is not None or any(name in what for name in _NO_TOOL)
    return Reading(prevented=AfterLoss.PARSER if no_tool else AfterLoss.TOOLS)


def _names(found: _ResponseEvent) -> StreamNames:
    response, item = found.response or _ResponseHead(), found.item or _OutputItem()
    message = item.id if item.type == "message" else ""
    return StreamNames(
        response.id, response.created_at, response.model, message, found.sequence_number
    )


def _item_id(raw: Raw, change: EventChange) -> str | Raw:
    """Return the message's id, or that of another item as it is."""
    return change.ours.item if msgspec.json.decode(raw) == change.theirs.item else raw


def _item(raw: Raw, change: EventChange) -> dict[str, Any]:
    fields = object_of(raw)
    return {**fields, "id": _item_id(fields["id"], change)} if "id" in fields else fields


def _response(fields: dict[str, Any], change: EventChange) -> dict[str, Any]:
    made = fields | {"id": change.ours.id, "created_at": change.ours.created}
    made["model"] = change.ours.model
    items = msgspec.json.decode(fields.get("output", b"[]"), type=list[Raw])
    return made | {"output": [_item(raw, change) for raw in items]}
