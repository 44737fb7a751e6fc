"""Requests to engines over connections that are kept, without a router."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvconnect import open_files
from kvconnect.router.connections import pool
from kvconnect.router.connections.engine_connection import (
    READ_BYTES,
    BaseUrl,
    ClosedEarly,
    ConnectionLost,
    Exhausted,
    Unreachable,
    read,
)
from kvconnect.router.connections.http1 import Connection, request_head
from kvconnect.router.connections.pool import ConnectionPool
from tests.fakes.engine import on_loop, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SILENCE = b"silence"
SILENCE_S = 0.3


class Engine:
    """Answers each request with the next of ``answers``; closes the connection after one that is
    not whole. ``end``: then listens no more."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.asked = self.connections = self.closed = 0
        self.end = False
        self.server: asyncio.Server
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        answer = OK
        try:
            while answer in (OK, SILENCE):
                await reader.readuntil(b"\r\n\r\n")
                answer = self._answers[self.asked]
                self.asked += 1
                if answer != SILENCE:
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client hung up
            pass
        finally:
            self.closed += 1
            if self.end:
                self.server.close()
            writer.close()


@asynccontextmanager
async def asked(
    engine: Engine, silence_s: float = SILENCE_S
) -> AsyncIterator[tuple[ConnectionPool, BaseUrl]]:
    engine.server = server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    base = BaseUrl.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = ConnectionPool(silence_s)
    try:
        yield client, base
    finally:
        client.close()
        server.close()


async def ask(client: ConnectionPool, base: BaseUrl) -> bytes:
    connection = await client.open(base, request_head(base, "GET", "/", {}))
    try:
        return await read(connection)
    finally:
        client.release(base, connection)


@on_loop
async def test_a_request_on_a_kept_connection_that_was_closed_is_repeated() -> None:
    engine = Engine([OK, b"", OK])
    async with asked(engine) as (client, base):
        assert [await ask(client, base) for _ in range(2)] == [b"ok", b"ok"]
    assert (engine.asked, engine.connections) == (3, 2)


@on_loop
async def test_a_request_with_which_an_engine_ended_is_not_repeated() -> None:
    engine = Engine([OK, b"", OK])
    async with asked(engine) as (client, base):
        assert await ask(client, base) == b"ok"
        engine.end = True
        with pytest.raises(ClosedEarly):
            await ask(client, base)
        with pytest.raises(Unreachable):
            await ask(client, base)
    assert (engine.asked, engine.connections) == (2, 1)


@on_loop
async def test_a_request_that_an_engine_had_for_a_while_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_AT_ONCE_S", 0.0)
    engine = Engine([OK, b"", OK])
    async with asked(engine) as (client, base):
        assert await ask(client, base) == b"ok"
        with pytest.raises(ClosedEarly):
            await ask(client, base)
        assert await ask(client, base) == b"ok"
    assert (engine.asked, engine.connections) == (3, 2)


@on_loop
async def test_an_idle_connection_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_S", 60.0)
    engine = Engine([OK] * 3)
    async with asked(engine) as (client, base):
        for _ in range(3):
            assert await ask(client, base) == b"ok"
            await asyncio.sleep(1.5 * SILENCE_S)
    assert (engine.asked, engine.connections) == (3, 1)


@on_loop
async def test_connections_to_an_engine_that_is_forgotten_are_closed() -> None:
    engine, other = Engine([OK] * 2), Engine([OK] * 2)
    async with asked(engine) as (client, base), asked(other) as (_, elsewhere):
        await ask(client, base)
        await ask(client, elsewhere)
        client.forget(base)
        await until(lambda: engine.closed == 1)
        assert await ask(client, elsewhere) == await ask(client, base) == b"ok"
        assert (engine.connections, other.connections, other.closed) == (2, 1, 0)
        client.close()
        await until(lambda: engine.closed == 2 and other.closed == 1)


def long_answer(letter: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LONG + letter * LONG


LONG = 4 << 20


async def little_is_kept_of_what_nobody_reads() -> None:
    """Two answers at once, in the memory that both connections receive to."""
    letters = (b"a", b"b")
    async with asked(Engine([long_answer(b"a"), long_answer(b"b")])) as (client, base):
        head = request_head(base, "GET", "/", {})
        one, other = [await client.open(base, head) for _ in letters]
        await until(lambda: one._paused and other._paused)
        for connection in (one, other):
            assert READ_BYTES < sum(map(len, connection.response.chunks)) <= 2 * READ_BYTES
        bodies = await asyncio.gather(read(one), read(other))
    assert bodies == [letter * LONG for letter in letters]


@pytest.mark.parametrize(
    "make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_little_is_kept_of_what_nobody_reads(
    make: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(asyncio.wait_for(little_is_kept_of_what_nobody_reads(), 60))


UNFRAMED = b"HTTP/1.0 200 OK\r\n\r\nhalf of it"


class Staying(Engine):
    """Keeps the connection open after an answer that only its end would frame."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answers[0])
        await reader.read()
        writer.close()


@on_loop
async def test_an_unframed_answer_is_whole_only_when_the_engine_ends_it() -> None:
    async with asked(Engine([UNFRAMED])) as (client, base):
        assert await ask(client, base) == b"half of it"
    async with asked(Staying([UNFRAMED])) as (client, base):
        with pytest.raises(ConnectionLost, match="sent nothing for"):
            await ask(client, base)


@pytest.mark.parametrize("more", [OK.replace(b"ok", b"no"), OK[:20], b"garbage"])
@on_loop
async def test_what_comes_after_an_answer_is_nobodys(more: bytes) -> None:
    engine = Engine([OK + more, OK])
    async with asked(engine) as (client, base):
        assert [await ask(client, base) for _ in range(2)] == [b"ok", b"ok"]
    assert engine.connections == 2, "the connection is not used again"


@on_loop
async def test_interim_answers_have_no_part_in_the_real_one() -> None:
    interim = b"HTTP/1.1 103 Early\r\nContent-Type: text/evil\r\n\r\n"
    async with asked(Engine([interim * 100 + OK])) as (client, base):
        connection = await client.open(base, request_head(base, "GET", "/", {}))
        assert await read(connection) == b"ok"
        assert connection.response.headers == {"content-length": "2"}
        client.release(base, connection)


@on_loop
async def test_a_head_has_a_bound() -> None:
    endless = b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % bytes(1000).replace(b"\0", b"a") * 100
    async with asked(Engine([endless])) as (client, base):
        with pytest.raises(ConnectionLost, match="invalid HTTP response"):
            await ask(client, base)


UPGRADE = b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"


@pytest.mark.parametrize("answer", [SILENCE, OK[:9], b"no HTTP", UPGRADE + OK])
@on_loop
async def test_a_request_that_an_engine_has_taken_is_not_repeated(answer: bytes) -> None:
    engine = Engine([OK, answer, OK])
    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: escaped.append(what))
    async with asked(engine) as (client, base):
        assert await ask(client, base) == b"ok"
        client.mark(base, up=False)
        with pytest.raises(ConnectionLost):
            await ask(client, base)
    assert (engine.asked, engine.connections) == (2, 1)
    assert escaped == []


@on_loop
async def test_an_engine_that_is_well_and_computes_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, listen = 0, Connection._listen

    def count(connection: Connection, silence_s: float) -> None:
        nonlocal looks
        looks += 1
        listen(connection, silence_s)

    monkeypatch.setattr(Connection, "_listen", count)
    async with asked(Engine([SILENCE])) as (client, base):
        asking = asyncio.create_task(ask(client, base))
        await until(lambda: looks > 3)
        assert not asking.done()
        client.mark(base, up=False)  # control
        with pytest.raises(ConnectionLost, match="sent nothing for"):
            await asking


@on_loop
async def test_what_an_engine_that_froze_has_not_answered_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine([SILENCE])
    async with asked(engine, silence_s=60.0) as (client, base):
        asking = asyncio.create_task(ask(client, base))
        await until(lambda: engine.asked == 1)
        client.mark(base, up=False)  # it may be busy
        assert not asking.done()
        monkeypatch.setattr(pool, "END_SILENT_S", 0.0)
        client.mark(base, up=True)
        client.mark(base, up=False)
        with pytest.raises(ConnectionLost, match="since it went down"):
            await asking


@on_loop
async def test_control_an_engine_that_sends_while_it_is_down_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK[:-1])
        await more.wait()
        writer.write(OK[-1:])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    base = BaseUrl.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = ConnectionPool(60.0)
    monkeypatch.setattr(pool, "END_SILENT_S", 60.0)
    client.mark(base, up=False)
    connection = await client.open(base, request_head(base, "GET", "/", {}))
    assert await connection.readany() == b"o"
    monkeypatch.setattr(pool, "END_SILENT_S", 0.0)
    client.mark(base, up=False)
    more.set()
    assert await read(connection) == b"k"
    client.release(base, connection)
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("code", "blamed"),
    [
        (errno.EADDRNOTAVAIL, False),
        (errno.ENOBUFS, False),
        (errno.ENOMEM, False),
        (errno.EMFILE, False),
        (errno.ECONNREFUSED, True),
    ],
)
@on_loop
async def test_an_engine_is_not_blamed_for_what_is_used_up_here(
    code: int, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, "none")

    loop = asyncio.get_running_loop()
    async with asked(Engine([OK])) as (client, base):
        with monkeypatch.context() as within:
            within.setattr(loop, "create_connection", refuse, raising=False)
            with pytest.raises(Unreachable) as failed:
                await ask(client, base)
        assert isinstance(failed.value, Exhausted) is not blamed
        with monkeypatch.context() as within:  # a name that cannot be looked up, for want of files
            within.setattr(loop, "create_connection", refuse, raising=False)
            within.setattr(open_files, "none_left", lambda: True)
            with pytest.raises(Exhausted):
                await ask(client, base)
        assert await ask(client, base) == b"ok"


@on_loop
async def test_a_connection_that_is_made_when_its_request_is_cancelled_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert not await reader.read(), "nobody asks anything"
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connect = loop.create_connection

    async def connect_and_hang_up(*args: Any, **more: Any) -> Any:
        made = await connect(*args, **more)
        asking.cancel()
        return made

    monkeypatch.setattr(loop, "create_connection", connect_and_hang_up, raising=False)
    client = ConnectionPool(SILENCE_S)
    base = BaseUrl.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    asking = asyncio.create_task(client.open(base, request_head(base, "GET", "/", {})))
    await asyncio.wait({asking})
    assert asking.cancelled()
    await ended.wait()
    server.close()
