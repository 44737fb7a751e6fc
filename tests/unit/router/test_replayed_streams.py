"""Routers whose decode engines die in mid-stream, where events have no token ids: another engine
answers again, and their clients see whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.requests import retries
from kvconnect.router.requests.continuation import AfterLoss
from tests.fakes.answer_streams import (
    ASKS,
    CHATS,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    TEXT,
    Answer,
    merged,
)
from tests.fakes.dying_streams import END, HANG, RESET, Death, sent_until
from tests.fakes.engine import (
    Bench,
    FakeEngine,
    administered,
    begin_stream,
    bench,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

VLLM, SGLANG = "", ",engine=sglang"
STREAMS = {"messages": (MESSAGES, VLLM), "responses": (RESPONSES, VLLM)}
STREAMS |= {"completions": (COMPLETIONS, SGLANG), "chats": (CHATS, SGLANG)}
STREAMS |= {"generate": (GENERATE, SGLANG), "responses of sglang": (RESPONSES, SGLANG)}
EVERY = pytest.mark.parametrize(("path", "kind"), STREAMS.values(), ids=STREAMS)
UNIFIED = {"mode": "plain", "reason": "unified"}


@dataclass
class Lives:
    """How the next answers end: after so many bytes, or events if negative. None: well.

    Attributes:
        answers: the one that is asked first says the first of these, and so on.
    """

    deaths: list[int | None] = field(default_factory=list)
    how: str = RESET
    asked: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(
        default_factory=lambda: [Answer("a"), Answer("b", each=(3, 1)), Answer("c", each=5)]
    )
    last: bytes = b""  # sent before the end

    async def answer(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        self.asked.append(body)
        death = self.deaths.pop(0) if self.deaths else None
        stream = await begin_stream(request)
        events = self.answers[len(self.asked) - 1].events(request.path)
        return await sent_until(request, stream, events, Death(death, self.how, self.last))


@asynccontextmanager
async def router(
    lives: Lives, kind: str, *, engines: int = 2, continuations: int = 1, **options: Any
) -> AsyncIterator[Bench]:
    decode = [FakeEngine(lives.answer) for _ in range(engines)]
    for engine in decode:
        engine.settings = kind
    options = {"handoff": "none", **options}
    async with bench([], decode, continuations=continuations, **options) as made:
        yield made


@pytest.fixture(autouse=True)
def many_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "LEAST_RETRIES", 10_000)


def whole(path: str) -> list[Any]:
    return merged(b"".join(Answer("a").events(path)))


def error_after_some(path: str, body: bytes) -> bytes:
    """Return the end of a stream that began as it should."""
    events = body.split(b"\n\n")
    at = next(at for at, event in enumerate(events) if b'"error"' in event)
    assert at and b"".join(Answer("a").events(path)).startswith(b"\n\n".join(events[:at]))
    return events[at]


async def lost(made: Bench, result: AfterLoss) -> float:
    return await made.metric("lost_streams_total", result=result.value)


def first_text(path: str) -> int:
    """Return the number of events with which a router begins a stream. Before, it tries again."""
    return {MESSAGES: 3, RESPONSES: 5, COMPLETIONS: 1, CHATS: 2, GENERATE: 1}[path]


@EVERY
@pytest.mark.parametrize("how", [RESET, END])
@on_loop
async def test_a_stream_goes_on_after_each_event(path: str, kind: str, how: str) -> None:
    events = Answer("a").events(path)
    ends = [sum(map(len, events[:at])) for at in range(1, len(events) + 1)]
    places = [at + off for at in ends[first_text(path) - 1 : -1] for off in (0, 9)]
    places = places if how == RESET else places[::5]
    async with router(Lives(), kind) as made:
        for number, at in enumerate(places):
            lives = Lives([at, None], how)
            for engine in made.decode:
                engine.answer = lives.answer
            reply = await made.post(ASKS[path] | {"user": f"{number}"}, path)
            assert merged(reply.body) == whole(path), at
            first, again = lives.asked
            named = {}
            if kind == SGLANG:  # the router names each request
                field = "request_id" if path == RESPONSES else "rid"
                assert first.pop(field) != again.pop(field)
            elif path == RESPONSES:
                named = {"request_id": "resp_a"}
            assert again == first | named
        assert await lost(made, AfterLoss.CONTINUED) == len(places)
        assert await made.metric("requests_total", **UNIFIED, outcome="continued") == len(places)
        assert await made.metric("requests_total", **UNIFIED, outcome="ok") == 0


@EVERY
@on_loop
async def test_without_the_flag_nothing_changes(path: str, kind: str) -> None:
    """The control: a stream that is cut ends with an error event."""
    lives = Lives([-5, None])
    async with router(lives, kind, continuations=0) as made:
        reply = await made.post(ASKS[path], path)
        assert b"was lost" in error_after_some(path, reply.body) and len(lives.asked) == 1
        assert await made.metric("requests_total", **UNIFIED, outcome="broken") == 1


@EVERY
@on_loop
async def test_bytes_are_those_of_a_stream_without_a_journal(path: str, kind: str) -> None:
    bodies = []
    for number in (0, 1):
        async with router(Lives(), kind, continuations=number) as made:
            bodies.append((await made.post(ASKS[path], path)).body)
    assert bodies[0] == bodies[1] == b"".join(Answer("a").events(path))


@EVERY
@on_loop
async def test_one_wrong_character_ends_the_stream_with_an_error(path: str, kind: str) -> None:
    """The control of the text. It counts as a loss, and two in a row are enough."""
    for most, reason in ((1, AfterLoss.LIMIT), (2, AfterLoss.WITHHELD)):
        lives = Lives([-12, None, None])
        lives.answers[1] = Answer("b", text=TEXT.replace("sea", "see"))
        async with router(lives, kind, engines=3, continuations=most) as made:
            reply = await made.post(ASKS[path], path)
            assert b"another text" in error_after_some(path, reply.body)
            assert await lost(made, reason) == 1 and len(lives.asked) == 2
            assert await made.metric("requests_total", **UNIFIED, outcome="broken") == 1


@EVERY
@on_loop
async def test_it_goes_on_as_often_as_it_may(path: str, kind: str) -> None:
    lives = Lives([-8, -15, None], END)
    async with router(lives, kind, engines=3, continuations=2) as made:
        assert merged((await made.post(ASKS[path], path)).body) == whole(path)
        assert await lost(made, AfterLoss.CONTINUED) == 2
        lives.asked.clear()
        lives.deaths = [-8, -15, -10]
        reply = await made.post(ASKS[path] | {"user": "another"}, path)
        assert b"ended its stream" in reply.body and len(lives.asked) == 3
        assert await lost(made, AfterLoss.LIMIT) == 1


@EVERY
@on_loop
async def test_an_engine_that_is_lost_before_it_has_caught_up_counts(path: str, kind: str) -> None:
    """A request that has ended two engines gets no third one."""
    lives = Lives([-9, -5, None])
    async with router(lives, kind, engines=3, continuations=5) as made:
        reply = await made.post(ASKS[path], path)
        assert b"was lost" in reply.body and len(lives.asked) == 2
        assert await lost(made, AfterLoss.WITHHELD) == 1


@EVERY
@on_loop
async def test_an_engine_that_is_silent_counts_as_lost(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    async with router(Lives([-5, None], HANG), kind, silence_s=0.5) as made:
        assert merged((await made.post(ASKS[path], path)).body) == whole(path)


@EVERY
@on_loop
async def test_what_an_engine_reports_of_its_end_is_no_end(path: str, kind: str) -> None:
    error = b'"error":{"message":"EngineCore died","code":500}'
    last = b'data: {"type":"error",' + error + b"}\n\n"
    if path in (MESSAGES, RESPONSES):
        last = b"event: error\n" + last
    async with router(Lives([-5, None], END, last=last), kind) as made:
        assert merged((await made.post(ASKS[path], path)).body) == whole(path)


@EVERY
@on_loop
async def test_sampled_answers_end_as_ever(path: str, kind: str) -> None:
    lives = Lives([-5])
    async with router(lives, kind) as made:
        warm: dict[str, Any] = {"temperature": 1, "n": 1}
        reply = await made.post(ASKS[path] | warm | {"sampling_params": warm}, path)
        assert b"was lost" in reply.body and len(lives.asked) == 1
        assert await lost(made, AfterLoss.SAMPLED) == 1


@pytest.mark.parametrize(
    ("path", "kind", "more", "reason"),
    [
        (RESPONSES, VLLM, {"previous_response_id": "resp_x"}, AfterLoss.FIELD),
        (RESPONSES, VLLM, {"background": True}, AfterLoss.FIELD),
        (RESPONSES, SGLANG, {"request_id": "mine"}, AfterLoss.FIELD),
        (CHATS, SGLANG, {"rid": "mine"}, AfterLoss.FIELD),
        (GENERATE, SGLANG, {"return_logprob": True}, AfterLoss.LOGPROBS),
        (GENERATE, SGLANG, {"sampling_params": {"n": 2, "temperature": 0}}, AfterLoss.PROMPTS),
        (GENERATE, SGLANG, {"sampling_params": {}}, AfterLoss.SAMPLED),
    ],
)
@on_loop
async def test_what_one_engine_alone_knows_ends_with_it(
    path: str, kind: str, more: dict[str, Any], reason: AfterLoss
) -> None:
    lives = Lives([-5])
    async with router(lives, kind) as made:
        reply = await made.post(ASKS[path] | more, path)
        assert b"was lost" in reply.body and len(lives.asked) == 1
        assert await lost(made, reason) == 1


@on_loop
async def test_what_is_no_text_ends_as_ever() -> None:
    thinks = b'event: content_block_start\ndata: {"type":"content_block_start","index":1,'
    thinks += b'"content_block":{"type":"thinking","thinking":""}}\n\n'
    lives = Lives([-5, None], last=thinks)
    async with router(lives, VLLM) as made:
        reply = await made.post(ASKS[MESSAGES], MESSAGES)
        assert thinks in reply.body and b"was lost" in reply.body and len(lives.asked) == 1
        assert await lost(made, AfterLoss.PARSER) == 1


@on_loop
async def test_completions_without_tokens_to_go_on_from_are_answered_again() -> None:
    """Of vLLM, if only the penalties of tokens prevent it."""
    lives = Lives([-5, None])
    async with router(lives, VLLM) as made:
        reply = await made.post(ASKS[COMPLETIONS] | {"presence_penalty": 1}, COMPLETIONS)
        assert merged(reply.body) == whole(COMPLETIONS)
        assert lives.asked[0] == lives.asked[1] and "return_token_ids" not in lives.asked[0]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("handoff", ["push", "pull"])
@on_loop
async def test_the_prefill_engine_that_has_the_prompt_hands_off_again(
    path: str, handoff: Any
) -> None:
    lives = Lives([-5, None])
    engines = [FakeEngine(prefills), FakeEngine(prefills)]
    decode = [FakeEngine(lives.answer), FakeEngine(lives.answer)]
    async with bench(engines, decode, handoff=handoff, continuations=1) as made:
        assert merged((await made.post(ASKS[path], path)).body) == whole(path)
        (asked,) = [engine.asked for engine in engines if engine.asked]
        first, again = (body["kv_transfer_params"] for body in asked)
        assert first["transfer_id"] != again["transfer_id"]
        given = [body["kv_transfer_params"] for body in lives.asked]
        assert given[0] != given[1] and given[1]["do_remote_prefill"]


@EVERY
@on_loop
async def test_if_the_next_engine_refuses_the_stream_ends_with_an_error(
    path: str, kind: str
) -> None:
    async with router(Lives([-5]), kind) as made:
        refusing = says(400, {"error": {"message": "no", "code": 400}})

        async def first(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
            for other in made.decode:
                if other is not engine:
                    other.answer = refusing
            return await Lives([-5]).answer(engine, request, body)

        for engine in made.decode:
            engine.answer = first
        assert b"no other one went on" in (await made.post(ASKS[path], path)).body
        assert await lost(made, AfterLoss.FAILED) == 1


@EVERY
@on_loop
async def test_if_no_engine_of_the_kind_is_left_the_stream_ends_with_an_error(
    path: str, kind: str
) -> None:
    lives = Lives([-5])
    other = FakeEngine(says(200, {}))
    other.settings = VLLM if kind else SGLANG
    engine = FakeEngine(lives.answer)
    engine.settings = kind
    if kind:  # either may be asked first
        lives.deaths, other.answer = [-5, -5], lives.answer
    async with bench([], [engine, other], handoff="none", continuations=1) as made:
        reply = await made.post(ASKS[path] | {"presence_penalty": 1}, path)
        assert b"no other one went on" in reply.body
        assert len(engine.asked) + len(other.asked) == 1


@EVERY
@on_loop
async def test_a_drained_engine_keeps_its_stream(path: str, kind: str) -> None:
    """All would be computed again elsewhere. If it is lost after all, it is."""
    gate, asked = asyncio.Event(), []

    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        asked.append(engine)
        events = Answer("ab"[len(asked) - 1]).events(path)
        stream = await begin_stream(request)
        await stream.write(b"".join(events[:-5]))
        if len(asked) == 1:
            await gate.wait()
            assert request.transport is not None
            request.transport.close()
        else:
            await stream.write(b"".join(events[-5:]))
        return stream

    decode = [FakeEngine(answer), FakeEngine(answer)]
    for engine in decode:
        engine.settings = kind
    async with administered([], decode, handoff="none", continuations=1) as admin:
        made = admin.router
        reply = asyncio.create_task(made.post(ASKS[path], path))
        await until(lambda: bool(asked))
        drained = {"role": "decode", "url": asked[0].url}
        assert (await admin.ask("POST", drained, "/drain"))[0] == 200

        async def stays() -> bool:
            return await made.metric("drained_streams_total", result="stayed") == 1

        await until(stays)
        assert len(asked) == 1
        gate.set()
        assert merged((await reply).body) == whole(path)
        assert await lost(made, AfterLoss.CONTINUED) == 1 and asked[0] is not asked[1]


@EVERY
@on_loop
async def test_many_streams_go_on_at_once(path: str, kind: str) -> None:
    """One of two engines dies in the middle of all of its streams."""
    async with router(Lives(), kind) as made:
        gate, begun = asyncio.Event(), 0

        async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
            nonlocal begun
            stream = await begin_stream(request)
            events = Answer("a").events(path)
            for event in events[:8]:
                await stream.write(event)
            begun += 1
            await gate.wait()
            if engine is made.decode[0] and begun <= 24:
                assert request.transport is not None
                request.transport.close()
                return stream
            for event in events[8:]:
                await stream.write(event)
            return stream

        for engine in made.decode:
            engine.answer = answer
        asked = [ASKS[path] | {"user": f"{number}"} for number in range(24)]
        replies = [asyncio.ensure_future(made.post(body, path)) for body in asked]
        await until(lambda: begun == 24)
        gate.set()
        for reply in await asyncio.gather(*replies):
            assert merged(reply.body) == whole(path)
        assert await lost(made, AfterLoss.CONTINUED) == 12
