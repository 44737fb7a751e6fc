"""When the decode engine of a push is asked: not long before prefill can begin with the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.http import attempt
from kvconnect.router.policy.prompt_times import LinearTime, TimeFit
from tests.fakes.engine import FakeEngine, bench, decodes, on_loop, prefills, says, until


class Gated:
    """A prefill engine that computes one prompt after the other, each when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.turns = [asyncio.Event() for _ in range(3)]

    async def answer(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        self.asked += 1
        await self.turns[self.asked - 1].wait()
        return await prefills(engine, request, body)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A token takes a minute."""
    monkeypatch.setattr(TimeFit, "at", lambda *_: LinearTime(0.0, 60.0))
    yield


def prompt(number: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"many words {number} " * 20, "max_tokens": 5}


@on_loop
async def test_a_decode_engine_is_asked_when_prefill_is_near() -> None:
    gated, decode = Gated(), FakeEngine(decodes)
    async with bench([FakeEngine(gated.answer)], [decode]) as router:
        asks = []
        for number in range(3):
            asks.append(asyncio.create_task(router.post(prompt(number))))
            await until(lambda number=number: gated.asked == number + 1)
        for number in range(3):
            await until(lambda number=number: len(decode.asked) == number + 1)
            assert decode.asked[-1]["prompt"] == prompt(number)["prompt"]
            gated.turns[number].set()
            assert (await asks[number]).status == 200


@pytest.mark.parametrize(("name", "value"), [("HEAD_START_S", 1e9), ("LONGEST_WAIT_S", 0.1)])
@on_loop
async def test_it_is_asked_before(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """The control, and what a standing ticket bears."""
    monkeypatch.setattr(attempt, name, value)
    gated, decode = Gated(), FakeEngine(decodes)
    async with bench([FakeEngine(gated.answer)], [decode]) as router:
        asks = [asyncio.create_task(router.post(prompt(number))) for number in range(3)]
        await until(lambda: len(decode.asked) == 3)
        for turn in gated.turns:
            turn.set()
        assert [(await ask).status for ask in asks] == [200] * 3


@on_loop
async def test_a_prompt_that_is_computed_sooner_than_expected_is_decoded() -> None:
    gated, decode = Gated(), FakeEngine(decodes)
    async with bench([FakeEngine(gated.answer)], [decode]) as router:
        first = asyncio.create_task(router.post(prompt(0)))
        await until(lambda: gated.asked == 1)
        second = asyncio.create_task(router.post(prompt(1)))
        await until(lambda: gated.asked == 2)
        gated.turns[1].set()
        assert (await second).status == 200
        gated.turns[0].set()
        assert (await first).status == 200


@on_loop
async def test_a_failed_prefill_ends_the_wait() -> None:
    gated, decode = Gated(), FakeEngine(decodes)
    prefill = FakeEngine(gated.answer)
    async with bench([prefill], [decode]) as router:
        first = asyncio.create_task(router.post(prompt(0)))
        await until(lambda: gated.asked == 1 and len(decode.asked) == 1)
        prefill.answer = says(400, {"error": {"message": "no"}})
        assert (await router.post(prompt(1))).status == 400
        assert len(decode.asked) == 1
        gated.turns[0].set()
        assert (await first).status == 200
