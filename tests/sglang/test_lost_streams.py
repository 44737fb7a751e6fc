"""One of two decode servers is killed in mid-stream: the other one answers again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.lost_streams import Fleet, survive_a_kill, two_routers
from tests.engines.streams import TEXT, Ask, Said, SaidEvents, Streamed, said, said_events
from tests.sglang.pd import decode_server, prefill_server, side_by_side

STREAMS = 8
NEW = 960  # tokens of an answer: all are in their middle for seconds


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    size: Any = {"texts": True, "tokens": 16384}
    prefill, decode = prefill_server(**size), [decode_server(**size) for _ in range(2)]
    with side_by_side(prefill, *decode), two_routers(prefill, decode) as fleet:
        yield fleet


def asked(number: int) -> Ask:
    """Return the path and the body of a stream."""
    common = {"model": "model", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    text = TEXT * (4 + number)
    match number % 4:
        case 0:
            return "/v1/completions", common | {"prompt": text}
        case 1:
            turns = [{"role": "user", "content": text}]
            return "/v1/chat/completions", common | {"messages": turns}
        case 2:
            response = {"model": "model", "temperature": 0, "stream": True}
            return "/v1/responses", response | {"input": text, "max_output_tokens": NEW}
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return "/generate", {"text": text, "stream": True, "sampling_params": sampling}


def heard(stream: Streamed) -> SaidEvents | Said:
    """Return what a client makes of a stream of any of these."""
    match stream.ask[0]:
        case "/v1/responses":
            return said_events(stream)
        case "/generate":
            return generated(stream)
    return said(stream)


def generated(stream: Streamed) -> Said:
    stream.join()
    assert stream.whole and not stream.error, stream.error
    for before, after in itertools.pairwise(stream.events):
        assert after["text"].startswith(before["text"])
    last = stream.events[-1]
    meta = last["meta_info"]
    tokens = meta["prompt_tokens"], meta["completion_tokens"], 0
    heads = {event["meta_info"]["id"] for event in stream.events}
    ends = [meta["finish_reason"]["type"]]
    return Said(last["text"], last["output_ids"], [], ends, [tokens], len(heads))


def test_streams_survive_kill_9_of_their_server(fleet: Fleet) -> None:
    want = survive_a_kill(fleet, [asked(number) for number in range(STREAMS)], heard)
    assert all(each.text for each in want)
    assert all(each.heads == 1 for each in want if isinstance(each, Said))
