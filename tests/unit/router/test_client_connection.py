"""Connections of clients over loopback, with handlers of these tests in place of the router's."""

from __future__ import annotations

import asyncio
import re
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.router.http import client_connection, queued_requests
from kvconnect.router.http.client_connection import ClientConnection, ClientConnections
from kvconnect.router.http.connection_limits import ConnectionLimits
from kvconnect.router.http.http_request import HttpError, HttpRequest
from kvconnect.router.http.http_response import HttpResponse
from kvconnect.router.http.response_writer import ResponseWriter
from tests.fakes.engine import on_loop, until

CLOSE = b"Connection: close\r\n"
GET = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"
TEXT = {"Content-Type": "text/plain"}
STREAM = {"Content-Type": "text/event-stream"}


@dataclass
class World:
    """A listener. ``seen``: method, path and body of each request, in order. ``hold``: answers wait
    for it."""

    port: int = 0
    seen: list[tuple[str, str, bytes]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    hold: asyncio.Event | None = None
    connections: ClientConnections = field(init=False)

    async def handle(self, request: HttpRequest) -> Any:
        """Answer by path."""
        if request.path == "/refused":
            raise HttpError(413, "too much")
        if request.path == "/fails":
            raise RuntimeError("a defect")
        if request.path == "/split":
            return HttpResponse(200, b"", {"X-A": "a\r\nX-Evil: b"})
        body = b""
        while piece := await request.content.readany():
            body += piece
        self.seen.append((request.method, request.path, body))
        if request.path.startswith("/stream"):
            stream = request.writer.begin(request, dict(STREAM))
            await stream.write(b"data: 1\n\n")
            if request.path == "/stream/fails":
                raise RuntimeError("a defect")
            await stream.end(b"data: 2\n\n")
            return None
        if self.hold is not None:
            await self.hold.wait()
        return HttpResponse(200, b"%d of %b" % (len(self.seen), body[:20]), dict(TEXT))

    async def ask(self, *sent: bytes, until_closed: bool = False) -> bytes:
        """Send pieces on a new connection; return what comes back until it is closed, or nothing
        more comes for a while."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        got = b""
        try:
            for piece in sent:
                writer.write(piece)
                await asyncio.sleep(0)
            while True:
                wait_s = 20.0 if until_closed else 0.15
                piece = await asyncio.wait_for(reader.read(65536), wait_s)
                if not piece:
                    return got
                got += piece
        except TimeoutError:
            assert not until_closed, got
            return got
        finally:
            writer.close()


@asynccontextmanager
async def world(idle_s: float = 60.0, memory: int = 2**30) -> AsyncIterator[World]:
    made = World()
    limits = ConnectionLimits(1000, memory, made.refused.append)
    made.connections = ClientConnections(made.handle, limits, idle_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(made.connections), "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.connections.end(0.0)


def post(body: bytes, path: bytes = b"/a", more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n"
    return head % (path, more, len(body)) + body


def chunked(body: bytes, path: bytes = b"/a") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    return head + b"%x;e=1\r\n%b\r\n0\r\nX-T: t\r\n\r\n" % (len(body), body)


def statuses(answers: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answers)]


PIPELINE = post(b"one") + chunked(b"two" * 9) + GET + post(b"x", b"/stream") + post(b"last")
ASKED = [
    ("POST", "/a", b"one"),
    ("POST", "/a", b"two" * 9),
    ("GET", "/a", b""),
    ("POST", "/stream", b"x"),
    ("POST", "/a", b"last"),
]


@given(st.lists(st.integers(1, len(PIPELINE) - 1), max_size=6))
@settings(max_examples=40, deadline=None)
def test_however_requests_are_split_they_are_the_same(cuts: list[int]) -> None:
    @on_loop
    async def play() -> None:
        async with world() as made:
            places = [0, *sorted(set(cuts)), len(PIPELINE)]
            pieces = [PIPELINE[a:b] for a, b in pairwise(places)]
            got = await made.ask(*pieces)
            assert made.seen == ASKED
            assert statuses(got) == [200] * 5
            assert b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n" in got

    play()


@on_loop
async def test_pipelined_requests_over_the_limit_are_not_taken() -> None:
    async with world() as made:
        made.hold = asyncio.Event()
        asking = asyncio.create_task(made.ask(GET * 100, until_closed=True))
        await until(lambda: bool(made.seen))
        made.hold.set()
        got = await asking
        most = 1 + queued_requests.MOST_QUEUED
        assert len(made.seen) == most and statuses(got) == [200] * most
        assert got.count(CLOSE) == 1 and CLOSE in got[got.rindex(b"HTTP/1.1") :]


LONG_HEADS = [post(b"", more=b"X-A: %b\r\n" % (b"a" * 60_000)) for _ in range(20)]
LONG_BODIES = [post(b"a" * 60_000) for _ in range(20)]
TINY_CHUNKS = [
    b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"2\r\nab\r\n" * 30_000
    + b"0\r\n\r\n"
] * 20


def taken_bytes() -> int:
    """Memory that the code of connections takes."""
    mine = tracemalloc.Filter(True, "*/kvconnect/router/http/*")
    traces = tracemalloc.take_snapshot().filter_traces([mine])
    return sum(each.size for each in traces.statistics("filename"))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("flood", [LONG_HEADS, LONG_BODIES, TINY_CHUNKS])
@on_loop
async def test_what_waits_for_an_earlier_answer_is_bounded(
    flood: list[bytes], bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bounded:
        for name in ("MOST_BYTES", "HELD_BYTES"):
            monkeypatch.setattr(queued_requests, name, 2**40)
        monkeypatch.setattr(client_connection, "HELD_BYTES", 2**40)
    async with world() as made:
        made.hold = asyncio.Event()
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(GET)
        await until(lambda: bool(made.seen))
        (connection,) = made.connections.open
        tracemalloc.start()
        writer.writelines(flood)
        await until(lambda: not connection._reading or not connection._taking)
        taken = taken_bytes()
        tracemalloc.stop()
        assert (taken < 640 * 1024) is bounded, taken
        assert connection._queued._waiting
        made.hold.set()
        answered = 1 + len(connection._queued)
        await until(lambda: len(made.seen) >= answered)
        await until(lambda: not connection._queued._waiting)
        assert statuses(await reader.read(10_000))[0] == 200
        writer.close()


@on_loop
async def test_who_has_most_waiting_is_closed_if_all_have_too_much() -> None:
    async with world(memory=100_000) as made:
        made.hold = asyncio.Event()
        small = asyncio.create_task(made.ask(GET + post(b"a" * 20_000), until_closed=True))
        await until(lambda: len(made.seen) == 1)
        (kept,) = made.connections.open
        large = asyncio.create_task(made.ask(GET + post(b"a" * 90_000), until_closed=True))
        assert await large == b"" and made.refused == ["memory"]
        assert made.connections.open == {kept}
        made.hold.set()
        await until(lambda: kept._serving is None)
        kept.end_soon()
        assert statuses(await small) == [200, 200]
        assert not made.connections.limits._waiting


@on_loop
async def test_leave_to_send_a_body_is_given_when_it_is_read() -> None:
    more = b"Expect: 100-continue\r\n"
    async with world() as made:
        head, body = post(b"hello", more=more)[:-5], b"hello"
        assert await made.ask(head) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert statuses(await made.ask(head, body)) in ([100, 200], [200])  # it may come at once
        got = await made.ask(post(b"hello", b"/refused", more)[:-5])
        assert statuses(got) == [413] and CLOSE in got
        assert statuses(await made.ask(post(b"", more=b"Expect: 1\r\n"))) == [417]


@on_loop
async def test_http_1_0() -> None:
    old = GET.replace(b"1.1", b"1.0")
    kept = old.replace(b"Host: a", b"Connection: keep-alive")
    async with world() as made:
        got = await made.ask(old, until_closed=True)
        assert statuses(got) == [200] and CLOSE in got
        got = await made.ask(kept + kept)
        assert statuses(got) == [200, 200] and got.count(b"Connection: keep-alive") == 2
        got = await made.ask(kept.replace(b"/a", b"/stream"), until_closed=True)
        assert got.endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n") and b"chunked" not in got


@on_loop
async def test_head_has_no_body() -> None:
    async with world() as made:
        got = await made.ask(GET.replace(b"GET", b"HEAD"))
        assert b"Content-Length: 5\r\n" in got and got.endswith(b"\r\n\r\n")


UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
LONG = b"a" * 400_000  # more than is received at once


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        (post(b"hi", more=UPGRADE) + b"PRI * HTTP/2.0\r\n\r\n", [200]),
        (GET.replace(b"Host: a\r\n", UPGRADE) + b"PRI * HTTP/2.0\r\n\r\n", [200]),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n\x16\x03", [200]),  # who handles it refuses it
        (GET + b"nonsense\r\n\r\n", [200, 400]),
        (GET.replace(b"1.1", b"2.0"), [400]),
        (b"GET /\r\n\r\n", [400]),
        (GET.replace(b"Host: a", b"Transfer-Encoding: gzip, chunked"), [400]),
        (GET.replace(b"1.1", b"1.0").replace(b"Host: a", b"Transfer-Encoding: chunked"), [400]),
        (b"GET /" + LONG, [400]),
        (b"GET / HTTP/1.1\r\nX: " + LONG, [400]),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 65 + b"\r\n", [400]),
        (chunked(b"a")[:-10] + b"0\r\n" + b"X: a\r\n" * 70 + b"\r\n", [400]),
        (chunked(b"a").replace(b"e=1", b"e=" + LONG), [400]),
        (chunked(b"a").replace(b"X-T: t", b"X-T: " + LONG), [400]),
        (chunked(b"a").replace(b"1;e=1", b"zz"), [400]),
        (b"\r\n" * 200_000, [400]),
    ],
)
@on_loop
async def test_what_ends_a_connection(sent: bytes, want: list[int]) -> None:
    async with world() as made:
        got = await made.ask(*(sent[at : at + 9000] for at in range(0, len(sent), 9000)))
        assert statuses(got) == want
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(sent + GET)
        while await reader.read(65536):  # to its end
            pass
        writer.close()
        assert len(made.seen) <= 2 * want.count(200)


@on_loop
async def test_control_a_good_request_ends_no_connection() -> None:
    async with world() as made:
        assert statuses(await made.ask(GET.replace(b"Host: a", b"X: " + b"a" * 60_000) + GET)) == [
            200,
            200,
        ]


@on_loop
async def test_a_refused_body_may_still_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    large = b"a" * 4_000_000
    async with world() as made:
        got = await made.ask(post(large, b"/refused"), until_closed=True)
        assert statuses(got) == [413] and CLOSE in got
    monkeypatch.setattr(client_connection, "LINGER_S", 0.05)
    async with world() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(post(large, b"/refused")[:-1])  # the rest never comes
        assert statuses(await asyncio.wait_for(reader.read(), 20)) == [413]
        writer.close()


@on_loop
async def test_a_defect_is_an_error_of_one_request(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as made:
        got = await made.ask(post(b"", b"/fails") + GET, until_closed=True)
        assert statuses(got) == [500] and CLOSE in got
        got = await made.ask(post(b"", b"/stream/fails"), until_closed=True)
        assert b"data: 1" in got and b"0\r\n\r\n" not in got, "nobody takes it for whole"
        got = await made.ask(post(b"", b"/split"), until_closed=True)
        assert statuses(got) == [500] and b"Evil" not in got
        assert "line end" in caplog.text
        assert statuses(await made.ask(GET)) == [200]


@on_loop
async def test_a_client_that_leaves_ends_its_request() -> None:
    async with world() as made:
        made.hold = asyncio.Event()
        _, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(GET)
        await until(lambda: bool(made.seen))
        (connection,) = made.connections.open
        task = connection._task
        assert task is not None and not task.done()
        writer.close()
        await until(task.done)
        assert not made.connections.open


@on_loop
async def test_the_end_of_a_listener() -> None:
    async with world() as made:
        made.hold = asyncio.Event()
        asked = asyncio.create_task(made.ask(GET, until_closed=True))
        late = asyncio.create_task(made.ask(post(b"hello")[:-2], b"lo", until_closed=True))
        idle = asyncio.create_task(made.ask(b"", until_closed=True))
        await until(lambda: len(made.seen) == 2 and len(made.connections.open) == 3)
        ending = asyncio.create_task(made.connections.end(60.0))
        assert await idle == b""
        assert not asked.done()
        made.hold.set()
        for each in (asked, late):
            got = await each
            assert statuses(got) == [200] and CLOSE in got
        await ending
    async with world() as made:
        made.hold = asyncio.Event()
        asked = asyncio.create_task(made.ask(GET, until_closed=True))
        await until(lambda: bool(made.seen))
        await made.connections.end(0.05)  # it does not end in time
        assert await asked == b""


@on_loop
async def test_idle_connections_are_closed() -> None:
    async with world(idle_s=0.2) as made:
        assert await made.ask(b"", until_closed=True) == b""
        assert await made.ask(b"GET /a HTTP/1.1\r\n", until_closed=True) == b""
        assert statuses(await made.ask(GET, until_closed=True)) == [200]


@on_loop
async def test_one_write_for_an_answer_and_for_the_beginning_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []
    send: Callable[[ResponseWriter, bytes], None] = ResponseWriter.send
    monkeypatch.setattr(
        ResponseWriter, "send", lambda self, data: (written.append(data), send(self, data))
    )
    async with world() as made:
        await made.ask(post(b"hello"))
        assert len(written) == 1 and written[0].endswith(b"\r\n\r\n1 of hello")
        written.clear()
        await made.ask(post(b"", b"/stream"))
        assert len(written) == 2 and written[0].endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")
        assert written[1] == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
