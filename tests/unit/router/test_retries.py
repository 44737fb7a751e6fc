"""Requests that end engines: they reach two at most, and then none for a while."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvconnect.router.fleet import watch
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.retries import (
    LEAST_RETRIES,
    MOST_BODIES,
    REFUSED_S,
    WINDOW_S,
    Retries,
    Withheld,
    digest_of,
)
from tests.fakes.engine import FakeEngine, bench, decodes, hurry, on_loop

DEADLY = {"model": "tiny", "prompt": "POISON"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def body() -> bytes:
    return b"body"


def test_one_more_engine_and_then_none() -> None:
    retries = Retries()
    with retries.opened():
        assert retries.again(1, body, 0.0) is None
        assert retries.again(2, body, 0.0) is Withheld.LOST_AGAIN


def test_a_body_with_two_crashes_within_a_minute_is_refused_for_a_while() -> None:
    retries = Retries()
    assert not retries.refuses(body, 0.0)
    retries.crashed(body(), "a", 0.0)
    assert not retries.refuses(body, 0.0)
    retries.crashed(body(), "a", 1.0)
    assert not retries.refuses(body, 1.0), "one engine is lost once, however many requests notice"
    retries.crashed(body(), "b", 1.0 + WINDOW_S)
    assert not retries.refuses(body, 1.0 + WINDOW_S), "not within a minute"
    retries.crashed(body(), "a", 2.0 + WINDOW_S)
    assert retries.refuses(body, 2.0 + WINDOW_S)
    assert retries.again(1, body, 2.0 + WINDOW_S) is Withheld.DEADLY
    assert not retries.refuses(lambda: b"another", 2.0 + WINDOW_S)
    assert retries.refuses(body, 1.9 + WINDOW_S + REFUSED_S)
    assert not retries.refuses(body, 2.0 + WINDOW_S + REFUSED_S)


def test_the_table_is_bounded_and_no_digest_is_made_while_it_is_empty() -> None:
    retries = Retries()

    def never() -> bytes:
        raise AssertionError

    assert not retries.refuses(never, 0.0)
    for number in range(MOST_BODIES + 1):
        for engine in ("a", "b"):
            retries.crashed(b"%d" % number, engine, 0.0)
    assert not retries.refuses(lambda: b"0", 0.0), "the oldest is forgotten"
    assert retries.refuses(lambda: b"1", 0.0)
    assert len(retries._bodies) == MOST_BODIES


def test_the_loss_of_one_engine_of_two_is_always_retried_and_endless_losses_are_not() -> None:
    retries, open_now = Retries(), 1000
    blocks = [retries.opened() for _ in range(open_now)]
    for block in blocks:
        block.__enter__()
    assert {retries.again(1, body, 0.0) for _ in range(open_now // 2)} == {None}
    left = open_now // 2 + LEAST_RETRIES
    assert {retries.again(1, body, 30.0) for _ in range(left)} == {None}
    assert retries.again(1, body, 30.0) is Withheld.BUDGET
    assert retries.again(1, body, WINDOW_S) is None, "a minute after the first"


def test_digests_tell_bodies_apart_and_not_ids() -> None:
    def digest(path: str = "/a", **fields: Any) -> bytes:
        return digest_of(path, read_body(msgspec.json.encode(fields)))

    assert digest(prompt="a") == digest(prompt="a", rid="x") == digest(rid="y", prompt="a")
    others = [
        digest("/b", prompt="a"),
        digest(prompt="b"),
        digest(prompt="a", n=1),
        digest(a="prompt"),
    ]
    assert len({digest(prompt="a"), *others}) == 5
    assert digest(ab="c") != digest(a="bc")


async def dies(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
    """Ends of a poisonous prompt: closes the connection."""
    if body["prompt"] == "POISON":
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
    return await decodes(engine, request, body)


@on_loop
async def test_a_request_that_ends_engines_reaches_two() -> None:
    engines = [FakeEngine(dies) for _ in range(6)]
    async with bench([], engines, handoff="none") as router:
        assert (await router.post(DEADLY)).status == 502
        assert sum(len(engine.asked) for engine in engines) == 2
        assert await router.metric("withheld_retries_total", reason="deadly") == 1
        # It is refused from now on, whichever id it has, and others are served.
        status, said, _ = await router.post(DEADLY | {"rid": "x"})
        assert status == 502 and b"two engines crashed" in said
        assert sum(len(engine.asked) for engine in engines) == 2
        assert await router.metric("withheld_retries_total", reason="deadly") == 2
        assert (await router.post(DEADLY | {"prompt": "good"})).status == 200


async def ends(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
    """Ends of a poisonous prompt, as a process does: it listens no more, either."""
    if body["prompt"] == "POISON":
        await engine.stop_listening()
    return await dies(engine, request, body)


@on_loop
async def test_a_request_that_ends_engines_over_kept_connections_reaches_two() -> None:
    engines = [FakeEngine(ends) for _ in range(5)]
    async with bench([], engines, handoff="none") as router:
        while not all(engine.asked for engine in engines):
            assert (await router.post(DEADLY | {"prompt": "good"})).status == 200
        before = sum(len(engine.asked) for engine in engines)
        assert (await router.post(DEADLY)).status == 502
        assert sum(len(engine.asked) for engine in engines) == before + 2
        assert await router.metric("withheld_retries_total", reason="deadly") == 1


@on_loop
async def test_the_loss_of_an_engine_of_two_is_hidden() -> None:
    bad, good = FakeEngine(dies), FakeEngine(decodes)
    async with bench([], [bad, good], handoff="none") as router:
        for _ in range(4):  # also the first time that each of them is asked
            assert (await router.post(DEADLY)).status == 200
        assert await router.metric("retries_total", role="decode", cause="lost") >= 1
        assert await router.metric("withheld_retries_total", reason="deadly") == 0


@on_loop
async def test_engines_that_refuse_connections_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request finds three of them: all but the one that was asked last."""
    monkeypatch.setattr(watch, "PROBE_EVERY_S", 1000.0)  # only requests find out
    engines = [FakeEngine(decodes) for _ in range(4)]
    async with bench([], engines, handoff="none") as router:
        while not all(engine.asked for engine in engines):
            reply = await router.post(DEADLY)
            assert reply.status == 200
        last = engines[int(reply.headers["x-kvconnect-decode"])]
        for engine in engines:
            if engine is not last:
                await engine.stop()
        assert (await router.post(DEADLY)).status == 200
        assert await router.metric("retries_total", role="decode", cause="unreachable") == 3
        assert await router.metric("withheld_retries_total", reason="lost_again") == 0
