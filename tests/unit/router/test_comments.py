"""Comments on silent streams (``--comment-after``)."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from kvconnect.errors import ConfigError
from kvconnect.router.http.http_request import HttpRequest, RequestContent
from kvconnect.router.http.http_response import ResponseHeads
from kvconnect.router.http.reply import Reply
from kvconnect.router.http.response_writer import ResponseWriter
from kvconnect.router.options import Listening, RouterLimits
from tests.fakes.engine import (
    ASK,
    DONE,
    EVENTS,
    Bench,
    FakeEngine,
    begin_stream,
    bench,
    decodes,
    on_loop,
    prefills,
    says,
    until,
)

COMMENT = b": keep-alive\n\n"
STREAM = ASK | {"stream": True}
OFTEN = {"comment_s": 0.05}


class Waits:
    """An engine that waits before the first event, and in mid-event and between events after it,
    until it may go on."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces or (*EVENTS, DONE)
        self.goes = [asyncio.Event() for _ in self.pieces]

    async def __call__(
        self, engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = await begin_stream(request)
        for piece, go in zip(self.pieces, self.goes, strict=True):
            await go.wait()
            await stream.write(piece)
        return stream


async def read_until(answer: Any, seen: bytearray, what: bytes, times: int) -> None:
    """Read on until something has come so often."""
    while seen.count(what) < times:
        piece = await asyncio.wait_for(answer.content.readany(), 20)
        assert piece, f"ended with {seen!r}"
        seen += piece


async def streamed(router: Bench, waits: Waits, seen: bytearray) -> None:
    """Have a stream be silent before each of its pieces until two comments came."""
    async with router.client.post(router.url + "/v1/completions", json=STREAM) as answer:
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event")
        for number, go in enumerate(waits.goes, 1):
            await read_until(answer, seen, COMMENT, 2 * number)
            go.set()
            await read_until(answer, seen, waits.pieces[number - 1], 1)
        seen += await answer.read()


@pytest.mark.parametrize("relay", [True, False])
@on_loop
async def test_a_silent_stream_gets_comments_between_its_events(relay: bool) -> None:
    waits, seen = Waits(), bytearray()
    listening = Listening(relay=relay)
    async with bench(
        [FakeEngine(prefills)], [FakeEngine(waits)], listening=listening, **OFTEN
    ) as router:
        await streamed(router, waits, seen)
        assert bytes(seen).replace(COMMENT, b"") == b"".join(waits.pieces)
        labels = {"mode": "push", "reason": "default", "outcome": "ok"}
        assert await router.metric("requests_total", **labels) == 1


@on_loop
async def test_no_comment_in_mid_event() -> None:
    waits = Waits(EVENTS[0], EVENTS[1][:9], EVENTS[1][9:], DONE)
    seen = bytearray()
    async with (
        bench([FakeEngine(prefills)], [FakeEngine(waits)], **OFTEN) as router,
        router.client.post(router.url + "/v1/completions", json=STREAM) as answer,
    ):
        waits.goes[0].set()
        waits.goes[1].set()
        await read_until(answer, seen, EVENTS[1][:9], 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer.content.readany(), 0.3)
        for go in waits.goes:
            go.set()
        seen += await answer.read()
        assert bytes(seen).replace(COMMENT, b"") == b"".join(waits.pieces)


@on_loop
async def test_control_without_the_flag_and_for_other_answers_there_are_none() -> None:
    async def slowly(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.3)
        return await decodes(engine, request, body)

    async with bench([FakeEngine(prefills)], [FakeEngine(slowly)]) as router:
        assert COMMENT not in (await router.post(STREAM)).body
    async with bench([FakeEngine(prefills)], [FakeEngine(slowly)], **OFTEN) as router:
        assert json.loads((await router.post(ASK)).body)
        assert COMMENT in (await router.post(STREAM)).body


@on_loop
async def test_an_answer_that_is_never_a_stream_has_none() -> None:
    async def slowly(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.3)
        return web.json_response({"data": []})

    d = FakeEngine(decodes)
    d.extra["/v1/embeddings"] = slowly
    async with bench([FakeEngine(prefills)], [d], **OFTEN) as router:
        answer = await router.post({"input": "a", "stream": True}, "/v1/embeddings")
        assert (answer.status, json.loads(answer.body)) == (200, {"data": []})


@on_loop
async def test_none_follows_a_whole_answer_that_its_client_reads_slowly() -> None:
    """It would be the answer to the connection's next request."""
    whole = {"choices": [], "filler": "a" * 900_000}
    async with bench([FakeEngine(prefills)], [FakeEngine(says(200, whole))], **OFTEN) as router:
        port, body = URL(router.url).port, json.dumps(STREAM).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        client.sendall((head % len(body) + body) * 8)  # more than the system takes
        await asyncio.sleep(0.5)  # longer than a comment waits
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        client.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        reader, writer = await asyncio.open_connection(sock=client)
        got = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert len(re.findall(rb"HTTP/1\.1 \d\d\d ", got)) == 9, got[-300:]
        assert got.endswith(b'{"status": "ok"}') or got.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    ("fails", "want"),
    [
        (says(500, {"error": {"message": "no memory"}}), "no memory"),
        (says(400, {"error": {"message": "too long"}}), "too long"),
        (says(200, {"choices": []}), "without a stream"),
    ],
)
@on_loop
async def test_what_fails_after_a_comment_is_an_event(fails: Any, want: str) -> None:
    go = asyncio.Event()

    async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await go.wait()
        return await fails(engine, request, body)

    seen = bytearray()
    async with (
        bench([FakeEngine(prefills)], [FakeEngine(late)], **OFTEN) as router,
        router.client.post(router.url + "/v1/completions", json=STREAM) as answer,
    ):
        await read_until(answer, seen, COMMENT, 1)
        go.set()
        seen += await answer.read()
        events = re.findall(rb"data: (.*)\n\n", seen)
        assert want in json.loads(events[0])["error"]["message"]


@on_loop
async def test_another_engine_is_tried_after_a_comment() -> None:
    go = asyncio.Event()

    async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await go.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    seen, whole = bytearray(), b""
    ds = [FakeEngine(late), FakeEngine(decodes)]
    async with bench([FakeEngine(prefills)], ds, decode_policy="round_robin", **OFTEN) as router:
        for _ in range(2):  # one of two begins at the engine that is lost
            url = router.url + "/v1/completions"
            async with router.client.post(url, json=STREAM) as answer:
                if not ds[0].asked:
                    whole = await answer.read()
                    continue
                await until(lambda: len(ds[0].asked) == 1)
                await read_until(answer, seen, COMMENT, 1)
                go.set()
                seen += await answer.read()
                break
        assert bytes(seen).replace(COMMENT, b"") == (whole or (await router.post(STREAM)).body)


class FakeTransport:
    """A client's transport that notes what is written."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class FakeRelayed:
    """A stream in the relay. When it is stopped, the next one begins, if there is one."""

    heard = 0.0

    def __init__(self, reply: Any, following: FakeRelayed | None = None) -> None:
        self.reply, self.following = reply, following

    def stop(self) -> None:
        self.reply._relayed = self.following


@pytest.mark.parametrize("begins_again", [True, False])
def test_none_is_sent_while_the_relay_writes(begins_again: bool) -> None:
    """What came back with a stream may be sent at once, and the relay go on after it."""
    client: Any = FakeTransport()
    request = HttpRequest("POST", "/v1/completions", {}, RequestContent(lambda: None))
    request.writer = ResponseWriter(client, ResponseHeads())
    reply: Any = Reply(request, named_events=False, show_hits=False, relay=None)
    reply.begin("text/event-stream", {})
    reply._relayed = FakeRelayed(reply, FakeRelayed(reply) if begins_again else None)
    reply._send_comment()
    assert (COMMENT in client.sent) == (not begins_again)


def test_the_limits_of_the_flag() -> None:
    assert RouterLimits().comment_s == 0.0
    for wrong in (-1.0, 90_000.0, float("nan")):
        with pytest.raises(ConfigError, match="comment-after"):
            RouterLimits(comment_s=wrong)
