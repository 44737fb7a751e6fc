"""Routers whose decode engines die in mid-stream: their clients see whole answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.options import Listening
from kvconnect.router.requests import retries
from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.journal import StreamJournal
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
from tests.fakes.token_model import DONE, PROMPT, TOKENS, TokenModel, merged, text_of_ids

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 18, "stream": True, "temperature": 0}
ASK |= {"stream_options": {"include_usage": True}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
PATHS = {"/v1/completions": ASK, "/v1/chat/completions": CHAT}
EVERY = pytest.mark.parametrize("path", PATHS)


@dataclass
class Lives:
    """How the next answers end: after so many bytes, or events if negative. None: well."""

    deaths: list[int | None] = field(default_factory=list)
    how: str = RESET
    asked: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: list("abcdefgh"))
    last: bytes = b""  # sent before the end
    each: int = 1  # tokens in an event
    tokens: list[bytes] = field(default_factory=lambda: list(TOKENS))
    tag: str = ""  # see TokenModel

    async def answer(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if not body.get("stream"):  # of the control
            return web.json_response({})
        self.asked.append(body)
        death = self.deaths.pop(0) if self.deaths else None
        stream = await begin_stream(request)
        name = self.names[len(self.asked) - 1]
        model = TokenModel(name, self.tokens, each=self.each, tag=self.tag)
        events = list(model.events(body))
        return await sent_until(request, stream, events, Death(death, self.how, self.last))


@asynccontextmanager
async def router(
    lives: Lives, *, engines: int = 2, unified: bool = True, continuations: int = 1, **options: Any
) -> AsyncIterator[Bench]:
    prefill = [] if unified else [FakeEngine(prefills), FakeEngine(prefills)]
    decode = [FakeEngine(lives.answer) for _ in range(engines)]
    for engine in (*prefill, *decode):
        engine.detokenizes(text_of_ids)
    mode: Any = "none" if unified else options.pop("handoff", "push")
    async with bench(prefill, decode, handoff=mode, continuations=continuations, **options) as made:
        yield made


@pytest.fixture(autouse=True)
def many_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "LEAST_RETRIES", 10_000)


def events_of(path: str, **more: Any) -> list[bytes]:
    return list(TokenModel("a").events(PATHS[path] | {"return_token_ids": True} | more))


def whole(path: str, **more: Any) -> list[Any]:
    return merged(TokenModel("a").answer(PATHS[path] | more))


async def lost(made: Bench, result: AfterLoss) -> float:
    return await made.metric("lost_streams_total", result=result.value)


@EVERY
@pytest.mark.parametrize("how", [RESET, END])
@on_loop
async def test_a_stream_goes_on_after_each_event(path: str, how: str) -> None:
    events = events_of(path)
    ends = [sum(map(len, events[:at])) for at in range(1, len(events) + 1)]
    begins = 1 if "chat" in path else 0  # before it, the request is tried again
    places = [at + off for at in ends[begins:-1] for off in (0, 7)]
    places = places if how == RESET else places[::5]
    async with router(Lives()) as made:
        for number, at in enumerate(places):
            lives = Lives([at, None], how)
            for engine in made.decode:
                engine.answer = lives.answer
            reply = await made.post(PATHS[path] | {"user": f"{number}"}, path)
            assert merged(reply.body) == whole(path), at
        assert await lost(made, AfterLoss.CONTINUED) == len(places)
        requests = {"mode": "plain", "reason": "unified"}
        assert await made.metric("requests_total", **requests, outcome="continued") == len(places)
        assert await made.metric("requests_total", **requests, outcome="ok") == 0


@EVERY
@pytest.mark.parametrize("handoff", ["push", "pull"])
@on_loop
async def test_the_prefill_engine_that_has_the_prompt_hands_off(path: str, handoff: str) -> None:
    lives = Lives([-5, None])
    async with router(lives, unified=False, handoff=handoff) as made:
        reply = await made.post(PATHS[path], path)
        assert merged(reply.body) == whole(path)
        asked = [(p, body) for p in made.prefill for body in p.asked]
        # A chat's first event has no token; its fifth has one that ends within a character.
        generated = [100 + at for at in range(3 if "chat" in path else 5)]
        assert [body.get("prompt") for _, body in asked] == [
            PATHS[path].get("prompt"),
            [*PROMPT, *generated],
        ]
        assert asked[0][0] is asked[1][0]
        assert [p.paths[-1] for p in made.prefill if p.asked] == ["/v1/completions"]
        first, then = lives.asked
        assert first["return_token_ids"] and then["return_token_ids"]
        assert then["kv_transfer_params"]["do_remote_prefill"]
        assert first["kv_transfer_params"] != then["kv_transfer_params"]
        assert then["max_tokens"] == (13 if path == "/v1/completions" else 4096 - len(PROMPT) - 3)
        assert "return_token_ids" not in asked[1][1]


@EVERY
@on_loop
async def test_without_the_flag_nothing_changes(path: str) -> None:
    """The control: nobody asks for ids, and a stream that is cut ends with an error event."""
    lives = Lives([-5, None])
    async with router(lives, continuations=0) as made:
        reply = await made.post(PATHS[path], path)
        assert b"was lost" in reply.body and reply.body.endswith(DONE)
        assert "return_token_ids" not in lives.asked[0] and len(lives.asked) == 1
        assert await made.metric("requests_total", **UNIFIED, outcome="broken") == 1


UNIFIED = {"mode": "plain", "reason": "unified"}


@EVERY
@on_loop
async def test_bytes_are_those_of_a_stream_without_a_journal(path: str) -> None:
    bodies = []
    for number in (0, 1):
        async with router(Lives(), continuations=number) as made:
            bodies.append((await made.post(PATHS[path], path)).body)
    assert bodies[0] == bodies[1] == TokenModel("a").answer(PATHS[path])


@on_loop
async def test_one_token_too_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all of these: the journal has a token that the client does not."""
    resume = StreamJournal.resume

    def late(journal: StreamJournal) -> Any:
        made = resume(journal)
        assert made is not None
        made.generated.append(100 + len(made.generated))
        return made

    monkeypatch.setattr(StreamJournal, "resume", late)
    async with router(Lives([-5, None])) as made:
        reply = await made.post(ASK)
        assert merged(reply.body) != whole("/v1/completions")


@on_loop
async def test_it_goes_on_as_often_as_it_may() -> None:
    lives = Lives([-4, -4, -4, None], END)
    async with router(lives, engines=4, continuations=3) as made:
        assert merged((await made.post(ASK)).body) == whole("/v1/completions")
        assert await lost(made, AfterLoss.CONTINUED) == 3
        lives.deaths, lives.asked[:] = [-4, -4, -4, -4], []
        reply = await made.post(ASK | {"user": "another"})
        assert b"ended its stream" in reply.body and reply.body.endswith(DONE)
        assert len(lives.asked) == 4
        assert await lost(made, AfterLoss.LIMIT) == 1


@on_loop
async def test_a_request_that_ends_engines_gets_no_third_one() -> None:
    lives = Lives([-4, -1, -1])
    async with router(lives, engines=3, continuations=5) as made:
        reply = await made.post(ASK)
        assert b"was lost" in reply.body and len(lives.asked) == 2
        assert await lost(made, AfterLoss.WITHHELD) == 1
        assert (await made.post(ASK)).status == 502  # it is known now


@on_loop
async def test_an_engine_that_is_silent_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    async with router(Lives([-5, None], HANG), silence_s=0.5) as made:
        assert merged((await made.post(ASK)).body) == whole("/v1/completions")


@on_loop
async def test_what_an_engine_reports_of_its_end_is_no_end() -> None:
    error = b'data: {"error":{"message":"EngineCore died","code":500}}\n\n'
    for last in (error, error + DONE):
        async with router(Lives([-5, None], END, last=last)) as made:
            assert merged((await made.post(ASK)).body) == whole("/v1/completions")


@pytest.mark.parametrize("serves", [True, False])
@on_loop
async def test_where_text_ends_is_asked_if_events_have_several_tokens(serves: bool) -> None:
    """Eight tokens in three events: the eighth ends within a character."""
    lives = Lives([-3, None], each=3)
    questions: list[list[int]] = []

    async def detokenize(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        questions.append(body["tokens"])
        raw = b"".join(TOKENS[id - 100] for id in body["tokens"])
        return web.json_response({"prompt": raw.decode(errors="replace")})

    async with router(lives) as made:
        for engine in made.decode:
            engine.extra["/detokenize"] = detokenize if serves else says(404, {})
        assert merged((await made.post(ASK)).body) == whole("/v1/completions")
        generated = [100 + at for at in range(9)]
        assert questions == ([generated, generated[:6]] if serves else [])
        assert lives.asked[1]["prompt"] == [*PROMPT, *(generated[:6] if serves else [])]


@on_loop
async def test_the_lost_engine_may_be_removed_while_another_is_asked_where_text_ends() -> None:
    lives, questions = Lives([-3, None], each=3), 0
    decode = [FakeEngine(lives.answer) for _ in range(3)]
    async with administered([], decode, handoff="none", continuations=1) as admin:

        async def detokenize(engine: FakeEngine, request: web.Request, body: Any) -> Any:
            nonlocal questions
            questions += 1
            (lost,) = (each for each in decode if each.asked)
            await admin.ask("DELETE", {"role": "decode", "url": lost.url})
            await until(lambda: gone(lost))
            raw = b"".join(TOKENS[id - 100] for id in body["tokens"])
            return web.json_response({"prompt": raw.decode(errors="replace")})

        async def gone(engine: FakeEngine) -> bool:
            return not await admin.of(engine.url)

        for engine in decode:
            engine.extra["/detokenize"] = detokenize
        assert merged((await admin.router.post(ASK)).body) == whole("/v1/completions")
        assert questions == 2


@on_loop
async def test_if_no_engine_is_left_the_stream_ends_with_an_error() -> None:
    async with router(Lives([-5]), engines=1) as made:
        reply = await made.post(ASK)
        assert reply.status == 200 and b"no other one went on" in reply.body
        assert reply.body.endswith(DONE)
        assert await lost(made, AfterLoss.FAILED) == 1
        assert await made.metric("requests_total", **UNIFIED, outcome="broken") == 1


@on_loop
async def test_if_the_next_engine_refuses_the_stream_ends_with_an_error() -> None:
    async with router(Lives([-5])) as made:
        refusing = says(400, {"error": {"message": "no", "code": 400}})

        async def first(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
            for other in made.decode:
                if other is not engine:
                    other.answer = refusing
            return await Lives([-5]).answer(engine, request, body)

        for engine in made.decode:
            engine.answer = first
        reply = await made.post(ASK)
        assert b"no other one went on" in reply.body and reply.body.endswith(DONE)


@on_loop
async def test_the_next_engine_has_the_deadline_of_a_request() -> None:
    async with router(Lives([-5]), timeout_s=1.0) as made:

        async def first(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
            for other in made.decode:
                if other is not engine:
                    other.answer = never
            return await Lives([-5]).answer(engine, request, body)

        async def never(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
            await asyncio.Event().wait()

        for engine in made.decode:
            engine.answer = first
        reply = await made.post(ASK)
        assert b"not done within 1 seconds" in reply.body and reply.body.endswith(DONE)
        assert await made.metric("requests_total", **UNIFIED, outcome="timeout") == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"response_format": {"type": "json_object"}}, AfterLoss.GRAMMAR),
        ({"presence_penalty": 1}, AfterLoss.PENALTIES),
        ({"logprobs": 2}, AfterLoss.LOGPROBS),
        ({"echo": True}, AfterLoss.ECHO),
        ({"vllm_xargs": {"a": 1}}, AfterLoss.FIELD),
    ],
)
@on_loop
async def test_what_cannot_go_on_ends_as_ever(more: dict[str, Any], reason: AfterLoss) -> None:
    """Sampled: the most likely tokens would be those of another engine, too."""
    lives = Lives([-5, None])
    async with router(lives) as made:
        reply = await made.post(ASK | {"temperature": 1} | more)
        assert b"was lost" in reply.body and len(lives.asked) == 1
        assert await lost(made, reason) == 1
        assert "return_token_ids" not in lives.asked[0]


@on_loop
async def test_streams_of_other_apis_end_as_ever() -> None:
    """Nobody knows their events. Those that are known: ``test_replayed_streams.py``."""
    lives = Lives([-5])
    engine = FakeEngine(lives.answer)
    engine.extra["/pooling"] = lives.answer
    async with bench([], [engine], handoff="none", continuations=1) as made:
        asked = {"model": "tiny", "input": "a", "stream": True, "temperature": 0}
        assert b"was lost" in (await made.post(asked, "/pooling")).body
        assert await lost(made, AfterLoss.API) == 1


@on_loop
async def test_a_sampled_chat_without_a_limit_ends_where_the_models_is_not_known() -> None:
    """A greedy one is answered again."""
    for temperature, result in ((1, AfterLoss.LENGTH), (0, AfterLoss.CONTINUED)):
        lives, path = Lives([-5, None]), "/v1/chat/completions"
        engines = [FakeEngine(lives.answer) for _ in range(2)]
        for engine in engines:
            engine.context = None
        async with bench([], engines, handoff="none", continuations=1) as made:
            reply = await made.post(CHAT | {"temperature": temperature}, path)
            assert await lost(made, result) == 1
            assert (b"was lost" in reply.body) == bool(temperature)
            assert temperature or merged(reply.body) == whole(path)
            assert not any(asked.get("return_token_ids") for asked in lives.asked)


@on_loop
async def test_what_a_parser_holds_back_is_asked_of_another_engine() -> None:
    tokens = [b"if", b" x", b" <", b" 5", b"."]
    lives, path = Lives([-4, None], tokens=tokens, tag="<tool>"), "/v1/chat/completions"
    async with router(lives) as made:
        for engine in made.decode:
            engine.detokenizes(lambda ids: text_of_ids(ids, tokens))
        reply = await made.post(CHAT, path)
        assert merged(reply.body) == merged(TokenModel("a", tokens).answer(CHAT))
        assert lives.asked[1]["prompt"] == [*PROMPT, 100, 101]


@on_loop
async def test_receipts_and_continuations_exclude_each_other() -> None:
    async with router(Lives([-5]), listening=Listening(receipts=True)) as made:
        assert b"was lost" in (await made.post(ASK)).body
        assert await lost(made, AfterLoss.RECEIPT) == 1


@on_loop
async def test_whole_answers_are_no_streams() -> None:
    async with router(Lives()) as made:
        reply = await made.post({name: ASK[name] for name in ("model", "prompt")})
        assert (reply.status, json.loads(reply.body)) == (200, {})


@on_loop
async def test_a_client_that_leaves_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    lives = Lives([-5, -5], HANG)
    async with router(lives, silence_s=0.5) as made:
        async with made.client.post(made.url + "/v1/completions", json=ASK) as answer:
            await answer.content.readany()
            await until(lambda: len(lives.asked) == 2)
        await until(lambda: sum(engine.dropped for engine in made.decode) == 2)
        assert await made.metric("in_flight", role="decode", upstream=made.decode[0].url) == 0


@on_loop
async def test_many_streams_go_on_at_once() -> None:
    """One of two engines dies in the middle of all of its streams."""
    async with router(Lives()) as made:
        gate, begun = asyncio.Event(), 0

        async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
            nonlocal begun
            stream = await begin_stream(request)
            events = list(TokenModel("a").events(body))
            for event in events[:6]:
                await stream.write(event)
            begun += 1
            await gate.wait()
            if engine is made.decode[0] and not isinstance(body["prompt"], list):
                assert request.transport is not None
                request.transport.close()
                return stream
            for event in events[6:]:
                await stream.write(event)
            return stream

        for engine in made.decode:
            engine.answer = answer
        asked = [ASK | {"user": f"{number}"} for number in range(24)]
        replies = [asyncio.ensure_future(made.post(body)) for body in asked]
        await until(lambda: begun == 24)
        gate.set()
        for reply in await asyncio.gather(*replies):
            assert merged(reply.body) == whole("/v1/completions")
        assert await lost(made, AfterLoss.CONTINUED) == 12
