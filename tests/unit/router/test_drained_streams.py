"""Routers whose decode engines are drained in mid-stream: streams go on elsewhere, and nobody
computes again what the drained engine has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.policy.leaving import AfterDrain
from kvconnect.router.requests import retries
from kvconnect.router.requests.continuation import AfterLoss
from tests.fakes.engine import (
    Admin,
    FakeEngine,
    Handler,
    administered,
    begin_stream,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)
from tests.fakes.token_model import PROMPT, TOKENS, TokenModel, merged, text_of_ids

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 18, "stream": True, "temperature": 0}
ASK |= {"stream_options": {"include_usage": True}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
PATHS = {"/v1/completions": ASK, "/v1/chat/completions": CHAT}
EVERY = pytest.mark.parametrize("path", PATHS)
PLAIN = {"mode": "plain", "reason": "unified"}
HANDED = {"mode": "pull", "reason": "drained"}
STAYED = {"mode": "plain", "reason": "drained"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@dataclass
class Decoding:
    """Engines that stream an answer to a client's prompt until after so many events, then wait for
    the gate. What goes on after a prompt of token ids does not wait, unless ``again``."""

    pause: int = 6
    able: bool = True
    """They send KV."""
    again: bool = False
    each: int = 1
    ids: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    paused: list[FakeEngine] = field(default_factory=list)

    async def answer(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if not body.get("stream"):
            assert body["max_tokens"] == 1
            return await (prefills if self.able else COMPUTES)(engine, request, body)
        stream = await begin_stream(request)
        events = list(TokenModel("a", each=self.each, ids=self.ids).events(body))
        waits = self.again or not isinstance(body.get("prompt"), list)
        for number, event in enumerate(events):
            if number == self.pause and waits:
                self.paused.append(engine)
                await self.gate.wait()
            await stream.write(event)
        return stream


COMPUTES = says(200, {"choices": [{"text": "x"}]})


@asynccontextmanager
async def fleet(
    answer: Handler,
    *,
    engines: int = 2,
    handoff: Any = "none",
    continuations: int = 1,
) -> AsyncIterator[Admin]:
    prefill = [] if handoff == "none" else [FakeEngine(prefills), FakeEngine(prefills)]
    decode = [FakeEngine(answer) for _ in range(engines)]
    for engine in (*prefill, *decode):
        engine.detokenizes(text_of_ids)
    made = administered(prefill, decode, handoff=handoff, continuations=continuations)
    async with made as admin:
        yield admin


def whole(path: str = "/v1/completions", **more: Any) -> list[Any]:
    return merged(TokenModel("a").answer(PATHS[path] | more))


async def drain(admin: Admin, engine: FakeEngine) -> None:
    status, said = await admin.ask("POST", {"role": "decode", "url": engine.url}, "/drain")
    assert (status, said["draining"]) == (200, True)


async def begin(
    admin: Admin, made: Decoding, body: dict[str, Any] = ASK, path: str = "/v1/completions"
) -> tuple[asyncio.Task[Any], FakeEngine, FakeEngine]:
    """Return an answer that is under way, its engine, and another one."""
    count = len(made.paused)
    reply = asyncio.create_task(admin.router.post(body, path))
    await until(lambda: len(made.paused) > count)
    first = made.paused[-1]
    return reply, first, next(each for each in admin.router.decode if each is not first)


async def results(admin: Admin) -> dict[str, float]:
    """Return what became of streams, apart from zeros."""
    text = (await admin.router.get("/metrics")).body.decode()
    found = re.findall(r'kvconnect_router_(lost|drained)_streams_total{result="(\w+)"} (\S+)', text)
    assert len(found) == len(AfterLoss) + len(AfterDrain)
    names = {"lost": "lost: ", "drained": ""}
    return {names[kind] + result: float(count) for kind, result, count in found if float(count)}


@EVERY
@pytest.mark.parametrize("handoff", ["none", "push", "pull"])
@on_loop
async def test_the_drained_engine_hands_its_stream_off(path: str, handoff: str) -> None:
    made = Decoding()
    async with fleet(made.answer, handoff=handoff) as admin:
        reply, first, other = await begin(admin, made, PATHS[path], path)
        computed = [len(p.asked) for p in admin.router.prefill]
        await drain(admin, first)
        assert merged((await reply).body) == whole(path)
        assert [len(p.asked) for p in admin.router.prefill] == computed, "nobody else is asked"
        # A chat's first event has no token; the sixth has one that ends within a character.
        generated = [100 + at for at in range(5 if "chat" in path else 6)]
        begun, asked = first.asked
        (then,) = other.asked
        assert begun["stream"] and (asked["stream"], asked["max_tokens"]) == (False, 1)
        assert asked["prompt"] == then["prompt"] == [*PROMPT, *generated]
        params = asked["kv_transfer_params"]
        assert params["do_remote_decode"] and params["kvconnect"] == {"if_able": True}
        ticket = then["kv_transfer_params"]
        assert ticket["kvconnect_ticket"] == f"ticket {params['transfer_id']}"
        assert then["max_tokens"] == (12 if path == "/v1/completions" else 4096 - len(PROMPT) - 5)
        await until(lambda: first.dropped == 1)
        assert await results(admin) == {"handed_off": 1}
        assert await admin.router.metric("requests_total", **HANDED, outcome="continued") == 1
        calls = {"role": "decode", "upstream": first.url}
        name = "upstream_requests_total"
        for outcome, count in {"ok": 1, "cancelled": 1, "error": 0, "unreachable": 0}.items():
            assert await admin.router.metric(name, **calls, outcome=outcome) == count
        assert await admin.router.metric("in_flight", **calls) == 0


@pytest.mark.parametrize("each", [1, 3])
@EVERY
@on_loop
async def test_after_each_event(path: str, each: int) -> None:
    count = len(list(TokenModel("a", each=each).events(PATHS[path] | {"return_token_ids": True})))
    begins = 2 if "chat" in path else 1  # before it, nothing is sent on
    ends = count - (1 if "chat" in path else 2)  # after the last token, there is no need to leave
    gone = left = stays = 0
    async with fleet(Decoding().answer) as admin:
        for pause in range(begins, count):
            made = Decoding(pause, each=each)
            for engine in admin.router.decode:
                engine.answer = made.answer
            reply, first, _ = await begin(admin, made, PATHS[path] | {"user": f"{pause}"}, path)
            await drain(admin, first)
            left, stays = left + (pause < ends), stays + (pause >= ends)
            await until(partial(decided, admin, left, stays))
            made.gate.set()
            assert merged((await reply).body) == whole(path), pause
            gone += 1
            await admin.ask("POST", {"role": "decode", "worker": first.url})
            await until(partial(only_one_is_up_at, admin, first))
    assert left and stays and gone == left + stays


async def decided(admin: Admin, left: int, stays: int) -> bool:
    """Whether so many streams have been handed off, and so many stayed."""
    want = {"handed_off": left, "stayed": stays}
    return await results(admin) == {result: count for result, count in want.items() if count}


async def only_one_is_up_at(admin: Admin, engine: FakeEngine) -> bool:
    found = await admin.of(engine.url)
    return [each["up"] and not each["draining"] and bool(each["models"]) for each in found] == [
        True
    ]


@on_loop
async def test_many_streams_leave_an_engine_that_is_removed_then() -> None:
    made = Decoding()
    async with fleet(made.answer) as admin:
        bodies = [ASK | {"user": f"{number}"} for number in range(24)]
        replies = [asyncio.create_task(admin.router.post(body)) for body in bodies]
        await until(lambda: len(made.paused) == 24)
        first, other = admin.router.decode
        status, _ = await admin.ask("DELETE", {"role": "decode", "url": first.url})
        assert status == 200

        async def gone() -> bool:
            return not await admin.of(first.url)

        await until(gone)
        made.gate.set()
        for reply in await asyncio.gather(*replies):
            assert merged(reply.body) == whole()
        assert await results(admin) == {"handed_off": 12}
        assert [sum(not body["stream"] for body in e.asked) for e in (first, other)] == [12, 0]


@on_loop
async def test_an_engine_is_there_until_its_blocks_have_arrived() -> None:
    """Who removes it may stop it then."""
    made, arrives = Decoding(), asyncio.Event()

    async def slowly(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        if isinstance(body["prompt"], list) and body.get("stream"):
            made.paused.append(engine)
            await arrives.wait()
        return await made.answer(engine, request, body)

    async with fleet(slowly) as admin:
        reply, first, other = await begin(admin, made)
        await admin.ask("DELETE", {"role": "decode", "url": first.url})
        await until(lambda: made.paused[-1] is other)
        assert [each["requests"] for each in await admin.of(first.url)] == [1]
        arrives.set()
        assert merged((await reply).body) == whole()

        async def gone() -> bool:
            return not await admin.of(first.url)

        await until(gone)


@EVERY
@pytest.mark.parametrize("unified", [True, False])
@on_loop
async def test_where_it_cannot_send_another_engine_computes(path: str, unified: bool) -> None:
    made = Decoding(able=False)
    async with fleet(made.answer, handoff="none" if unified else "push") as admin:
        reply, first, other = await begin(admin, made, PATHS[path], path)
        await drain(admin, first)
        assert merged((await reply).body) == whole(path)
        assert await results(admin) == {"computed": 1}
        then = other.asked[-1]
        params = then.get("kv_transfer_params", {})
        assert bool(params.get("do_remote_prefill")) is not unified
        asked = [[body.get("prompt") for body in p.asked] for p in admin.router.prefill]
        # The one that has computed the prompt computes the rest, too.
        assert unified or [PATHS[path].get("prompt"), then["prompt"]] in asked
        for role in ("prefill", "decode"):
            assert await admin.router.metric("retries_total", role=role, cause="error") == 0
        assert [e["trusted"] for e in await admin.listed()] == [True] * len(await admin.listed())


@pytest.mark.parametrize("why", ["no flag", "grammar", "again", "no ids", "no other engine"])
@on_loop
async def test_what_cannot_leave_stays(why: str) -> None:
    """Controls: without the flag nobody is cut; nor is a stream that could not go on, or that
    another engine would have to answer again."""
    made = Decoding(ids=why != "no ids")
    engines = 1 if why == "no other engine" else 2
    format = {"response_format": {"type": "json_object"}} if why in ("grammar", "again") else {}
    body = ASK | format | {"temperature": 1 if why == "grammar" else 0}
    flag = 0 if why == "no flag" else 1
    async with fleet(made.answer, continuations=flag, engines=engines) as admin:
        reply = asyncio.create_task(admin.router.post(body))
        await until(lambda: made.paused)
        (first,) = made.paused
        await drain(admin, first)
        journaled = why in ("again", "no ids", "no other engine")
        if journaled:
            await until(lambda: stayed(admin))
        made.gate.set()
        assert merged((await reply).body) == whole()
        assert sum(len(engine.asked) for engine in admin.router.decode) == 1
        assert first.dropped == 0
        assert await results(admin) == ({"stayed": 1} if journaled else {})
        assert await admin.router.metric("requests_total", **PLAIN, outcome="ok") == 1


@on_loop
async def test_a_chat_stays_if_nobody_says_where_its_text_ends() -> None:
    made, path = Decoding(), "/v1/chat/completions"
    async with fleet(made.answer) as admin:
        for engine in admin.router.decode:
            engine.extra["/detokenize"] = says(404, {})
        reply, first, other = await begin(admin, made, CHAT | {"temperature": 1}, path)
        await drain(admin, first)
        await until(lambda: stayed(admin))
        made.gate.set()
        assert merged((await reply).body) == whole(path)
        assert not other.asked and first.dropped == 0


async def stayed(admin: Admin) -> bool:
    return await admin.router.metric("drained_streams_total", result="stayed") == 1


@pytest.mark.parametrize("status", [400, 500])
@on_loop
async def test_if_nobody_else_takes_it_the_drained_engine_goes_on(status: int) -> None:
    made = Decoding()
    refusing = says(status, {"error": {"message": "no", "code": status}})
    async with fleet(made.answer) as admin:
        reply, first, other = await begin(admin, made)
        other.answer = refusing
        await drain(admin, first)
        assert merged((await reply).body) == whole()
        assert await results(admin) == {"stayed": 1}
        assert await admin.router.metric("requests_total", **STAYED, outcome="continued") == 1
        # Handed off to the other one, then computed by it, then at home; the drain is known.
        assert [body["stream"] for body in first.asked] == [True, False, True]
        assert len(other.asked) == 2 and first.dropped == 1


@on_loop
async def test_one_that_dies_instead_of_handing_off_is_lost() -> None:
    made = Decoding()

    async def dies(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        if body.get("stream"):
            return await made.answer(engine, request, body)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with fleet(dies, handoff="push") as admin:
        reply, first, _ = await begin(admin, made)
        await drain(admin, first)
        assert merged((await reply).body) == whole()
        assert await results(admin) == {"computed": 1}


@on_loop
async def test_drains_are_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use up neither ``--continue`` nor the budget of retries."""
    monkeypatch.setattr(retries, "LEAST_RETRIES", -100)
    made = Decoding(pause=4, again=True)
    async with fleet(made.answer, engines=4) as admin:
        reply, *_ = await begin(admin, made)
        for count in (2, 3, 4):
            await drain(admin, made.paused[-1])
            await until(lambda count=count: len(made.paused) == count or reply.done())
        assert not reply.done() and len(set(made.paused)) == 4
        made.gate.set()
        assert merged((await reply).body) == whole()
        assert await results(admin) == {"handed_off": 3}
        for reason in retries.Withheld:
            assert await admin.router.metric("withheld_retries_total", reason=reason.value) == 0


@on_loop
async def test_after_a_drain_a_loss_is_one_and_none_is_handed_off() -> None:
    made = Decoding(again=True)
    async with fleet(made.answer, engines=3) as admin:
        reply, first, _ = await begin(admin, made)
        await drain(admin, first)
        await until(lambda: len(made.paused) == 2)
        second = made.paused[-1]
        made.again = False
        await second.stop()
        assert merged((await reply).body) == whole()
        assert await results(admin) == {"handed_off": 1, "lost: continued": 1}
        assert sum(not body["stream"] for body in first.asked) == 1


@on_loop
async def test_who_is_drained_before_the_first_token_is_left_after_it() -> None:
    made, asked, may_begin = Decoding(), list[FakeEngine](), asyncio.Event()

    async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        if not asked:
            asked.append(engine)
            await may_begin.wait()
        return await made.answer(engine, request, body)

    async with fleet(late) as admin:
        reply = asyncio.create_task(admin.router.post(ASK))
        await until(lambda: asked)
        await drain(admin, asked[0])
        may_begin.set()
        assert merged((await reply).body) == whole()
        assert await results(admin) == {"handed_off": 1}


@on_loop
async def test_a_client_that_leaves_meanwhile_ends_all() -> None:
    made = Decoding(again=True)
    async with fleet(made.answer) as admin:
        reply, first, other = await begin(admin, made)
        await drain(admin, first)
        await until(lambda: len(made.paused) == 2)
        reply.cancel()
        await until(lambda: first.dropped + other.dropped == 2)

        async def idle() -> bool:
            return all(each["requests"] == 0 for each in await admin.listed())

        await until(idle)


@on_loop
async def test_streams_leave_an_engine_that_switches_its_role() -> None:
    made = Decoding()

    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        probe = body.get("max_tokens") == 1 and not isinstance(body.get("prompt"), str)
        wanted = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if probe and not wanted:  # of the decode engine
            cached = {"usage": {"prompt_tokens_details": {"cached_tokens": 127}}, "choices": []}
            return web.json_response(cached)
        return await made.answer(engine, request, body)

    async with fleet(answer, handoff="pull") as admin:
        reply, first, _ = await begin(admin, made)
        named = {"role": "decode", "url": first.url}
        status, said = await admin.ask("POST", named, "/switch")
        assert (status, said.get("role")) == (200, "prefill"), said
        assert merged((await reply).body) == whole()
        assert await results(admin) == {"handed_off": 1}


def test_the_script_has_a_token_within_a_character() -> None:
    """On which the cases above rely."""
    assert any(token.decode(errors="replace").endswith("\ufffd") for token in TOKENS)
