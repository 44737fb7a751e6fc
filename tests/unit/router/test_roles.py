"""Engines that change their role while requests run: drained, probed, and back if that fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvconnect.router.fleet import handoff_probes
from kvconnect.router.fleet.sources import file
from kvconnect.router.options import Intervals, Sources
from tests.fakes.engine import (
    ASK,
    Admin,
    FakeEngine,
    administered,
    decodes,
    hangs,
    hurry,
    on_loop,
    prefills,
    says,
    until,
)

COMPUTED = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(file, "FILE_EVERY_S", 0.02)


async def both(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """An engine of either role."""
    params = body.get("kv_transfer_params") or {}
    return await (prefills if params.get("do_remote_decode") else decodes)(engine, request, body)


async def roles(admin: Admin) -> list[tuple[str, str]]:
    """Return role and URL of those that get requests."""
    return [(each["role"], each["url"]) for each in await admin.listed() if not each["draining"]]


async def switch(admin: Admin, role: str, engine: FakeEngine) -> tuple[int, Any]:
    return await admin.ask("POST", {"role": role, "url": engine.url}, "/switch")


@on_loop
async def test_an_engine_switches_there_and_back_under_load() -> None:
    ps, d = [FakeEngine(prefills), FakeEngine(both)], FakeEngine(decodes)
    async with administered(ps, [d], handoff="pull") as admin:
        failed: list[int] = []
        running = True

        async def load() -> None:
            while running:
                status, _, _ = await admin.router.post(ASK)
                if status != 200:
                    failed.append(status)

        clients = [asyncio.create_task(load()) for _ in range(3)]
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            status, said = await switch(admin, role, ps[1])
            assert (status, said["role"], said["draining"]) == (200, other, False)
            assert (role, ps[1].url) not in await roles(admin)
            before = len(ps[1].asked)
            await until(lambda count=before: len(ps[1].asked) > count + 3)
            role = "do_remote_prefill" if other == "decode" else "do_remote_decode"
            assert ps[1].asked[-1]["kv_transfer_params"][role] is True
        running = False
        await asyncio.gather(*clients)
        assert failed == []


@pytest.mark.parametrize("probe_s", [0.0, 60.0])
@on_loop
async def test_who_passed_its_probe_is_proven_where_there_are_probes(
    monkeypatch: pytest.MonkeyPatch, probe_s: float
) -> None:
    monkeypatch.setattr(handoff_probes.Prober, "_due", lambda _: [])  # no other probe is made
    ps, d = [FakeEngine(prefills), FakeEngine(both)], FakeEngine(decodes)
    async with administered(ps, [d], intervals=Intervals(probe_s=probe_s), handoff="pull") as admin:
        _, said = await switch(admin, "prefill", ps[1])
        assert (said["role"], said["proven"]) == ("decode", probe_s > 0)
        for _ in range(4):
            assert (await admin.router.post(ASK)).status == 200
        told = {"kv_transfer_params"}
        assert bool([body for body in d.asked if told <= body.keys()]) == (probe_s == 0)


@on_loop
async def test_engines_of_a_unified_router_have_one_role() -> None:
    d, more = FakeEngine(decodes), FakeEngine(decodes)
    async with administered([], [d, more], handoff="none") as admin:
        status, said = await switch(admin, "decode", d)
        assert (status, "--unified" in said["error"]) == (409, True)
        named = {"role": "prefill", "worker": "http://127.0.0.1:9"}
        status, said = await admin.ask("POST", named)
        assert status in (400, 409) and "--unified" in said["error"]
        status, _ = await admin.ask("POST", {**named, "role": "decode"})  # control
        assert status < 300
        assert len(await roles(admin)) == 3


@pytest.mark.parametrize(
    ("role", "answer", "why"),
    [
        ("prefill", says(200, COMPUTED), "decode computed the prompt itself"),
        ("prefill", says(500, {"error": "out of order"}), "decode answered 500"),
        ("decode", decodes, "prefill offers no hand-off"),
    ],
)
@on_loop
async def test_an_engine_whose_hand_off_fails_goes_on_as_before(
    role: str, answer: Any, why: str
) -> None:
    ps = [FakeEngine(prefills), FakeEngine(prefills)]
    ds = [FakeEngine(decodes), FakeEngine(decodes)]
    engine = (ps if role == "prefill" else ds)[1]
    async with administered(ps, ds, handoff="pull") as admin:
        before = await roles(admin)
        engine.answer = answer
        status, said = await switch(admin, role, engine)
        assert status == 409 and why in said["error"]
        assert await roles(admin) == before
        engine.answer = both
        count = len(engine.asked)
        for _ in range(4):
            assert (await admin.router.post(ASK)).status == 200
        assert len(engine.asked) > count, "it gets requests again"


@on_loop
async def test_what_cannot_succeed_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    ps, ds = [FakeEngine(both), FakeEngine(both)], [FakeEngine(both), FakeEngine(decodes)]
    named = FakeEngine(both)
    await named.start()
    path.write_text(f"prefill {named.url}\n")
    try:
        async with administered(
            ps, ds, sources=Sources(str(path)), drain_s=0.2, handoff="pull"
        ) as admin:
            other = (
                await admin.ask("POST", {"role": "prefill", "worker": f"{ds[0].url},engine=sglang"})
            )[0]
            assert other == 201
            await admin.ask("POST", {"role": "decode", "url": ds[1].url}, "/drain")
            for role, engine, why in (
                ("prefill", ds[0], "SGLang's servers"),
                ("prefill", named, "its role is named by file: change it there"),
                ("decode", ds[0], "it is a prefill engine too"),
                ("decode", ds[1], "it is down, or being drained"),
            ):
                status, said = await switch(admin, role, engine)
                assert (status, why in said["error"]) == (409, True), said
            assert (await switch(admin, "decode", named))[0] == 404
            status, said = await admin.ask("DELETE", {"role": "prefill", "url": named.url})
            assert status == 409 and "it is named by file: remove it there" in said["error"]
            ps[1].answer = hangs
            requests = [asyncio.create_task(admin.router.post(ASK)) for _ in range(6)]
            await until(lambda: bool(ps[1].asked))
            status, said = await switch(admin, "prefill", ps[1])
            assert status == 409 and "did not end in time" in said["error"]
            for request in requests:
                request.cancel()
    finally:
        await named.stop()


async def is_draining(admin: Admin, engine: FakeEngine) -> bool:
    (listed,) = await admin.of(engine.url)
    return bool(listed["draining"])


@contextlib.asynccontextmanager
async def being_switched(
    admin: Admin, engine: FakeEngine
) -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
    """Have requests hang at a prefill engine, which is drained to be switched meanwhile."""
    requests = [asyncio.create_task(admin.router.post(ASK)) for _ in range(6)]
    try:
        await until(lambda: bool(engine.asked))
        switching = asyncio.create_task(switch(admin, "prefill", engine))
        await until(lambda: is_draining(admin, engine))
        yield switching
    finally:
        for request in requests:
            request.cancel()


@pytest.mark.parametrize("wish", ["DELETE", "/drain"])
@on_loop
async def test_what_an_operator_wants_during_a_switch_counts(wish: str) -> None:
    ps, d = [FakeEngine(prefills), FakeEngine(hangs)], FakeEngine(decodes)
    async with administered(ps, [d], handoff="pull") as admin:
        async with being_switched(admin, ps[1]) as switching:
            named = {"role": "prefill", "url": ps[1].url}
            method, path = ("DELETE", "") if wish == "DELETE" else ("POST", wish)
            assert (await admin.ask(method, named, path))[0] == 200
            ps[1].answer = both
        status, said = await switching
        assert status == 409 and "removed or drained meanwhile" in said["error"]
        assert ps[1].url not in [url for _, url in await roles(admin)]


@on_loop
async def test_the_last_engine_of_a_role_stays() -> None:
    async with administered([FakeEngine(both)], [FakeEngine(both)], handoff="pull") as admin:
        for role, engine in (
            ("prefill", admin.router.prefill[0]),
            ("decode", admin.router.decode[0]),
        ):
            status, said = await switch(admin, role, engine)
            assert status == 409 and f"no other {role} engine" in said["error"]


@on_loop
async def test_an_engine_goes_on_when_it_becomes_the_last_of_its_role() -> None:
    ps, d = [FakeEngine(both), FakeEngine(hangs)], FakeEngine(both)
    async with administered(ps, [d], handoff="pull", drain_s=600.0) as admin:
        async with being_switched(admin, ps[1]) as switching:
            ps[0].well = False
            status, said = await switching
        assert status == 409 and "no other prefill engine is up any more" in said["error"]
        assert not await is_draining(admin, ps[1])
        ps[1].answer = both
        assert (await admin.router.post(ASK)).status == 200
