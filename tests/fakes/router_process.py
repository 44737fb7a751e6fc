"""A real router's process between two fake engines, and one who asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.engine import ASK, FakeEngine, decodes, prefills, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
PATIENCE_S = 0.5
HURRY = (
    "from kvconnect.router import server\n"
    "from kvconnect.router.http import request_reader as reading\n"
    f"server.IDLE_S = reading.BODY_S = server.UNREAD_S = {PATIENCE_S}; "
)
RUN = "import sys; from kvconnect import cli; sys.exit(cli.main(sys.argv[1:]))"


@dataclass
class Running:
    """A router's process, its engines, and one who asks it."""

    pid: int
    url: str
    client: aiohttp.ClientSession
    p: FakeEngine
    d: FakeEngine

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    async def post(self, path: str = "/v1/completions", **options: Any) -> int:
        """Ask for a completion; return the status."""
        options = {"data": json.dumps(ASK).encode(), **options}
        async with self.client.post(self.url + path, **options) as answer:
            await answer.read()
            return answer.status

    async def up(self) -> list[bool]:
        """Return whether each engine is."""
        async with self.client.get(self.url + "/health") as answer:
            said = await answer.json()
        return [*said["prefill"].values(), *said["decode"].values()]

    async def both_up(self) -> bool:
        return await self.up() == [True, True]

    def memory(self) -> int:
        """Return the bytes that the process has in memory."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    async def raw(self, sent: bytes, drip: bytes = b"") -> bytes:
        """Send, and ``drip`` ever again; return what comes back, nothing if the router hangs up."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(sent)
            coming = asyncio.ensure_future(reader.read(2**16))
            while drip and not coming.done():
                await asyncio.sleep(PATIENCE_S / 10)
                writer.write(drip)
            return await coming
        except ConnectionError:
            return b""
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running(
    log: Path, *, before: str = "", tls: ssl.SSLContext | None = None, **environment: str
) -> AsyncIterator[Running]:
    """Run a router in a process of its own, ``before`` first, between two fake engines."""
    async with contextlib.AsyncExitStack() as ends:
        p, d = FakeEngine(prefills, tls), FakeEngine(decodes, tls)
        for engine in (p, d):
            await engine.start()
            ends.push_async_callback(engine.stop)
        argv = ["router", "--port", "0", "--prefill", p.url, "--decode", d.url]
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", before + RUN, *argv),
                stderr=out,
                env={**os.environ, **environment},
            )
        ends.push_async_callback(process.wait)
        ends.callback(process.terminate)
        await until(lambda: "router on" in log.read_text())
        found = re.search(r"router on (\S+)", log.read_text())
        assert found is not None
        # A router in a hurry may close a connection just when it would be used again.
        connector = aiohttp.TCPConnector(force_close=before == HURRY)
        client = await ends.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Running(process.pid, found[1], client, p, d)
