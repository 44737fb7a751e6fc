"""Streams that another engine continues, wherever they were cut: as if nothing had happened."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.journal import Delivered
from tests.fakes.journaled import Continued, streamed
from tests.fakes.token_model import (
    DONE,
    END,
    LOST,
    PROMPT,
    TOKENS,
    TokenModel,
    detokenized,
    merged,
    text_of,
)

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 18, "stream": True, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
ASKED = {
    "plain": ASK,
    "all": ASK | {"max_tokens": 100},
    "no limit": {"prompt": "a", "stream": True},
    "null": {"prompt": "a", "stream": True, "max_tokens": None},
    "usage": ASK | USAGE,
    "ids": ASK | USAGE | {"return_token_ids": True},
    "stop": ASK | {"stop": ["END", "STARTs again and again"], "max_tokens": 100},
    "stops at once": ASK | {"stop": [" STARTs", "\nEND", "D"], "max_tokens": 100},
    "stops, with ids": ASK | {"stop": "\nEND", "max_tokens": 100, "return_token_ids": True},
    "stop is told": ASK | {"stop": "STARTs", "include_stop_str_in_output": True} | USAGE,
    "short stop": ASK | {"stop": "."},
    "chat": CHAT | USAGE,
    "chat, stop": CHAT | {"stop": ["STARTs"]},
    "chat, ids": CHAT | {"return_token_ids": True, "max_tokens": 9},
}
EVERY = pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)


@EVERY
@pytest.mark.parametrize("each", [1, 2])
def test_a_client_sees_no_ids_that_it_did_not_ask_for(asked: dict[str, Any], each: int) -> None:
    stream, model = Continued(asked), TokenModel(each=each)
    stream.feed(streamed(asked, model))
    assert stream.got == model.answer(asked)
    assert stream.journal.prevented is None and stream.journal.done


@EVERY
def test_a_stream_goes_on_after_each_event(asked: dict[str, Any]) -> None:
    events = streamed(asked, TokenModel("a"))
    whole = merged(TokenModel("a").answer(asked))
    for cut in range(2 if "messages" in asked else 1, len(events)):
        for part in (0, 1, len(events[cut]) // 2, len(events[cut]) - 1):
            stream = Continued(asked)
            stream.feed([*events[:cut], events[cut][:part]])
            stream.go_on(TokenModel("b"))
            assert merged(stream.got) == whole, (cut, part)


@pytest.mark.parametrize("name", [name for name in ASKED if name != "stop"])
def test_it_goes_on_again_and_again(name: str) -> None:
    """Each engine dies after some events. One gets further only if it generates twice what is held
    back for stop strings."""
    asked = ASKED[name]
    stream, engines = Continued(asked), 0
    events = streamed(asked, TokenModel("a"))
    while not stream.journal.done:
        stream.feed(events[: 12 if "stop" in asked else 4])
        engines += 1
        assert engines < 12 and not stream.journal.broken
        if not stream.journal.done and (ending := stream.journal.ending()) is not None:
            stream.got += ending
            break
        if not stream.journal.done:
            events = list(TokenModel("b").events(stream.resumed()))
    assert merged(stream.got) == merged(TokenModel("a").answer(asked))


def test_one_token_too_late_is_seen() -> None:
    """The control: what the tests above would see."""
    seen = 0
    events = streamed(ASK, TokenModel("a"))
    for cut in range(1, len(events) - 2):
        stream = Continued(ASK)
        stream.feed(events[:cut])
        delivered = stream.journal.resume()
        assert delivered is not None
        late = len(delivered.generated)
        generated = array("i", [*delivered.generated, 100 + late])
        body = stream.body(Delivered(delivered.prompt, generated))
        stream.feed(list(TokenModel("b").events(body)))
        seen += merged(stream.got) != merged(TokenModel("a").answer(ASK))
    assert seen == len(range(1, len(events) - 2)) - 2  # the late token has no text


def test_a_cut_within_a_character_is_seen() -> None:
    """The control for UTF-8: an engine whose prompt ends within a character repeats text."""
    body = ASK | {"prompt": [*PROMPT, *(100 + at for at in range(8))]}
    assert TOKENS[7] == b"\xf0\x9f"
    assert text_of(TokenModel("b").answer(body)).startswith("The sea")


def test_another_prompt_is_seen() -> None:
    body = ASK | {"prompt": [*PROMPT, 100, 102]}
    assert LOST in text_of(TokenModel("b").answer(body))


@pytest.mark.parametrize("asking", [False, True])
def test_events_of_several_tokens_go_on_where_a_character_ends(asking: bool) -> None:
    tokens = [b"a", b"b", b"\xf0\x9f\x98\x80", b"c\xf0\x9f", b"\x98\x80d", b"e", b"f", b"g"]
    first = TokenModel("a", tokens)
    stream = Continued(ASK)
    stream.feed(streamed(ASK, first)[:2])
    first.each = 2
    events = streamed(ASK, first)
    stream.feed(events[1:2])
    assert text_of(stream.got) == "ab\U0001f600"
    assert stream.journal.doubtful().tolist() == [100, 101, 102, 103]
    if asking:
        stream.journal.settle("ab\U0001f600c\ufffd")
        assert not stream.journal.doubtful()
        stream.feed(events[2:3])
        assert stream.journal.doubtful()[-1] == 105
        stream.journal.settle("whatever it is")
        assert not stream.journal.doubtful()
    begun = 6 if asking else 2  # without an answer: where a single token told it
    body = stream.resumed()
    assert body["prompt"] == [*PROMPT, *(100 + at for at in range(begun))]
    assert body["max_tokens"] == ASK["max_tokens"] - begun
    stream.feed(list(TokenModel("b", tokens).events(body)))
    assert text_of(stream.got) == "ab\U0001f600c\U0001f600defg" and not stream.journal.broken


SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=7)


@given(name=st.sampled_from(sorted(ASKED)), first=SIZES, then=SIZES, cut=st.integers(1, 30))
@example(name="stops, with ids", first=[*[1] * 10, 2, *[1] * 20], then=[1], cut=13)
def test_it_goes_on_however_many_tokens_an_event_has(
    name: str, first: list[int], then: list[int], cut: int
) -> None:
    """Engines put tokens together for slow clients: then text is generated again, while more of it
    is held back for stop strings."""
    asked = ASKED[name]
    stream = Continued(asked)
    stream.feed(streamed(asked, TokenModel(each=first))[:cut])
    stream.go_on(TokenModel("b", each=then))
    whole = TokenModel().answer(asked)
    assert text_of(stream.got) == text_of(whole)


def test_doubts_are_bounded() -> None:
    """Of engines that always send several tokens at once, few places are kept."""
    tokens = [b"word "] * 4000
    stream = Continued(CHAT)
    for event in streamed(CHAT, TokenModel("a", tokens, each=2))[:1800]:
        stream.feed([event])
    assert stream.journal.doubtful()[-1] == 100 + 2 * 1799 - 1
    for _ in range(8):
        stream.journal.settle("another text")
    assert stream.journal.resume() is None
    assert stream.journal.prevented is AfterLoss.TEXT


def test_an_engine_that_says_something_else_breaks_the_stream() -> None:
    asked = ASK | {"stop": "another text", "max_tokens": 100}
    events = streamed(asked, TokenModel("a"))
    broken = 0
    for cut in range(9, 18):
        stream = Continued(asked)
        stream.feed(events[:cut])
        before = stream.got
        body = stream.resumed()
        begun = len(body["prompt"]) - len(PROMPT)
        other = [*TOKENS[:begun], b"?" * 20, *TOKENS[begun + 1 :]]
        stream.feed(list(TokenModel("b", other).events(body)))
        if stream.journal.broken:
            assert "another text" in stream.journal.broken
            assert stream.got == before
            broken += 1
            # Then a third engine may be tried.
            stream.feed(list(TokenModel("c").events(stream.resumed())))
            assert merged(stream.got) == merged(TokenModel("a").answer(asked))
        else:  # nothing of that token was sent yet: who samples may say anything
            assert text_of(stream.got).startswith(text_of(before) + "?" * 20)
    assert 0 < broken < 9


@given(
    st.sampled_from(list(ASKED)),
    st.integers(1, 3),
    st.integers(0, 10_000),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_every_split_is_the_same(name: str, each: int, cut: int, cuts: list[int]) -> None:
    asked = ASKED[name]
    whole = b"".join(streamed(asked, TokenModel("a", each=each)))
    first = whole.index(END) + 2
    if "messages" in asked:
        first = whole.index(END, first) + 2
    part = whole[: first + cut % (len(whole) - first)]
    stream = Continued(asked)
    at = [0, *sorted(each % (len(part) + 1) for each in cuts), len(part)]
    stream.feed([part[a:b] for a, b in itertools.pairwise(at)])
    stream.go_on(TokenModel("b", each=each))
    assert merged(stream.got) == merged(TokenModel("a").answer(asked))


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (b'data: {"choices":[],"error":{"message":"died","code":500}}\n\n', "died"),
        (b'data: {"error":{"message":"EngineCore died","type":"x","code":500}}\n\n', "EngineCore"),
        (b'data: {"error":"odd"}\n\n', "reported"),
        (b'data: {"choices":[{"text":"","finish_reason":"abort","token_ids":[]}]}\n\n', "ended"),
    ],
)
def test_what_an_engine_reports_of_its_end_reaches_no_client(event: bytes, why: str) -> None:
    stream = Continued(ASK)
    events = streamed(ASK, TokenModel("a"))
    stream.feed([*events[:3], event + DONE])
    assert why in stream.journal.broken
    assert stream.got == b"".join(list(TokenModel("a").events(ASK))[:3])
    stream.go_on(TokenModel("b"))
    assert merged(stream.got) == merged(TokenModel("a").answer(ASK))


@pytest.mark.parametrize("name", ["stops, with ids", "stop is told"])
def test_an_engine_that_ends_too_early_breaks_the_stream(name: str) -> None:
    """It samples another end of the answer while it generates again what was sent."""
    asked, model = ASKED[name], TokenModel("a")
    events = streamed(asked, model)
    broken = 0
    for cut in range(8, len(events) - 2):
        for end in (1, 2):
            stream = Continued(asked)
            stream.feed(events[:cut])
            if stream.journal.finished:
                continue
            before, body = stream.got, stream.resumed()
            begun = len(body["prompt"]) - len(PROMPT)
            ends = TokenModel("b", TOKENS[: begun + end])
            stream.feed(list(ends.events(body)))
            said = detokenized(TOKENS[: begun + end])
            again = begun + end >= cut or not stream.terms.shows_ids
            if len(said) >= len(text_of(before)) and again:
                continue
            assert "ended before" in stream.journal.broken
            assert text_of(stream.got) == text_of(before)
            broken += 1
            stream.go_on(TokenModel("c"))
            assert merged(stream.got) == merged(model.answer(asked))
    assert broken


def test_ids_come_once_if_an_engine_is_lost_before_it_has_repeated_all() -> None:
    asked = ASKED["stops, with ids"]
    events = streamed(asked, TokenModel("a"))
    for cut in range(4, len(events) - 2):
        stream = Continued(asked)
        stream.feed(events[:cut])
        if stream.journal.finished:
            continue
        stream.feed(list(TokenModel("b").events(stream.resumed()))[:1])
        stream.go_on(TokenModel("c"))
        assert merged(stream.got) == merged(TokenModel("a").answer(asked)), cut


def test_without_memory_for_the_last_tokens_no_usage_is_made_up() -> None:
    stream = Continued(ASKED["usage"], memory=4 * len(PROMPT))
    (event, *_) = streamed(ASKED["usage"] | {"max_tokens": 1}, TokenModel("a"))
    stream.feed([event])
    assert stream.journal.finished and stream.journal.ending() is None
    assert stream.journal.rest({}) is AfterLoss.MEMORY
    stream = Continued(ASK, memory=4 * len(PROMPT))
    stream.feed([event])
    assert stream.journal.ending() == DONE  # there is nothing to count


def test_where_there_are_no_ids_there_is_no_continuation() -> None:
    stream = Continued(ASK)
    events = list(TokenModel(ids=False).events(ASK))
    stream.feed(events[:5])
    assert stream.got == b"".join(events[:5])
    assert stream.journal.resume() is None
    assert stream.journal.prevented is AfterLoss.IDS


@pytest.mark.parametrize(
    "delta",
    [{"reasoning": "hm", "content": None}, {}, {"tool_calls": [{"index": 0}]}, {"role": "x"}],
)
def test_chats_that_the_engine_parses_are_not_continued(delta: dict[str, Any]) -> None:
    stream = Continued(CHAT)
    events = streamed(CHAT, TokenModel("a"))
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [100]}
    stream.feed([*events[:1], b"data: " + json.dumps({"choices": [choice]}).encode() + END])
    assert stream.journal.resume() is None
    assert stream.journal.prevented is AfterLoss.PARSER
    shown = stream.got.count(b"data: ")
    assert shown == (2 if delta else 1)  # without the wish for ids, vLLM sends no empty delta


def test_a_stream_that_finds_no_memory_ends_as_without_a_journal() -> None:
    stream = Continued(ASK, memory=100)
    stream.feed(streamed(ASK, TokenModel("a")))
    assert stream.got == TokenModel("a").answer(ASK)
    assert stream.journal.prevented is AfterLoss.MEMORY
    assert stream.journal.resume() is None


def test_memory_is_taken_for_prompt_and_tokens() -> None:
    stream = Continued(ASK, memory=1 << 20)
    stream.feed(streamed(ASK, TokenModel("a")))
    assert 4 * (len(PROMPT) + len(TOKENS)) <= (1 << 20) - stream.memory <= 4 * (len(PROMPT) + 1024)


def test_an_endless_event_breaks_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.router.requests.whole_events.MOST_EVENT", 100)
    stream = Continued(ASK)
    stream.feed([b"data: " + b"x" * 90, b"y" * 20])
    assert "size limit" in stream.journal.broken
    assert stream.got == b""


def test_overlaps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.router.requests.sent_text.MOST_OVERLAP", 8)
    stream = Continued(ASK)
    stream.feed(streamed(ASK, TokenModel("a", each=2))[:5])
    assert stream.journal.resume() is None
    assert stream.journal.prevented is AfterLoss.TEXT
