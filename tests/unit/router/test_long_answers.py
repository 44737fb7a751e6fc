"""Answers that are no streams and too long to be held: they pass as they arrive."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvconnect.router import app
from kvconnect.router.fleet.engines import FAILURES
from kvconnect.router.http.engine_call import HELD_BYTES
from kvconnect.router.options import Listening
from tests.fakes.engine import (
    ASK,
    Bench,
    FakeEngine,
    bench,
    decodes,
    on_loop,
    prefills,
    says,
    until,
)

LONG = 16 * HELD_BYTES


class Sends:
    """A decode engine whose answer has so many bytes; it sends ``first`` of them, and the others
    once it is told to. ``breaks``: it closes the connection instead."""

    def __init__(self, total: int, first: int, *, chunked: bool, breaks: bool = False) -> None:
        self.body = b'{"choices":[{"text":"' + b"ab" * (total // 2)
        self.first, self.chunked, self.breaks = first, chunked, breaks
        self.told = asyncio.Event()

    async def __call__(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        if not self.chunked:
            stream.content_length = len(self.body)
        await stream.prepare(request)
        await stream.write(self.body[: self.first])
        await self.told.wait()
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        else:
            await stream.write(self.body[self.first :])
        return stream


async def counted(router: Bench, outcome: str) -> bool:
    labels = {"mode": "push", "reason": "default", "outcome": outcome}
    return await router.metric("requests_total", **labels) == 1


def ask(router: Bench) -> Any:
    return router.client.post(router.url + "/v1/completions", json=ASK)


@pytest.mark.parametrize("chunked", [False, True])
@on_loop
async def test_a_long_answer_passes_as_it_arrives(chunked: bool) -> None:
    sends = Sends(LONG, 2 * HELD_BYTES, chunked=chunked)
    async with bench([FakeEngine(prefills)], [FakeEngine(sends)]) as router, ask(router) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        begun = await answer.content.readexactly(HELD_BYTES)  # before the engine sends the rest
        sends.told.set()
        assert begun + await answer.content.read() == sends.body


@on_loop
async def test_an_answer_that_is_not_long_has_a_length() -> None:
    """Control."""
    sends = Sends(HELD_BYTES // 2, HELD_BYTES // 4, chunked=True)
    sends.told.set()
    async with bench([FakeEngine(prefills)], [FakeEngine(sends)]) as router, ask(router) as answer:
        assert answer.headers["Content-Length"] == str(len(sends.body))
        assert await answer.read() == sends.body


@on_loop
async def test_a_long_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    sends = Sends(LONG, 2 * HELD_BYTES, chunked=False, breaks=True)
    async with bench([FakeEngine(prefills)], [FakeEngine(sends)]) as router:
        async with ask(router) as answer:
            await answer.content.readexactly(HELD_BYTES)
            sends.told.set()
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
        await until(partial(counted, router, "broken"))


@on_loop
async def test_an_answer_that_breaks_off_before_it_is_long_is_tried_again() -> None:
    sends = Sends(LONG, HELD_BYTES // 2, chunked=False, breaks=True)
    sends.told.set()
    broken, good = FakeEngine(sends), FakeEngine(decodes)
    async with bench([FakeEngine(prefills)], [broken, good]) as router:
        answers = [await router.post(ASK) for _ in range(4)]
    assert {answer.status for answer in answers} == {200}
    assert broken.asked and len(good.asked) == 4


@pytest.mark.parametrize(("receipts", "status"), [(False, 200), (True, 429)])
@on_loop
async def test_a_long_answer_takes_little_memory_unless_it_is_needed_whole(
    receipts: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_body_memory_bytes", lambda largest: 4 * HELD_BYTES)
    sends = Sends(LONG, LONG, chunked=False)
    sends.told.set()
    at = Listening(receipts=receipts)
    async with bench([FakeEngine(prefills)], [FakeEngine(sends)], listening=at) as router:
        answer = await router.post(ASK)
        assert answer.status == status
        assert (answer.body == sends.body) is (status == 200)


@pytest.mark.parametrize(("size", "whole"), [(2 * HELD_BYTES, False), (HELD_BYTES // 2, True)])
@on_loop
async def test_a_long_refusal_is_one_and_no_engine_is_blamed(size: int, whole: bool) -> None:
    """Engines repeat what they refuse. A client's long one must not make an engine look broken."""
    refusal = {"error": {"message": "a" * size, "code": 400}}
    decode = FakeEngine(says(400, refusal))
    async with bench([FakeEngine(prefills)], [decode]) as router:
        for _ in range(FAILURES + 1):
            status, got, _ = await router.post(ASK)
            assert status == 400
            told = json.loads(got)["error"]["message"]
            assert told == refusal["error"]["message"] if whole else "has more than" in told
        rejected = {"role": "decode", "upstream": decode.url, "outcome": "rejected"}
        assert await router.metric("upstream_requests_total", **rejected) == FAILURES + 1
