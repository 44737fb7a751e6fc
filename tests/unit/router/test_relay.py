"""Streams through the relay: bytes, ends, errors and waits are those of the path in Python."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Never

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.connections.relay import make_relay
from kvconnect.router.options import Listening
from tests.fakes.engine import (
    ASK,
    DONE,
    EVENTS,
    Bench,
    FakeEngine,
    begin_stream,
    bench,
    on_loop,
    prefills,
    until,
)
from tests.fakes.event_publisher import publisher
from tests.unit.router.conftest import Seen, note_streams

STREAM = ASK | {"stream": True}
LONG = b"data: " + b"x" * 2000 + b"\n\n"


@asynccontextmanager
async def router(answer: Any, *, relay: bool = True, **options: Any) -> AsyncIterator[Bench]:
    listening = options.pop("listening", Listening(relay=relay))
    engines = [FakeEngine(prefills)], [FakeEngine(answer)]
    async with bench(*engines, listening=listening, **options) as made:
        yield made


def event(number: int) -> bytes:
    return b'data: {"choices":[{"text":"%d"}]}\n\n' % number


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def in_pieces(pieces: Sequence[bytes], end: bytes = b"", seen: Seen | None = None) -> Any:
    """Return an engine that sends a first event, then pieces of a chunked body as they are. With
    ``end`` it sends this instead of a last chunk, and closes the connection; with ``seen`` it waits
    until the stream is left to a relay."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(event(0))
        if seen is not None:
            await until(lambda: seen.started > 0)
        transport = request.transport
        assert transport is not None
        for piece in pieces:
            transport.write(piece)
            for _ in range(4):  # so that others run
                await asyncio.sleep(0)
        if end:
            transport.write(end)
            transport.close()
            return stream
        await stream.write(DONE)
        return stream

    return answer


async def answered(answer: Any, *, relay: bool, **options: Any) -> tuple[int, bytes]:
    async with router(answer, relay=relay, **options) as made:
        reply = await made.post(STREAM)
    return reply.status, reply.body


def cut(body: bytes, cuts: Sequence[int]) -> list[bytes]:
    at = [0, *sorted(each % (len(body) + 1) for each in cuts), len(body)]
    return [body[a:b] for a, b in itertools.pairwise(at) if a < b]


@on_loop
async def test_a_stream_goes_through_the_relay(seen: Seen) -> None:
    pieces = [chunk(event(number)) for number in range(1, 20)]
    expected = b"".join(map(event, range(20))) + DONE
    assert await answered(in_pieces(pieces, seen=seen), relay=True) == (200, expected)
    assert seen.chunks >= 19
    assert sum(each.nbytes for each in seen) >= sum(len(event(n)) for n in range(1, 20))


@on_loop
async def test_without_it_the_bytes_are_the_same(seen: Seen) -> None:
    pieces = [chunk(event(number)) for number in range(1, 20)]
    expected = b"".join(map(event, range(20))) + DONE
    assert await answered(in_pieces(pieces), relay=False) == (200, expected)
    assert not seen


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.lists(st.integers(0, 10_000), max_size=10),
)
def test_every_split_is_the_same_as_in_python(sizes: list[int], cuts: list[int]) -> None:
    contents = [b"data: " + b"x" * size + b"\n\n" for size in sizes]
    body = b"".join(map(chunk, contents))

    @on_loop
    async def run() -> None:
        expected = event(0) + b"".join(contents) + DONE
        with pytest.MonkeyPatch.context() as patch:
            seen = note_streams(patch)
            answer = in_pieces(cut(body, cuts), seen=seen)
            assert await answered(answer, relay=True) == (200, expected)
        assert seen, "the relay took part"

    run()


@pytest.mark.parametrize("end", [b"5\r\nhe", b"zz\r\n", b"5;a\r\nhello\r\nxx", b"\x00"])
@on_loop
async def test_what_breaks_in_the_relay_ends_as_in_python(end: bytes, seen: Seen) -> None:
    pieces = [chunk(event(number)) for number in range(1, 9)]
    relayed = await answered(in_pieces(pieces, end, seen), relay=True)
    assert relayed == await answered(in_pieces(pieces, end), relay=False)
    assert b"error" in relayed[1]
    assert seen.chunks > 0


@on_loop
async def test_a_client_that_leaves_ends_the_engines_request(seen: Seen) -> None:
    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(EVENTS[0])
        await until(lambda: seen.started > 0)
        while True:
            await stream.write(EVENTS[0])
            await asyncio.sleep(0.001)

    async with router(answer) as made:
        async with made.client.post(made.url + "/v1/completions", json=STREAM) as reply:
            for _ in range(50):
                await reply.content.readline()
        await until(lambda: made.decode[0].dropped == 1)
        assert await made.metric("in_flight", role="decode", upstream=made.decode[0].url) == 0
    assert seen.chunks > 0


@on_loop
async def test_an_engine_that_falls_silent_in_the_relay_is_given_up(seen: Seen) -> None:
    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for number in range(5):
            await stream.write(event(number))
            await asyncio.sleep(0.001)
        await asyncio.Event().wait()
        raise AssertionError

    async with router(answer, silence_s=0.2) as made:
        reply = await made.post(STREAM)
        assert reply.body.startswith(b"".join(map(event, range(5))))
        assert b"sent nothing for 0.2 seconds" in reply.body or b"was lost" in reply.body
    assert seen[-1].reason == "removed"


@on_loop
async def test_what_passes_in_the_relay_is_heard(seen: Seen) -> None:
    """A stream that takes longer than the silence that is allowed, without any that long. The
    control is the test above."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for number in range(40):
            await stream.write(event(number))
            await asyncio.sleep(0.05)
        await stream.write(DONE)
        return stream

    async with router(answer, silence_s=1.0) as made:
        reply = await made.post(STREAM)
    assert reply.body == b"".join(map(event, range(40))) + DONE
    assert seen.chunks > 30


@on_loop
async def test_a_client_that_does_not_read_holds_the_engine_back(seen: Seen) -> None:
    """What it does not take stays in the sockets, at most 72 MiB, and the rest in the engine."""
    sent = 0

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        nonlocal sent
        stream = await begin_stream(request)
        await stream.write(event(0))
        await until(lambda: seen.started > 0)
        while sent < 60_000:
            await stream.write(LONG)
            sent += 1
            await asyncio.sleep(0)
        await stream.write(DONE)
        return stream

    async with router(answer) as made:
        timeout = aiohttp.ClientTimeout(total=120)
        async with made.client.post(
            made.url + "/v1/completions", json=STREAM, timeout=timeout
        ) as reply:
            await until(lambda: sent > 0)
            before = -1
            while before != sent:  # too early, it would have sent less
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 60_000, "the engine waits"
            body = await reply.read()
        assert body == event(0) + LONG * 60_000 + DONE
    assert seen


@on_loop
async def test_a_stream_that_was_taken_back_at_once_is_relayed_again(seen: Seen) -> None:
    """A comment takes it back before the relay had anything to pass on."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(event(0))
        await until(lambda: any(each.reason == "removed" for each in seen))
        await stream.write(event(1))
        await until(lambda: seen.started > 1)
        await stream.write(DONE)
        return stream

    async with router(answer, comment_s=0.05) as made:
        reply = await made.post(STREAM)
    assert reply.body.replace(b": keep-alive\n\n", b"") == event(0) + event(1) + DONE
    assert seen[0].chunks == 0


@on_loop
async def test_a_receipt_comes_before_the_end(seen: Seen) -> None:
    """With receipts, the last event waits for them; what passes before it passes in the relay."""
    receipt = {"prompt": 5}

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        await stream.write(event(0))
        await until(lambda: seen.started > 0)
        for number in range(1, 20):
            await stream.write(event(number))
        nonce = body["kv_transfer_params"]["kvconnect"]["receipt"]
        await events.publish({"type": "KVConnectReceipt", "nonce": nonce, "receipt": receipt})
        await stream.write(DONE)
        return stream

    engine = FakeEngine(answer)
    async with publisher() as events:
        engine.settings = f",events={events.port}"
        async with bench([], [engine], listening=Listening(receipts=True), handoff="none") as made:

            async def heard() -> bool:
                await events.publish()
                labels = {"role": "decode", "upstream": engine.url, "outcome": "ok"}
                return await made.metric("kv_events_total", **labels) > 0

            await until(heard)
            body = (await made.post(STREAM)).body
    tokens = b"".join(map(event, range(20)))
    assert body.startswith(tokens) and body.endswith(DONE)
    told = json.loads(body.removeprefix(tokens + b"data: ").removesuffix(DONE))
    assert told["kv_transfer_params"] == {"kvconnect": {"receipt": receipt}}
    assert seen.chunks >= 19


@on_loop
async def test_http_1_0_is_not_relayed(seen: Seen) -> None:
    async with router(in_pieces([chunk(event(1))] * 9)) as made:
        host, port = made.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model":"tiny","prompt":"a","stream":true}'
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        answer = await reader.read()
        writer.close()
    assert answer.endswith(event(1) + DONE)
    assert not seen


@on_loop
async def test_streams_at_the_same_time_keep_their_bytes_apart(seen: Seen) -> None:
    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for number in range(50):
            await stream.write(event(int(body["prompt"]) * 1000 + number))
            await asyncio.sleep(0)
        await stream.write(DONE)
        return stream

    async with router(answer) as made:
        asked = [made.post(STREAM | {"prompt": str(number)}) for number in range(20)]
        replies = await asyncio.gather(*asked)
    for number, reply in enumerate(replies):
        events = (event(number * 1000 + each) for each in range(50))
        assert reply.body == b"".join(events) + DONE
    assert seen


def test_where_the_extension_is_not_built_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = make_relay(lambda _: None)
    assert relay is not None
    relay.close()
    monkeypatch.setitem(sys.modules, "kvconnect._native", None)
    monkeypatch.delattr("kvconnect._native", raising=False)
    assert make_relay(lambda _: None) is None


def test_where_the_relay_cannot_start_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(most_fd: int) -> Never:
        raise OSError(errno.EAGAIN, f"no thread, {most_fd}")

    monkeypatch.setattr("kvconnect._native.Relay", refused)
    assert make_relay(lambda _: None) is None
    assert "the relay cannot start: [Errno 11] no thread" in caplog.text
