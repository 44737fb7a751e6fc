"""One of two decode servers is killed in mid-stream: the other one answers again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.engines.ranks import until
from tests.engines.server import Router
from tests.engines.streams import TEXT, WELL_BEGUN, Ask, Streamed, said
from tests.sglang.pd import decode_server, prefill_server, side_by_side
from tests.sglang.server import SglangServer

STREAMS = 6
NEW = 960  # tokens of an answer: all are in their middle for seconds


class Servers(NamedTuple):
    decode: list[SglangServer]
    router: Router
    control: Router


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    size: Any = {"texts": True, "tokens": 16384}
    p, decode = prefill_server(**size), [decode_server(**size) for _ in range(2)]
    with (
        side_by_side(p, *decode),
        Router([p], decode, ("--continue", "1")) as router,
        Router([p], decode) as control,
    ):
        yield Servers(decode, router, control)


def asked(number: int) -> Ask:
    """Return the path and the body of a stream."""
    common = {"model": "model", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    text = TEXT * (4 + number)
    if number % 2:
        return "/v1/completions", common | {"prompt": text}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


def count(router: Router, name: str, **labels: str) -> float:
    return router.metric(f"kvconnect_router_{name}_total", **labels)


def in_the_middle(stream: Streamed) -> bool:
    return WELL_BEGUN < len(stream.events) < NEW // 2 and not stream.whole


def test_streams_survive_kill_9_of_their_server(servers: Servers) -> None:
    asks = [asked(number) for number in range(STREAMS)]
    want = [said(each) for each in [Streamed(servers.control, ask) for ask in asks]]
    assert all(each.text and each.heads == 1 for each in want)
    both = [(Streamed(servers.router, ask), Streamed(servers.control, ask)) for ask in asks]
    streams, control = [first for first, _ in both], [second for _, second in both]

    def killable() -> set[int]:
        """Servers in the middle of a stream of both routers. Others may still be handed off."""
        at = [{e.decode for e in some if in_the_middle(e)} for some in (streams, control)]
        return at[0] & at[1]

    until(lambda: bool(killable()), "a stream of both routers at one server")
    victim = min(killable())
    servers.decode[victim].kill()
    assert [said(each) for each in streams] == want
    lost = sum(each.decode == victim for each in streams)
    assert 0 < count(servers.router, "lost_streams", result="continued") <= lost
    for each in control:
        each.join()
    broken = [each for each in control if each.error]
    assert broken, "the control: these are lost without the flag"
    assert count(servers.control, "requests", outcome="broken") == len(broken)
    assert count(servers.router, "requests", outcome="broken") == 0
