"""Operators control the caches of engines through the router's admin API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvconnect import cli
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.fleet.cache_reports import cache_stats
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.options import Listening
from tests.fakes.engine import (
    ADMIN_TOKEN,
    Admin,
    FakeEngine,
    Handler,
    administered,
    decodes,
    hurry,
    on_loop,
    prefills,
    says,
    until,
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
    keys = (ApiKey("first-key"), ApiKey("second-key"))
    async with administered([p], [d], listening=Listening(api_keys=keys)) as admin:
        tenant = Tenants(keys, isolate=True).find("second-key", "")
        assert tenant is not None
        await control(admin, hint="drop", api_key="second-key")
        assert d.asked[-1]["cache_salt"] == tenant.salt(b"")
        assert "api_key" not in d.asked[-1]
        await control(admin, hint="drop")
        assert "cache_salt" not in d.asked[-1]  # control: no client is named
        status, said = await control(admin, hint="drop", api_key="third-key")
        assert status == 400 and said["error"].startswith("api_key")


VLLM_METRICS = """\
# HELP vllm:kvconnect_host_blocks_used Host slots that hold a block.
vllm:kvconnect_host_blocks_used{engine="0",model_name="tiny"} 3.0
vllm:kvconnect_host_blocks_used{engine="1",model_name="tiny"} 4.0
vllm:kvconnect_host_blocks_capacity{engine="0",model_name="tiny"} 8.0
vllm:kvconnect_host_blocks_capacity{engine="1",model_name="tiny"} 8.0
vllm:kvconnect_host_bytes_used{engine="0",model_name="tiny"} 1048576.0
vllm:kvconnect_host_blocks_kept{engine="0",hint="pin",model_name="tiny"} 2.0
vllm:kvconnect_host_blocks_kept{engine="0",hint="retain",model_name="tiny"} 0.0
vllm:kvconnect_tier_bytes_used{engine="0",model_name="tiny",tier="disk"} 2097152.0
vllm:kvconnect_tier_bytes_capacity{engine="0",model_name="tiny",tier="disk"} 4194304.0
vllm:kvconnect_tier_available{engine="0",model_name="tiny",tier="disk"} 1.0
vllm:kvconnect_tier_available{engine="1",model_name="tiny",tier="disk"} 0.0
vllm:kvconnect_tier_available{engine="0",model_name="tiny",tier="peer"} 1.0
vllm:kvconnect_tier_available{engine="0",model_name="tiny",tier="remote"} 0.0
vllm:kvconnect_tier_bytes_used{engine="0",model_name="tiny",tier="remote"} 0.0
vllm:kvconnect_prompt_tokens_total{engine="0",model_name="tiny",source="computed"} 25.0
vllm:kvconnect_prompt_tokens_total{engine="0",model_name="tiny",source="host"} 60.0
vllm:kvconnect_prompt_tokens_total{engine="1",model_name="tiny",source="host"} 15.0
vllm:kvconnect_cache_hints_total{engine="0",hint="drop",model_name="tiny"} 1.0
vllm:kvconnect_ignored_cache_hints_total{engine="0",model_name="tiny",reason="invalid"} 0.0
vllm:kvconnect_cache_hint_blocks_total{engine="0",model_name="tiny",outcome="dropped"} 4.0
vllm:kvconnect_transfer_bytes_total{engine="0",model_name="tiny",transfer_type="PEER_to_CPU"} 1e6
vllm:kvconnect_transfer_bytes_total{engine="0",model_name="tiny",transfer_type="CPU_to_PEER"} 2e6
vllm:kvconnect_transfer_bytes_created{engine="0",model_name="tiny",transfer_type="SEND"} 2e9
vllm:kvconnect_host_bytes_capacity{engine="0",model_name="tiny"} NaN
"""
SGLANG_METRICS = """\
sglang:kvconnect_host_blocks_used{model_name="tiny",tp_rank="0"} 5.0
sglang:prompt_tokens_total{model_name="tiny"} 100.0
sglang:cached_tokens_total{cache_source="device",model_name="tiny"} 30.0
sglang:cached_tokens_total{cache_source="storage",model_name="tiny"} 10.0
"""


def test_what_engines_publish_of_their_caches_is_read_and_nothing_is_made_up() -> None:
    assert cache_stats(VLLM_METRICS) == {
        "host": {
            "blocks_used": 7,
            "blocks_capacity": 16,
            "bytes_used": 1 << 20,
            "blocks_pinned": 2,
            "blocks_retained": 0,
        },
        "tiers": {
            "disk": {"bytes_used": 2 << 20, "bytes_capacity": 4 << 20, "available": False},
            "peer": {"available": True},
        },
        "prompt_tokens": {"computed": 25, "host": 75},
        "hit_share": 0.75,
        "hints": {"applied": {"drop": 1}, "ignored": {"invalid": 0}, "blocks": {"dropped": 4}},
        "peers": {"bytes_read": 1e6, "bytes_served": 2e6},
    }
    assert cache_stats(SGLANG_METRICS) == {
        "host": {"blocks_used": 5},
        "prompt_tokens": {"device": 30, "storage": 10, "computed": 60},
        "hit_share": 0.4,
    }
    unasked = VLLM_METRICS.replace("computed", "device").replace("} 60.0", "} 0.0")
    assert "hit_share" not in cache_stats(unasked.replace("} 25.0", "} 0").replace("} 15.0", "} 0"))
    assert cache_stats(unasked)["hit_share"] == 1.0
    for nothing in ("", "vllm:num_requests_running 3\n", "\0\xff{}" * 99):
        assert cache_stats(nothing) == {}


@on_loop
async def test_stats_come_from_each_engine_or_say_why_not() -> None:
    p, d, other = FakeEngine(prefills), FakeEngine(decodes), FakeEngine(decodes)
    other.models = ("large",)
    async with administered([p], [d, other]) as admin:
        p.extra["/metrics"] = publishes(VLLM_METRICS)
        status, said = await admin.ask("GET", path="/../cache")
        assert status == 200
        first, second, third = said["engines"]
        assert (first["url"], first["models"], first["up"]) == (p.url, ["tiny"], True)
        assert first["host"]["blocks_used"] == 7 and "error" not in first
        assert second["error"] == third["error"] == "/metrics answered 404"
        for query, urls in (("model=large", [other.url]), (f"url={d.url}/", [d.url])):
            status, said = await admin.ask("GET", path=f"/../cache?{query}")
            assert [one["url"] for one in said["engines"]] == urls
        for query in ("model=none", "url=http://nobody:1", f"model=large&url={d.url}"):
            status, said = await admin.ask("GET", path=f"/../cache?{query}")
            assert status == 400 and "there is no such engine" in said["error"]
        await p.stop()

        async def is_down() -> bool:
            _, said = await admin.ask("GET", path="/../cache")
            return bool(said["engines"][0]["error"] == "it is down")

        await until(is_down)
        admin.token = "wrong"
        assert (await admin.ask("GET", path="/../cache"))[0] == 401


def publishes(text: str) -> Handler:
    async def answer(
        engine: FakeEngine,
        request: web.Request,
        body: dict[str, Any],
    ) -> web.Response:
        return web.Response(text=text)

    return answer


@on_loop
async def test_the_command_shows_stats_as_lines_or_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(ADMIN_TOKEN)
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    p.models = ("tiny", "bad\x1b[31m")
    async with administered([p], [d]) as admin:
        p.extra["/metrics"] = publishes(VLLM_METRICS)
        url = admin.url.removesuffix("/workers")
        stats = ["cache", "stats", url, "--admin-token-file", str(token)]
        assert await asyncio.to_thread(cli.main, [*stats, "--engine", p.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            f"prefill  {p.url}  vllm  up  tiny, bad?[31m",
            "    host            7 of 16 blocks, 1.0 MiB, 2 pinned, 0 retained",
            "    disk            2.0 of 4.0 MiB, not available",
            "    peer            available",
            "    prompts         tokens computed 25, host 75; 75.0% not computed",
            "    hints applied   drop 1",
            "    hints blocks    dropped 4",
            "    peers           read 1.0 MiB, served 1.9 MiB",
        ]
        assert await asyncio.to_thread(cli.main, [*stats, "--model", "tiny", "--json"]) == 1
        engines = json.loads(capsys.readouterr().out)["engines"]
        assert [("host" in one, "error" in one) for one in engines] == [
            (True, False),
            (False, True),
        ]
        assert await asyncio.to_thread(cli.main, stats) == 1
        assert "/metrics answered 404" in capsys.readouterr().out
        for wrong, said in (
            ([url], "admin-token-file"),
            ([str(tmp_path), "--engine", p.url], "only with the URL"),
            ([*stats[2:], "--model", "none"], "no such engine"),
        ):
            with pytest.raises(SystemExit):
                await asyncio.to_thread(cli.main, ["cache", "stats", *wrong])
            assert said in capsys.readouterr().err


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
        for wrong in (
            ["--request", "/none"],
            ["--prompt", "p", "--tokens", "-1"],
            ["--prompt", "p", "--tokens", "0"],
        ):
            with pytest.raises(SystemExit):
                await asyncio.to_thread(cli.main, ["cache", "drop", *common, *wrong])
