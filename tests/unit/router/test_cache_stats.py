"""Operators ask a router how much of a prompt each engine has, and where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvconnect import cli
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.fleet import kv_subscriber
from kvconnect.router.fleet.kv_events import RankEvents
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.options import Listening
from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import CacheTier, HeldTokens, PrefixIndex
from kvconnect.router.policy.ranking import RankingPolicy
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
    until,
)
from tests.fakes.event_publisher import batch, publisher

IDS = list(range(100, 118))
"""Four blocks of four tokens, and a part of a block."""
A, B = Target(0), Target(1)
KEYS = (ApiKey("first-key"), ApiKey("second-key"))
NOTHING = HeldTokens(0, {})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(kv_subscriber, "LOOK_S", 0.05)


def stored(hashes: range, **more: Any) -> dict[str, Any]:
    """Blocks of ``IDS`` on a device. Hashes 1 and 11 are of the first block, 2 and 12 of the next,
    and so on."""
    first = hashes.start % 10 - 1
    tokens, parent = IDS[4 * first : 4 * (first + len(hashes))], hashes.start - 1 if first else None
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent}
    return event | {"token_ids": tokens, "block_size": 4, "lora_id": None, "medium": "GPU"} | more


def moved(hashes: range, medium: str) -> dict[str, Any]:
    return stored(hashes) | {"token_ids": [], "medium": medium}


def told(*events: Any) -> PrefixIndex:
    index = PrefixIndex()
    assert RankEvents(A, index).receive(0, batch(*events))
    return index


# The index ----------------------------------------------------------------------------------------


def test_where_the_blocks_of_a_prompt_are() -> None:
    events = stored(range(1, 5)), moved(range(1, 3), "CPU"), moved(range(1, 2), "DISK")
    index = told(*events)
    device, host, disk = CacheTier.DEVICE, CacheTier.HOST, CacheTier.DISK
    assert index.held(A, IDS) == HeldTokens(16, {device: 16, host: 8, disk: 4})
    assert index.held(A, IDS[:11]) == HeldTokens(8, {device: 8, host: 8, disk: 4})
    assert index.held(A, IDS[1:]) == index.held(B, IDS) == NOTHING
    removed = {"type": "BlockRemoved", "block_hashes": [1, 4], "medium": "GPU"}
    assert told(*events, removed).held(A, IDS) == HeldTokens(12, {device: 8, host: 8, disk: 4})


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"extra_keys": [["alice"], None]}, {"extra_keys": [None, None]}),  # vLLM
        ({"cache_salt": "alice"}, {"cache_salt": "alice"}),  # SGLang
    ],
)
def test_a_salt_finds_its_own_blocks_only(first: Any, later: Any) -> None:
    index = told(stored(range(1, 3), **first), stored(range(3, 5), **later))
    assert index.held(A, IDS, "alice").tokens == 16
    assert index.held(A, IDS) == index.held(A, IDS, "bob") == NOTHING
    assert index.match(IDS) == {}, "requests without a salt do not find it"
    both = told(stored(range(1, 3), **first), stored(range(11, 15)))
    assert (both.held(A, IDS, "alice").tokens, both.held(A, IDS).tokens) == (8, 16)
    assert both.match(IDS)[A].tokens == 16


@pytest.mark.parametrize(
    "special",
    [
        {"extra_keys": [["adapter", "alice"], None], "lora_name": "adapter"},
        {"extra_keys": [[["image", 0], "alice"], None]},
        {"extra_keys": [["alice"], [["image", 4]]]},
        {"extra_keys": [None, ["alice"]]},
        {"extra_keys": [[7], None]},
        {"cache_salt": "alice", "lora_id": 1},
    ],
)
def test_what_a_salt_and_tokens_do_not_identify_is_left_out(special: dict[str, Any]) -> None:
    index = told(stored(range(1, 3), **special))
    assert index.held(A, IDS, "alice") == index.held(A, IDS) == NOTHING
    assert not len(index)
    later = told(stored(range(11, 13)), stored(range(13, 15), extra_keys=[["embeds"], None]))
    assert later.held(A, IDS).tokens == 8, "only a prompt's first block names a salt"


# The admin API and the command --------------------------------------------------------------------


@asynccontextmanager
async def reporting(*events: Any, **options: Any) -> AsyncIterator[tuple[Admin, Any, Any]]:
    """A router that was told ``events`` by its prefill engine; its decode engine tells nothing."""
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    aware = {"prefill_policy": RankingPolicy.CACHE_AWARE, **options}
    async with publisher() as publishes:
        p.settings = f",events={publishes.port},replay={publishes.replay}"
        async with administered([p], [d], **aware) as admin:
            for each in events:
                await publishes.publish(each, mute=True)  # repeated when the router listens

            async def heard() -> bool:
                await publishes.publish()
                counted = {"role": "prefill", "upstream": p.url}
                router = admin.router
                return await router.metric("kv_events_total", **counted, outcome="replayed") > 0

            await until(heard)
            yield admin, p, d


async def ask(admin: Admin, **body: Any) -> tuple[int, Any]:
    return await admin.ask("POST", {"model": "tiny", "prompt": IDS, **body}, "/../cache/stats")


@on_loop
async def test_each_engine_says_how_much_of_a_prompt_it_has() -> None:
    async with reporting(stored(range(1, 5)), moved(range(1, 3), "CPU")) as (admin, p, d):
        status, said = await ask(admin)
        assert status == 200
        has, lacks = said["engines"]
        assert has == {
            "role": "prefill",
            "url": p.url,
            "rank": None,
            "prompt_tokens": 18,
            "tokens": 16,
            "tiers": {"device": 16, "host": 8},
        }
        assert lacks["url"] == d.url and "events=PORT" in lacks["error"]
        _, said = await ask(admin, url=p.url, tokens=9)
        (has,) = said["engines"]
        assert (has["prompt_tokens"], has["tokens"]) == (9, 8)
        _, said = await ask(admin, prompt=[*IDS[:5], 7, 7, 7])
        assert said["engines"][0]["tokens"] == 4
        _, said = await ask(admin, prompt=IDS[1:])  # control: another prompt
        assert (said["engines"][0]["tokens"], said["engines"][0]["tiers"]) == (0, {})
        assert not p.asked and not d.asked, "no engine computes anything"


@on_loop
async def test_a_text_or_a_chat_is_tokenized_by_an_engine() -> None:
    bodies: list[dict[str, Any]] = []

    async def tokenizes(engine: Any, request: web.Request, body: dict[str, Any]) -> web.Response:
        bodies.append(body)
        return web.json_response({"tokens": IDS, "count": len(IDS)})

    chat = [{"role": "user", "content": "hello"}]
    async with reporting(stored(range(1, 5))) as (admin, p, d):
        status, said = await ask(admin, prompt="text")
        assert status == 400 and "/tokenize" in said["error"] and d.url in said["error"]
        p.extra["/tokenize"] = says(200, {"tokens": "none"})  # then the other engine is asked
        d.extra["/tokenize"] = tokenizes
        for more in ({"prompt": "text"}, {"prompt": None, "messages": chat}):
            status, said = await ask(admin, **more, cache_salt="", url="")
            assert (status, said["engines"][0]["tokens"]) == (200, 16)
            assert bodies.pop() == {"model": "tiny", **more}


@on_loop
async def test_a_tenant_is_named_by_its_key_or_salt() -> None:
    alice = Tenants(KEYS, isolate=True).find("second-key", "")
    assert alice is not None
    events = stored(range(1, 5), extra_keys=[[alice.salt(b"")], None, None, None])
    own = stored(range(11, 13), extra_keys=[["own"], None])
    async with reporting(events, own, listening=Listening(api_keys=KEYS)) as (admin, p, _):
        for more, tokens in (
            ({"api_key": "second-key"}, 16),
            ({"api_key": "first-key"}, 0),  # control: another tenant
            ({}, 0),
            ({"cache_salt": "own"}, 8),
            ({"api_key": "second-key", "cache_salt": "own"}, 0),
        ):
            status, said = await ask(admin, url=p.url, **more)
            assert status == 200
            assert [one["tokens"] for one in said["engines"]] == [tokens], more
        status, said = await ask(admin, api_key="third-key")
        assert status == 400 and said["error"].startswith("api_key")


@on_loop
async def test_what_cannot_be_told_is_refused() -> None:
    async with reporting(stored(range(1, 5))) as (admin, p, d):
        for wrong, field in (
            ({"model": ""}, "model"),
            ({"model": "other"}, "model"),
            ({"model": 7}, "model"),
            ({"url": "http://nobody:1"}, "model"),
            ({"lora_path": "adapter"}, "model"),
            ({"tokens": 0}, "tokens"),
            ({"tokens": "5"}, "tokens"),
            ({"cache_salt": 5}, "cache_salt"),
        ):
            status, said = await ask(admin, **wrong)
            assert status == 400 and said["error"].startswith(field), (wrong, said)
        status, said = await ask(admin, url=d.url)
        assert status == 400 and "cache_aware" in said["error"] and "events=" in said["error"]
        await p.stop()

        async def is_down() -> bool:
            _, said = await ask(admin, url=p.url)
            return bool(said["engines"][0].get("error") == "it is down")

        await until(is_down)
        admin.token = "wrong"
        assert (await ask(admin))[0] == 401


@pytest.mark.parametrize("policy", [RankingPolicy.CACHE_AWARE, RankingPolicy.LEAST_TOKENS])
@on_loop
async def test_without_an_index_the_answer_says_what_to_set(policy: RankingPolicy) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    if policy is RankingPolicy.LEAST_TOKENS:
        p.settings = ",events=9"
    async with administered([p], [d], prefill_policy=policy) as admin:
        status, said = await ask(admin)
        assert status == 400 and said["error"].startswith("events: no engine of 'tiny' reports")
        assert "cache_aware" in said["error"] and "events=PORT" in said["error"]
        assert "--disaggregate auto" in said["error"]


@on_loop
async def test_the_command_names_the_prompt_as_for_hints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, request, key = (tmp_path / name for name in ("token", "request.json", "key"))
    token.write_text(ADMIN_TOKEN)
    key.write_text("# the third's\ncarol third-key-0123456789\n")
    request.write_text(json.dumps({"prompt": IDS}))
    events = stored(range(1, 5)), moved(range(1, 3), "CPU")
    async with reporting(*events, listening=Listening(api_keys=KEYS)) as (admin, p, d):
        url = admin.url.removesuffix("/workers")
        stats = ["cache", "stats", url, "--admin-token-file", str(token)]
        asked = [*stats, "--model", "tiny", "--request", str(request)]
        assert await asyncio.to_thread(cli.main, asked) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"prefill  {p.url}  16 of 18 tokens: device 16, host 8"
        assert lines[1].startswith(f"decode  {d.url}  it does not report its blocks")
        asked = [*asked, "--engine", p.url]
        assert await asyncio.to_thread(cli.main, [*asked, "--tokens", "3"]) == 0
        assert capsys.readouterr().out == f"prefill  {p.url}  0 of 3 tokens\n"
        assert await asyncio.to_thread(cli.main, [*asked, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["engines"][0]["tokens"] == 16
        request.write_text(json.dumps({"prompt": IDS, "model": "tiny"}))
        named = [*stats, "--request", str(request), "--engine", p.url]
        assert await asyncio.to_thread(cli.main, named) == 0
        assert "16 of 18 tokens" in capsys.readouterr().out
        for wrong, said in (
            ([*asked, "--api-key-file", str(key)], "the router does not know it"),
            ([*stats, "--prompt", "a"], "model: name the one"),
            ([*stats, "--tokens", "3"], "need --prompt or --request"),
            ([*stats, "--tokens", "0"], "need --prompt or --request"),
            ([*asked, "--tokens", "0"], "tokens 0: use 1 or more"),
            (["cache", "stats", str(tmp_path), "--prompt", "a"], "only with the URL"),
            (["cache", "stats", str(tmp_path), "--tokens", "0"], "only with the URL"),
        ):
            with pytest.raises(SystemExit):
                await asyncio.to_thread(cli.main, wrong)
            assert said in capsys.readouterr().err
