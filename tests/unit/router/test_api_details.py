"""What clients of OpenAI's and Anthropic's APIs expect beside answers: keys, errors, headers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from kvconnect.router import app
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.options import Listening
from tests.fakes.engine import (
    ASK,
    FakeEngine,
    Handler,
    begin_stream,
    bench,
    decodes,
    on_loop,
    prefills,
    until,
)

KEY = ApiKey("sk-0123456789abcdef")
MESSAGES, COMPLETIONS = "/v1/messages", "/v1/completions"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY.key}"}, 200),
        ({"Authorization": f"bearer {KEY.key}"}, 200),
        ({"x-api-key": KEY.key}, 200),
        ({"x-api-key": KEY.key[:-1]}, 401),
        ({"Authorization": KEY.key}, 401),
        ({"Authorization": f"Basic {KEY.key}"}, 401),
        ({"x-api-key": f"Bearer {KEY.key}"}, 401),
        ({}, 401),
    ],
)
@on_loop
async def test_a_key_is_sent_as_either_api_says(headers: dict[str, str], status: int) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], listening=Listening(api_keys=(KEY,))) as router:
        assert (await router.post(ASK, headers=headers)).status == status
        assert len(d.asked) == (status == 200)
        # The key is the router's alone.
        assert not any({"x-api-key", "authorization"} & each.keys() for each in d.headers)


@on_loop
async def test_errors_have_the_format_of_the_api() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    at = Listening(api_keys=(KEY,))
    key = {"x-api-key": KEY.key}
    async with bench([p], [d], listening=at, body_mib=1 / 64) as router:
        for ask, headers, status, kind in (
            (ASK, {}, 401, "authentication_error"),
            (ASK | {"model": "other"}, key, 404, "not_found_error"),
            (ASK | {"prompt": "a" * 2**15}, key, 413, "request_too_large"),
        ):
            for path in (MESSAGES, COMPLETIONS):
                answer = await router.post(ask, headers=headers, path=path)
                said = json.loads(answer.body)
                assert answer.status == status
                assert said["error"]["message"]
                if path == MESSAGES:
                    assert said["type"] == "error" and said["error"]["type"] == kind
                else:
                    assert said["error"]["code"] == status and "type" not in said
        assert "--max-body" in said["error"]["message"], "it names the flag"


def refuses(status: int, **headers: str) -> Handler:
    async def answer(
        engine: FakeEngine, request: web.Request, asked: dict[str, Any]
    ) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=status, headers=headers)

    return answer


async def names_request(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    request_id = {"X-Request-Id": request.headers["X-Request-Id"], "X-Own": "secret"}
    if not body.get("stream"):
        return web.json_response({}, headers=request_id)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", **request_id})
    await stream.prepare(request)
    await stream.write(b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')
    return stream


@on_loop
async def test_headers_of_engines_that_clients_get() -> None:
    p, d = FakeEngine(prefills), FakeEngine(refuses(429, **{"Retry-After": "7"}))
    async with bench([p], [d]) as router:
        answer = await router.post(ASK)
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        d.answer = names_request
        for stream in (False, True):
            answer = await router.post(ASK | {"stream": stream}, headers={"X-Request-Id": "mine"})
            assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
            assert "x-own" not in answer.headers


@on_loop
async def test_headers_may_be_as_long_as_engines_take_them() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        assert (await router.post(ASK, headers={"X-Groups": "a" * 60_000})).status == 200
        assert (await router.post(ASK, headers={"X-Groups": "a" * 70_000})).status == 400  # control


@on_loop
async def test_comments_of_an_engine_are_no_first_token() -> None:
    """An engine that sends comments while it waits fails before its first token: that is tried
    again, as without comments."""

    async def comments_and_fails(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for _ in range(3):
            await stream.write(b": keep-alive\n\n")
        assert request.transport is not None
        request.transport.abort()
        return stream

    p, ds = FakeEngine(prefills), [FakeEngine(comments_and_fails), FakeEngine(decodes)]
    async with bench([p], ds, decode_policy="round_robin") as router:
        bodies = [(await router.post(ASK | {"stream": True})).body for _ in range(2)]
        assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
        assert not any(b"error" in body for body in bodies)
        assert await router.metric("retries_total", role="decode", cause="lost") == 1


@on_loop
async def test_live_is_not_ready() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], listening=Listening(api_keys=(KEY,))) as router:
        for path in ("/live", "/ready", "/health"):
            assert (await router.get(path)).status == 200, "without a key"
        d.well = False
        for path, status in (("/ready", 503), ("/health", 503), ("/live", 200)):
            await until(lambda path=path, status=status: router.answers(path, status))


@on_loop
async def test_metrics_are_made_seldom_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made, generate = 0, app.generate_latest

    def slowly(registry: Any) -> bytes:
        nonlocal made
        made += 1
        time.sleep(0.05)
        return generate(registry)

    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        monkeypatch.setattr(app, "generate_latest", slowly)
        began = time.monotonic()
        answers = await asyncio.gather(*(router.get("/metrics") for _ in range(40)))
        assert all(answer.status == 200 for answer in answers)
        assert made <= 1 + (time.monotonic() - began) / 0.5, "a tenth of the time"
        for number in (1, 2):  # control: whoever asks after a request sees it
            assert (await router.post(ASK)).status == 200
            assert await router.metric("upstream_requests_total", **done(d)) == number


@on_loop
async def test_who_leaves_has_metrics_made_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    made = running = most = 0
    generate = app.generate_latest

    def slowly(registry: Any) -> bytes:
        nonlocal made, running, most
        made, running = made + 1, running + 1
        most = max(most, running)
        time.sleep(0.1)
        running -= 1
        return generate(registry)

    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        monkeypatch.setattr(app, "generate_latest", slowly)
        began = time.monotonic()
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", URL(router.url).port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.close()
        assert (await router.get("/metrics")).status == 200
        assert most == 1 <= made <= 1 + (time.monotonic() - began) / 1.0


@on_loop
async def test_a_long_request_id_is_not_forwarded() -> None:
    """An engine that repeats it would send a head that is too large."""
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        for length in (1024, 1025):
            answer = await router.post(ASK, headers={"X-Request-Id": "a" * length})
            assert answer.status == 200
        assert [len(each.get("x-request-id", "")) for each in d.headers] == [1024, 0]


def done(engine: FakeEngine) -> dict[str, str]:
    return {"role": "decode", "upstream": engine.url, "outcome": "ok"}
