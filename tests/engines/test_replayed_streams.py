"""One of two decode engines is killed in mid-stream: the other one answers again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.engines.pd import decode_config, prefill_config, side_by_side
from tests.engines.ranks import until
from tests.engines.server import Router, Server
from tests.engines.streams import NEW, TEXT, Ask, Streamed, in_the_middle

STREAMS = 8


class Fleet(NamedTuple):
    decode: list[Server]
    router: Router
    control: Router


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    size: Any = {"blocks": 512}
    p = Server("llama", prefill_config(), **size)
    decode = [Server("llama", decode_config(), **size) for _ in range(2)]
    with (
        side_by_side(p, *decode),
        Router([p], decode, ("--continue", "1")) as router,
        Router([p], decode) as control,
    ):
        for each in (router, control):
            until(lambda each=each: count(each, "standing_ticket_fetches", outcome="ok") > 0, "one")
        yield Fleet(decode, router, control)


def count(router: Router, name: str, **labels: str) -> float:
    return router.metric(f"kvconnect_router_{name}_total", **labels)


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
    asks = [asked(number) for number in range(STREAMS)]
    want = [said(each) for each in [Streamed(fleet.control, ask) for ask in asks]]
    assert all(len(each.text) > NEW // 2 for each in want)
    both = [(Streamed(fleet.router, ask), Streamed(fleet.control, ask)) for ask in asks]
    streams, control = [first for first, _ in both], [second for _, second in both]

    def killable() -> set[int]:
        """Engines in the middle of a stream of both routers. Others may have ended, or not begun:
        a busy machine starts threads late."""
        at = [{e.decode for e in some if in_the_middle(e)} for some in (streams, control)]
        return at[0] & at[1]

    until(lambda: bool(killable()), "a stream of both routers at one engine")
    victim = min(killable())
    fleet.decode[victim].kill()
    found = [said(each) for each in streams]
    assert [each.text for each in found] == [each.text for each in want]
    assert [each.events for each in found] == [each.events for each in want]
    lost = sum(each.decode == victim for each in streams)
    assert 0 < count(fleet.router, "lost_streams", result="continued") <= lost
    for each in control:
        each.join()
    broken = [each for each in control if each.error]
    assert broken, "the control: these are lost without the flag"
    assert count(fleet.control, "requests", outcome="broken") == len(broken)
    assert count(fleet.router, "requests", outcome="broken") == 0
