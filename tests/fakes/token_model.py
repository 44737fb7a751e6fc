"""A model that always says the same, and the events in which vLLM streams it.

Its tokens are pieces of UTF-8, which may end within a character. As vLLM's detokenizer does, it
holds text back until a character is whole and while a stop string may begin there, and repeats text
if a prompt ends within a character. As vLLM's parsers of chats do, it may hold back what may begin
a tag.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPT = [7, 8, 9]
FIRST = 100  # id of the first token of the script
END = b"\n\n"
DONE = b"data: [DONE]\n\n"
LOST = "<lost>"  # said by a model whose prompt is not what it says

TOKENS = [
    *(b"The", b" sea", b" is", b" \xc3", b"\xa9t", b"ernal", b": ", b"\xf0\x9f", b"\x98", b"\x80"),
    *(b" and", b" ST", b"", b"ART", b"s ag", b"ain", b".", b"\nE", b"ND", b" of", b" it"),
]
"""The script: characters of two and four bytes in pieces, a token without text, and words that a
stop string may begin."""


def text_of_ids(ids: Sequence[int], tokens: Sequence[bytes] = TOKENS) -> str:
    """Return the text of token ids, as ``/detokenize`` does."""
    return b"".join(tokens[id - FIRST] for id in ids).decode(errors="replace")


def detokenized(tokens: Sequence[bytes]) -> str:
    """Return the text of the longest beginning of tokens that ends with a character."""
    for count in range(len(tokens), -1, -1):
        with contextlib.suppress(UnicodeDecodeError):
            return b"".join(tokens[:count]).decode()
    raise AssertionError(tokens)


@dataclass
class TokenModel:
    """The model of one engine.

    Attributes:
        name: of the engine, part of its ids.
        tokens: what it says.
        each: tokens in an event, or in one event after another, again and again.
        ids: it tells token ids to those who ask.
        tag: its parser of chats holds back what may begin this.
    """

    name: str = "a"
    tokens: list[bytes] = field(default_factory=lambda: list(TOKENS))
    each: int | Sequence[int] = 1
    ids: bool = True
    tag: str = ""

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events of a stream."""
        return _Stream(self, body).events()

    def answer(self, body: dict[str, Any]) -> bytes:
        """Return the whole stream."""
        return b"".join(self.events(body))


class _Stream:
    def __init__(self, model: TokenModel, body: dict[str, Any]) -> None:
        self.model, self.body = model, body
        self.chat = "messages" in body
        prompt = body.get("prompt")
        ids = list(prompt) if isinstance(prompt, list) else PROMPT
        said = [FIRST + at for at in range(len(model.tokens))]
        self.prompt, self.begun = ids, len(ids) - len(PROMPT)
        self.lost = ids[len(PROMPT) :] != said[: self.begun] or ids[: len(PROMPT)] != PROMPT
        self.shows_ids = bool(model.ids and body.get("return_token_ids"))
        stop = body.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else stop
        self.told = bool(body.get("include_stop_str_in_output"))
        longest = max(map(len, self.stops), default=1)
        self.held = 0 if self.told else longest - 1

    def events(self) -> Iterator[bytes]:
        shown = (self.body.get("stream_options") or {}).get("include_usage")
        if self.chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            choice |= {"logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": self.prompt if self.shows_ids else None}
            yield self._event([choice], **ids)
        made = 0
        for count, event in self._tokens():
            made = count
            yield event
        if shown:
            usage = {"prompt_tokens": len(self.prompt), "total_tokens": len(self.prompt) + made}
            yield self._event([], usage=usage | {"completion_tokens": made})
        yield DONE

    def _tokens(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number of tokens, and the event that ends with the last of them."""
        tokens = self.model.tokens
        before = detokenized(tokens[: self.begun])
        base = len(before)
        if before.encode() != b"".join(tokens[: self.begun]):  # the prompt ends within a character
            base = 0
        most = self.body.get("max_tokens")
        if most is None and not self.chat:
            most = 16
        end = len(tokens) if most is None else min(len(tokens), self.begun + most)
        sent, at = base, self.begun
        each = self.model.each
        sizes = itertools.cycle([each] if isinstance(each, int) else each)
        while at < end:
            ids, size = [], next(sizes)
            reason = stopped = None
            text = ""
            while len(ids) < size and at < end and reason is None:
                ids.append(FIRST + at)
                at += 1
                text = before + LOST if self.lost else detokenized(tokens[:at])
                if (found := self._stop(text, base)) is not None:
                    reason, (stopped, text) = "stop", found
            if at == end and reason is None:
                reason = "stop" if at == len(tokens) else "length"
            upto = max(sent, len(text) - (0 if reason else self.held))
            if not reason:
                upto -= self._parsed(text[sent:upto])
            first = at - len(ids) == self.begun
            yield at - self.begun, self._answer(text[sent:upto], ids, reason, stopped, first=first)
            sent = upto
            if reason:
                return

    def _parsed(self, text: str) -> int:
        """Return how many characters at the end of a text may begin the tag."""
        tag = self.model.tag if self.chat else ""
        return max((n for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)

    def _stop(self, text: str, base: int) -> tuple[str, str] | None:
        """Return the stop string that ends a text, and the text until there."""
        for stop in self.stops:
            if (begin := text.find(stop, base)) >= 0:
                return stop, text[: begin + (len(stop) if self.told else 0)]
        return None

    def _answer(
        self, text: str, ids: list[int], reason: str | None, stopped: str | None, *, first: bool
    ) -> bytes:
        shown = ids if self.shows_ids else None
        if self.chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "logprobs": None}
            choice |= {"finish_reason": reason}
            if reason:
                choice["stop_reason"] = stopped
            return self._event([choice | {"token_ids": shown}])
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        prompt = self.prompt if self.shows_ids and first else None
        choice |= {"stop_reason": stopped, "prompt_token_ids": prompt, "token_ids": shown}
        return self._event([choice])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind, prefix = ("chat.completion.chunk", "chatcmpl") if self.chat else ("", "cmpl")
        head = {"id": f"{prefix}-{self.model.name}", "object": kind or "text_completion"}
        head |= {"created": ord(self.model.name[0]), "model": self.body.get("model", "tiny")}
        made = {**head, "choices": choices, **more}
        text = json.dumps(made, separators=(",", ":"), ensure_ascii=False)
        return b"data: " + text.encode() + END


def text_of(answer: bytes) -> str:
    events = [json.loads(e[6:]) for e in answer.split(END)[:-1] if not e.endswith(b"[DONE]")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices)


def merged(answer: bytes) -> list[Any]:
    """Return an answer as what its client makes of it, without the cuts between events."""
    events = [json.loads(e[6:]) for e in answer.split(END)[:-1] if not e.endswith(b"[DONE]")]
    assert answer.endswith(DONE)
    choices = [choice for event in events for choice in event["choices"]]
    ids = [id for choice in choices for id in choice.get("token_ids") or ()]
    heads = {(e["id"], e["object"], e["created"], e["model"]) for e in events}
    roles = [c["delta"]["role"] for c in choices if "role" in c.get("delta", ())]
    ends = [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]]
    usage = [event["usage"] for event in events if "usage" in event]
    return [text_of(answer), ids, heads, roles, ends, usage]
