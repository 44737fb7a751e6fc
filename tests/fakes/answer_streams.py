"""Streams in which engines send an answer of plain text, by API: vLLM's Messages and Responses,
SGLang's completions and chats, and its own API. As those engines' own code makes them.

Two engines send the same answer with other ids, times and numbers, and cut it into other events.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

END = b"\n\n"
TEXT = "The sea is \u00e9ternal: \U0001f600\U0001f30a and it sta\u0301rts again.\nEnd \u6d77"
USAGE = (3, 20)  # tokens of the prompt, and of the answer

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GENERATE = "/generate"
_TURN = {"messages": [{"role": "user", "content": "hello"}]}
_COMMON = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 40}
ASKS: dict[str, dict[str, Any]] = {
    MESSAGES: _COMMON | _TURN,
    RESPONSES: {"model": "tiny", "stream": True, "temperature": 0, "input": "hello"},
    COMPLETIONS: _COMMON | {"prompt": "hello", "stream_options": {"include_usage": True}},
    CHATS: _COMMON | _TURN | {"stream_options": {"include_usage": True}},
    GENERATE: {"text": "hello", "stream": True, "sampling_params": {"temperature": 0}},
}


@dataclass
class Answer:
    """What an engine says, and how.

    Attributes:
        name: of the engine; its ids have it.
        each: characters in an event, or in one event after another, again and again.
        joined: of completions: the last text and the end are one event.
    """

    name: str = "a"
    text: str = TEXT
    each: int | Sequence[int] = 2
    joined: bool = True

    def events(self, path: str) -> list[bytes]:
        """Return the events of a stream."""
        made = {MESSAGES: self._messages, RESPONSES: self._responses, CHATS: self._chat}
        made |= {GENERATE: self._generate}
        return list(made.get(path, self._completion)())

    @property
    def _pieces(self) -> list[str]:
        sizes = itertools.cycle([self.each] if isinstance(self.each, int) else self.each)
        pieces, at = [], 0
        while at < len(self.text):
            pieces.append(self.text[at : (at := at + next(sizes))])
        return pieces

    @property
    def _created(self) -> int:
        return ord(self.name[0])

    def _messages(self) -> Iterator[bytes]:
        message = {"id": f"chatcmpl-{self.name}", "type": "message", "role": "assistant"}
        message |= {"content": [], "model": "tiny", "stop_reason": None, "stop_sequence": None}  # type: ignore[dict-item]
        begun = {"input_tokens": USAGE[0], "output_tokens": 0}
        yield _named("message_start", message=message | {"usage": begun})
        if self.text:
            yield _named("content_block_start", content_block={"type": "text", "text": ""}, index=0)
        for piece in self._pieces:
            yield _named(
                "content_block_delta", delta={"type": "text_delta", "text": piece}, index=0
            )
        if self.text:
            yield _named("content_block_stop", index=0)
        end = {"stop_reason": "max_tokens", "stop_sequence": None}
        usage = {"input_tokens": USAGE[0], "output_tokens": USAGE[1]}
        yield _named("message_delta", delta=end, usage=usage)
        yield _named("message_stop")

    def _responses(self) -> Iterator[bytes]:
        number = itertools.count()
        usage = {"input_tokens": USAGE[0], "output_tokens": USAGE[1], "total_tokens": sum(USAGE)}

        def event(kind: str, **fields: Any) -> bytes:
            return _named(f"response.{kind}", last=True, **fields, sequence_number=next(number))

        def response(status: str, output: list[Any]) -> dict[str, Any]:
            made = {"id": f"resp_{self.name}", "created_at": self._created, "model": "tiny"}
            made |= {"object": "response", "output": output, "status": status}
            return made | {"usage": None if status == "in_progress" else usage}

        def message(status: str, content: list[Any]) -> dict[str, Any]:
            made = {"id": item, "content": content, "role": "assistant"}
            return made | {"status": status, "type": "message", "phase": None}

        def part(text: str, logprobs: Any) -> dict[str, Any]:
            made = {"annotations": [], "text": text, "type": "output_text"}
            return made | {"logprobs": logprobs}

        item = f"msg_{self.name}"
        at, inside = {"output_index": 0}, {"content_index": 0, "item_id": item, "output_index": 0}
        yield event("created", response=response("in_progress", []))
        yield event("in_progress", response=response("in_progress", []))
        yield event("output_item.added", item=message("in_progress", []), **at)
        yield event("content_part.added", **inside, part=part("", []))
        for piece in self._pieces:
            yield event("output_text.delta", **inside, delta=piece, logprobs=[])
        whole = part(self.text, None)
        yield event("output_text.done", **inside, logprobs=[], text=self.text)
        yield event("content_part.done", **inside, part=whole)
        done = message("completed", [whole])
        yield event("output_item.done", item=done, **at)
        yield event("completed", response=response("incomplete", [done]))

    def _completion(self) -> Iterator[bytes]:
        *pieces, last = self._pieces or [""]
        pieces, last = (pieces, last) if self.joined else ([*pieces, last], "")
        for piece in pieces:
            yield self._chunk("text_completion", [_choice(text=piece)])
        yield self._chunk("text_completion", [_choice(text=last, reason="length")])
        yield self._chunk("text_completion", [], usage=_usage())
        yield b"data: [DONE]" + END

    def _chat(self) -> Iterator[bytes]:
        kind, empty = "chat.completion.chunk", {"reasoning_content": None}
        yield self._chunk(kind, [_choice(delta={**empty, "role": "assistant", "content": ""})])
        for piece in self._pieces:
            yield self._chunk(kind, [_choice(delta={**empty, "content": piece})])
        yield self._chunk(kind, [_choice(delta=empty, reason="length")])
        yield self._chunk(kind, [], usage=_usage())
        yield b"data: [DONE]" + END

    def _generate(self) -> Iterator[bytes]:
        pieces = (self._pieces or [""]) if self.joined else [*self._pieces, ""]
        for at, said in enumerate(itertools.accumulate(pieces)):
            end = {"type": "length", "length": 40} if at == len(pieces) - 1 else None
            meta = {"id": self.name * 32, "finish_reason": end, "prompt_tokens": USAGE[0]}
            meta |= {"completion_tokens": len(said), "cached_tokens": 0}
            event = {"text": said, "output_ids": [*map(ord, said)], "meta_info": meta}
            yield b"data: " + _json(event) + END
        yield b"data: [DONE]" + END

    def _chunk(self, kind: str, choices: list[Any], **more: Any) -> bytes:
        head = {"id": self.name * 32, "object": kind, "created": self._created, "model": "tiny"}
        return b"data: " + _json({**head, "choices": choices, **more}) + END


def _choice(*, reason: str | None = None, **said: Any) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason, "matched_stop": None}


def _usage() -> dict[str, Any]:
    prompt, answer = USAGE
    return {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}


def _named(kind: str, *, last: bool = False, **fields: Any) -> bytes:
    """Return an event with a name; ``last``: its type is its last field, as vLLM's Responses have
    it."""
    fields = {**fields, "type": kind} if last else {"type": kind, **fields}
    return f"event: {kind}\ndata: ".encode() + _json(fields) + END


def _json(made: dict[str, Any]) -> bytes:
    return json.dumps(made, separators=(",", ":"), ensure_ascii=False).encode()


def read(answer: bytes) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events, which are whole."""
    *events, rest = answer.split(END)
    assert not rest, rest
    raws = [event.partition(b"data: ")[2] for event in events]
    return [json.loads(raw) for raw in raws if raw != b"[DONE]"]


def merged(answer: bytes) -> list[Any]:
    """Return a stream as what its client makes of it, without the cuts between pieces of text: its
    other events as they are, and between them the text. The message of a response has the id of the
    engine that began it, which need not have begun the stream."""
    made: list[Any] = []
    names = set(re.findall(rb'"msg_[^"]*"', answer))
    assert len(names) <= 1, names
    for name in names:
        answer = answer.replace(name, b'"msg"')
    said = ""
    for number, event in enumerate(read(answer)):
        text = _text_of(event)
        if "meta_info" in event:  # and all before
            assert text.startswith(said)
            text, said = text[len(said) :], text
        if "sequence_number" in event:
            assert event.pop("sequence_number") == number
        if text and made and isinstance(made[-1], str):
            made[-1] += text
        elif text:
            made.append(text)
        if not _only_text(event):
            made.append(_without_text(event))
    return [*made, answer.endswith(b"data: [DONE]" + END)]


def _text_of(event: dict[str, Any]) -> str:
    if event.get("choices"):
        choice = event["choices"][0]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    if "meta_info" in event:
        return str(event["text"])
    delta = event.get("delta")
    return delta.get("text", "") if isinstance(delta, dict) else delta or ""


def _only_text(event: dict[str, Any]) -> bool:
    if event.get("choices"):
        choice = event["choices"][0]
        role = choice.get("delta", {}).get("role")
        return choice["finish_reason"] is None and role is None
    if "meta_info" in event:
        return event["meta_info"]["finish_reason"] is None
    delta = event.get("delta")
    return isinstance(delta, str) or (isinstance(delta, dict) and "text" in delta)


def _without_text(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of which only the rest is compared: where text ends, nobody cares."""
    if not event.get("choices"):
        return event
    choice = dict(event["choices"][0])
    choice.pop("text", None)
    if "delta" in choice:
        choice["delta"] = {k: v for k, v in choice["delta"].items() if v and k != "content"}
    return event | {"choices": [choice]}
