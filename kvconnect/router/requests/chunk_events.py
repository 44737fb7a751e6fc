"""Events of streams of OpenAI's completions and chats, as they are without token ids. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.router.requests import stream_events
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

_NULL = (b"", b"null", b"[]")
_OF_TEXT = {"role", "content"}
_PLAIN = {"index", "text", "delta", "finish_reason", "stop_reason", "matched_stop"}
_REASONS = {
    "tool_calls": AfterLoss.TOOLS,
    "logprobs": AfterLoss.LOGPROBS,
    "token_ids": AfterLoss.IDS,
    "prompt_token_ids": AfterLoss.IDS,
}
"""Why what is no text cannot be cut. Anything else is the work of a parser."""


class _TextChunk(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[dict[str, Raw]] = []
    usage: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


_CHUNK = msgspec.json.Decoder(_TextChunk)


class ChunkEvents:
    """See :class:`EventFormat`."""

    def read(self, event: bytes) -> Reading:
        """Return what an event is."""
        if event == stream_events.DONE:
            return Reading(ends="done", last=True)
        try:
            found = _CHUNK.decode(data_of(event) or b"")
            if bytes(found.error) != b"null":
                return error_reading(found.error)
            made = _of_choices(found)
        except BROKEN:
            return Reading(prevented=AfterLoss.PARSER)
        return made._replace(names=StreamNames(found.id, found.created, found.model))

    def changed(self, event: bytes, change: EventChange) -> bytes:
        """Return an event that was read as one of the first stream."""
        if event == stream_events.DONE:
            return event
        ours = change.ours
        fields = fields_of(event) | {"id": ours.id, "created": ours.created, "model": ours.model}
        if change.text is not None:
            choices = msgspec.json.decode(fields["choices"], type=list[Raw])
            fields["choices"] = [_with_text(object_of(choices[0]), change.text)]
        return with_fields(event, fields)

    def asked_again(self, names: StreamNames) -> dict[str, Any]:  # noqa: ARG002
        """Return no field: the client's are all."""
        return {}


def error_reading(raw: Raw) -> Reading:
    """Return what an event with an error is."""
    try:
        error = msgspec.json.decode(raw, type=stream_events.EngineError)
    except BROKEN:
        error = stream_events.EngineError()
    if error.code is not None and error.code < 500:
        return Reading(prevented=AfterLoss.FAILED)
    return Reading(broken=error.message or "reported an error")


def _of_choices(found: _TextChunk) -> Reading:
    if not found.choices:
        return Reading(ends="usage" if bytes(found.usage) != b"null" else "more")
    choice, *others = map(_set, found.choices)
    delta = _set(object_of(choice.get("delta", Raw(b"{}"))))
    reason = choice.get("finish_reason")
    if others or choice.get("index") != b"0":
        return Reading(prevented=AfterLoss.PROMPTS)
    if reason == b'"abort"':
        return Reading(broken="ended the request")
    for name in sorted((choice.keys() - _PLAIN) | (delta.keys() - _OF_TEXT)):
        return Reading(prevented=_REASONS.get(name, AfterLoss.PARSER))
    text = choice.get("text") or delta.get("content") or b'""'
    stop = choice.get("stop_reason") or choice.get("matched_stop") or b""
    return Reading(
        msgspec.json.decode(text, type=str),
        begins="role" if "role" in delta else "",
        ends=f"{reason.decode()} {stop.decode()}" if reason else "",
    )


def _set(fields: dict[str, Raw]) -> dict[str, bytes]:
    """Return the fields that say anything."""
    raws = {name: bytes(raw) for name, raw in fields.items()}
    return {name: raw for name, raw in raws.items() if raw not in _NULL}


def _with_text(choice: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a choice with the rest of its text. The client has its role."""
    if "delta" not in choice:
        return choice | {"text": text}
    delta = object_of(choice["delta"])
    delta |= {"content": text} | ({"role": None} if "role" in delta else {})
    return choice | {"delta": delta}
