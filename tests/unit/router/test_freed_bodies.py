"""A body's memory is free when its request has ended, however it ended, without a collector."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from kvconnect.router.http import exchange, request_reader
from kvconnect.router.http.admission import BodyMemory
from tests.fakes.engine import (
    Bench,
    FakeEngine,
    bench,
    decodes,
    hangs,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

SIZE = 400_000  # large enough for the thread that parses
BODY = {"model": "tiny", "prompt": "a" * SIZE}
TIMES = 3


class TrackedBody(bytearray):
    """A body that is counted while it lives. Decoded fields refer to it."""

    live: ClassVar[weakref.WeakSet[TrackedBody]] = weakref.WeakSet()
    made = 0

    def __init__(self) -> None:
        super().__init__()
        TrackedBody.live.add(self)
        TrackedBody.made += 1

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.fixture(autouse=True)
def without_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(request_reader, "bytearray", TrackedBody, raising=False)
    hurry(monkeypatch)
    gc.collect()
    gc.disable()
    TrackedBody.live.clear()
    TrackedBody.made = 0
    yield
    gc.enable()


async def loses(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def asks(router: Bench, body: object) -> int:
    return (await router.post(body)).status


async def leaves_in_the_body(router: Bench, _: object) -> None:
    made = TrackedBody.made
    _, writer = await connected(router, b"x" * SIZE, missing=9)
    await until(lambda: TrackedBody.made > made)
    writer.close()
    await writer.wait_closed()


async def connected(router: Bench, body: bytes, missing: int = 0) -> Any:
    at = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
    writer.write(f"{head}{len(body) + missing}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def leaves_while_it_waits(router: Bench, body: object) -> None:
    before = sum(len(engine.asked) for engine in router.decode)
    _, writer = await connected(router, json.dumps(body).encode())
    await until(lambda: sum(len(engine.asked) for engine in router.decode) > before)
    writer.close()
    await writer.wait_closed()


Play = Callable[[Bench, object], Awaitable[object]]
MANY = {**BODY, **{str(number): 1 for number in range(2000)}}
WAYS: dict[str, tuple[Any, Any, Any, Play, int | None, dict[str, Any]]] = {
    # prefill engine, decode engine, body, what the client does, the first status, router options
    "answered": (prefills, decodes, BODY, asks, 200, {}),
    "pulled": (prefills, decodes, BODY, asks, 200, {"handoff": "pull"}),
    "streamed": (prefills, decodes, BODY | {"stream": True}, asks, 200, {}),
    "not an object": (prefills, decodes, ["a" * SIZE], asks, 400, {}),
    "too many fields": (prefills, decodes, MANY, asks, 400, {}),
    "too large": (prefills, decodes, BODY, asks, 413, {"body_mib": 0.25}),
    "unknown model": (prefills, decodes, BODY | {"model": "no"}, asks, 404, {}),
    "decode refuses": (prefills, says(400, {}), BODY, asks, 400, {}),
    "prefill refuses": (says(400, {}), hangs, BODY, asks, 400, {}),
    "prefill refuses a pull": (says(400, {}), hangs, BODY, asks, 400, {"handoff": "pull"}),
    "decode fails": (prefills, says(500, {}), BODY, asks, 500, {}),
    "prefill fails": (says(500, {}), hangs, BODY, asks, 502, {}),
    "decode is lost": (prefills, loses, BODY, asks, 502, {}),
    "prefill is lost": (loses, hangs, BODY, asks, 502, {}),
    "prefill of a pull is lost": (loses, hangs, BODY, asks, 502, {"handoff": "pull"}),
    "no answer in time": (prefills, hangs, BODY, asks, 504, {"timeout_s": 0.5}),
    "the client leaves in the body": (prefills, decodes, BODY, leaves_in_the_body, None, {}),
    "the client leaves while it waits": (prefills, hangs, BODY, leaves_while_it_waits, None, {}),
}


async def play(way: str) -> None:
    """End some requests in one way, and wait until none of their bodies lives."""
    prefill, decode, body, client, status, options = WAYS[way]
    ps, ds = [FakeEngine(prefill) for _ in range(2)], [FakeEngine(decode) for _ in range(2)]
    async with bench(ps, ds, **options) as router:
        assert await client(router, body) == status
        for _ in range(TIMES - 1):
            await client(router, body)
        assert TrackedBody.made == TIMES * (way != "too large"), "each was read"
        for _ in range(200):  # rounds of the loop, in which tasks end
            if TrackedBody.live:
                await asyncio.sleep(0.01)
        assert len(TrackedBody.live) == 0, "bodies live"


@pytest.mark.parametrize("way", WAYS)
@on_loop
async def test_a_body_is_freed(way: str) -> None:
    await play(way)


@on_loop
async def test_an_evicted_body_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BodyMemory] = []
    monkeypatch.setattr(BodyMemory, "__init__", _small(made, BodyMemory.__init__))
    async with bench([FakeEngine(prefills)], [FakeEngine(decodes)]) as router:
        reader, writer = await connected(router, b"x" * SIZE, missing=9)
        await until(lambda: bool(made and made[0].arriving) and any(map(len, TrackedBody.live)))
        assert (await router.post(BODY)).status == 200
        assert b"429" in await reader.readline()
        writer.close()
        await until(lambda: not TrackedBody.live)


def _small(made: list[BodyMemory], init: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: BodyMemory, what: str, most: int, share: int) -> None:
        made.append(self)
        init(self, what, SIZE + SIZE // 2, SIZE + SIZE // 2)

    return wrapped


@on_loop
async def test_control_a_body_that_a_traceback_keeps_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[BaseException] = []
    again = exchange.Exchange._try_again

    def keeps(self: Any, failed: Any, *asked: Any) -> bool:
        kept.append(failed)
        return again(self, failed, *asked)

    monkeypatch.setattr(exchange.Exchange, "_try_again", keeps)
    monkeypatch.setattr(exchange, "FreedFrames", nullcontext)
    with pytest.raises(AssertionError, match="live"):
        await play("decode is lost")
