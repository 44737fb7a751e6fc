"""Receipts of streamed answers: from an engine's KV events into the stream, before its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Refused
from kvconnect.router.fleet import kv_subscriber, receipts
from kvconnect.router.fleet.kv_events import PublishedReceipt, receipts_in
from kvconnect.router.fleet.receipts import OwedReceipts
from kvconnect.router.http.receipt_stream import ReceiptStream
from kvconnect.router.options import Listening
from kvconnect.router.policy.ranking import RankingPolicy
from tests.fakes.engine import (
    ASK,
    DONE,
    EVENTS,
    Bench,
    FakeEngine,
    begin_stream,
    bench,
    decodes,
    hurry,
    on_loop,
    until,
)
from tests.fakes.event_publisher import Publisher, batch, publisher

STREAM = ASK | {"stream": True}
RECEIPT = {"prompt": 5, "device": 3, "host": 1, "computed": 1, "waited_s": 0.5}
HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "tiny"}
FIRST = b"data: " + msgspec.json.encode(HEAD | {"choices": [{"text": "a"}]}) + b"\n\n"
TOLD: dict[str, Any] = {"listening": Listening(receipts=True), "handoff": "none"}
LONG_S = 1000.0  # longer than a test may take


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who does not wait at all, or for ever, is told apart: no test depends on time."""
    hurry(monkeypatch)
    monkeypatch.setattr(receipts, "WAIT_S", LONG_S)
    monkeypatch.setattr(kv_subscriber, "LOOK_S", 0.05)


def event(nonce: Any, receipt: Any = RECEIPT, **more: Any) -> dict[str, Any]:
    return {"type": "KVConnectReceipt", "nonce": nonce, "receipt": receipt} | more


def nonce_in(body: dict[str, Any]) -> Any:
    return body["kv_transfer_params"]["kvconnect"]["receipt"]


def with_receipt(head: dict[str, Any] = HEAD) -> bytes:
    chunk = {**head, "choices": [], "kv_transfer_params": {"kvconnect": {"receipt": RECEIPT}}}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


Before = Callable[[dict[str, Any]], Awaitable[None]]


def streams(before: Before) -> Any:
    """Streams, and calls ``before`` with the request's body before the end."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(FIRST)
        await stream.write(EVENTS[1])
        await before(body)
        await stream.write(DONE)
        return stream

    return answer


async def nothing(body: dict[str, Any]) -> None:
    """Publish nothing."""


@asynccontextmanager
async def fleet(
    *engines: FakeEngine, **options: Any
) -> AsyncIterator[tuple[Bench, list[Publisher]]]:
    """Run engines that publish KV events, and a router that hears them."""
    async with publisher() as one, publisher() as other:
        published = [one, other][: len(engines)]
        for engine, events in zip(engines, published, strict=True):
            engine.settings = f",events={events.port}"
        async with bench([], engines, **{**TOLD, **options}) as router:
            for engine, events in zip(engines, published, strict=True):

                async def heard(engine: FakeEngine = engine, events: Publisher = events) -> bool:
                    await events.publish()
                    return await outcome(router, engine, "ok") > 0

                await until(heard)
            yield router, published


async def outcome(router: Bench, engine: FakeEngine, name: str) -> float:
    labels = {"role": "decode", "upstream": engine.url, "outcome": name}
    return await router.metric("kv_events_total", **labels)


async def counted(router: Bench, engine: FakeEngine) -> list[float]:
    """How many streams had a receipt, and how many lacked it."""
    name, url = "stream_receipts_total", engine.url
    return [await router.metric(name, upstream=url, outcome=each) for each in ("ok", "missing")]


# In the stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("policy", [RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE])
@on_loop
async def test_the_receipt_stands_before_the_end(
    path: str, policy: RankingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = FakeEngine(decodes)
    async with fleet(d, decode_policy=policy) as (router, (events,)):
        d.answer = streams(lambda body: events.publish(event(nonce_in(body))))
        for _ in range(2):
            status, body, _ = await router.post(STREAM, path)
            assert (status, body) == (200, FIRST + EVENTS[1] + with_receipt() + DONE)
        first, second = (nonce_in(body) for body in d.asked)
        assert first != second
        assert await counted(router, d) == [2, 0]
        # Negative control: without the engine's word, nothing is said.
        monkeypatch.setattr(receipts, "WAIT_S", 0.0)
        d.answer = streams(nothing)
        assert (await router.post(STREAM, path)).body == FIRST + EVENTS[1] + DONE
        assert await counted(router, d) == [2, 1]


@on_loop
async def test_a_receipt_that_comes_after_the_stream_is_waited_for() -> None:
    d = FakeEngine(streams(nothing))
    async with (
        fleet(d) as (router, (events,)),
        router.client.post(router.url + "/v1/completions", json=STREAM) as answer,
    ):
        tokens = FIRST + EVENTS[1]
        assert await answer.content.readexactly(len(tokens)) == tokens, "tokens are not held back"
        await events.publish(event(nonce_in(d.asked[0])))
        assert await answer.read() == with_receipt() + DONE


@on_loop
async def test_an_engine_that_publishes_none_delays_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = FakeEngine(streams(nothing))
    async with fleet(d) as (router, (events,)):
        monkeypatch.setattr(receipts, "WAIT_S", 0.0)
        assert (await router.post(STREAM)).body == FIRST + EVENTS[1] + DONE
        monkeypatch.setattr(receipts, "WAIT_S", LONG_S)  # what waits now never ends
        assert (await router.post(STREAM)).body == FIRST + EVENTS[1] + DONE
        assert await counted(router, d) == [0, 2]
        # It publishes again, though not in time: the next stream waits.
        heard = await outcome(router, d, "ok")
        await events.publish(event(nonce_in(d.asked[0])))

        async def more() -> bool:
            return await outcome(router, d, "ok") > heard

        await until(more)
        asked = asyncio.create_task(router.post(STREAM))
        await until(lambda: len(d.asked) == 3)
        await events.publish(event(nonce_in(d.asked[2])))
        assert (await asked).body == FIRST + EVENTS[1] + with_receipt() + DONE


@on_loop
async def test_what_another_engine_says_of_a_stream_is_not_believed() -> None:
    one, other = FakeEngine(decodes), FakeEngine(decodes)
    async with fleet(one, other) as (router, published):
        by_engine = dict(zip((one, other), published, strict=True))

        def tells(own: FakeEngine, foreign: FakeEngine) -> Before:
            async def before(body: dict[str, Any]) -> None:
                heard = await outcome(router, foreign, "ok")
                await by_engine[foreign].publish(event(nonce_in(body), {"prompt": 666}))
                while await outcome(router, foreign, "ok") == heard:
                    await asyncio.sleep(0.01)
                await by_engine[own].publish(event(nonce_in(body)))

            return before

        one.answer, other.answer = (
            streams(tells(each, next(e for e in by_engine if e is not each))) for each in by_engine
        )
        for _ in range(4):
            assert (await router.post(STREAM)).body == FIRST + EVENTS[1] + with_receipt() + DONE
        assert one.asked and other.asked


HOSTILE = [
    event("0" * 32),  # of nobody
    event(7),
    event(None),
    event("0" * 32, None),
    event("0" * 32, {"prompt": []}),
    event("0" * 32, {"prompt": {"deep": 1}}),
    event("0" * 32, {7: 7}),
    event("x" * 10_000),
    event("0" * 32, {"prompt": "x" * 10_000}),
    event("0" * 32, {str(n): n for n in range(1000)}),
    {"type": "KVConnectReceipt"},
    ["KVConnectReceipt", "0" * 32, RECEIPT],
]


@on_loop
async def test_bad_receipts_harm_nobody() -> None:
    d = FakeEngine(decodes)
    async with fleet(d) as (router, (events,)):

        async def before(body: dict[str, Any]) -> None:
            for bad in HOSTILE:
                await events.publish(bad)
            await events.publish(event(nonce_in(body), {"prompt": "x" * 10_000}))
            await events.publish(event(nonce_in(body)))
            await events.publish(event(nonce_in(body), {"prompt": 666}))  # it is said once

        d.answer = streams(before)
        for _ in range(2):
            assert (await router.post(STREAM)).body == FIRST + EVENTS[1] + with_receipt() + DONE
        assert await outcome(router, d, "refused") > 10
        assert await router.metric("task_failures_total", task="events") == 0


@on_loop
async def test_a_client_that_leaves_is_not_waited_for() -> None:
    d = FakeEngine(streams(nothing))
    async with fleet(d) as (router, (events,)):
        async with router.client.post(router.url + "/v1/completions", json=STREAM) as answer:
            await answer.content.readexactly(len(FIRST + EVENTS[1]))
            answer.close()

        async def idle() -> bool:
            return await router.metric("in_flight", role="decode", upstream=d.url) == 0

        await until(idle)
        d.answer = streams(lambda body: events.publish(event(nonce_in(body))))
        assert with_receipt() in (await router.post(STREAM)).body


@on_loop
async def test_a_stream_that_breaks_has_no_receipt() -> None:
    async def breaks(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(FIRST + DONE[:7])
        await events.publish(event(nonce_in(body)))
        assert request.transport is not None
        request.transport.close()
        return stream

    d = FakeEngine(breaks)
    async with fleet(d) as (router, (events,)):
        status, body, _ = await router.post(STREAM)
        assert status == 200 and body.startswith(FIRST) and body.endswith(DONE)
        assert b"was lost" in body and b"receipt" not in body
        assert await counted(router, d) == [0, 0]


@pytest.mark.parametrize(
    ("more", "path", "listening"),
    [
        ({}, "/v1/completions", Listening()),
        ({"stream": False}, "/v1/completions", Listening(receipts=True)),
        ({"n": 2}, "/v1/completions", Listening(receipts=True)),
        ({"prompt": ["a", "b"]}, "/v1/completions", Listening(receipts=True)),
        ({}, "/v1/responses", Listening(receipts=True)),
        ({}, "/v1/messages", Listening(receipts=True)),
    ],
)
@on_loop
async def test_other_answers_are_passed_on_as_before(
    more: dict[str, Any], path: str, listening: Listening
) -> None:
    d = FakeEngine(decodes)
    d.settings = ",events=9"
    async with bench([], [d], listening=listening, handoff="none") as router:
        status, body, _ = await router.post(STREAM | more, path)
        assert status == 200
        if more.get("stream", True):
            assert body == b"".join((*EVENTS, DONE))
        params = d.asked[0].get("kv_transfer_params")
        assert params == ({"kvconnect": {"receipt": True}} if listening.receipts else None)
        assert await counted(router, d) == [0, 0]


@on_loop
async def test_engines_without_events_are_asked_as_before() -> None:
    d = FakeEngine(decodes)
    async with bench([], [d], **TOLD) as router:
        assert (await router.post(STREAM)).body == b"".join((*EVENTS, DONE))
        assert nonce_in(d.asked[0]) is True


# Parts --------------------------------------------------------------------------------------------


class _Sink:
    """What a client gets; ``forwards`` says whether it takes chunks without a wait."""

    def __init__(self, forwards: bool = False) -> None:
        self.got, self.forwards, self.forwarded = b"", forwards, 0

    async def write(self, chunk: bytes) -> None:
        assert chunk
        self.got += chunk

    def forward(self, chunk: bytes) -> bool:
        if self.forwards:
            self.got += chunk
            self.forwarded += 1
        return self.forwards


def relayed(pieces: list[bytes], sink: Any, receipt: dict[str, Any] | None) -> Any:
    """Pass pieces on as the router does; return the receipt that was sent."""

    async def relay() -> Any:
        owed = OwedReceipts(lambda outcome: None)
        with owed.awaited() as awaited:
            if receipt is not None:
                owed.arrived(awaited.nonce, receipt)
            stream = ReceiptStream(sink, awaited)
            for number, piece in enumerate(pieces):
                if not number or not stream.forward(piece):
                    await stream.write(piece)
            return await stream.end()

    return asyncio.run(relay())


@given(
    texts=st.lists(st.sampled_from(["a", "data: [DONE]", "}", "d", "da"]), max_size=4),
    cuts=st.sets(st.integers(1, 400), max_size=12),
    forwards=st.booleans(),
    ends=st.sampled_from([DONE, b"", DONE[:9], DONE + b": bye\n\n", DONE[:-1]]),
)
def test_however_a_stream_is_cut_nothing_is_lost_and_the_end_is_last(
    texts: list[str], cuts: set[int], forwards: bool, ends: bytes
) -> None:
    chunks = (json.dumps({**HEAD, "choices": [{"text": text}]}) for text in texts)
    before = FIRST + b"".join(b"data: " + chunk.encode() + b"\n\n" for chunk in chunks)
    whole = before + ends
    places = [0, *sorted(cut + len(FIRST) for cut in cuts if cut + len(FIRST) < len(whole))]
    pieces = [whole[a:b] for a, b in zip(places, [*places[1:], len(whole)], strict=True)]
    sink = _Sink(forwards)
    told = relayed(pieces, sink, RECEIPT)
    assert told == (RECEIPT if ends == DONE else {})
    assert sink.got == (before + with_receipt() + DONE if ends == DONE else whole)


def test_tokens_take_the_fast_path() -> None:
    sink = _Sink(forwards=True)
    relayed([FIRST, *EVENTS, DONE], sink, RECEIPT)
    assert sink.forwarded == len(EVENTS)


def test_the_fast_path_does_not_overtake_what_is_held_back() -> None:
    sink = _Sink(forwards=True)
    relayed([FIRST, EVENTS[0][:3], EVENTS[0][3:], EVENTS[1], DONE], sink, RECEIPT)
    assert sink.got == FIRST + EVENTS[0] + EVENTS[1] + with_receipt() + DONE
    assert sink.forwarded == 1


@pytest.mark.parametrize("beginning", [b"", b": ping\n\n", b"data: {}\n\n", b"data: [1\n\n"])
def test_a_stream_whose_chunks_have_no_name_still_has_its_receipt(beginning: bytes) -> None:
    sink = _Sink()
    relayed([beginning + EVENTS[0], DONE], sink, RECEIPT)
    assert sink.got == beginning + EVENTS[0] + with_receipt({}) + DONE


@pytest.mark.parametrize("bad", HOSTILE[1:-1])
def test_a_bad_receipt_is_refused(bad: Any) -> None:
    with pytest.raises(Refused):
        list(receipts_in(batch(event("1" * 32), bad)))
    other = {"type": "BlockRemoved", "block_hashes": [1]}
    found = list(receipts_in(batch(other, event("1" * 32, new_field=[]), other)))
    assert found == [PublishedReceipt("1" * 32, RECEIPT)]
