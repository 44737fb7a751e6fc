"""A real router process: clients that are slow, large, malformed or many; engines behind TLS."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import re
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from kvconnect.router.http import request_reader
from kvconnect.router.options import RouterLimits
from tests.fakes.engine import ASK, FakeEngine, bench, decodes, on_loop, prefills, until
from tests.fakes.router_process import HEAD, HURRY, PATIENCE_S, running
from tests.links import make_certificates

IDLE = 10_000
PER_IDLE_BYTES = 16 * 1024


@on_loop
async def test_slow_clients_are_hung_up_on_and_hold_up_nobody(tmp_path: Path) -> None:
    async with running(
        tmp_path / "log", before=HURRY, KVCONNECT_ROUTER_PROBE_INTERVAL="0"
    ) as router:
        await until(router.both_up)
        posts, begun = 0, time.monotonic()
        slow = [
            asyncio.create_task(router.raw(b"")),
            asyncio.create_task(router.raw(HEAD + b"X-A: ", b"a")),
            asyncio.create_task(router.raw(HEAD + b"Content-Length: 999\r\n\r\n", b"a")),
            asyncio.create_task(
                router.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n")
            ),
        ]
        while not all(task.done() for task in slow):
            assert await router.post() == 200
            posts += 1
            assert time.monotonic() - begun < 40
        assert time.monotonic() - begun > PATIENCE_S
        silent, head, body, chunks = [task.result() for task in slow]
        assert (silent, head) == (b"", b"")
        for answer in (body, chunks):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the request body was not complete within" in answer
        reached = [len(engine.asked) for engine in (router.p, router.d)]
        assert reached == [posts, posts], "none of them reached an engine"


@on_loop
async def test_a_client_that_does_not_take_its_answer_is_hung_up_on(tmp_path: Path) -> None:
    async def long(*arguments: Any) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"choices": [{"text": "a" * 2**24}]})

    async with running(tmp_path / "log", before=HURRY) as router:
        await until(router.both_up)
        router.d.answer = long
        raw = json.dumps(ASK).encode()
        with socket.create_connection(router.address) as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            await until(lambda: connections(router.pid, client.getsockname()[1]) == 1)
            await until(lambda: connections(router.pid, client.getsockname()[1]) == 0)


def connections(pid: int, peer: int) -> int:
    """Return how many connections of a process lead to a port."""
    rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    ours = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
            ours.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return sum(row.split()[2].endswith(f":{peer:04X}") and row.split()[9] in ours for row in rows)


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no method": b"/v1/completions HTTP/1.1\r\n\r\n",
    "long line": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    "long header": HEAD + b"X-A: " + b"a" * 70_000 + b"\r\n\r\n",
    "many headers": HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na",
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "folded": HEAD + b"X-A: a\r\n b\r\n\r\n",
    "zeros": HEAD + b"X-A: \0\r\n\r\n",
}


@on_loop
async def test_malformed_and_oversized_requests_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "log", KVCONNECT_ROUTER_PROBE_INTERVAL="0") as router:
        await until(router.both_up)
        for name, sent in MALFORMED.items():
            answer = await router.raw(sent)
            assert re.match(rb"HTTP/1\.[01] 4\d\d |$", answer), (name, answer)
        bomb = gzip.compress(bytes(64 * 2**20))
        before = router.memory()
        for path in ("/v1/completions", "/health", "/nowhere"):
            want = 415 if path.startswith("/v1") else 405 if path == "/health" else 404
            encoded = {"Content-Encoding": "gzip"}
            assert await router.post(path, data=bomb, headers=encoded) == want
        assert await router.post(headers={"Content-Encoding": "Identity"}) == 200
        assert router.memory() - before < 8 * 2**20
        assert await router.post(data=io.BytesIO(bytes(RouterLimits().body_bytes + 1))) == 413
        assert len(router.p.asked) == len(router.d.asked) == 1, "only the good one was passed on"
        assert await router.post() == 200
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and "Error handling" not in log


@pytest.mark.parametrize("refused", [True, False])
@on_loop
async def test_encoded_bodies_are_refused_before_they_are_looked_at(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not refused:
        monkeypatch.setattr(request_reader, "_refuse_encoded", lambda request: None)
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d]) as router:

        async def post(*encodings: str) -> tuple[int, str]:
            body = gzip.compress(json.dumps(ASK).encode())
            headers = CIMultiDict(("Content-Encoding", each) for each in encodings)
            url = router.url + "/v1/completions"
            async with router.client.post(url, data=body, headers=headers) as answer:
                return answer.status, await answer.text()

        for encodings in (("gzip",), ("identity", "gzip"), ("br",)):
            status, said = await post(*encodings)
            assert status == (415 if refused else 400)
            told = json.loads(said)["error"]["message"]
            assert ("without Content-Encoding" in told) is refused  # the control: it is no JSON
        assert p.asked == d.asked == []


@pytest.fixture
def files() -> Iterator[int]:
    """How many files this process may have open: as many as the system lets it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@on_loop
async def test_ten_thousand_idle_connections(tmp_path: Path, files: int) -> None:
    # The router starts with the usual limit, which it has to raise.
    low = f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1024, {files})); "
    number = min(IDLE, files - 200)
    async with running(tmp_path / "log", before=low) as router:
        await until(router.both_up)
        assert await router.post() == 200
        before = router.memory()
        with contextlib.ExitStack() as idle:
            for count in range(number):
                idle.enter_context(socket.create_connection(router.address, 30))
                if count % 500 == 0:
                    await router.up()  # more than it listens for would have to try again
            assert await router.post() == 200
            assert await router.both_up()
            each = (router.memory() - before) / number
            assert 0 < each < PER_IDLE_BYTES, f"{each:.0f} bytes each"
        assert await router.post() == 200


@on_loop
async def test_a_router_without_files_for_connections_blames_no_engine(tmp_path: Path) -> None:
    async with running(tmp_path / "log") as router:
        await until(router.both_up)  # over a connection that is kept
        limits = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        assert await router.post() == 429
        await asyncio.sleep(2.5)  # longer than from one look at an engine to the next
        assert await router.up() == [True, True]
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, limits)
        assert await router.post() == 200


@on_loop
async def test_engines_behind_tls_are_those_of_a_known_authority(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, alternative="IP:127.0.0.1")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(made.tls_cert, made.tls_key)
    async with running(tmp_path / "log", tls=server, SSL_CERT_FILE=made.tls_ca) as router:
        await until(router.both_up)
        assert await router.post() == 200
    async with running(tmp_path / "log", tls=server) as router:
        await asyncio.sleep(0.5)
        assert await router.up() == [False, False]
        assert await router.post() == 503
