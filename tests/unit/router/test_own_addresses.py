"""Metrics and the admin API at addresses of their own."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvconnect.errors import ConfigError
from kvconnect.router.http.own_address import MOST_CONNECTIONS, at_own_address
from kvconnect.router.options import AdminAccess, Listening, RouterOptions
from tests.fakes.engine import ASK, FakeEngine, bench, decodes, on_loop, prefills, until
from tests.fakes.router_process import running
from tests.links import make_certificates
from tests.servers import free_port

TOKEN = "0123456789abcdef"


async def port_of(what: str, log: Path) -> int:
    """Return the port that a router says it serves something at."""
    await until(lambda: f"{what} on" in log.read_text())
    found = re.search(rf"{what} on \('127.0.0.1', (\d+)\)", log.read_text())
    assert found is not None, log.read_text()
    return int(found[1])


async def status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
        text = await answer.text()
        assert ("kvconnect_router_requests_total" in text) is (
            url.endswith("/metrics") and answer.ok
        )
        return answer.status


@on_loop
async def test_metrics_have_an_address_of_their_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running(log, KVCONNECT_ROUTER_METRICS_PORT="0") as router:
        url = f"http://127.0.0.1:{await port_of('metrics', log)}"
        assert await status(router.client, f"{url}/metrics") == 200
        assert await status(router.client, f"{url}/v1/models") == 404
        assert await status(router.client, f"{router.url}/metrics") == 404
        assert await router.post() == 200
    async with running(log) as router:  # control: by default they are beside clients' paths
        assert await status(router.client, f"{router.url}/metrics") == 200
        assert "metrics on" not in log.read_text()


@on_loop
async def test_the_admin_api_has_the_certificate_of_clients(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, alternative="IP:127.0.0.1")
    (token := tmp_path / "token").write_text(TOKEN)
    token.chmod(0o600)
    admin = {
        "KVCONNECT_ROUTER_ADMIN_TOKEN_FILE": str(token),
        "KVCONNECT_ROUTER_ADMIN_PORT": "0",
        "KVCONNECT_ROUTER_TLS_CERT": made.tls_cert,
        "KVCONNECT_ROUTER_TLS_KEY": made.tls_key,
    }
    trust = ssl.create_default_context(cafile=made.tls_ca)
    log = tmp_path / "log"
    connector = aiohttp.TCPConnector(ssl=trust)
    async with aiohttp.ClientSession(connector=connector) as client:
        async with running(log, KVCONNECT_ROUTER_ADMIN_TLS="true", **admin):
            address = f"127.0.0.1:{await port_of('admin API', log)}/workers"
            assert await status(client, f"https://{address}") == 200
            with pytest.raises(aiohttp.ClientError):
                await status(client, f"http://{address}")
        async with running(log, **admin):  # control: without the flag it is plain HTTP
            address = f"127.0.0.1:{await port_of('admin API', log)}/workers"
            assert await status(client, f"http://{address}") == 200


@on_loop
async def test_an_address_of_metrics_takes_few_connections(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running(log, KVCONNECT_ROUTER_METRICS_PORT="0") as router:
        port = await port_of("metrics", log)
        idle = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_CONNECTIONS + 1)
        ]
        assert (await idle[-1][0].read()).startswith(b"HTTP/1.1 503 ")
        assert await router.post() == 200
        for _, writer in idle:
            writer.close()
        url = f"http://127.0.0.1:{port}/metrics"

        async def served() -> bool:
            async with router.client.get(url) as answer:
                return answer.status == 200

        await until(served)


def test_an_address_of_metrics_needs_a_port() -> None:
    with pytest.raises(ConfigError, match=r"metrics-host.*0\.0\.0\.0.*name --metrics-port"):
        Listening(metrics_host="0.0.0.0")
    Listening(metrics_host="0.0.0.0", metrics_port=9090)  # control


def test_an_admin_api_with_a_certificate_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"admin-tls.*name --tls-cert"):
        RouterOptions((), (), admin=AdminAccess(token=TOKEN, tls=True))
    at = Listening(cert="c", key="k")
    RouterOptions((), (), admin=AdminAccess(token=TOKEN, tls=True), listening=at)  # control


@on_loop
async def test_a_port_that_is_taken_leaves_nothing_running() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = AdminAccess(port=taken.getsockname()[1], token=TOKEN)
        before = asyncio.all_tasks()
        with pytest.raises(OSError, match="in use"):
            async with bench([p], [d], admin=admin):
                pass
        assert asyncio.all_tasks() == before
    async with bench([p], [d], admin=admin) as router:  # the control: the port is free
        assert len(asyncio.all_tasks()) > len(before)
        assert (await router.post(ASK)).status == 200


@on_loop
async def test_a_request_that_hangs_does_not_keep_the_router() -> None:
    asked = asyncio.Event()

    async def hangs(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it never ends")

    made, port = web.Application(), free_port()
    made.router.add_get("/", hangs)
    async with aiohttp.ClientSession() as client, asyncio.timeout(40):
        async with at_own_address("admin API", made, "127.0.0.1", port):
            asking = asyncio.create_task(status(client, f"http://127.0.0.1:{port}/"))
            await asked.wait()
        with pytest.raises(aiohttp.ClientError):
            await asking
