"""A real router process between two strict engines, for corpora that come over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

HASTE_S = 1.0
"""Seconds that a router in a hurry gives clients for a head, a body, the rest of a body that it
has refused, or to take an answer."""
UP_S = 120.0
BEFORE = ""
"""Python that the router's process runs first: what takes a protection away, as a control."""
_HASTE = (
    "from kvconnect.router import server\n"
    "from kvconnect.router.http import client_connection\n"
    "from kvconnect.router.http import request_reader as reading\n"
    f"server.IDLE_S = reading.BODY_S = server.UNREAD_S = {HASTE_S}\n"
    f"client_connection.LINGER_S = {HASTE_S}\n"
)
_RUN = "import sys; from kvconnect import cli; sys.exit(cli.main(sys.argv[1:]))"
_TICKET = {"do_remote_prefill": True, "kvconnect_ticket": "t" * 20}
_STANDING_TICKET = {"kvconnect_card": "c" * 20, "kvconnect_card_expires_in": 3600}
_GETS = {
    b"/health": {},
    b"/v1/models": {"object": "list", "data": [{"id": "fake", "object": "model"}]},
    b"/version": {"version": "1"},
}

Reply = Callable[[bytes, bytes], bytes]
"""Head and body of a request -> the bytes to answer, nothing: hang up."""


def answer_of(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """Return a framed answer."""
    lines = (b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def completed(head: bytes, body: bytes) -> bytes:
    """Answer as a good engine."""
    said: dict[str, Any] = {"choices": [{"index": 0, "text": "good"}]}
    if b"do_remote_decode" in body:
        said["kv_transfer_params"] = _TICKET
    return answer_of(json.dumps(said).encode(), b"Content-Type: application/json")


class Recorder:
    """An engine that takes one request after the other by ``Content-Length`` alone, and keeps what
    it got. Whatever a request was cut or joined into is seen as it came."""

    def __init__(self, reply: Reply = completed) -> None:
        self.seen: list[tuple[bytes, bytes]] = []
        self.odd: list[bytes] = []  # heads that an engine could take for something else
        self.reply = reply
        self.hold_s = 0.0  # before it answers
        self.together = 1  # requests that must have come before it answers any
        self.port = 0
        self._came = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Recorder]:
        """Listen while in the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while said := await self._next(reader):
                writer.write(said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        names = [line.partition(b":")[0].lower() for line in lines[1:]]
        lengths = re.findall(rb"(?i)\r\ncontent-length: *(\d+)\r\n", head)
        strict = all(re.fullmatch(rb"[a-z0-9-]+", name) for name in names)
        if len(lengths) > 1 or not strict or b"transfer-encoding" in names:
            self.odd.append(head)
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        path = lines[0].split(b" ")[1]
        if path in _GETS:
            return answer_of(json.dumps(_GETS[path]).encode())
        if path.startswith(b"/metrics/"):
            return answer_of(b"")
        if b'"kvconnect_card"' in body:
            return answer_of(
                json.dumps({"choices": [], "kv_transfer_params": _STANDING_TICKET}).encode()
            )
        async with self._came:
            self.seen.append((head, body))
            self._came.notify_all()
            await self._came.wait_for(lambda: len(self.seen) >= self.together)
        await asyncio.sleep(self.hold_s)
        return self.reply(head, body)


class Routed:
    """A router's process, and its engines."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: int) -> None:
        self._process, self._log = process, log
        self.port = port
        self.prefill: Recorder
        self.decode: Recorder

    @property
    def pid(self) -> int:
        """The router's."""
        return self._process.pid

    def crashes(self) -> list[str]:
        """Return what says that it ended, or that an error left its connection."""
        log = self._log.read_text(errors="replace")
        found = [f"router: {each[:800]}" for each in re.split(r"(?=Traceback \()", log)[1:]]
        if self._process.returncode is not None:
            found.append(f"router: ended with {self._process.returncode}")
        return found

    async def talk(self, sent: bytes, *, half: bool = False, deadline_s: float = 60.0) -> bytes:
        """Send, and return what comes until the router hangs up, which it does with whoever says
        nothing; ``half``: say at once that no more comes.

        Raises:
            TimeoutError: it does not.
        """
        return await asyncio.wait_for(self._talk(sent, half), deadline_s)

    async def _talk(self, sent: bytes, half: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
        got = bytearray()
        try:
            writer.write(sent)
            if half:
                writer.write_eof()
            while piece := await reader.read(2**16):
                got += piece
        except ConnectionError:
            pass
        finally:
            writer.close()
        return bytes(got)


class Session:
    """A connection that is kept, for many requests one after the other, from ``address``."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._port, self._address = port, address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(
        self, path: str, body: bytes, *headers: bytes, deadline_s: float = 60.0
    ) -> tuple[int, bytes]:
        """Return status and body of an answer. Once more if the connection was just closed.

        Raises:
            TimeoutError: none comes.
        """
        lines = (b"POST %b HTTP/1.1" % path.encode(), b"Host: a", *headers)
        head = b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        return await asyncio.wait_for(self._ask(head + body), deadline_s)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        asking = self._ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
        return await asyncio.wait_for(asking, 60.0)

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        for _ in range(2):
            if self._streams is None:
                self._streams = await asyncio.open_connection(
                    "127.0.0.1", self._port, limit=2**26, local_addr=(self._address, 0)
                )
            try:
                self._streams[1].write(request)
                return await self._answer(self._streams[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                self.close()
        return 0, b""

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"\r\ntransfer-encoding: chunked\r\n" in head:
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
        if b"\r\nconnection: close\r\n" in head:
            self.close()
        return int(head.split(b" ", 2)[1]), body


@contextlib.asynccontextmanager
async def routed(
    *flags: str, prefill: Reply = completed, decode: Reply = completed, hurry: bool = True
) -> AsyncIterator[Routed]:
    """Run a router between two engines, in a ``hurry`` with clients; wait until it knows both."""
    async with contextlib.AsyncExitStack() as ends:
        engines = [
            await ends.enter_async_context(Recorder(reply).listening())
            for reply in (prefill, decode)
        ]
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "log"
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        named = ["--prefill", urls[0], "--decode", urls[1], "--probe-interval", "0"]
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-c",
                    "\n".join((BEFORE, _HASTE * hurry, _RUN)),
                    "router",
                    "--port",
                    "0",
                    *named,
                    *flags,
                ),
                stderr=out,
                env={**os.environ},
            )
        ends.push_async_callback(process.wait)
        ends.callback(_end, process)
        found: re.Match[str] | None = None
        for _ in waiting():
            found = re.search(r"router on \S+:(\d+)", log.read_text())
            if found or process.returncode is not None:
                break
            await asyncio.sleep(0.05)
        assert found is not None, f"the router did not start: {log.read_text()[-2000:]}"
        place = Routed(process, log, int(found[1]))
        place.prefill, place.decode = engines
        await _ready(place)
        for engine in engines:
            engine.seen.clear()
        yield place


def waiting() -> Iterator[None]:
    """Yield until it takes too long."""
    ends = time.monotonic() + UP_S
    while time.monotonic() < ends:
        yield


async def _ready(place: Routed) -> None:
    session = Session(place.port)
    body = json.dumps({"model": "fake", "prompt": "ready?"}).encode()
    for _ in waiting():
        status, said = await session.get("/v1/models")
        known = status == 200 and b"fake" in said
        if known and (await session.post("/v1/completions", body))[0] == 200:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the router does not serve")
    session.close()


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
