"""Whole answers on a connection to an engine: what they wake, and what they leave. No sockets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from kvconnect.router.connections.engine_connection import READ_BYTES, ConnectionLost, read
from kvconnect.router.connections.http1 import Connection, IncomingResponse
from tests.fakes.engine import on_loop

KIND = b"Content-Type: application/json\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\n" + KIND + b"Content-Length: 2\r\n\r\nok"


def connected() -> Connection:
    connection = Connection(memoryview(b""), lambda: True)
    connection.connection_made(Mock(is_closing=lambda: False))
    return connection


def asking(connection: Connection) -> asyncio.Task[None]:
    connection.send(b"", b"", 60.0)
    return asyncio.create_task(connection.wait_for_head())


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"503 Busy"])
@pytest.mark.parametrize("cut", [1, len(WHOLE) - 2, len(WHOLE) - 1])
@on_loop
async def test_a_short_answer_wakes_its_task_once(status: bytes, cut: int) -> None:
    connection, answer = connected(), WHOLE.replace(b"200 OK", status)
    cut += len(answer) - len(WHOLE)
    task = asking(connection)
    await asyncio.sleep(0)
    waiting = connection._waiting
    assert waiting is not None
    connection.receive(answer[:cut])
    early = waiting.done()
    connection.receive(answer[cut:])
    await task
    # Half a head tells nobody what follows, so it does wake.
    assert early is (b"\r\n\r\n" not in answer[:cut])
    assert connection.response.status == int(status[:3])
    assert await read(connection) == b"ok"
    connection.connection_lost(None)


LENGTH = b"Content-Length: "


@pytest.mark.parametrize(
    "head",
    [
        KIND + LENGTH + b"%d\r\n\r\n" % (READ_BYTES + 1),
        KIND + LENGTH + b"0" * 5000 + b"2\r\n\r\n",  # Python reads no number so long
        KIND + b"Transfer-Encoding: chunked\r\n\r\n",
        KIND + b"\r\n",
        LENGTH + b"2\r\n\r\n",
        b"Content-Type: text/event-stream\r\n" + LENGTH + b"2\r\n\r\n",
    ],
)
@on_loop
async def test_the_head_of_any_other_answer_is_told_at_once(head: bytes) -> None:
    connection = connected()
    task = asking(connection)
    await asyncio.sleep(0)
    connection.receive(b"HTTP/1.1 200 OK\r\n" + head)
    await task
    assert connection.response.began and not connection.response.ended
    connection.connection_lost(None)


@pytest.mark.parametrize("sent", [0, 1])
@on_loop
async def test_a_short_answer_that_breaks_off_wakes_its_task(sent: int) -> None:
    connection = connected()
    task = asking(connection)
    await asyncio.sleep(0)
    connection.receive(WHOLE[: len(WHOLE) - 2 + sent])
    await asyncio.sleep(0)
    assert not task.done()
    connection.connection_lost(None)
    await task
    with pytest.raises(ConnectionLost):
        await read(connection)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@on_loop
async def test_an_answer_is_freed_without_the_collector() -> None:
    connection, answers = connected(), list[weakref.ref[IncomingResponse]]()
    for _ in range(3):
        task = asking(connection)
        await asyncio.sleep(0)
        connection.receive(WHOLE)
        await task
        assert await read(connection) == b"ok"
        assert connection.response.keep
        answers.append(weakref.ref(connection.response))
    assert [answer() is None for answer in answers] == [True, True, False], "it has the last one"
    connection.connection_lost(None)
