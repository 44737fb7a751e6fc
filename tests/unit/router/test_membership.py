"""Whom a router trusts: breakers, engines that come and go, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.app import RouterApp
from kvconnect.router.connections.engine_connection import BaseUrl
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.engine_spec import EngineSpec, engine_spec
from kvconnect.router.fleet import engines as breakers
from kvconnect.router.fleet.engines import Engine, Fleet, engine_breaker
from kvconnect.router.fleet.sources import OnRefused, dns, file
from kvconnect.router.metrics import InputKind
from kvconnect.router.options import RouterOptions, Sources
from kvconnect.router.policy.fleet_view import EngineKind, Role
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prompt_times import PromptTimer
from tests.fakes.engine import (
    ASK,
    Admin,
    FakeEngine,
    Handler,
    administered,
    bench,
    decodes,
    hangs,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

BROKEN = says(500, {"error": {"message": "out of order"}})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(file, "FILE_EVERY_S", 0.02)
    monkeypatch.setattr(dns, "DNS_EVERY_S", 0.02)


# Breaker ----------------------------------------------------------------------------------------


def test_three_failures_in_a_row_and_trials_that_get_rarer() -> None:
    breaker = engine_breaker()
    for failures in range(3):
        assert breaker.allows(0.0), failures
        breaker.failed(0.0, 0.0)
    pauses, now = [], 0.0
    for _ in range(8):
        start = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - start)
        breaker.begin(now)
        assert not breaker.allows(now), "one trial at a time"
        breaker.failed(now, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    breaker.succeeded()
    for _ in range(2):
        assert breaker.allows(now)
        breaker.failed(now, now)
    breaker.failed(now, now - 0.5)
    assert breaker.allows(now), "of a request that began before the engine was given up"
    breaker.failed(now, now)
    assert not breaker.allows(now + 0.9) and breaker.allows(now + 1.0), "a first pause again"


def test_a_burst_of_failures_is_one_and_a_restart_forgets_them() -> None:
    breaker = engine_breaker()
    for _ in range(16):
        breaker.failed(5.0, 0.0)
    assert not breaker.allows(5.9) and breaker.allows(6.0), "the pause is the first one"
    breaker.begin(6.0)
    breaker.begin(7.5)  # another trial: the first takes longer than the pause
    breaker.failed(8.0, 7.5)
    breaker.failed(8.5, 6.0)
    assert not breaker.allows(9.9) and breaker.allows(10.0)
    spec, loads, timer = EngineSpec("http://a:1"), Loads(1.0), PromptTimer()
    upstream = Engine(Role.DECODE, 0, spec, loads, lambda _: None, timer)
    for _ in range(breakers.FAILURES):
        upstream.breaker.failed(time.monotonic(), 0.0)
    assert not upstream.breaker.allows(time.monotonic())
    upstream.mark(up=True)
    assert upstream.breaker.allows(time.monotonic())
    for _ in range(breakers.FAILURES):
        upstream.breaker.failed(time.monotonic(), 0.0)
    assert upstream.breaker.allows(time.monotonic()), "these were asked of the one before"


@given(st.lists(st.sampled_from(["began", "failed", "succeeded"])), st.floats(0, 100))
def test_nothing_is_given_up_for_good(events: list[str], now: float) -> None:
    breaker = engine_breaker()
    for event in events:
        if event == "succeeded":
            breaker.succeeded()
        elif event == "failed":
            breaker.failed(now, now)
        else:
            breaker.begin(now)
    assert breaker.allows(now + breakers.PAUSE_MOST_S)


@on_loop
async def test_an_engine_that_only_looks_well_is_gone_around() -> None:
    ps, d = [FakeEngine(BROKEN), FakeEngine(prefills)], FakeEngine(decodes)
    async with bench(ps, [d], handoff="pull") as router:
        for _ in range(12):
            assert (await router.post(ASK)).status == 200
        assert len(ps[0].asked) == breakers.FAILURES
        ps[0].answer = prefills
        await until(lambda: _asked_again(router, ps[0]))


async def _asked_again(router: Any, engine: FakeEngine) -> bool:
    await router.post(ASK)
    await asyncio.sleep(0.02)
    return len(engine.asked) > breakers.FAILURES


@on_loop
async def test_when_all_fail_all_are_still_tried() -> None:
    p, d = FakeEngine(BROKEN), FakeEngine(decodes)
    async with bench([p], [d], handoff="pull") as router:
        for _ in range(5):
            assert (await router.post(ASK)).status == 502
        p.answer = prefills
        assert (await router.post(ASK)).status == 200, "no pause for the only one"


# Membership -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def engine(answer: Handler) -> AsyncIterator[FakeEngine]:
    found = FakeEngine(answer)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


@on_loop
async def test_engines_are_added_drained_and_removed_while_requests_run() -> None:
    ps, ds = [FakeEngine(prefills)], [FakeEngine(decodes)]
    async with engine(decodes) as late, administered(ps, ds) as admin:
        router = admin.router
        failed: list[int] = []
        running = True

        async def load() -> None:
            while running:
                status, _, _ = await router.post(ASK)
                if status != 200:
                    failed.append(status)

        clients = [asyncio.create_task(load()) for _ in range(3)]
        named = {"role": "decode", "worker": late.url}
        assert (await admin.ask("POST", named))[0] == 201
        assert (await admin.ask("POST", named))[0] == 409, "it is there already"
        await until(lambda: len(late.asked) > 3)
        old = {"role": "decode", "url": ds[0].url}
        status, said = await admin.ask("POST", old, "/drain")
        assert (status, said["draining"]) == (200, True)
        await until(lambda: _requests(admin, ds[0].url, 0))
        before = len(ds[0].asked)
        assert (await admin.ask("DELETE", old))[0] == 200
        await until(lambda: _gone(admin, ds[0].url))
        await ds[0].stop()
        count = len(late.asked)
        await until(lambda: len(late.asked) > count + 3)
        running = False
        await asyncio.gather(*clients)
        assert (failed, len(ds[0].asked)) == ([], before)
        assert await router.metric("upstream_up", role="decode", upstream=ds[0].url) == -1
        listed = await admin.listed()
        assert [(each["role"], each["url"], each["up"]) for each in listed] == [
            ("prefill", ps[0].url, True),
            ("decode", late.url, True),
        ]
        for method, body, path, want in (
            ("DELETE", old, "", 404),
            ("POST", {"role": "decode", "worker": "ftp://x"}, "", 400),
            ("POST", {"role": "both", "worker": late.url}, "", 400),
            ("POST", {"role": "decode", "worker": 7}, "", 400),
            ("POST", [], "/drain", 400),
        ):
            assert (await admin.ask(method, body, path))[0] == want
        admin.token = "wrong"
        assert (await admin.ask("GET"))[0] == 401
        assert (await admin.ask("POST", named))[0] == 401


@on_loop
async def test_an_engine_that_two_sources_name_stays_until_both_drop_it() -> None:
    router = RouterApp(RouterOptions((), (), sources=Sources("engines")))
    members, fleet = router._membership, router._fleet
    specs = tuple(engine_spec("test", f"http://127.0.0.1:{port}") for port in (7, 9))

    def kept() -> list[tuple[str, str]]:
        return [(members.source_of(e), e.url) for e in fleet.all() if members.is_kept(e)]

    try:
        for source in ("file", "etcd"):
            members.update(source, {Role.DECODE: specs})
        assert kept() == [("file", spec.url) for spec in specs]
        members.update("file", {Role.DECODE: specs[:1]})
        assert kept() == [("file", specs[0].url), ("etcd", specs[1].url)]
        members.update("file", {Role.DECODE: ()})
        assert sorted(kept()) == [("etcd", spec.url) for spec in specs]
        members.update("etcd", {Role.DECODE: ()})
        assert kept() == []
    finally:
        await members.stop()


@on_loop
async def test_an_engine_comes_back_where_one_is_drained() -> None:
    p, d = FakeEngine(prefills), FakeEngine(hangs)
    async with administered([p], [d]) as admin:
        router = admin.router

        def in_flight() -> Any:
            return router.metric("in_flight", role="decode", upstream=d.url)

        held = [asyncio.create_task(router.post(ASK))]
        await until(lambda: _requests(admin, d.url, 1))
        named = {"role": "decode", "url": d.url}
        await admin.ask("POST", named, "/drain")
        _, said = await admin.ask("POST", {"role": "decode", "worker": d.url})
        assert said["number"] == 1
        await until(lambda: _up(admin, d.url, 1))
        held.append(asyncio.create_task(router.post(ASK)))
        await until(lambda: _at(in_flight, 2))
        held[0].cancel()
        # The old one is forgotten, and nothing of the new one with it.
        await until(lambda: _requests(admin, d.url, 1))
        assert await in_flight() == 1
        held[1].cancel()
        await until(lambda: _at(in_flight, 0))
        _, said = await admin.ask("POST", named, "/drain")
        assert (said["number"], said["draining"]) == (1, True)
        assert await router.metric("upstream_up", role="decode", upstream=d.url) == 1


def test_a_removed_engine_takes_nothing_from_others_at_its_url() -> None:
    observer, spec = Mock(), engine_spec("decode", "http://engine")
    fleet = Fleet(RouterOptions((), (spec,)), observer)
    old, new = fleet.all()[0], fleet.add(Role.DECODE, spec)
    both = fleet.add(Role.PREFILL, spec)
    for engine in (old, new, both):
        engine.mark(up=True)
    new.loads.report(new.loads.ask(time.monotonic()), {0: 7.0, 1: 7.0})
    for left in (new, both):
        observer.reset_mock()
        fleet.remove(old)
        assert [load.foreign for load in left.loads.at(time.monotonic())] == [7, 7]
        seen = [(call.args[0].index, call.args[0].up) for call in observer.up.call_args_list]
        assert seen == ([(0, False), (1, True)] if left is new else [(1, False)])
        assert observer.remove_engine.called is (left is both)
        old = new
    fleet.remove(both)
    assert [load.foreign for load in both.loads.at(time.monotonic())] == [None]


@on_loop
async def test_an_engine_that_a_prefill_is_for_is_not_idle() -> None:
    may_answer = asyncio.Event()

    async def slowly(*arguments: Any) -> Any:
        await may_answer.wait()
        return await prefills(*arguments)

    p, d = FakeEngine(slowly), FakeEngine(decodes)
    async with administered([p], [d], handoff="pull") as admin:
        router = admin.router
        asking = asyncio.create_task(router.post(ASK))
        await until(lambda: bool(p.asked))
        _, said = await admin.ask("DELETE", {"role": "decode", "url": d.url})
        assert said["requests"] == 1
        await asyncio.sleep(0.2)
        assert await _requests(admin, d.url, 1), "it is kept until its request has come and gone"
        may_answer.set()
        assert (await asking)[0] == 200
        await until(lambda: _gone(admin, d.url))


@on_loop
async def test_no_connection_to_an_engine_that_was_removed_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten: list[BaseUrl] = []
    monkeypatch.setattr(ConnectionPool, "forget", lambda _, base: forgotten.append(base))
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with administered([p], [d]) as admin:
        body = {"role": "decode", "url": d.url}
        assert (await admin.ask("DELETE", body))[0] == 200
        await until(lambda: forgotten == [BaseUrl.of(d.url)])


async def _up(admin: Admin, url: str, number: int) -> bool:
    return any(each["up"] and each["number"] == number for each in await admin.of(url))


async def _at(read: Any, value: float) -> bool:
    return bool(await read() == value)


async def _requests(admin: Admin, url: str, number: int) -> bool:
    return [each["requests"] for each in await admin.of(url)] == [number]


async def _gone(admin: Admin, url: str) -> bool:
    return await admin.of(url) == []


@on_loop
async def test_a_file_adds_and_removes_engines(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with engine(prefills) as p, engine(decodes) as d, engine(decodes) as other:
        path.write_text(f"# engines\n\nprefill {p.url}\ndecode {d.url}\n")
        async with bench([], [], sources=Sources(str(path))) as router:

            async def served_by(one: FakeEngine) -> bool:
                count = len(one.asked)
                status, _, _ = await router.post(ASK)
                return status == 200 and len(one.asked) == count + 1

            await until(lambda: served_by(d))
            path.write_text("decode nonsense\n")

            async def refused() -> bool:
                return await router.metric("refused_answers_total", what="file") > 0

            await until(refused)
            assert await served_by(d), "a wrong file changes nothing"
            path.write_text(f"prefill {p.url}\ndecode {other.url}\n")
            await until(lambda: served_by(other))
            await until(lambda: _series_gone(router, d.url))


async def _series_gone(router: Any, url: str) -> bool:
    return await router.metric("upstream_up", role="decode", upstream=url) == -1


def test_what_a_file_names() -> None:
    said: list[str] = []

    def refuse(what: InputKind, text: str) -> None:
        said.append(f"{what.value}: {text}")

    text = "prefill http://a:1,engine=sglang\n# no\n  decode   http://b:2  \n"
    named = {
        Role.PREFILL: (EngineSpec("http://a:1", EngineKind.SGLANG),),
        Role.DECODE: (EngineSpec("http://b:2"),),
    }
    assert file.parse(text, {}, refuse) == named
    assert not said
    long = f"decode http://b:2,events={'9' * 5000}"  # more digits than Python converts
    wrongs = (("both http://a:1", 1), ("\nprefill a", 2), ("decode", 1), (long, 1))
    for wrong, line in wrongs:
        assert file.parse(wrong, named, refuse) == named, "while a line is wrong, none is removed"
        assert said.pop().startswith(f"file: kvconnect: line {line}=")
    more = file.parse("decode nonsense\ndecode http://c:3\ndecode http://c:3", named, refuse)
    assert more[Role.DECODE] == (EngineSpec("http://c:3"), EngineSpec("http://b:2")), (
        "but others are added"
    )
    assert len(said) == 2


@on_loop
async def test_dns_stands_for_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*args: Any, **more: Any) -> list[Any]:
        assert args[0] == "pods"
        v4, v6 = socket.AF_INET, socket.AF_INET6
        addresses = [(v4, ("10.0.0.1", 0)), (v4, ("10.0.0.1", 0)), (v6, ("fd00::1", 0, 0, 0))]
        addresses.append((v4, ("not an address", 0)))
        return [(family, 1, 6, "", address) for family, address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found, raising=False)
    said: list[str] = []
    model = "http://pods:8000/base,engine=sglang"
    one, two = await dns.resolve(model, lambda what, text: said.append(what.value))
    assert said == ["dns"], "an address that is none is refused by itself"
    assert (one.url, two.url) == ("http://10.0.0.1:8000/base", "http://[fd00::1]:8000/base")
    assert one.kind is two.kind is EngineKind.SGLANG


@on_loop
async def test_dns_adds_engines_and_a_failed_lookup_removes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine(prefills) as p, engine(decodes) as d:
        prefix = "http://localhost:"
        names = {Role.PREFILL: (f"{prefix}{p.port}",), Role.DECODE: (f"{prefix}{d.port}",)}
        sources = Sources(dns=names)
        fails, failed = False, set[str]()

        async def found(name: str, refuse: OnRefused) -> tuple[EngineSpec, ...]:
            if fails:
                failed.add(name)
                raise OSError("no answer")
            return (EngineSpec(name.replace("localhost", "127.0.0.1")),)

        monkeypatch.setattr(dns, "resolve", found)
        async with bench([], [], sources=sources) as router:

            async def serves() -> bool:
                return (await router.post(ASK)).status == 200

            await until(serves)
            fails = True
            await until(lambda: len(failed) == 2)  # both names were looked up again
            assert await serves()


@on_loop
async def test_dns_may_name_a_part_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = EngineSpec("http://127.0.0.1:1"), EngineSpec("http://127.0.0.1:2")
    answers = [(a, b), (a,), (b, a), (a,), (), (a,), (a,)]

    async def found(*_: Any) -> tuple[EngineSpec, ...]:
        return answers.pop(0)

    monkeypatch.setattr(dns, "resolve", found)
    named = []
    async for engines in dns.follow(Role.DECODE, "http://many:1", lambda *_: None):
        named.append(set(engines[Role.DECODE]))
        if not answers:
            break
    assert named == [{a, b}] * 5 + [{a}], "three answers lack it; one without any counts nothing"


# The end ----------------------------------------------------------------------------------------


class Slow(BaseHTTPRequestHandler):
    """An engine that takes half a second."""

    asked = threading.Event()

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "kvconnect_card" not in str(body):
            self.asked.set()
            time.sleep(0.5)
        self._answer({"choices": [{"text": "ab"}]})

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def _answer(self, said: object) -> None:
        raw = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def test_open_requests_end_before_the_router_does() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as slow:
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{slow.server_address[1]}"
        argv = ["router", "--port", "0", "--prefill", url, "--decode", url]
        command = [sys.executable, "-m", "kvconnect.cli", *argv]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
            try:
                assert router.stderr is not None
                line = next(line for line in router.stderr if "router on" in line)
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
                assert found is not None
                answers: list[int] = []

                def ask() -> None:
                    request = urllib.request.Request(
                        f"{found[0]}/v1/completions", json.dumps(ASK).encode()
                    )
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        answers.append(answer.status)

                client = threading.Thread(target=ask)
                client.start()
                assert Slow.asked.wait(60)
                router.send_signal(signal.SIGTERM)
                client.join(60)
                assert answers == [200]
                assert router.wait(60) == 0
            finally:
                router.kill()
        slow.shutdown()
