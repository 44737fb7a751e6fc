"""Operators control the caches of engines through the router's admin API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvconnect import cli
from kvconnect.router.http.admission import Tenants
from kvconnect.router.options import Listening
from tests.fakes.engine import (
    ADMIN_TOKEN,
    Admin,
    FakeEngine,
    administered,
    decodes,
    hurry,
    on_loop,
    prefills,
    says,
)

RECEIPT = {"receipt": {"prompt": 5}, "hints": {"pinned": 1}}
PINNED = says(200, {"choices": [], "kv_transfer_params": {"kvconnect": RECEIPT}})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def control(admin: Admin, **body: Any) -> tuple[int, Any]:
    return await admin.ask("POST", {"model": "tiny", "prompt": "long", **body}, "/../cache")


@on_loop
async def test_every_engine_of_the_model_gets_the_prompt_and_the_hint() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with administered([p], [d]) as admin:
        for engine in (p, d):
            engine.answer = PINNED
        status, said = await control(admin, hint="pin", seconds=60, tokens=32, stream=True)
        assert status == 200
        assert [(one["role"], one["url"]) for one in said["engines"]] == [
            ("prefill", p.url),
            ("decode", d.url),
        ]
        for one, engine in zip(said["engines"], (p, d), strict=True):
            assert (one["hints"], one["receipt"]) == ({"pinned": 1}, {"prompt": 5})
            asked = engine.asked[-1]
            assert asked["kv_transfer_params"] == {
                "kvconnect": {"pin": 60, "tokens": 32, "receipt": True}
            }
            assert (asked["max_tokens"], asked["stream"], asked["prompt"]) == (1, False, "long")
            assert not {"hint", "seconds", "tokens"} & set(asked)
        before = len(p.asked)
        status, said = await control(admin, hint="drop", url=d.url)
        assert (status, len(said["engines"]), len(p.asked)) == (200, 1, before)
        assert d.asked[-1]["kv_transfer_params"]["kvconnect"] == {"drop": True, "receipt": True}
        await control(admin, hint="prewarm", url=d.url)
        assert d.asked[-1]["kv_transfer_params"]["kvconnect"] == {"receipt": True}


@on_loop
async def test_bad_requests_reach_no_engine_and_failures_are_named() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with administered([p], [d]) as admin:
        before = len(p.asked), len(d.asked)
        for wrong, field in (
            ({}, "hint"),
            ({"hint": "hold"}, "hint"),
            ({"hint": "pin"}, "seconds"),
            ({"hint": "drop", "seconds": 5}, "seconds"),
            ({"hint": "pin", "seconds": 1e9}, "hint"),
            ({"hint": "pin", "seconds": "5"}, "seconds"),
            ({"hint": "drop", "tokens": 0}, "hint"),
            ({"hint": "drop", "model": "other"}, "model"),
            ({"hint": "drop", "model": ["tiny"]}, "model"),
            ({"hint": "drop", "url": "http://nobody:1"}, "model"),
            ({"hint": "drop", "api_key": 7}, "api_key"),
        ):
            status, said = await control(admin, **wrong)
            assert status == 400 and said["error"].startswith(field), (wrong, said)
        assert (len(p.asked), len(d.asked)) == before
        d.answer = says(500, {"error": {"message": "out of order"}})
        p.answer = PINNED
        status, said = await control(admin, hint="demote")
        assert status == 200 and "error" not in said["engines"][0]
        assert "out of order" in said["engines"][1]["error"]
        admin.token = "wrong"
        assert (await control(admin, hint="drop"))[0] == 401


@on_loop
async def test_a_client_s_own_cache_is_named_by_its_key() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    keys = ("first-key", "second-key")
    async with administered([p], [d], listening=Listening(api_keys=keys)) as admin:
        tenant = Tenants(keys, isolate=True).find("Bearer second-key", "")
        assert tenant is not None
        await control(admin, hint="drop", api_key="second-key")
        assert d.asked[-1]["cache_salt"] == tenant.salt(b"")
        assert "api_key" not in d.asked[-1]
        await control(admin, hint="drop")
        assert "cache_salt" not in d.asked[-1]  # control: no client is named
        status, said = await control(admin, hint="drop", api_key="third-key")
        assert status == 400 and said["error"].startswith("api_key")


@on_loop
async def test_the_command_asks_the_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, request = tmp_path / "token", tmp_path / "request.json"
    token.write_text(ADMIN_TOKEN)
    request.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with administered([p], [d]) as admin:
        p.answer = d.answer = PINNED
        url = admin.url.removesuffix("/workers")
        common = [url, "--admin-token-file", str(token), "--model", "tiny"]
        pin = ["cache", "pin", *common, "--prompt", "long", "--seconds", "60"]
        assert await asyncio.to_thread(cli.main, pin) == 0
        assert len(json.loads(capsys.readouterr().out)["engines"]) == 2
        assert d.asked[-1]["kv_transfer_params"]["kvconnect"]["pin"] == 60
        drop = ["cache", "drop", *common, "--request", str(request), "--engine", d.url]
        d.answer = says(500, {"error": {"message": "out of order"}})
        assert await asyncio.to_thread(cli.main, drop) == 1
        assert d.asked[-1]["messages"] and "prompt" not in d.asked[-1]
        for wrong in (["--request", "/none"], ["--prompt", "p", "--tokens", "-1"]):
            with pytest.raises(SystemExit):
                await asyncio.to_thread(cli.main, ["cache", "drop", *common, *wrong])
