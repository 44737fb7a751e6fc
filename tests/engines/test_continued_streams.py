"""One of two decode engines is killed in mid-stream: the other one continues its streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvconnect.router.requests import text_ends
from tests.engines.pd import decode_config, prefill_config, side_by_side
from tests.engines.ranks import until
from tests.engines.server import Router, Server
from tests.engines.streams import Streamed, asked, in_the_middle, said

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


def test_streams_survive_kill_9_of_their_engine(fleet: Fleet) -> None:
    asks = [asked(number) for number in range(STREAMS)]
    want = [said(each) for each in [Streamed(fleet.control, ask) for ask in asks]]
    assert all(each.text and each.heads == 1 for each in want)
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
    assert [said(each) for each in streams] == want
    lost = sum(each.decode == victim for each in streams)
    assert 0 < count(fleet.router, "lost_streams", result="continued") <= lost
    for each in control:
        each.join()
    broken = [each for each in control if each.error]
    assert broken, "the control: these are lost without the flag"
    assert count(fleet.control, "requests", outcome="broken") == len(broken)
    assert count(fleet.router, "requests", outcome="broken") == 0


def test_engines_tell_where_a_character_is_incomplete(fleet: Fleet) -> None:
    """On which :mod:`text_ends` relies."""
    engine = next(each for each in fleet.decode if each.process.poll() is None)
    asked = {"model": "model", "prompt": "the sea \U0001f600", "add_special_tokens": False}
    tokens = json.loads(engine.post("/tokenize", asked))["tokens"]
    told = [
        text_ends.ends(engine.post(text_ends.PATH, {"tokens": tokens[:end]}).encode())
        for end in range(1, len(tokens) + 1)
    ]
    assert told[0] and told[-1] and False in told
