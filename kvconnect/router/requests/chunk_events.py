"""Events of streams of OpenAI's completions and chats, as SGLang sends them, without token ids.
Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.router.requests import stream_events
from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.replay_events import (
    BROKEN,
    Change,
    Reading,
    StreamNames,
    data_of,
    fields_of,
    is_comment,
    object_of,
    with_fields,
)

_NULL = (b"", b"null", b"[]")
_OF_TEXT = {"role", "content"}


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Raw] | None = None
    logprobs: Raw = Raw(b"null")
    finish_reason: str | None = None
    matched_stop: Raw = Raw(b"null")


class _Chunk(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    usage: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


_CHUNK = msgspec.json.Decoder(_Chunk)


class ChunkEvents:
    """See :class:`EventFormat`."""

    def read(self, event: bytes) -> Reading:
        """Return what an event is."""
        if is_comment(event):
            return Reading()
        if event == stream_events.DONE:
            return Reading(ends="done", last=True)
        try:
            found = _CHUNK.decode(data_of(event) or b"")
            if bytes(found.error) != b"null":
                return _error(found)
            made = _of_choices(found)
        except BROKEN:
            return Reading(prevented=AfterLoss.PARSER)
        return made._replace(names=StreamNames(found.id, found.created, found.model))

    def changed(self, event: bytes, change: Change) -> bytes:
        """Return an event that was read as one of the first stream."""
        if event == stream_events.DONE or is_comment(event):
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


def _error(found: _Chunk) -> Reading:
    try:
        error = msgspec.json.decode(found.error, type=stream_events.EngineError)
    except BROKEN:
        error = stream_events.EngineError()
    if error.code is not None and error.code < 500:
        return Reading(prevented=AfterLoss.FAILED)
    return Reading(broken=error.message or "reported an error")


def _of_choices(found: _Chunk) -> Reading:
    if not found.choices:
        return Reading(ends="usage" if bytes(found.usage) != b"null" else "more")
    choice, *others = found.choices
    if others or choice.index:
        return Reading(prevented=AfterLoss.PROMPTS)
    if choice.finish_reason == "abort":
        return Reading(broken="ended the request")
    delta = {name: raw for name, raw in (choice.delta or {}).items() if bytes(raw) not in _NULL}
    if delta.keys() - _OF_TEXT:
        tools = "tool_calls" in delta
        return Reading(prevented=AfterLoss.TOOLS if tools else AfterLoss.PARSER)
    if bytes(choice.logprobs) not in _NULL:
        return Reading(prevented=AfterLoss.LOGPROBS)
    text = choice.text
    if choice.delta is not None:
        text = msgspec.json.decode(delta.get("content", b'""'), type=str)
    if text is None:
        return Reading(prevented=AfterLoss.PARSER)
    ends = ""
    if choice.finish_reason is not None:
        ends = f"{choice.finish_reason} {bytes(choice.matched_stop).decode()}"
    return Reading(text, begins="role" if "role" in delta else "", ends=ends)


def _with_text(choice: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a choice with the rest of its text. The client has its role."""
    if "delta" not in choice:
        return choice | {"text": text}
    delta = object_of(choice["delta"])
    delta |= {"content": text} | ({"role": None} if "role" in delta else {})
    return choice | {"delta": delta}
