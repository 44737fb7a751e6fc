"""Engines from a real etcd, through the real client."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvconnect.router.engine_spec import EngineSpec
from kvconnect.router.fleet.sources import etcd
from kvconnect.router.options import EtcdServer, Sources
from kvconnect.router.policy.fleet_view import EngineKind, Role
from tests.fakes.engine import ASK, FakeEngine, bench, decodes, on_loop, prefills, until
from tests.fakes.engine_source import Latest, refused
from tests.links import make_certificates
from tests.servers import free_port


class Etcd:
    """A real server. One that is killed before it has answered may leave files that none reads."""

    url: str

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, self._peers = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *tls: str) -> None:
        """Start with these flags of TLS; a server that runs is stopped before."""
        self.stop()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        here, peers = self.url, f"http://127.0.0.1:{self._peers}"
        command = [
            *("etcd", "--data-dir", str(self._folder / "data"), "--log-level", "error"),
            "--unsafe-no-fsync",  # beside other tests, a disk may need seconds for each one
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}", *tls),
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def answers(self, call: Callable[[], object]) -> None:
        """Repeat a call until the server, which starts, answers it."""

        async def answered() -> bool:
            assert self._process is not None and self._process.poll() is None, (
                self._folder / "log"
            ).read_text()[-2000:]
            try:
                await asyncio.to_thread(call)
            except etcd.Etcd3Exception:
                return False
            return True

        await until(answered)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Etcd]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    monkeypatch.setattr(etcd, "EVERY_S", 0.02)
    found = Etcd(tmp_path)
    yield found
    found.stop()


@on_loop
async def test_engines_register_in_etcd_and_a_wrong_one_harms_itself_alone(server: Etcd) -> None:
    client = etcd.Etcd3Client(port=server.port, timeout=5.0)
    server.start()
    await server.answers(client.status)
    async with Latest(etcd.follow(EtcdServer(f"{server.url}/kv/one"), refused)) as latest:
        await until(lambda: latest.times == 1)
        assert latest.named == {Role.PREFILL: (), Role.DECODE: ()}

        def register() -> Any:
            lease = client.lease(ttl=3600)
            client.put("kv/one/prefill/a", "http://10.0.0.1:8000,engine=sglang")
            client.put("kv/one/decode/b", "http://10.0.0.2:8000", lease)
            client.put("kv/one/decode/c", "nonsense")
            client.put("kv/one/both/d", "http://10.0.0.4:8000")
            client.put("kv/ones/decode/e", "http://10.0.0.5:8000")
            client.put("kv/one/decode/z", "http://10.0.0.6:8000")
            return lease

        lease = await asyncio.to_thread(register)
        await until(lambda: len(latest.urls(Role.DECODE)) == 2)
        a = EngineSpec("http://10.0.0.1:8000", EngineKind.SGLANG)
        b, z = EngineSpec("http://10.0.0.2:8000"), EngineSpec("http://10.0.0.6:8000")
        assert latest.named == {Role.PREFILL: (a,), Role.DECODE: (b, z)}
        server.stop()
        times = latest.times
        await asyncio.sleep(0.2)
        assert latest.times == times, "no answer changes nothing"
        server.start()
        await server.answers(lease.revoke)
        await until(lambda: latest.named == {Role.PREFILL: (a,), Role.DECODE: (z,)})


def _put_as_root(client: Any) -> None:
    who = {"name": "root", "password": "secret"}
    client.session.headers.pop("Authorization", None)
    answer = client.post(client.get_url("/auth/authenticate"), json=who)
    client.session.headers["Authorization"] = answer["token"]
    client.put("kv/decode/b", "http://10.0.0.2:8000")


@on_loop
async def test_tls_and_users(
    tmp_path: Path,
    server: Etcd,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
    made = make_certificates(tmp_path, alternative="IP:127.0.0.1")
    certificate = ("--cert-file", made.tls_cert, "--key-file", made.tls_key)

    async def learns_nothing(one: EtcdServer) -> None:
        caplog.clear()
        async with Latest(etcd.follow(one, refused)) as latest:
            await until(lambda: "etcd: " in caplog.text)
            assert latest.times == 0

    server.start(*certificate, "--client-cert-auth", "--trusted-ca-file", made.tls_ca)
    client = (made.tls_ca, made.tls_key, made.tls_cert)
    admin = etcd.Etcd3Client("127.0.0.1", server.port, "https", *client, timeout=5.0)
    admin.session.trust_env = False
    put = partial(admin.put, "kv/decode/a", "http://10.0.0.1:8000")
    await server.answers(put)
    url = f"{server.url}/kv"
    async with Latest(
        etcd.follow(EtcdServer(url, made.tls_ca, (made.tls_cert, made.tls_key)), refused)
    ) as latest:
        await until(lambda: len(latest.urls(Role.DECODE)) == 1)
    await learns_nothing(EtcdServer(url, made.tls_ca))

    # With users, etcd wants no certificate of a client.
    server.start(*certificate)
    admin.session.cert = None
    await server.answers(put)
    for path, body in (
        ("user/add", {"name": "root", "password": "secret"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        await asyncio.to_thread(admin.post, admin.get_url(f"/auth/{path}"), json=body)
    known = EtcdServer(url, made.tls_ca, None, "root", "secret")
    async with Latest(etcd.follow(known, refused)) as latest:
        await until(lambda: len(latest.urls(Role.DECODE)) == 1)
        server.start(*certificate)  # etcd forgets its tokens
        await server.answers(partial(_put_as_root, admin))
        await until(lambda: len(latest.urls(Role.DECODE)) == 2)
    await learns_nothing(EtcdServer(url, made.tls_ca))
    await learns_nothing(EtcdServer(url, made.tls_ca, None, "root", "guess"))
    await learns_nothing(EtcdServer(url, "", None, "root", "secret"))


@on_loop
async def test_a_router_serves_with_what_etcd_names(server: Etcd) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    server.start()
    async with contextlib.AsyncExitStack() as ends:
        for engine in (p, d):
            await engine.start()
            ends.push_async_callback(engine.stop)
        source = Sources(etcd=EtcdServer(f"{server.url}/kv"))
        router = await ends.enter_async_context(bench([], [], sources=source))
        client = etcd.Etcd3Client(port=server.port, timeout=5.0)
        for role, engine in (("prefill", p), ("decode", d)):
            await server.answers(partial(client.put, f"kv/{role}/x", engine.url))

        async def serves(status: int) -> bool:
            return (await router.post(ASK)).status == status

        await until(lambda: serves(200))
        await asyncio.to_thread(client.delete, "kv/decode/x")
        await until(lambda: serves(503))
