"""Events of streams of vLLM's completions and chats: read, without token ids, and made. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Raw

END = b"\n\n"
DONE = b"data: [DONE]"
DATA = b"data: "
_IDS = re.compile(rb'("(?:prompt_)?token_ids":)\[[^\]]*\]')
"""Within a JSON string, the quotation marks of such names would be escaped."""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class StreamUsage(msgspec.Struct, omit_defaults=True):
    """Counted tokens, in the order of vLLM."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: Raw | msgspec.UnsetType = msgspec.UNSET


class StreamChoice(msgspec.Struct):
    """The answer's part in one event."""

    text: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


class StreamEvent(msgspec.Struct):
    """An event, as far as a journal reads it."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[StreamChoice] = []
    prompt_token_ids: list[TokenId] | None = None
    usage: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


class StreamHead(NamedTuple):
    """What all events of one stream have in common."""

    id: str
    created: int
    model: str


class EngineError(msgspec.Struct):
    """An error that an engine reports in a stream."""

    message: str = ""
    code: int | None = None


_EVENT = msgspec.json.Decoder(StreamEvent)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)


def read(event: bytes) -> StreamEvent | None:
    """Return an event's content; None if it has none that can be read."""
    if not event.startswith(DATA):
        return None
    try:
        return _EVENT.decode(event[len(DATA) :])
    except _BROKEN:
        return None


def error_of(event: StreamEvent) -> EngineError | None:
    """Return the error that an event reports, None if it reports none."""
    if bytes(event.error) == b"null":
        return None
    try:
        return msgspec.json.decode(event.error, type=EngineError)
    except _BROKEN:
        return EngineError()


def without_ids(event: bytes) -> bytes:
    """Return an event as it is of a request that did not ask for token ids."""
    return _IDS.sub(rb"\1null", event)


class EventPart(NamedTuple):
    """What of another engine's event a client gets.

    Attributes:
        text: what follows the client's text.
        token_ids: those of the text; None: the client gets none.
        prompt_tokens: of the client's prompt.
        generated: tokens of the answer until here.
    """

    text: str
    token_ids: list[int] | None
    prompt_tokens: int
    generated: int


def continued(event: bytes, head: StreamHead, part: EventPart, *, chat: bool) -> bytes:
    """Return an event of the completion that continues a stream, as one of that stream.

    Raises:
        ValueError: it is not an event of vLLM.
    """
    fields: dict[str, Any] = _FIELDS.decode(event[len(DATA) :])
    fields |= {"id": head.id, "created": head.created, "model": head.model}
    if chat:
        fields["object"] = "chat.completion.chunk"
    if bytes(fields.get("usage", b"null")) != b"null":
        fields["usage"] = _usage_of(fields["usage"], part)
    choices = msgspec.json.decode(fields.get("choices", b"[]"), type=list[dict[str, Any]])
    if choices:
        made = _chat_choice if chat else _completion_choice
        fields["choices"] = [made(choices[0], part)]
    return _event_of(fields)


def _usage_of(raw: Raw, part: EventPart) -> StreamUsage:
    usage = msgspec.json.decode(raw, type=StreamUsage)
    usage.prompt_tokens, usage.completion_tokens = part.prompt_tokens, part.generated
    usage.total_tokens = part.prompt_tokens + part.generated
    details = usage.prompt_tokens_details
    if details and isinstance(cached := details.get("cached_tokens"), int):
        details["cached_tokens"] = min(cached, part.prompt_tokens)
    return usage


def _completion_choice(choice: dict[str, Any], part: EventPart) -> dict[str, Any]:
    ids = {"prompt_token_ids": None, "token_ids": part.token_ids}
    return {**choice, "text": part.text, **ids}


def _chat_choice(choice: dict[str, Any], part: EventPart) -> dict[str, Any]:
    made = {"index": 0, "delta": {"content": part.text}, "logprobs": None}
    made["finish_reason"] = choice.get("finish_reason")
    if made["finish_reason"] is not None:
        made["stop_reason"] = choice.get("stop_reason")
    return {**made, "token_ids": part.token_ids}


def usage_event(head: StreamHead, part: EventPart, *, chat: bool) -> bytes:
    """Return the event that tells a stream's usage at its end."""
    usage = StreamUsage(part.prompt_tokens, part.prompt_tokens + part.generated, part.generated)
    kind = "chat.completion.chunk" if chat else "text_completion"
    common = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return _event_of({**common, "choices": [], "usage": usage})


def _event_of(fields: dict[str, Any]) -> bytes:
    return DATA + msgspec.json.encode(fields) + END
