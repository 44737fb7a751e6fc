"""``--auto-roles``: engines change their role while a router runs, or stay where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from kvconnect.errors import ConfigError
from kvconnect.router.fleet import auto_roles
from kvconnect.router.options import RouterOptions
from kvconnect.router.policy import role_balance
from kvconnect.router.policy.fleet_view import FleetView, Role
from kvconnect.router.policy.role_balance import RoleWait, Waits
from tests.fakes.engine import (
    Admin,
    FakeEngine,
    administered,
    decodes,
    hurry,
    on_loop,
    prefills,
    until,
)


class Waiting:
    """How long prompts wait, as the router is told; and how often it has looked."""

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self.looks = 0

    def waits_of(self, _: FleetView) -> Waits:
        self.looks += 1
        return {Role.PREFILL: RoleWait(2, self.prefill_s), Role.DECODE: RoleWait(2, 0.0)}


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """A router looks at once, and changes a role at the second look."""
    hurry(monkeypatch)
    found = Waiting()
    monkeypatch.setattr(auto_roles, "LOOK_S", 0.02)
    monkeypatch.setattr(auto_roles, "waits_of", found.waits_of)
    monkeypatch.setattr(role_balance, "SUSTAINED_S", 0.0)
    return found


async def both(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """An engine of either role."""
    params = body.get("kv_transfer_params") or {}
    return await (prefills if params.get("do_remote_decode") else decodes)(engine, request, body)


async def prefilling(admin: Admin) -> list[str]:
    """Return the prefill engines that get requests."""
    listed = await admin.listed()
    return [e["url"] for e in listed if e["role"] == "prefill" and not e["draining"]]


async def changes(admin: Admin, outcome: str) -> float:
    return await admin.router.metric("role_changes_total", role="prefill", outcome=outcome)


@on_loop
async def test_an_engine_changes_once_prompts_wait(waiting: Waiting) -> None:
    p, ds = FakeEngine(prefills), [FakeEngine(both), FakeEngine(both)]
    async with administered([p], ds, auto_roles=True) as admin:
        await until(lambda: waiting.looks > 5)
        assert len(await prefilling(admin)) == 1, "control: nobody waits"
        waiting.prefill_s = 5.0

        async def changed() -> bool:
            return await changes(admin, "made") == 1

        await until(changed)
        assert len(await prefilling(admin)) == 2
        seen = waiting.looks
        await until(lambda: waiting.looks > seen + 5)
        assert await changes(admin, "made") == 1, "nothing changes for a while"


@on_loop
async def test_without_the_flag_nothing_changes(waiting: Waiting) -> None:
    waiting.prefill_s = 5.0
    p, ds = FakeEngine(prefills), [FakeEngine(both), FakeEngine(both)]
    async with administered([p], ds) as admin:
        assert len(await prefilling(admin)) == 1 and not waiting.looks


@on_loop
async def test_an_engine_that_cannot_change_keeps_its_role(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_balance, "PAUSE_S", 0.0)
    waiting.prefill_s = 5.0
    p, ds = FakeEngine(prefills), [FakeEngine(decodes), FakeEngine(decodes)]
    async with administered([p], ds, auto_roles=True) as admin:

        async def asked_both() -> bool:
            return await changes(admin, "refused") == 2 and await changes(admin, "none") > 3

        await until(asked_both)
        assert await prefilling(admin) == [p.url]
        assert sorted(await decoding(admin)) == sorted(d.url for d in ds)


async def decoding(admin: Admin) -> list[str]:
    """Return the decode engines that get requests."""
    listed = await admin.listed()
    return [e["url"] for e in listed if e["role"] == "decode" and not e["draining"]]


def test_unified_engines_have_one_role() -> None:
    with pytest.raises(ConfigError, match="one role"):
        RouterOptions((), (), handoff="none", auto_roles=True)
