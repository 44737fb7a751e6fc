"""One of two decode engines is killed in mid-stream: the other one answers again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.engines.lost_streams import Fleet, survive_a_kill, vllm_fleet
from tests.engines.streams import NEW, TEXT, Ask, Streamed

STREAMS = 8


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with vllm_fleet() as fleet:
        yield fleet


def asked(number: int) -> Ask:
    """Return the path and the body of a stream."""
    common = {"model": "model", "temperature": 0, "stream": True}
    turns = [{"role": "user", "content": TEXT * (4 + number)}]
    if number % 4 == 0:
        return "/v1/messages", common | {"messages": turns, "max_tokens": NEW}
    common |= {"ignore_eos": True}
    if number % 4 == 1:  # the tokens so far count, so no other engine can begin after them
        options = {"max_tokens": NEW, "stream_options": {"include_usage": True}}
        options |= {"presence_penalty": 0.01, "messages": turns}
        return "/v1/chat/completions", common | options
    return "/v1/responses", common | {"input": turns[0]["content"], "max_output_tokens": NEW}


class Said(NamedTuple):
    """What a client makes of a stream.

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


def said(stream: Streamed) -> Said:
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
        for told in (event, event.get("item"), event.get("response")):
            if told and "id" in told:
                names.add(f"{told['id']} {told.get('created_at')} {told.get('created')}")
    if "response" in (last := stream.events[-1]):
        (item,) = last["response"]["output"]
        names.add(f"{item['id']} None None")
        (part,) = item["content"]
        assert part["text"] == text
        events.append(f"{last['response']['status']} {counted(last['response']['usage'])}")
    events.append(f"{len(names)} names")
    return Said(events, text)


def test_streams_survive_kill_9_of_their_engine(fleet: Fleet) -> None:
    want = survive_a_kill(fleet, [asked(number) for number in range(STREAMS)], said)
    assert all(len(each.text) > NEW // 2 for each in want)
