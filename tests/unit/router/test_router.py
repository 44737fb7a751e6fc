"""The router between fake engines: what reaches them, what comes back, and what failures do."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import HttpVersion, HttpVersion10, HttpVersion11, web

from kvconnect.router.api_keys import ApiKey
from kvconnect.router.fleet import watch
from kvconnect.router.http import draining
from kvconnect.router.options import Listening, RouterLimits
from tests.fakes.engine import (
    ASK,
    DONE,
    EVENTS,
    TOKEN_IDS,
    Bench,
    FakeEngine,
    begin_stream,
    bench,
    decodes,
    hangs,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

STREAM = ASK | {"stream": True}
BROKEN = says(500, {"error": {"message": "load failed", "type": "InternalServerError"}})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def pair() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine(prefills), FakeEngine(decodes)


async def ended(router: Bench, mode: str, reason: str, outcome: str) -> float:
    """How many client requests ended like that."""
    return await router.metric("requests_total", mode=mode, reason=reason, outcome=outcome)


def transfer_of(body: dict[str, Any]) -> str:
    return str(body["kv_transfer_params"]["transfer_id"])


# Push and pull ----------------------------------------------------------------------------------


@on_loop
async def test_push_asks_both_with_one_transfer_id() -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        status, body, headers = await router.post(ASK)
        assert (status, json.loads(body)) == (200, {"choices": [{"text": "ab"}]})
        assert headers["x-kvconnect-mode"] == "push"
        assert (headers["x-kvconnect-prefill"], headers["x-kvconnect-decode"]) == ("0", "0")
        (asked_p,), (asked_d,) = p.asked, d.asked
        transfer = transfer_of(asked_p)
        assert re.fullmatch("[0-9a-f]{32}", transfer)
        assert asked_p["max_tokens"] == 1 and asked_p["stream"] is False
        assert asked_d == ASK | {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer,
                "kvconnect_ticket": f"standing 1 of {p.port}",
            }
        }
        await router.post(ASK)
        assert transfer_of(p.asked[1]) != transfer
        assert await ended(router, "push", "default", "ok") == 2


class Meeting:
    """Two engines that answer only once both have been asked."""

    def __init__(self) -> None:
        self.came: set[FakeEngine] = set()
        self.both = asyncio.Event()

    async def wait(self, engine: FakeEngine) -> None:
        self.came.add(engine)
        if len(self.came) == 2:
            self.both.set()
        await self.both.wait()

    async def prefills(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await self.wait(engine)
        return await prefills(engine, request, body)

    async def decodes(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await self.wait(engine)
        return await decodes(engine, request, body)


@on_loop
async def test_push_asks_both_before_either_answers_and_pull_does_not() -> None:
    meeting = Meeting()
    p, d = FakeEngine(meeting.prefills), FakeEngine(meeting.decodes)
    async with bench([p], [d]) as router:
        status, body, _ = await router.post(STREAM)
        assert (status, body) == (200, b"".join((*EVENTS, DONE)))
    meeting.__init__()  # type: ignore[misc]
    async with bench([p], [d], handoff="pull", timeout_s=1.0) as router:
        status, _, _ = await router.post(STREAM)
        assert status == 504
        assert meeting.came == {p}


@on_loop
async def test_pull_hands_on_what_prefill_offered_word_for_word() -> None:
    p, d = pair()
    async with bench([p], [d], handoff="pull") as router:
        status, _, headers = await router.post(ASK, "/v1/chat/completions")
        assert (status, headers["x-kvconnect-mode"]) == (200, "pull")
        assert p.paths == d.paths == ["/v1/chat/completions"]
        transfer = transfer_of(p.asked[0])
        assert d.asked[0] == ASK | {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "kvconnect_ticket": f"ticket {transfer}",
                "odd": [1, {}],
                "prompt_token_ids": TOKEN_IDS,
            }
        }
        assert await ended(router, "pull", "forced", "ok") == 1


@on_loop
async def test_chats_are_tokenized_once_where_decode_is_asked_after_prefill() -> None:
    p, d = pair()
    async with bench([p], [d], handoff="pull") as router:
        await router.post(ASK, "/v1/chat/completions")
        await router.post(ASK)  # vLLM takes no token ids with the ticket of a completion
    async with bench([p], [d]) as router:  # push: decode is asked before prefill has an answer
        await router.post(ASK, "/v1/chat/completions")
    given = [asked["kv_transfer_params"].get("prompt_token_ids") for asked in d.asked]
    assert given == [TOKEN_IDS, None, None]
    assert [asked.get("return_token_ids", False) for asked in p.asked] == [True, False, False]


@on_loop
async def test_short_prompts_are_pulled() -> None:
    p, d = pair()
    async with bench([p], [d], push_min_tokens=4) as router:
        modes = []
        for prompt in ([1, 2, 3], [1, 2, 3, 4]):
            _, _, headers = await router.post(ASK | {"prompt": prompt})
            modes.append(headers["x-kvconnect-mode"])
        assert modes == ["pull", "push"]
        assert await ended(router, "pull", "short", "ok") == 1


@on_loop
async def test_without_a_card_it_is_pull() -> None:
    p, d = pair()
    p.standing_ticket_lifetime_s = 0
    async with bench([p], [d]) as router:
        _, _, headers = await router.post(ASK)
        assert headers["x-kvconnect-mode"] == "pull"
        assert await ended(router, "pull", "no_standing_ticket", "ok") == 1
        await until(lambda: router.fetched(p.url, "failed"))
        p.standing_ticket_lifetime_s = 100
        await router.standing_tickets_are_held()
        _, _, headers = await router.post(ASK)
        assert headers["x-kvconnect-mode"] == "push"


@on_loop
async def test_without_a_ticket_decode_does_it_all() -> None:
    p, d = FakeEngine(says(200, {"choices": []})), FakeEngine(decodes)
    async with bench([p], [d], handoff="pull") as router:
        status, _, headers = await router.post(ASK)
        assert (status, headers["x-kvconnect-mode"]) == (200, "plain")
        assert d.asked == [ASK]
        assert await ended(router, "plain", "no_ticket", "ok") == 1


@pytest.mark.parametrize("several", [{"prompt": ["a", "b"]}, {"n": 2}, {"prompt": [[1], [2]]}])
@on_loop
async def test_several_prompts_or_answers_go_to_decode_alone(several: dict[str, Any]) -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        status, _, headers = await router.post(ASK | several | {"kv_transfer_params": {"x": 1}})
        assert (status, headers["x-kvconnect-mode"]) == (200, "plain")
        assert "x-kvconnect-prefill" not in headers
        assert (p.asked, d.asked) == ([], [ASK | several])
        assert await ended(router, "plain", "multi", "ok") == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt_logprobs": 0}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": [], "echo": True}),
    ],
)
@on_loop
async def test_prompts_whose_logprobs_are_asked_for_are_computed_once(
    path: str, fields: dict[str, Any]
) -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        status, _, headers = await router.post(ASK | fields, path)
        assert (status, headers["x-kvconnect-mode"]) == (200, "plain")
        assert (p.asked, d.asked) == ([], [ASK | fields])
        assert await ended(router, "plain", "multi", "ok") == 1
        _, _, headers = await router.post(ASK | {"echo": True, "prompt_logprobs": None})
        assert headers["x-kvconnect-mode"] == "push"


@pytest.mark.parametrize("pull", [False, True])
@on_loop
async def test_what_a_client_says_about_transfers_goes_nowhere(pull: bool) -> None:
    p, d = pair()
    evil = {"remote_host": "10.6.6.6", "kvconnect_ticket": "forged", "transfer_id": "f" * 32}
    async with bench([p], [d], handoff="pull" if pull else "push") as router:
        status, _, _ = await router.post(ASK | {"kv_transfer_params": evil})
        assert status == 200
        for body in (*p.asked, *d.asked):
            assert not re.search("10.6.6.6|forged|ffff", json.dumps(body))


@on_loop
async def test_requests_are_spread_and_headers_forwarded() -> None:
    ps = [FakeEngine(prefills) for _ in range(2)]
    ds = [FakeEngine(decodes) for _ in range(3)]
    sent = {"X-Request-Id": "abc", "Authorization": "Bearer k", "X-Other": "no"}
    sent["X-Vllm-Priority"] = "7"
    async with bench(ps, ds) as router:
        for _ in range(6):
            await router.post(ASK, headers=sent)
        assert [len(engine.asked) for engine in (*ps, *ds)] == [3, 3, 2, 2, 2]
        for engine in (*ps, *ds):
            for headers in engine.headers:
                assert headers["x-request-id"] == "abc"
                assert headers["x-vllm-priority"] == "7", "who needs no key may set it"
                assert not headers.keys() & {"x-other", "authorization"}
    async with bench(ps, ds, listening=Listening(forward_authorization=True)) as router:
        await router.post(ASK, headers=sent)
        asked = [
            engine.headers[-1] for engine in (*ps, *ds) if "authorization" in engine.headers[-1]
        ]
        assert [headers["authorization"] for headers in asked] == ["Bearer k"] * 2


@on_loop
async def test_a_large_prompt_passes() -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        prompt = "long " * 2**20
        assert (await router.post(ASK | {"prompt": prompt})).status == 200
        assert p.asked[0]["prompt"] == d.asked[0]["prompt"] == prompt


# Streams ----------------------------------------------------------------------------------------

ODD_PIECES = (
    b"da",
    b'ta: {"a": "\xc3',
    b'\xa9"}\n',
    b"\ndata: 2\r\n\n: ping\n\n",
    DONE[:5],
    DONE[5:],
)


@on_loop
async def test_a_stream_passes_byte_for_byte() -> None:
    async def in_pieces(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for piece in ODD_PIECES:
            await stream.write(piece)
            await asyncio.sleep(0)
        return stream

    async with bench([FakeEngine(prefills)], [FakeEngine(in_pieces)]) as router:
        status, body, headers = await router.post(STREAM)
        assert (status, body) == (200, b"".join(ODD_PIECES))
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert await router.metric("ttft_seconds_count", mode="push") == 1
        assert await router.metric("added_latency_seconds_count", mode="push") == 1


@on_loop
async def test_events_are_not_held_back() -> None:
    more = asyncio.Event()

    async def slowly(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(EVENTS[0])
        await more.wait()
        await stream.write(EVENTS[1] + DONE)
        return stream

    async with (
        bench([FakeEngine(prefills)], [FakeEngine(slowly)]) as router,
        router.client.post(router.url + "/v1/completions", json=STREAM) as answer,
    ):
        assert await answer.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        more.set()
        assert await answer.read() == EVENTS[1] + DONE


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
@on_loop
async def test_who_reads_late_gets_every_byte_and_the_engine_waits(version: HttpVersion) -> None:
    pieces = [bytes([97 + n % 26]) * (n * n % 130_000 + 1) for n in range(1000)]
    written = 0

    async def much(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        nonlocal written
        stream = await begin_stream(request)
        for written, piece in enumerate((*EVENTS, *pieces)):  # noqa: B007
            await stream.write(piece)
        return stream

    async def waits() -> bool:
        before = written
        await asyncio.sleep(0.2)
        return written == before

    async with (
        bench([FakeEngine(prefills)], [FakeEngine(much)]) as router,
        aiohttp.ClientSession(version=version, read_bufsize=1024) as client,
        client.post(router.url + "/v1/completions", json=STREAM) as answer,
    ):
        await until(waits)
        assert written < len(pieces)
        assert await answer.read() == b"".join((*EVENTS, *pieces))


def breaks_off(*begin: bytes) -> Any:
    """Loses the connection after ``begin`` of a stream."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for piece in begin:
            await stream.write(piece)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return stream

    return answer


@pytest.mark.parametrize("rest", [b"", b'data: {"cho'])
@on_loop
async def test_after_the_first_byte_nothing_is_retried(rest: bytes) -> None:
    ps, broken = [FakeEngine(prefills), FakeEngine(prefills)], breaks_off(EVENTS[0] + rest)
    ds = [FakeEngine(broken), FakeEngine(broken)]
    async with bench(ps, ds) as router:
        status, body, _ = await router.post(STREAM)
        assert status == 200
        head, error, done = re.split(rb"\n\n(?=data: \{\"error|data: \[DONE)", body)
        assert head.rstrip(b"\n") == (EVENTS[0] + rest).rstrip(b"\n")
        assert "was lost" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert done == b"data: [DONE]\n\n"
        assert sum(len(engine.asked) for engine in (*ps, *ds)) == 2
        assert await ended(router, "push", "default", "broken") == 1


@on_loop
async def test_before_the_first_byte_it_is_retried() -> None:
    ps, ds = [FakeEngine(prefills)], [FakeEngine(breaks_off()), FakeEngine(decodes)]
    async with bench(ps, ds) as router:
        status, body, headers = await router.post(STREAM)
        assert (status, body) == (200, b"".join((*EVENTS, DONE)))
        assert headers["x-kvconnect-decode"] == "1"
        assert await router.metric("retries_total", role="decode", cause="lost") == 1
        transfers = [transfer_of(body) for body in ps[0].asked]
        assert len(set(transfers)) == 2, "an id is used once"


# Failures ---------------------------------------------------------------------------------------


async def drops(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.Response:
    """Closes the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize(
    ("bad", "cause"), [(BROKEN, "error"), (drops, "lost")], ids=["error", "lost"]
)
@on_loop
async def test_another_prefill_engine_is_tried(pull: bool, bad: Any, cause: str) -> None:
    more = [FakeEngine(bad)] if cause == "error" else []  # after a loss, there is one more attempt
    ps = [FakeEngine(bad), FakeEngine(prefills), *more]

    async def waits_for_the_good_one(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        while not ps[1].asked:
            await asyncio.sleep(0.01)
        return await decodes(engine, request, body)

    d = FakeEngine(waits_for_the_good_one)
    async with bench(ps, [d], handoff="pull" if pull else "push") as router:
        status, _, headers = await router.post(ASK)
        assert (status, headers["x-kvconnect-prefill"]) == (200, "1")
        assert [len(engine.asked) for engine in ps] == [1] * len(ps)
        retries = len(ps) - 1
        assert await router.metric("retries_total", role="prefill", cause=cause) == retries
        if not pull:
            assert len(d.asked) == len(ps)
            await until(lambda: d.dropped == retries)  # failed attempts were ended here too


@on_loop
async def test_a_dead_prefill_engine_is_passed_over_and_comes_back() -> None:
    ps, d = [FakeEngine(prefills), FakeEngine(prefills)], FakeEngine(decodes)
    async with bench(ps, [d]) as router:
        await ps[0].stop()
        for _ in range(4):
            status, _, headers = await router.post(ASK)
            assert (status, headers["x-kvconnect-prefill"]) == (200, "1")
        await until(lambda: up(router, ps[0], False))
        tickets = ps[0].standing_tickets
        await ps[0].start()
        await until(lambda: up(router, ps[0], True))
        await until(
            lambda: ps[0].standing_tickets > tickets
        )  # another incarnation: its old ticket is worthless
        before = len(ps[0].asked)
        for _ in range(2):
            assert (await router.post(ASK)).status == 200
        assert len(ps[0].asked) == before + 1
        given = d.asked[-1]["kv_transfer_params"]["kvconnect_ticket"]
        assert given != f"standing 1 of {ps[0].port}"


async def up(router: Bench, engine: FakeEngine, wanted: bool) -> bool:
    return await router.metric("upstream_up", role="prefill", upstream=engine.url) == wanted


@on_loop
async def test_when_every_prefill_engine_failed_it_is_502() -> None:
    ps, d = [FakeEngine(BROKEN), FakeEngine(BROKEN)], FakeEngine(hangs)
    async with bench(ps, [d]) as router:
        status, body, _ = await router.post(STREAM)
        assert status == 502
        error = json.loads(body)["error"]
        assert re.fullmatch("prefill engine [01] answered 500: load failed", error["message"])
        assert (error["code"], error["type"]) == (502, "server_error")
        assert [len(engine.asked) for engine in ps] == [1, 1]
        await until(lambda: d.dropped == 2)
        await idle(router)


async def idle(router: Bench) -> None:
    """No request to any engine is open."""
    for role, engines in (("prefill", router.prefill), ("decode", router.decode)):
        for engine in engines:
            await until(lambda e=engine, n=role: _open(router, n, e.url))


async def _open(router: Bench, role: str, url: str) -> bool:
    return await router.metric("in_flight", role=role, upstream=url) == 0


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


def fails_in_stream(code: int, *begin: bytes) -> Any:
    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for piece in begin:
            await stream.write(piece)
            await asyncio.sleep(0.01)
        error = {"error": {"message": "load failed", "code": code}}
        await stream.write(b"data: " + json.dumps(error).encode() + b"\n\n")
        await stream.write(DONE)
        return stream

    return answer


@pytest.mark.parametrize(
    "bad",
    [BROKEN, fails_in_stream(500), fails_in_stream(500, ROLE[:9], ROLE[9:])],
    ids=["whole", "stream", "chat"],
)
@on_loop
async def test_a_failed_handoff_is_retried_once_on_another_prefill_engine(bad: Any) -> None:
    ps, d = [FakeEngine(prefills) for _ in range(3)], FakeEngine(bad)
    async with bench(ps, [d]) as router:
        status, body, _ = await router.post(STREAM)
        assert status == 500, "an error before the first token is an HTTP error"
        message = json.loads(body)["error"]["message"]
        assert message.startswith("load failed: the hand-off failed by push and by pull")
        assert sorted(len(engine.asked) for engine in ps) == [0, 1, 1]
        assert await router.metric("retries_total", role="decode", cause="error") == 1

        async def fails_once(
            engine: FakeEngine, request: web.Request, asked: dict[str, Any]
        ) -> web.StreamResponse:
            engine.answer = decodes
            return await bad(engine, request, asked)

        d.answer = fails_once
        status, body, _ = await router.post(STREAM)
        assert (status, body) == (200, b"".join((*EVENTS, DONE)))


async def fails_pushes(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Reads the prompt differently from prefill, unless it is given its token ids."""
    ids = body["kv_transfer_params"].get("prompt_token_ids")
    return await (decodes if ids == TOKEN_IDS else BROKEN)(engine, request, body)


@on_loop
async def test_after_a_failed_push_the_only_prefill_engines_token_ids_go_by_pull() -> None:
    p, d = FakeEngine(prefills), FakeEngine(fails_pushes)
    async with bench([p], [d]) as router:
        status, body, headers = await router.post(STREAM, "/v1/chat/completions")
        assert (status, body) == (200, b"".join((*EVENTS, DONE)))
        assert headers["x-kvconnect-mode"] == "pull"
        assert transfer_of(p.asked[0]) != transfer_of(p.asked[1])
        assert await ended(router, "pull", "push_failed", "ok") == 1
        assert await router.metric("retries_total", role="decode", cause="error") == 1
    # Control: where pull alone is used, nothing is tried again.
    p, d = FakeEngine(prefills), FakeEngine(BROKEN)
    async with bench([p], [d], handoff="pull") as router:
        status, body, _ = await router.post(STREAM)
        assert (status, json.loads(body)["error"]["message"]) == (500, "load failed")
        assert len(p.asked) == len(d.asked) == 1


@on_loop
async def test_the_second_attempt_by_pull_ends_when_prefill_fails() -> None:
    async def computes_once(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        engine.answer = BROKEN
        return await prefills(engine, request, body)

    p, d = FakeEngine(computes_once), FakeEngine(BROKEN)
    async with bench([p], [d]) as router:
        status, body, _ = await router.post(STREAM)
        assert (status, len(p.asked), len(d.asked)) == (502, 2, 1)
        assert json.loads(body)["error"]["message"] == "prefill engine 0 answered 500: load failed"


@on_loop
async def test_a_chat_begins_with_its_role() -> None:
    async def chats(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for event in (ROLE, ROLE, *EVENTS, DONE):
            await stream.write(event)
        return stream

    async with bench([FakeEngine(prefills)], [FakeEngine(chats)]) as router:
        status, body, _ = await router.post(STREAM, "/v1/chat/completions")
        assert (status, body) == (200, b"".join((ROLE, ROLE, *EVENTS, DONE)))


@on_loop
async def test_a_clients_mistake_in_a_stream_is_not_a_failure() -> None:
    async with bench([FakeEngine(prefills)], [FakeEngine(fails_in_stream(400))]) as router:
        status, body, _ = await router.post(STREAM)
        assert status == 200 and b"load failed" in body
        assert await router.metric("retries_total", role="decode", cause="error") == 0


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("who", ["prefill", "decode"])
@on_loop
async def test_4xx_of_an_engine_is_passed_on(pull: bool, who: str) -> None:
    said = {"error": {"message": "prompt too long", "code": 400, "param": "prompt"}}
    wrong = says(422, said)
    ps = [FakeEngine(wrong if who == "prefill" else prefills) for _ in range(2)]
    d = FakeEngine(wrong if who == "decode" else hangs)
    async with bench(ps, [d], handoff="pull" if pull else "push") as router:
        status, body, headers = await router.post(STREAM)
        assert (status, json.loads(body)) == (422, said)
        assert headers["content-type"].startswith("application/json")
        assert sum(len(engine.asked) for engine in ps) == 1
        await idle(router)
        rejected = [
            await router.metric(
                "upstream_requests_total", role=who, upstream=engine.url, outcome="rejected"
            )
            for engine in (ps if who == "prefill" else [d])
        ]
        assert sum(rejected) == 1


# Cancelling and deadlines -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_client_that_leaves_cancels_both_requests(stream: bool) -> None:
    p, d = FakeEngine(hangs), FakeEngine(hangs)
    async with bench([p], [d]) as router:
        asking = asyncio.create_task(router.post(ASK | {"stream": stream}))
        await until(lambda: bool(p.asked and d.asked))
        assert p.dropped == d.dropped == 0
        asking.cancel()
        await until(lambda: p.dropped == d.dropped == 1)
        await idle(router)
        assert await ended(router, "push", "default", "cancelled") == 1


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_prefill_engine_may_end_after_the_answer(stream: bool) -> None:
    may_end, ended_itself = asyncio.Event(), asyncio.Event()

    async def late(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await may_end.wait()
        ended_itself.set()
        return await prefills(engine, request, body)

    p, d = FakeEngine(late), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        status, _, _ = await router.post(ASK | {"stream": stream})
        assert status == 200
        assert await router.metric("in_flight", role="prefill", upstream=p.url) == 1
        may_end.set()
        await idle(router)
        assert ended_itself.is_set() and p.dropped == 0
        done = {"role": "prefill", "upstream": p.url, "outcome": "ok"}
        assert await router.metric("upstream_requests_total", **done) == 1


@on_loop
async def test_a_prefill_engine_that_never_ends_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draining, "END_S", 0.2)
    p, d = FakeEngine(hangs), FakeEngine(decodes)
    async with bench([p], [d]) as router:
        status, _, _ = await router.post(ASK)
        assert status == 200
        await until(lambda: p.dropped == 1)
        await idle(router)


async def endless(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    stream = await begin_stream(request)
    while True:
        await stream.write(EVENTS[0] * 1000)
        await asyncio.sleep(0.001)


@on_loop
async def test_a_client_that_leaves_a_running_stream_cancels_it() -> None:
    p, d = FakeEngine(prefills), FakeEngine(endless)
    async with bench([p], [d]) as router:
        async with router.client.post(router.url + "/v1/completions", json=STREAM) as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: d.dropped == 1)
        await idle(router)


@pytest.mark.parametrize("pull", [False, True])
@on_loop
async def test_the_deadline_ends_both_requests(pull: bool) -> None:
    p, d = FakeEngine(hangs), FakeEngine(hangs)
    async with bench([p], [d], handoff="pull" if pull else "push", timeout_s=1.0) as router:
        status, body, _ = await router.post(ASK)
        assert status == 504
        assert json.loads(body)["error"]["message"] == "not done within 1 seconds"
        await until(lambda: p.dropped == 1 and d.dropped == (not pull))
        await idle(router)
        mode, reason = ("pull", "forced") if pull else ("push", "default")
        assert await ended(router, mode, reason, "timeout") == 1


async def slowly(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Sends an event every 50 ms for a second, or a whole answer at its end."""
    if not body.get("stream"):
        await asyncio.sleep(1.0)
        return web.json_response({})
    stream = await begin_stream(request)
    for _ in range(20):
        await stream.write(EVENTS[0])
        await asyncio.sleep(0.05)
    await stream.write(DONE)
    return stream


@on_loop
async def test_a_stream_may_go_on_as_long_as_it_sends_tokens() -> None:
    p, d = FakeEngine(prefills), FakeEngine(slowly)
    async with bench([p], [d], timeout_s=0.5) as router:
        status, body, _ = await router.post(STREAM)
        assert (status, body.count(EVENTS[0])) == (200, 20) and body.endswith(DONE)
        assert (await router.post(ASK)).status == 504, "control: a whole answer has to come in time"


# The edge ---------------------------------------------------------------------------------------


@on_loop
async def test_bad_requests_are_named_and_reach_no_engine() -> None:
    p, d = pair()
    async with bench([p], [d]) as router:

        async def send(path: str, data: object, method: str = "POST") -> tuple[int, dict[str, Any]]:
            async with router.client.request(method, router.url + path, data=data) as answer:
                return answer.status, json.loads(await answer.read())["error"]

        status, error = await send("/v1/completions", b'{"prompt": ')
        assert status == 400 and "not a JSON object: Input data was trunc" in error["message"]
        assert error["type"] == "invalid_request_error"
        status, error = await send("/v1/completions", b"[]")
        assert status == 400 and "not a JSON object" in error["message"]
        status, error = await send(
            "/v1/completions", io.BytesIO(b" " * (RouterLimits().body_bytes + 1))
        )
        assert status == 413 and error["code"] == 413
        assert (await send("/v1/audio/speech", b"{}"))[0] == 404
        assert (await send("/v1/completions", b"", "GET"))[0] == 405
        assert (p.asked, d.asked) == ([], [])
        assert await ended(router, "none", "none", "rejected") == 3


@on_loop
async def test_clients_name_a_key_where_keys_are_asked_for() -> None:
    p, d = pair()
    async with bench(
        [p], [d], listening=Listening(api_keys=(ApiKey("one"), ApiKey("two")))
    ) as router:
        for key, want in (("two", 200), ("one", 200), ("three", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            status, body, _ = await router.post(ASK, headers=headers)
            assert status == want
            assert want == 200 or json.loads(body)["error"]["type"] == "invalid_request_error"
        assert len(d.asked) == 2
        assert await router.answers("/health", 200) and await router.answers("/metrics", 200)
        assert await router.answers("/v1/models", 401)


@on_loop
async def test_models_are_those_of_a_decode_engine() -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        status, body, _ = await router.get("/v1/models")
        listed = [{"id": "tiny", "max_model_len": d.context}]
        assert (status, json.loads(body)["data"]) == (200, listed)
        await d.stop()
        await until(lambda: router.answers("/v1/models", 503))


async def lacks(router: Bench, names: list[str]) -> bool:
    """Whether the router says that engines of these roles are missing."""
    health = await router.get("/health")
    return (health.status, json.loads(health.body)["missing"]) == (503 if names else 200, names)


@on_loop
async def test_health_names_what_is_missing() -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        assert await lacks(router, [])

        for engines, missing in (([p], ["prefill"]), ([p, d], ["prefill", "decode"])):
            for engine in engines:
                engine.well = False

            await until(lambda names=missing: lacks(router, names))
        assert json.loads((await router.get("/health")).body)["prefill"] == {p.url: False}
        status, body, _ = await router.post(ASK)
        assert status == 503
        assert json.loads(body)["error"]["message"] == "no prefill and no decode engine is up"
        assert p.asked == d.asked == []
        p.well = d.well = True
        await until(lambda: router.answers("/health", 200))


@on_loop
async def test_every_series_exists_at_the_first_scrape() -> None:
    p, d = pair()
    async with bench([p], [d]) as router:
        before = await series(router)
        for body in (ASK, STREAM, ASK | {"n": 2}):
            await router.post(body)
        d.answer = BROKEN
        await router.post(ASK)
        await p.stop()
        await until(lambda: up(router, p, False))
        await router.post(ASK)
        assert await series(router) == before
        assert any("upstream_requests_total" in name for name in before)
        assert await ended(router, "none", "none", "failed") == 1


async def series(router: Bench) -> set[str]:
    lines = (await router.get("/metrics")).body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


@on_loop
async def test_standing_tickets_are_renewed_before_they_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "RENEW_LEAST_S", 0.01)
    p, d = pair()
    p.standing_ticket_lifetime_s = 0.1
    async with bench([p], [d]) as router:
        await until(lambda: p.standing_tickets >= 5)

        async def pushed() -> bool:
            return (await router.post(ASK)).headers["x-kvconnect-mode"] == "push"

        await until(pushed)
        given = d.asked[-1]["kv_transfer_params"]["kvconnect_ticket"]
        assert int(given.split()[1]) >= 4


@on_loop
async def test_tickets_that_end_at_once_are_not_fetched_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "RENEW_LEAST_S", 60.0)
    p, d = pair()
    p.standing_ticket_lifetime_s = 1e-6
    pauses: list[float] = []

    async def noted(event: asyncio.Event, timeout_s: float) -> bool:
        pauses.append(timeout_s)
        return await wait(event, timeout_s)

    wait = watch.wait
    monkeypatch.setattr(watch, "wait", noted)
    async with bench([p], [d]):
        await until(lambda: 60.0 in pauses)
    assert p.standing_tickets == 1


@on_loop
async def test_an_engine_silent_to_two_probes_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_TIMEOUT_S", 0.5)
    p, d = pair()
    async with bench([p], [d]) as router:
        await until(lambda: up(router, p, True))
        probed, tickets = p.got["/health"], p.standing_tickets
        p.silent = 1
        await until(lambda: p.got["/health"] > probed + 3)
        assert p.standing_tickets == tickets, "new ones are fetched from an engine that comes back"
        p.silent = 10**6
        await until(lambda: up(router, p, False))
        p.silent = 0
        await until(lambda: up(router, p, True))
        await until(lambda: p.standing_tickets > tickets)


@on_loop
async def test_every_metric_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "router.md").read_text()
    rows = dict(re.findall(r"^\| `(kvconnect_router_\w+)` \|(.*)", text, re.MULTILINE))
    async with bench(*([engine] for engine in pair())) as router:
        every = {name.partition("{")[::2] for name in await series(router)}
    found = {re.sub("_(bucket|sum|count)$", "", name) for name, _ in every}
    assert rows.keys() == {name for name in found if not name.endswith("_created")}
    for name, labels in every:
        if name.endswith("_total"):
            known = rows[name] + "`prefill`, `decode`"
            for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
                assert label == "upstream" or f"`{value}`" in known, (name, label, value)
