"""Journals of streams that other engines answer again: the client gets one stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.requests.chunk_events import ChunkEvents
from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.generate_events import GenerateEvents
from kvconnect.router.requests.messages_events import MessagesEvents
from kvconnect.router.requests.replay_events import EventFormat
from kvconnect.router.requests.replay_journal import ReplayJournal
from kvconnect.router.requests.responses_events import ResponsesEvents
from tests.fakes.answer_streams import (
    ASKS,
    CHATS,
    COMPLETIONS,
    END,
    GENERATE,
    MESSAGES,
    RESPONSES,
    TEXT,
    Answer,
    merged,
    read,
)

FORMATS: dict[str, Callable[[], EventFormat]] = {
    MESSAGES: MessagesEvents,
    RESPONSES: ResponsesEvents,
    COMPLETIONS: ChunkEvents,
    CHATS: ChunkEvents,
    GENERATE: GenerateEvents,
}
EVERY = pytest.mark.parametrize("path", FORMATS)
OTHER = "answered again with another text than the one that was sent"


class Stream:
    """A journal, and what its client has."""

    def __init__(self, path: str) -> None:
        self.path, self.got = path, b""
        self.journal = ReplayJournal(FORMATS[path])

    def feed(self, sent: bytes, size: int = 0) -> None:
        """Feed a stream, in chunks of a size; 0: whole."""
        size = size or len(sent) or 1
        for at in range(0, len(sent), size):
            self.got += self.journal.feed(sent[at : at + size])

    def again(self) -> Any:
        found = self.journal.rest(ASKS[self.path])
        assert not isinstance(found, AfterLoss), found
        return found


def whole(path: str, **said: Any) -> bytes:
    return b"".join(Answer(**said).events(path))


@EVERY
@pytest.mark.parametrize("each", [1, 2, 3, (1, 5), 1000])
def test_it_goes_on_after_every_event(path: str, each: int | Sequence[int]) -> None:
    events, want = Answer("a").events(path), merged(whole(path, name="a"))
    for count in range(len(events)):
        stream = Stream(path)
        stream.feed(b"".join(events[:count]) + events[count][:-3])  # in mid-event
        before = stream.got
        stream.again()
        stream.feed(whole(path, name="b", each=each, joined=False))
        assert stream.got.startswith(before)
        assert merged(stream.got) == (want if count else merged(whole(path, name="b"))), count
        assert stream.journal.done and not stream.journal.broken


@EVERY
def test_an_undisturbed_stream_keeps_its_bytes(path: str) -> None:
    sent = whole(path)
    for size in (1, 7, 0):
        stream = Stream(path)
        stream.feed(sent, size)
        assert stream.got == sent and stream.journal.done and stream.journal.prevented is None


@EVERY
@given(data=st.data())
def test_it_goes_on_as_often_as_engines_are_lost(path: str, data: st.DataObject) -> None:
    """However they cut their events, and wherever they end."""
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    text = data.draw(st.text(st.sampled_from('a\u00e9\u6d77\U0001f600\n"\\'), min_size=1))
    stream = Stream(path)
    named = ""
    for name in "abcd":
        sent = whole(
            path, name=name, text=text, each=data.draw(sizes), joined=data.draw(st.booleans())
        )
        if name != "d":
            sent = sent[: data.draw(st.integers(0, len(sent) - 1))]
        stream.feed(sent, data.draw(st.integers(1, 90)))
        assert not stream.journal.broken
        named = named or (name if stream.got else "")
        if name != "d":
            stream.again()
    assert merged(stream.got) == merged(whole(path, name=named, text=text))


@EVERY
def test_nothing_is_passed_until_all_that_is_known_has_come(path: str) -> None:
    events = Answer("a").events(path)
    stream = Stream(path)
    stream.feed(b"".join(events[:8]))
    before = stream.got
    stream.again()
    stream.feed(b"".join(Answer("b").events(path)[:8]))
    assert stream.got == before
    stream.feed(Answer("b").events(path)[8])
    assert len(stream.got) > len(before)


@EVERY
def test_one_wrong_character_is_seen(path: str) -> None:
    """The control of all of these. It comes before the cut, at it, or the answer is too short."""
    events = Answer("a").events(path)
    known = 10  # characters and more
    for other in ("the" + TEXT[3:], TEXT[: known - 1] + "_" + TEXT[known:], TEXT[:5], ""):
        stream = Stream(path)
        stream.feed(b"".join(events[:-5]))
        before = stream.got
        stream.again()
        stream.feed(whole(path, name="b", text=other, each=3))
        assert stream.got == before
        assert stream.journal.broken == OTHER and not stream.journal.done
        # Yet another engine may say the right thing.
        stream.again()
        stream.feed(whole(path, name="c"))
        assert merged(stream.got) == merged(whole(path, name="a"))


@EVERY
def test_what_differs_after_the_cut_is_the_engines_own(path: str) -> None:
    """Nobody can know better. The last character before it is compared."""
    events = Answer("a", each=1).events(path)
    stream = Stream(path)
    at = next(at for at, event in enumerate(events) if b'"h"' in event or b'"Th"' in event) + 1
    stream.feed(b"".join(events[:at]))
    stream.again()
    stream.feed(whole(path, name="b", text="Thx sea"))
    assert merged(stream.got) == merged(whole(path, name="a", text="Thx sea"))


@EVERY
def test_memory_does_not_grow_with_the_answer(path: str) -> None:
    sizes = []
    for length in (10, 100_000):
        stream = Stream(path)
        for event in Answer("a", text="ab" * length, each=length).events(path)[:-4]:
            stream.journal.feed(event)
        sizes.append(size_of(stream.journal))
        stream.again()
        for event in Answer("b", text="ab" * length, each=length).events(path)[:-4]:
            stream.journal.feed(event)
        sizes.append(size_of(stream.journal))
    assert max(sizes) - min(sizes) < 400
    assert size_of({"a": "ab" * 1000}) > 2000  # the control of the measure


def size_of(thing: object, seen: set[int] | None = None) -> int:
    """Return the bytes of an object and of all that it holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    held: list[object] = []
    if isinstance(thing, dict):
        held = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple):
        held = list(thing)
    if hasattr(thing, "__dict__"):
        held += vars(thing).values()
    return sys.getsizeof(thing) + sum(size_of(each, seen) for each in held)


def event(path: str, name: str, **fields: Any) -> bytes:
    raw = json.dumps({"type": name, **fields}).encode()
    if path in (MESSAGES, RESPONSES):
        return f"event: {name}\ndata: ".encode() + raw + END
    return b"data: " + raw + END


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "logprobs": None, "finish_reason": None, **fields}]}


def generated(text: str, tokens: int, **end: Any) -> bytes:
    """Return an event of SGLang's own API with one token id per character."""
    meta = {"id": "a", "completion_tokens": tokens, "finish_reason": end or None}
    return event(GENERATE, "", text=text, output_ids=[*map(ord, text)], meta_info=meta)


ITEM, PART = "response.output_item.added", "response.content_part.added"
DELTA = "response.output_text.delta"


@pytest.mark.parametrize(
    ("path", "sent", "reason"),
    [
        (
            MESSAGES,
            event(MESSAGES, "content_block_start", content_block={"type": "tool_use"}),
            "tools",
        ),
        (
            MESSAGES,
            event(MESSAGES, "content_block_start", content_block={"type": "thinking"}),
            "parser",
        ),
        (
            MESSAGES,
            event(MESSAGES, "content_block_delta", delta={"type": "input_json_delta"}),
            "tools",
        ),
        (
            MESSAGES,
            event(MESSAGES, "content_block_delta", delta={"type": "signature_delta"}),
            "parser",
        ),
        (MESSAGES, event(MESSAGES, "nobody_knows"), "parser"),
        (RESPONSES, event(RESPONSES, ITEM, item={"type": "function_call"}), "tools"),
        (RESPONSES, event(RESPONSES, ITEM, item={"type": "reasoning"}), "parser"),
        (RESPONSES, event(RESPONSES, PART, part={"type": "refusal"}), "parser"),
        (
            RESPONSES,
            event(RESPONSES, PART, part={"type": "output_text", "annotations": [{}]}),
            "parser",
        ),
        (RESPONSES, event(RESPONSES, "response.reasoning_text.delta", delta="a"), "parser"),
        (RESPONSES, event(RESPONSES, "response.refusal.delta", delta="a"), "parser"),
        (RESPONSES, event(RESPONSES, "response.mcp_call.in_progress"), "tools"),
        (RESPONSES, event(RESPONSES, DELTA, delta="a", logprobs=[{"token": "a"}]), "logprobs"),
        (RESPONSES, b"event: odd" + END, "parser"),
        (COMPLETIONS, event(COMPLETIONS, "", **choice(text="a", logprobs={"a": 1})), "logprobs"),
        (COMPLETIONS, event(COMPLETIONS, "", **choice(text="a", token_ids=[1])), "ids"),
        (COMPLETIONS, event(COMPLETIONS, "", **choice(text="a", index=1)), "prompts"),
        (COMPLETIONS, event(COMPLETIONS, "", **choice(text="a", hidden_states=[1])), "parser"),
        (COMPLETIONS, b"data: {" + END, "parser"),
        (COMPLETIONS, b'data: {"choices":[{"index":0,"text":3}]}' + END, "parser"),
        (CHATS, event(CHATS, "", **choice(delta={"tool_calls": [{}]})), "tools"),
        (CHATS, event(CHATS, "", **choice(delta={"reasoning_content": "a"})), "parser"),
        (CHATS, event(CHATS, "", error={"code": 400, "message": "no"}), "failed"),
        (GENERATE, event(GENERATE, "", error={"code": 400, "message": "no"}), "failed"),
        (GENERATE, generated("a", 9), "ids"),  # what is new
        (GENERATE, event(GENERATE, "", text="a"), "parser"),
        (GENERATE, b"data: {" + END, "parser"),
    ],
)
def test_streams_with_anything_but_text_are_not_answered_again(
    path: str, sent: bytes, reason: str
) -> None:
    stream = Stream(path)
    begin = b"".join(Answer().events(path)[:3])
    stream.feed(begin + sent)
    assert stream.got == begin + sent
    assert stream.journal.prevented == reason
    assert stream.journal.rest(ASKS[path]) == reason
    rest = b"".join(Answer().events(path)[3:])
    stream.feed(rest)
    assert stream.got == begin + sent + rest and stream.journal.done
    plain = Stream(path)  # the control: without it, the stream is
    plain.feed(begin)
    plain.again()
    plain.feed(sent)  # which the first engine has not sent before the cut
    assert plain.got == begin and plain.journal.broken == OTHER


@pytest.mark.parametrize(
    ("path", "sent", "message"),
    [
        (MESSAGES, event(MESSAGES, "error", error={"message": "core died"}), "core died"),
        (
            MESSAGES,
            event(MESSAGES, "message_delta", delta={"stop_reason": None}),
            "ended the request",
        ),
        (RESPONSES, event(RESPONSES, "error", message="core died"), "core died"),
        (
            RESPONSES,
            event(RESPONSES, "response.failed", response={"error": {"message": "core died"}}),
            "core died",
        ),
        (
            RESPONSES,
            event(RESPONSES, "response.completed", response={"status": "cancelled"}),
            "ended the request",
        ),
        (
            COMPLETIONS,
            event(COMPLETIONS, "", error={"message": "core died", "code": 500}),
            "core died",
        ),
        (
            COMPLETIONS,
            event(COMPLETIONS, "", **choice(text="a", finish_reason="abort")),
            "ended the request",
        ),
        (CHATS, event(CHATS, "", error={}), "reported an error"),
        (CHATS, event(CHATS, "", **choice(delta={}, finish_reason="abort")), "ended the request"),
        (GENERATE, generated("a", 9, type="abort", message="gone"), "ended the request"),
        (GENERATE, event(GENERATE, "", error={"message": "core died", "code": 503}), "core died"),
    ],
)
def test_what_an_engine_says_of_its_end_is_no_end(path: str, sent: bytes, message: str) -> None:
    stream = Stream(path)
    begin = b"".join(Answer("a").events(path)[:5])
    if "message_delta" in sent.decode():  # vLLM ends the block before
        begin += event(path, "content_block_stop", index=0)
    stream.feed(begin + sent)
    assert stream.journal.broken == message and not stream.journal.done
    stream.again()
    stream.feed(whole(path, name="b"))
    assert merged(stream.got) == merged(whole(path, name="a"))


ODD = b'null 1e400 [] {} "" "a" -1 [null] [[{}]] {"id":null} {"type":"message"} \\ \xff :'.split()


@EVERY
@given(data=st.data())
def test_nothing_that_an_engine_sends_is_an_error_of_the_router(
    path: str, data: st.DataObject
) -> None:
    """Whatever it puts in place of a value, or of any bytes; also when it answers again."""
    stream = Stream(path)
    for name in "abc":
        sent = whole(path, name=name)
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(sent) - 1))
            odd = data.draw(st.sampled_from(ODD))
            at = sent.find(b":", at) + 1 or at
            end = min(e for e in (sent.find(b",", at), sent.find(b"}", at), len(sent)) if e >= 0)
            sent = sent[:at] + odd + sent[end:]
        stream.feed(sent[: data.draw(st.integers(1, len(sent)))])
        if stream.journal.prevented is not None or stream.journal.done:
            return
        stream.again()


def test_where_there_is_no_text_token_ids_are_compared() -> None:
    def ids(name: str, *ends: int, shift: int = 0) -> list[bytes]:
        raws = []
        for end in ends:
            made = {"id": name, "completion_tokens": end, "finish_reason": None}
            ids = [*range(shift, shift + end)]
            raws.append(event(GENERATE, "", output_ids=ids, meta_info=made))
        return raws

    stream = Stream(GENERATE)
    stream.feed(b"".join(ids("a", 1, 3)))
    before = stream.got
    stream.again()
    stream.feed(b"".join(ids("b", 2, 3, shift=1)))  # the control
    assert stream.got == before and stream.journal.broken == OTHER
    stream.again()
    stream.feed(b"".join(ids("c", 2, 3, 4)))
    assert read(stream.got) == read(before + ids("a", 4)[0])


def test_an_event_without_an_end_is_not_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.router.requests.whole_events.MOST_EVENT", 1000)
    stream = Stream(MESSAGES)
    stream.feed(b"event: a\ndata: " + b"x" * 2000, 100)
    assert stream.journal.broken == "sent an event over the size limit" and not stream.got


@EVERY
def test_comments_are_passed(path: str) -> None:
    stream = Stream(path)
    events = Answer().events(path)
    sent = b": a" + END + events[0] + b": b" + END + events[1]
    stream.feed(sent)
    assert stream.got == sent
    stream.again()
    stream.feed(sent)
    assert stream.got == sent  # but not again
    stream.feed(b": c" + END + b"".join(events[2:]))
    assert stream.got == sent + b": c" + END + b"".join(events[2:])


def test_the_engine_gets_the_response_id_that_the_client_knows() -> None:
    """With it, an engine that stores responses stores this one."""
    stream = Stream(RESPONSES)
    assert stream.again() == ASKS[RESPONSES]
    stream.feed(b"".join(Answer("a").events(RESPONSES)[:4]))
    assert stream.again() == ASKS[RESPONSES] | {"request_id": "resp_a"}
    for path in FORMATS.keys() - {RESPONSES}:
        other = Stream(path)
        other.feed(Answer("a").events(path)[0])
        assert other.again() == ASKS[path]
