"""Engines from a file, and from Kubernetes: the real client, and a server that speaks the part of
Kubernetes' REST protocol that matters here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from kubernetes import client

from kvconnect.router.fleet.sources import configured_sources, etcd, file, kubernetes
from kvconnect.router.fleet.sources.kubernetes import Slices
from kvconnect.router.options import EtcdServer, Sources
from kvconnect.router.policy.fleet_view import EngineKind, Role
from tests.fakes.engine import on_loop, until
from tests.fakes.engine_source import Latest, refused

# Kubernetes -------------------------------------------------------------------------------------


class Cluster:
    """EndpointSlices of one service, with an API that lists and watches them."""

    def __init__(self) -> None:
        self.slices: dict[str, Any] = {}
        self.version = 1
        self.lists = 0
        self.watches: list[web.StreamResponse] = []
        self.asked: list[dict[str, str]] = []
        self.fails = False

    def slice(self, name: str, *endpoints: tuple[str, bool | None]) -> dict[str, Any]:
        self.version += 1
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "addressType": "IPv4",
            "ports": [],
            "endpoints": [
                {
                    "addresses": [address, "10.9.9.9"],
                    "conditions": {} if ready is None else {"ready": ready},
                }
                for address, ready in endpoints
            ],
        }

    async def change(self, name: str, *endpoints: tuple[str, bool | None]) -> None:
        """Set a slice, or delete it if it has no endpoints; watchers hear of it."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        said = self.slice(name, *endpoints)
        if endpoints:
            self.slices[name] = said
        else:
            del self.slices[name]
            kind = "DELETED"
        await self.tell({"type": kind, "object": said})

    async def tell(self, event: dict[str, Any]) -> None:
        for stream in self.watches:
            await stream.write(json.dumps(event).encode() + b"\n")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.match_info["namespace"] == "serving"
        self.asked.append(dict(request.query))
        if self.fails:
            status = {"kind": "Status", "code": 503, "message": "not now"}
            return web.json_response(status, status=503)
        if request.query.get("watch", "").lower() != "true":
            self.lists += 1
            listed = {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSliceList",
                "metadata": {"resourceVersion": str(self.version)},
                "items": list(self.slices.values()),
            }
            return web.json_response(listed)
        assert request.query["resourceVersion"]
        stream = web.StreamResponse()
        stream.content_type = "application/json"
        await stream.prepare(request)
        self.watches.append(stream)
        self.ended = asyncio.Event()
        await self.ended.wait()
        self.watches.remove(stream)
        return stream


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Serve a cluster, and have the client find it as users do: by a kubeconfig file."""
    monkeypatch.setattr(kubernetes, "PAUSE_S", 0.05)
    served = Cluster()
    app = web.Application()
    path = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    app.router.add_get(path, served.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    where = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(where, str(file))
    try:
        yield served
    finally:
        await runner.cleanup()


@on_loop
async def test_ready_endpoints_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, monkeypatch) as served:
        served.slices["a"] = served.slice("a", ("10.0.0.1", True), ("10.0.0.2", False))
        name = "http://decode.serving.svc:8000/base,engine=sglang"
        async with Latest(kubernetes.follow(Role.DECODE, name, refused)) as latest:

            async def shows(*addresses: str) -> None:
                want = [f"http://{address}:8000/base" for address in addresses]
                await until(lambda: latest.urls(Role.DECODE) == want)

            await shows("10.0.0.1")
            assert latest.named[Role.DECODE][0].kind is EngineKind.SGLANG
            assert list(latest.named) == [Role.DECODE]
            await until(lambda: bool(served.watches))
            assert served.asked[0]["labelSelector"] == "kubernetes.io/service-name=decode"
            await served.change("a", ("10.0.0.1", True), ("10.0.0.2", None))
            await shows("10.0.0.1", "10.0.0.2")
            await served.change("b", ("fd00::1", True))
            await until(lambda: "http://[fd00::1]:8000/base" in latest.urls(Role.DECODE))
            await served.change("a")
            await until(lambda: latest.urls(Role.DECODE) == ["http://[fd00::1]:8000/base"])
            # What was listed is too old to go on from: it is listed again.
            lists = served.lists
            served.slices["c"] = served.slice("c", ("10.0.0.3", True))
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await served.tell({"type": "ERROR", "object": gone})
            await until(lambda: "http://10.0.0.3:8000/base" in latest.urls(Role.DECODE))
            assert served.lists == lists + 1


@on_loop
async def test_a_cluster_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, monkeypatch) as served:
        served.slices["a"] = served.slice("a", ("10.0.0.1", True))
        async with Latest(
            kubernetes.follow(Role.PREFILL, "http://p.serving:8000", refused)
        ) as latest:
            await until(lambda: bool(served.watches))
            served.fails, count = True, len(served.asked)
            served.ended.set()
            await until(lambda: len(served.asked) > count + 1)
            assert latest.urls(Role.PREFILL) == ["http://10.0.0.1:8000"]
            served.slices["a"] = served.slice("a", ("10.0.0.2", True))
            served.fails = False
            await until(lambda: latest.urls(Role.PREFILL) == ["http://10.0.0.2:8000"])


def test_each_source_is_opened_once_under_its_name() -> None:
    sources = Sources(
        "/f", {Role.DECODE: ("http://d:1",)}, {Role.PREFILL: ("http://p:1",)}, "http://e/x"
    )
    assert [name for name, _ in configured_sources(sources)] == [
        "file",
        "Kubernetes service http://p:1",
        "DNS http://d:1",
        "etcd",
    ]
    assert list(configured_sources(Sources())) == []


@on_loop
async def test_a_file_that_is_gone_is_logged_once_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads = 0

    async def read(work: Callable[[], str]) -> str:
        nonlocal reads
        reads += 1
        return work()

    async def read_often(more: int) -> None:
        enough = reads + more
        await until(lambda: reads >= enough)

    monkeypatch.setattr(file, "FILE_EVERY_S", 0.0)
    monkeypatch.setattr(file, "asyncio", SimpleNamespace(to_thread=read, sleep=asyncio.sleep))
    path = tmp_path / "engines"
    path.write_text("prefill http://a:1\n")
    source = file.follow(str(path), lambda *_: None)
    assert [w.url for w in (await anext(source))[Role.PREFILL]] == ["http://a:1"]
    waiting = asyncio.ensure_future(anext(source))
    for _ in range(2):
        caplog.clear()
        path.unlink()
        await read_often(5)
        (said,) = (each for each in caplog.messages if str(path) in each)
        assert said.count(str(path)) == 1 and "No such file" in said and not waiting.done()
        path.write_text("prefill http://a:1\n")
        await read_often(3)
    path.write_text("prefill http://b:1\n")
    assert [w.url for w in (await waiting)[Role.PREFILL]] == ["http://b:1"]
    await source.aclose()


@on_loop
async def test_a_file_that_is_being_written_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, then = (
        "prefill http://a:1\ndecode http://b:20\n",
        "decode http://b:20\ndecode http://c:300",
    )
    writing = ["", "", first, then[:7], then[:20], then[:-2], then, then]
    polls = iter([first, *writing, "", "", "# none", "# none"])

    async def read(work: Callable[[], str]) -> str:
        return next(polls, "# none")

    monkeypatch.setattr(file, "FILE_EVERY_S", 0.0)
    monkeypatch.setattr(file, "asyncio", SimpleNamespace(to_thread=read, sleep=asyncio.sleep))
    source = file.follow("engines", lambda *_: None)
    found = [
        {role.value: [spec.url for spec in specs] for role, specs in (await anext(source)).items()}
        for _ in range(3)
    ]
    assert found == [
        {"prefill": ["http://a:1"], "decode": ["http://b:20"]},
        {"prefill": [], "decode": ["http://b:20", "http://c:300"]},
        {"prefill": [], "decode": []},
    ]


def test_a_pod_with_addresses_of_both_families_is_one_engine() -> None:
    def endpoint(address: str, pod: str | None) -> client.V1Endpoint:
        target = client.V1ObjectReference(uid=pod) if pod else None
        return client.V1Endpoint(addresses=[address], target_ref=target)

    def made(name: str, family: str, *endpoints: client.V1Endpoint) -> client.V1EndpointSlice:
        return client.V1EndpointSlice(
            address_type=family,
            endpoints=list(endpoints),
            metadata=client.V1ObjectMeta(name=name),
        )

    slices = Slices(lambda text: pytest.fail(text))
    slices.listed(
        [
            made("six", "IPv6", endpoint("fd00::1", "a"), endpoint("fd00::3", "c")),
            made("four", "IPv4", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")),
            made("more", "IPv4", endpoint("10.0.0.9", None)),
        ]
    )
    assert slices.ready() == {"10.0.0.1", "10.0.0.2", "10.0.0.9", "fd00::3"}


# etcd -------------------------------------------------------------------------------------------


@on_loop
async def test_what_is_no_answer_of_etcd_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = (b64encode(text).decode() for text in (b"kv/decode/a", b"http://127.0.0.1:1"))
    header = {"header": {"revision": "1"}}
    answers: list[Any] = [{**header, "kvs": [{"key": key, "value": value}]}, {}, [], {"kvs": []}]
    refusals: list[str] = []

    def post(*_: Any, **asked: Any) -> Any:
        assert {name: b64decode(each) for name, each in asked["json"].items()} == {
            "key": b"kv/",
            "range_end": b"kv0",
        }
        return answers.pop(0) if answers else header

    monkeypatch.setattr(etcd.Etcd3Client, "get_url", lambda _, path: path)  # asks for a version
    monkeypatch.setattr(etcd.Etcd3Client, "post", post)
    monkeypatch.setattr(etcd, "EVERY_S", 0.0)
    named = etcd.follow(EtcdServer("http://127.0.0.1:1/kv"), lambda *said: refusals.append(said[1]))
    assert len((await anext(named))[Role.DECODE]) == 1
    assert not (await anext(named))[Role.DECODE], "now there are none"
    assert len(refusals) == 3
    await named.aclose()
