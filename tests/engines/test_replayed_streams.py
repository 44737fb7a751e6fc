"""One of two decode engines is killed in mid-stream: the other one answers again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.lost_streams import Fleet, survive_a_kill, vllm_fleet
from tests.engines.streams import NEW, TEXT, Ask, said_events

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


def test_streams_survive_kill_9_of_their_engine(fleet: Fleet) -> None:
    want = survive_a_kill(fleet, [asked(number) for number in range(STREAMS)], said_events)
    assert all(len(each.text) > NEW // 2 for each in want)
