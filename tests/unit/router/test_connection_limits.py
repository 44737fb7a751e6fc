"""Clients' connections: idle ones take neither the engines' files nor those of other clients."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.http.connection_limits import ConnectionLimits
from tests.fakes.engine import ASK, EVENTS, FakeEngine, begin_stream, decodes, on_loop, until
from tests.fakes.router_process import HEAD, Running, running

FILES = 120  # of the router's process: 90 for clients, 67 of them for one address
OF_ADDRESS = 67
MORE_FILES = 400  # 300 for clients, 225 of them for one address
STREAMS = 50  # take four files each in the relay: clients' and engines' sockets, and their copies
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0})); "
FEW_FILES = LIMIT.format(FILES)
NO_LIMIT = (
    "from kvconnect.router.http.connection_limits import ConnectionLimits as C; "
    "C.opened = lambda self, connection, address: True; "
)
MALLORY, ALICE = "127.0.0.1", "127.0.0.2"


class Line(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@asynccontextmanager
async def idle(router: Running, address: str, number: int) -> AsyncIterator[list[Line]]:
    """Open connections from an address, and let them idle."""
    async with AsyncExitStack() as ends:
        lines = []
        for _ in range(number):
            both = await asyncio.open_connection(*router.address, local_addr=(address, 0))
            ends.callback(both[1].close)
            lines.append(Line(*both))
        yield lines


async def status_from(router: Running, address: str) -> int:
    """Ask from an address on a new connection; return the status of the answer."""
    connector = aiohttp.TCPConnector(local_addr=(address, 0), force_close=True)
    async with aiohttp.ClientSession(connector=connector) as client:
        router.client, before = client, router.client
        try:
            return await router.post()
        finally:
            router.client = before


@on_loop
async def test_idle_connections_leave_room_for_others_and_for_engines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running(log, before=FEW_FILES) as router:
        await until(router.both_up)
        async with idle(router, MALLORY, 100) as lines:
            answers = [await line.reader.read() for line in lines[OF_ADDRESS:]]
            assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
            assert all(b"Retry-After: 1" in answer for answer in answers)
            assert f"127.0.0.1 has {OF_ADDRESS} connections, the most" in log.read_text()
            assert log.read_text().count("connections are refused") == 1, "once a minute"
            assert await status_from(router, ALICE) == 200
            lines[0].writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")  # those that are in stay
            assert (await lines[0].reader.read(12)).startswith(b"HTTP/1.1 200")
        await until(lambda: is_served(router, MALLORY))


async def is_served(router: Running, address: str) -> bool:
    return await status_from(router, address) == 200


@on_loop
async def test_control_without_the_limit_others_are_kept_out(tmp_path: Path) -> None:
    async with running(tmp_path / "log", before=FEW_FILES + NO_LIMIT) as router:
        await until(router.both_up)
        async with idle(router, MALLORY, FILES):
            try:
                kept_out = await status_from(router, ALICE) != 200
            except aiohttp.ClientError:
                kept_out = True
            assert kept_out


def copied_sockets(pid: int) -> int:
    """Return how many sockets of a process have more than one descriptor."""
    found = Counter[str]()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found[str(each.readlink())] += 1
    return sum(name.startswith("socket:") and times > 1 for name, times in found.items())


async def begins(engine: FakeEngine, request: web.Request, body: Any) -> web.StreamResponse:
    """Sends a stream's first event, and no other."""
    if not body.get("stream"):
        return await decodes(engine, request, body)
    stream = await begin_stream(request)
    await stream.write(EVENTS[0])
    await asyncio.Event().wait()
    raise AssertionError


@on_loop
async def test_idle_connections_beside_the_relay_leave_room_for_engines(tmp_path: Path) -> None:
    log, body = tmp_path / "log", json.dumps(ASK | {"stream": True}).encode()
    ask = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    async with running(log, before=LIMIT.format(MORE_FILES)) as router:
        await until(router.both_up)
        router.d.answer = begins
        async with idle(router, ALICE, STREAMS) as streams:
            for each in streams:
                each.writer.write(ask)
                await each.reader.readuntil(EVENTS[0])
            await until(lambda: copied_sockets(router.pid) >= 2 * STREAMS)
            async with idle(router, MALLORY, 225) as lines:
                await until(lambda: "connections are refused: clients have" in log.read_text())
                for each in lines[:8]:  # more than there are idle connections to the engine
                    each.writer.write(ask)
                    assert (await each.reader.read(12)).startswith(b"HTTP/1.1 200")


def test_files_that_the_relay_holds_are_the_clients() -> None:
    refused: list[str] = []
    limit = ConnectionLimits(1024, 0, refused.append, held=lambda: 400)
    assert all(limit.opened(Ended(), "ab"[number % 2]) for number in range(368))
    assert not limit.opened(Ended(), "a") and refused == ["files"]


OPENS = st.sampled_from([True, True, True, False])  # so often that some are refused


@given(st.lists(st.tuples(st.sampled_from("aab"), OPENS), min_size=40, max_size=80))
def test_connections_are_counted_in_and_out(steps: list[tuple[str, bool]]) -> None:
    refused: list[str] = []
    limit = ConnectionLimits(32, 0, refused.append)
    inside: dict[Ended, str] = {}
    for address, opens in steps:
        mine = [each for each, of in inside.items() if of == address]
        if not opens:
            connection = mine[0] if mine else Ended()  # one that was refused
            limit.closed(connection)
            inside.pop(connection, None)
            continue
        connection, before = Ended(), len(refused)
        taken = limit.opened(connection, address)
        room = len(mine) < limit.most_of_address and len(inside) < limit.most
        assert taken == room
        assert len(refused) == before + (not room)
        if taken:
            inside[connection] = address
    for connection in list(inside):
        limit.closed(connection)
    assert not limit._of_address and not limit._address_of


class Ended:
    """A connection that notes its end."""

    def __init__(self) -> None:
        self.ended = False

    def end(self) -> None:
        self.ended = True


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=60))
def test_what_waits_on_connections_is_bounded(steps: list[tuple[int, int]]) -> None:
    refused: list[str] = []
    limit = ConnectionLimits(32, 100, refused.append)
    connections, waiting = [Ended() for _ in range(5)], dict[Ended, int]()
    for number, nbytes in steps:
        connection = connections[number]
        limit.waits(connection, nbytes)
        waiting[connection] = nbytes
        while sum(waiting.values()) > 100:
            largest = max(waiting.values())
            assert [each.ended for each in waiting if waiting[each] == largest].count(True)
            gone = next(each for each in waiting if each.ended)
            assert waiting[gone] == largest
            del waiting[gone]
            connections[connections.index(gone)] = Ended()
        assert not any(each.ended for each in waiting)
    for connection in connections:
        limit.closed(connection)
    assert limit._memory_left == 100 and not limit._waiting


@pytest.mark.parametrize(("files", "most", "of_address"), [(1024, 768, 576), (4, 8, 8)])
def test_shares_of_the_files(files: int, most: int, of_address: int) -> None:
    limit = ConnectionLimits(files, 0, lambda _: None)
    assert (limit.most, limit.most_of_address) == (most, of_address)
