"""Streams that one of two decode engines loses: what a router that continues streams saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from tests.engines.pd import decode_config, prefill_config, side_by_side
from tests.engines.ranks import until
from tests.engines.server import Process, Router, Server
from tests.engines.streams import Ask, Streamed, in_the_middle

_TRIES = 10

Said = TypeVar("Said")


class Fleet(NamedTuple):
    """Decode engines behind two routers. ``control``: the one without ``--continue``."""

    decode: Sequence[Process]
    router: Router
    control: Router


@contextmanager
def two_routers(prefill: Process, decode: Sequence[Process]) -> Iterator[Fleet]:
    """Start both routers of engines that run."""
    with (
        Router([prefill], decode, ("--continue", "1")) as router,
        Router([prefill], decode) as control,
    ):
        yield Fleet(decode, router, control)


@contextmanager
def vllm_fleet() -> Iterator[Fleet]:
    """Start vLLM's engines and both routers."""
    size: Any = {"blocks": 512}
    prefill = Server("llama", prefill_config(), **size)
    decode = [Server("llama", decode_config(), **size) for _ in range(2)]
    with side_by_side(prefill, *decode), two_routers(prefill, decode) as fleet:
        for each in (fleet.router, fleet.control):
            until(lambda each=each: count(each, "standing_ticket_fetches", outcome="ok") > 0, "one")
        yield fleet


def count(router: Router, name: str, **labels: str) -> float:
    return router.metric(f"kvconnect_router_{name}_total", **labels)


def _killed(fleet: Fleet, asks: Sequence[Ask]) -> tuple[list[Streamed], list[Streamed], int]:
    """Kill an engine in the middle of a stream of both routers; return the streams of each, and
    the engine's number. A busy machine starts threads late: if all end before, others are begun."""
    at_once: set[int] = set()
    for _ in range(_TRIES):
        both = [(Streamed(fleet.router, ask), Streamed(fleet.control, ask)) for ask in asks]
        streams, control = [first for first, _ in both], [second for _, second in both]

        def found(streams: list[Streamed] = streams, control: list[Streamed] = control) -> bool:
            some, others = (
                {e.decode for e in each if in_the_middle(e)} for each in (streams, control)
            )
            at_once.update(some & others)
            return bool(at_once) or all(each.whole for each in (*streams, *control))

        until(found, "a stream of both routers at one engine, or all have ended")
        if at_once:
            break
    victim = min(at_once)
    fleet.decode[victim].kill()
    return streams, control, victim


def survive_a_kill(
    fleet: Fleet, asks: Sequence[Ask], said: Callable[[Streamed], Said]
) -> list[Said]:
    """Kill an engine in mid-stream, and check what the clients of both routers make of it. Return
    what they are told without a kill. ``said``: joins a stream, and fails on one that is lost."""
    want = [said(each) for each in [Streamed(fleet.control, ask) for ask in asks]]
    streams, control, victim = _killed(fleet, asks)
    assert [said(each) for each in streams] == want
    lost = sum(each.decode == victim for each in streams)
    assert 0 < count(fleet.router, "lost_streams", result="continued") <= lost
    for each in control:
        each.join()
    broken = [each for each in control if each.error]
    assert broken, "the control: these are lost without the flag"
    assert count(fleet.control, "requests", outcome="broken") == len(broken)
    assert count(fleet.router, "requests", outcome="broken") == 0
    return want
