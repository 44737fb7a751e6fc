"""Streams of all kinds that threads read, and what their clients make of them."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.engines.models import prompt_tokens
from tests.engines.server import Client

NEW = 480  # tokens of an answer
WELL_BEGUN = 8  # events
LAST = ("message_stop", "response.completed", "response.incomplete")
"""Types of last events, where these have types."""
LIMITS = ("max_tokens", "max_output_tokens", "max_new_tokens")
"""Fields that say how many tokens are wanted, by API."""
TEXT = "Say something about the sea, and about the wind. "
Ask = tuple[str, dict[str, Any]]


def asked(number: int) -> Ask:
    """Return the path and the body of a stream: of each API, with and without limits."""
    common = {"model": "model", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    text = TEXT * (4 + number)
    match number % 5:
        case 0:
            return "/v1/completions", common | {"prompt": prompt_tokens(100, start=50 * number)}
        case 1:
            return "/v1/completions", common | {"prompt": text, "stop": ["never said at all"]}
        case 2:
            return "/v1/completions", common | {"prompt": text, "return_token_ids": True}
    chat = common | {"messages": [{"role": "user", "content": text}]}
    if number % 5 == 4:  # until the model's limit
        del chat["max_tokens"]
    return "/v1/chat/completions", chat


@dataclass
class Streamed(threading.Thread):
    """A stream that a thread reads."""

    client: Client
    ask: Ask
    events: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False
    decode: int = -1
    """Number of the engine that begins it."""

    def __post_init__(self) -> None:
        super().__init__()
        self.start()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        with self.client.open(*self.ask) as reply:
            self.decode = int(reply.headers["X-KVConnect-Decode"])
            for line in reply:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.whole = self.whole or self.events[-1].get("type") in LAST
                self.whole = self.whole or line == b"data: [DONE]\n"

    @property
    def error(self) -> str:
        return "".join(event["error"]["message"] for event in self.events if "error" in event)


class Said(NamedTuple):
    """What a client makes of a stream."""

    text: str
    ids: list[int]
    roles: list[str]
    ends: list[str]
    usage: list[tuple[int, int, int]]
    heads: int


def said(stream: Streamed) -> Said:
    stream.join()
    assert stream.whole and not stream.error, stream.error
    choices = [choice for event in stream.events for choice in event["choices"]]
    texts = [c["delta"].get("content") if "delta" in c else c["text"] for c in choices]
    usage = [event["usage"] for event in stream.events if event.get("usage")]
    heads = {(e["id"], e["object"], e["created"], e["model"]) for e in stream.events}
    return Said(
        "".join(filter(None, texts)),
        [id for choice in choices for id in choice.get("token_ids") or ()],
        [c["delta"]["role"] for c in choices if c.get("delta", {}).get("role")],
        [c["finish_reason"] for c in choices if c["finish_reason"]],
        [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usage],
        len(heads),
    )


class SaidEvents(NamedTuple):
    """What a client makes of a stream whose events it does not know.

    Attributes:
        events: those without a piece of the text, with the names of ids that occur.
        text: in all pieces.
    """

    events: list[str]
    text: str


def counted(usage: dict[str, Any] | None) -> list[int]:
    """Return the tokens of prompt and answer. How many were cached is up to who computes."""
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    prompt = ("input_tokens", "prompt_tokens", *cached)
    answer = ("output_tokens", "completion_tokens")
    return [sum((usage or {}).get(name) or 0 for name in each) for each in (prompt, answer)]


def said_events(stream: Streamed) -> SaidEvents:
    """Return what is said in a stream of an API whose events have types, or of a chat."""
    stream.join()
    assert stream.whole and not stream.error, stream.error
    text, events, names = "", [], set[str]()
    for number, event in enumerate(stream.events):
        kind = event.get("type", "chunk")
        if kind == "response.output_text.delta":
            text += event["delta"]
        elif kind == "content_block_delta":
            text += event["delta"]["text"]
        elif kind == "chunk" and event["choices"]:
            text += event["choices"][0]["delta"].get("content", "")
        else:
            events.append(f"{kind} {counted(event.get('usage'))} {event.get('delta')}")
        assert event.get("sequence_number", number) == number
        names |= {event["item_id"]} if "item_id" in event else set()
        for named in (event, event.get("item"), event.get("response")):
            if named and "id" in named:
                names.add(f"{named['id']} {named.get('created_at')} {named.get('created')}")
    if "response" in (last := stream.events[-1]):
        (item,) = last["response"]["output"]
        names.add(f"{item['id']} None None")
        (part,) = item["content"]
        assert part["text"] == text
        events.append(f"{last['response']['status']} {counted(last['response']['usage'])}")
    events.append(f"{len(names)} names")
    return SaidEvents(events, text)


def in_the_middle(stream: Streamed) -> bool:
    """Whether a stream has begun, and is far from its end."""
    _, body = stream.ask
    limits = body | body.get("sampling_params", {})
    most: int = next((limits[name] for name in LIMITS if name in limits), NEW)
    return WELL_BEGUN < len(stream.events) < most // 2 and not stream.whole
