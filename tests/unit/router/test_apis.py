"""What a router serves besides completions: other ways to ask for tokens, handed over; the rest
passed to an engine as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.requests.apis import APIS
from tests.fakes.engine import (
    FakeEngine,
    begin_stream,
    bench,
    decodes,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

ALONE = [api for api in APIS if api.decode_only]
NAMED = b'event: message_start\ndata: {"type": "message_start"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'
FAILED = b'event: error\ndata: {"type": "error", "error": {"message": "load failed"}}\n\n'


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def echoes(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Answer with what was asked."""
    said = {"path": request.path_qs, "method": request.method, "body": body}
    return web.json_response(said)


async def streams(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    stream = await begin_stream(request)
    await stream.write(NAMED)
    await stream.write(DELTA)
    return stream


@pytest.mark.parametrize("api", ALONE, ids=lambda api: api.path)
@on_loop
async def test_other_paths_are_passed_to_a_decode_engine_as_they_are(api: Any) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    asked = {"model": "tiny", "input": ["a", 7, None, {"n": 2}], "kv_transfer_params": {"x": 1}}
    async with bench([p], [d]) as router:
        body = asked if api.method == "POST" else {}
        url = router.url + api.path
        d.extra[api.path] = echoes
        async with router.client.request(api.method, url, json=body or None) as answer:
            said = await answer.json()
            assert answer.headers["X-KVConnect-Mode"] == "plain"
            assert "X-KVConnect-Prefill" not in answer.headers
        body.pop("kv_transfer_params", None)
        assert said == {"path": api.path, "method": api.method, "body": body}
        assert p.asked == []
        d.extra[api.path] = says(418, {"error": {"message": "engine's own"}})
        async with router.client.request(api.method, url, json=body or None) as answer:
            assert (answer.status, "engine's own" in await answer.text()) == (418, True)
        d.extra[api.path] = streams
        async with router.client.request(api.method, url, json=body or None) as answer:
            assert await answer.read() == NAMED + DELTA


@on_loop
async def test_what_one_engine_does_not_serve_another_may() -> None:
    p, ds = FakeEngine(prefills), [FakeEngine(decodes) for _ in range(4)]
    ds[3].models = ("embedder",)
    ds[3].extra["/v1/embeddings"] = echoes
    async with bench([p], ds) as router:

        async def known() -> bool:
            return (await router.post({"model": "nobody's"}, "/v1/embeddings")).status == 404

        await until(known)
        for engine in ds:
            engine.got.clear()
        for turn in range(6):
            for body in ({"input": "a"}, {"input": "a", "model": "embedder"}):
                status, said, _ = await router.post(body, "/v1/embeddings")
                assert (status, json.loads(said)["body"]) == (200, body), turn
        asked = sum(engine.got["/v1/embeddings"] for engine in ds[:3])
        assert asked <= 6, "engines with the same models are not asked one after the other"
        ds[3].extra.clear()
        assert (await router.post({"input": "a"}, "/v1/embeddings")).status == 404


@on_loop
async def test_no_prefill_engine_is_needed_for_what_is_not_handed_over() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    d.extra["/tokenize"] = echoes
    async with bench([p], [d]) as router:
        await p.stop()

        async def down() -> bool:
            return (await router.post({"prompt": "a"})).status == 503

        await until(down)
        assert (await router.post({"prompt": "a"}, "/tokenize")).status == 200


@pytest.mark.parametrize(
    ("path", "bound"), [("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")]
)
@on_loop
async def test_responses_and_messages_are_handed_over(path: str, bound: str) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    body = {"model": "tiny", "input": "a", "messages": [], bound: 9, "stream": True}
    if path == "/v1/responses":
        del body["messages"]
    async with bench([p], [d]) as router:
        status, _, headers = await router.post(body, path)
        assert (status, headers["x-kvconnect-mode"]) == (200, "push")
        (asked_p,), (asked_d,) = p.asked, d.asked
        assert asked_p[bound] == 1 and asked_p["stream"] is False
        assert ("max_tokens" in asked_p) == (bound == "max_tokens")
        params = asked_p.pop("kv_transfer_params"), asked_d.pop("kv_transfer_params")
        assert params[0]["transfer_id"] == params[1]["transfer_id"]
        assert asked_d == body
        assert p.paths == d.paths == [path]


@on_loop
async def test_responses_that_need_others_are_not_handed_over() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        for more in (
            {"previous_response_id": "resp_1"},
            {"background": True},
            {"tools": [{"type": "code_interpreter"}]},
        ):
            body = {"model": "tiny", "input": "a", **more}
            _, _, headers = await router.post(body, "/v1/responses")
            assert headers["x-kvconnect-mode"] == "plain"
        assert p.asked == []
        tools = {"model": "tiny", "input": "a", "tools": [{"type": "function", "name": "f"}]}
        _, _, headers = await router.post(tools, "/v1/responses")
        assert headers["x-kvconnect-mode"] == "push"


@on_loop
async def test_messages_cannot_be_handed_over_by_sglang() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    p.settings = d.settings = ",engine=sglang"
    p.standing_ticket_lifetime_s = 0.0
    async with bench([p], [d]) as router:
        status, body, _ = await router.post({"model": "tiny", "messages": []}, "/v1/messages")
        assert status == 404 and b"No engine here serves this path" in body
        assert p.asked == d.asked == []


@on_loop
async def test_a_named_stream_that_fails_at_once_is_tried_again_and_later_ends_with_an_error() -> (
    None
):
    async def fails(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(NAMED)
        await stream.write(FAILED)
        return stream

    async def breaks(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(NAMED)
        await stream.write(DELTA)
        assert request.transport is not None
        request.transport.abort()
        return stream

    p, d = FakeEngine(prefills), FakeEngine(fails)
    async with bench([p], [d]) as router:
        body = {"model": "tiny", "messages": [], "max_tokens": 5, "stream": True}
        status, said, _ = await router.post(body, "/v1/messages")
        message = json.loads(said)["error"]["message"]
        assert status == 500 and message.startswith("load failed: the hand-off failed by push")
        d.answer = breaks
        status, said, _ = await router.post(body, "/v1/messages")
        begin, _, last = said.partition(b"event: error\ndata: ")
        assert (status, begin) == (200, NAMED + DELTA)
        assert json.loads(last)["type"] == "error" and b"[DONE]" not in said
