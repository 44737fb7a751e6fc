"""Clients apart: what one has cached, how much of the router it may take, and who it is."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvconnect import memory
from kvconnect.cache.keys import tenant_of
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.http.admission import BodyMemory, Busy, ClientConcurrency
from kvconnect.router.http.request_reader import RequestReader
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.options import Listening, RouterOptions
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.fleet_view import Role, Target
from kvconnect.router.policy.prefixes import CacheTier, StoredBlocks
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.requests.body import prefix_of, read_body
from tests.fakes.engine import Bench, FakeEngine, bench, decodes, hangs, on_loop, prefills, until

SECRET = (
    "CONFIDENTIAL: who is to be told on Monday: Alice, Bob, Carol, Dan, Eve, Frank, Grace. " * 20
)
ASK = {"model": "tiny", "prompt": SECRET, "max_tokens": 5}
AWARE: dict[str, Any] = {
    "prefill_policy": RankingPolicy.CACHE_AWARE,
    "decode_policy": RankingPolicy.CACHE_AWARE,
}
KEYS = (ApiKey("tenant-a-s-key"), ApiKey("tenant-b-s-key"))


def units(**more: Any) -> list[int]:
    return prefix_of(read_body(msgspec.json.encode(ASK | more))).chunk_hashes


# Cached prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [SECRET * 4, list(range(1600))])
def test_prompts_are_the_same_only_with_the_same_salt_model_and_adapter(prompt: Any) -> None:
    kinds = [
        {},
        *({"cache_salt": salt} for salt in ("a", "b", ["a", "b"])),
        {"model": "other"},
        {"extra_key": "a"},
        {"lora_path": "a"},
    ]
    found = [units(prompt=prompt, **kind) for kind in kinds]
    assert found == [units(prompt=prompt, **kind) for kind in kinds]
    assert len(found[0]) > 20
    for one, other in itertools.combinations(found, 2):
        assert not set(one) & set(other), "in every unit, not only in the first"


def test_events_say_nothing_about_prompts_with_a_salt_or_of_adapters() -> None:
    ids, target = list(range(64)), Target(0)
    caches = Caches(RouterOptions((), (), **AWARE).rules)
    for index in caches.indexes.values():
        index.stored(target, StoredBlocks([1, 2, 3, 4], None, ids, 16, CacheTier.DEVICE))

    def hits(base: bool = True, **more: Any) -> Any:
        body = read_body(msgspec.json.encode({"prompt": ids, **more}))
        return caches.hits(prefix_of(body), 64, base=base)[Role.PREFILL]

    assert hits()[target].tokens == 64
    assert hits(base=False) == hits(cache_salt="a") == hits(lora_path="a") == {}
    assert hits(cache_salt=None)[target].tokens == 64


async def told(router: Bench, salt: str, prompt: str = SECRET) -> dict[str, str]:
    """Ask, and return what the answer's headers say of caches."""
    _, _, headers = await router.post(ASK | {"prompt": prompt, "cache_salt": salt})
    return {k: v for k, v in headers.items() if k.endswith(("-hit", "-reason"))}


@pytest.mark.parametrize("hit_headers", [False, True])
@on_loop
async def test_a_client_does_not_learn_what_others_sent(hit_headers: bool) -> None:
    ps, ds = [FakeEngine(prefills) for _ in range(2)], [FakeEngine(decodes) for _ in range(2)]
    async with bench(ps, ds, listening=Listening(hit_headers=hit_headers), **AWARE) as router:
        before = await told(router, "b", "x" + SECRET)
        await told(router, "a")
        guessed = await told(router, "b")
        assert guessed == before
        again = await told(router, "b")
        if hit_headers:  # the control: what it sent itself is there
            assert before["x-kvconnect-prefill-reason"] == "no_hit"
            assert again["x-kvconnect-prefill-reason"] == "hit"
            assert int(again["x-kvconnect-prefill-hit"]) > 50
        else:
            assert again == {"x-kvconnect-handoff-reason": "rule"}, "of caches, nothing"


@on_loop
async def test_salts_follow_from_keys() -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)

    async def salts(shared: bool, *asked: tuple[str, Any]) -> list[str]:
        del d.asked[:]
        listening = Listening(api_keys=KEYS, isolate=not shared)
        async with bench([p], [d], listening=listening) as router:
            for key, salt in asked:
                body = ASK | ({} if salt is None else {"cache_salt": salt})
                headers = {"Authorization": f"Bearer {key}"}
                assert (await router.post(body, headers=headers)).status == 200
            assert all(
                p["cache_salt"] == d["cache_salt"] for p, d in zip(p.asked, d.asked, strict=True)
            )
            return [body.get("cache_salt") for body in d.asked]

    p.asked.clear()
    a, b = (key for key in (each.key for each in KEYS))
    asked = [(a, None), (a, None), (b, None), (a, "own"), (b, "own"), (a, "other"), (b, 7)]
    found = await salts(False, *asked)
    assert found[0] == found[1] and len(set(found)) == 6
    # vLLM takes 128 characters, without @, / and \.
    assert all(re.fullmatch(r"[0-9a-f]{32}\.[0-9a-f]{64}", salt) for salt in found)
    tenants = [tenant_of(salt) for salt in found]
    assert len(set(tenants)) == 2, "a client's own salts are the same tenant's"
    assert tenants == [tenants[0 if key == a else 2] for key, _ in asked]
    p.asked.clear()
    assert await salts(False, *asked) == found, "after a restart, and in another router"
    p.asked.clear()
    chosen = await salts(False, (b, found[0]))
    assert chosen[0] not in found, "another's salt is not one's own"
    p.asked.clear()
    assert await salts(True, (a, "own"), (b, "own")) == ["own", "own"]


# Limits -----------------------------------------------------------------------------------------


def test_clients_are_their_keys_or_else_their_addresses() -> None:
    keyed, open_to_all = Tenants(KEYS, isolate=True), Tenants((), isolate=True)
    assert keyed.find("nobody's", "10.0.0.1") is None
    assert keyed.find(f"Bearer {KEYS[0].key}", "10.0.0.1") is None
    one = keyed.find(KEYS[0].key, "10.0.0.1")
    assert one and one == keyed.find(KEYS[0].key, "10.0.0.2")
    assert one != keyed.find(KEYS[1].key, "10.0.0.1")
    named = [
        open_to_all.find("any", address)
        for address in ("10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2", "fd01::1", "::ffff:10.0.0.1")
    ]
    assert [each.name for each in named if each] == [
        *("10.0.0.1", "10.0.0.2", "fd00::/64", "fd00::/64", "fd01::/64", "10.0.0.1")
    ]
    assert not any(each.secret for each in named if each)


def test_requests_in_flight_are_counted_by_client() -> None:
    flights = ClientConcurrency(2)
    with flights.enter("a"), flights.enter("b"), flights.enter("a"):
        with pytest.raises(Busy, match="2 open requests"), flights.enter("a"):
            raise AssertionError
        with flights.enter("b"):
            pass
    assert flights._open == {}
    with flights.enter("a"):
        pass


@on_loop
async def test_a_client_with_many_requests_does_not_hold_up_others() -> None:
    p, d = FakeEngine(prefills), FakeEngine(hangs)
    listening = Listening(api_keys=KEYS)
    async with bench([p], [d], listening=listening, client_concurrent=1) as router:
        a, b = ({"Authorization": f"Bearer {key}"} for key in (each.key for each in KEYS))
        first = asyncio.create_task(router.post(ASK, headers=a))
        await until(lambda: len(d.asked) == 1)
        status, body, headers = await router.post(ASK, headers=a)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "this client has 1 open requests" in json.loads(body)["error"]["message"]
        d.answer = decodes
        assert (await router.post(ASK, headers=b)).status == 200
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        async def free() -> bool:
            return (await router.post(ASK, headers=a)).status == 200

        await until(free)


@pytest.mark.parametrize(("weight", "order"), [(2, [1, 3, 4, 2]), (1, [1, 3, 2, 4])])
@on_loop
async def test_a_key_with_weight_has_more_turns(weight: int, order: list[int]) -> None:
    p, d = FakeEngine(prefills), FakeEngine(hangs)
    keys = (KEYS[0], ApiKey(KEYS[1].key, weight=weight))
    async with bench([p], [d], listening=Listening(api_keys=keys), concurrent=1) as router:
        tasks = []
        for number, key in enumerate((keys[0], keys[0], keys[0], keys[1], keys[1])):
            headers = {"Authorization": f"Bearer {key.key}"}
            ask = ASK | {"max_tokens": number + 1}
            tasks.append(asyncio.create_task(router.post(ask, headers=headers)))
            if not number:
                await until(lambda: len(d.asked) == 1)
                d.answer = decodes
            else:
                await until(partial(waiting, router, number))
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks[1:])
    assert {answer.status for answer in answers} == {200}
    assert [body["max_tokens"] - 1 for body in d.asked[1:]] == order


async def waiting(router: Bench, number: int) -> bool:
    return await router.metric("queue") == number


def test_a_client_has_a_share_of_the_room_for_bodies() -> None:
    bodies = BodyMemory("bodies", 100, 60)
    with (
        bodies.allocation("a") as first,
        bodies.allocation("a") as second,
        bodies.allocation("b") as other,
    ):
        first.take(50)
        with pytest.raises(Busy, match="bodies of this client take"):
            second.take(20)
        other.take(30)
        with pytest.raises(Busy, match="bodies of all clients take"):
            other.take(30)
        other.take(20)  # what was refused is not taken
    with bodies.allocation("c") as third:
        third.take(60)
    assert (bodies._free_bytes, bodies._by_client) == (100, {})


def test_what_is_still_coming_gives_its_room_to_what_needs_it() -> None:
    bodies, stopped = BodyMemory("bodies", 100, 60), list[str]()
    with (
        bodies.allocation("a") as old,
        bodies.allocation("a") as new,
        bodies.allocation("b") as whole,
    ):
        with (
            old.arriving(SimpleNamespace(cancel=lambda: stopped.append("old"))),  # type: ignore[arg-type]
            new.arriving(SimpleNamespace(cancel=lambda: stopped.append("new"))),  # type: ignore[arg-type]
        ):
            old.take(20)
            new.take(20)
            whole.take(60)
            with pytest.raises(
                Busy, match="arrived slowly"
            ):  # it is the oldest, whoever needs room
                old.take(10)
            old.free()
            old.take(20)
            assert stopped == []
            with bodies.allocation("c") as more:
                more.take(10)
                assert (stopped, old.lost, new.lost) == (["old"], True, False)
                more.take(10)
                more.take(10)
                assert stopped == ["old", "new"]
                with pytest.raises(Busy):
                    more.take(60)
        assert not bodies.arriving
    assert (bodies._free_bytes, bodies._by_client) == (100, {})


@on_loop
async def test_a_body_keeps_its_room_from_its_last_byte_on() -> None:
    bodies, refused = BodyMemory("bodies", 100, 100), list[Busy]()
    with bodies.allocation("a") as whole, bodies.allocation("b") as other:

        def needs_it() -> None:
            try:
                other.take(60)
            except Busy as error:
                refused.append(error)

        class Content:
            left = (b"a" * 60,)

            def is_eof(self) -> bool:
                return False

            async def readany(self) -> bytes:
                piece, self.left = b"".join(self.left), ()
                if not piece:  # before whoever waits for the body is told that it is there
                    asyncio.get_running_loop().call_soon(needs_it)
                return piece

        request: Any = SimpleNamespace(content=Content())
        assert await RequestReader(1000, Caches(RoutingRules()))._whole(request, whole) == b"a" * 60
        assert (whole.taken, whole.lost, len(refused)) == (60, False, 1)


@on_loop
async def test_slow_bodies_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * 2**20)  # room for 1 MiB
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], body_mib=1.0) as router:
        held, going = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"prompt": "' + b"a" * 900_000
            held.set()
            await going.wait()
            yield b'"}'

        async def send() -> tuple[int, str]:
            url = router.url + "/v1/completions"
            async with router.client.post(url, data=slow()) as answer:
                return answer.status, await answer.text()

        late = asyncio.create_task(send())
        await held.wait()
        for _ in range(3):
            status, _, _ = await router.post(ASK | {"prompt": "b" * 900_000})
            assert status == 200
        going.set()
        status, said = await late
        assert status == 429 and "the request body arrived slowly" in said
        assert (await router.post(ASK)).status == 200


@on_loop
async def test_large_bodies_are_parsed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], **AWARE) as router:
        names = set()

        def spy(body: Any, *, ids: bool) -> Any:
            names.add(threading.current_thread().name.partition("_")[0])
            return prefix_of(body, ids=ids)

        monkeypatch.setattr("kvconnect.router.requests.body.prefix_of", spy)
        assert (await router.post(ASK | {"prompt": "b" * 900_000})).status == 200
        assert names == {"kvconnect-bodies"}
        assert (await router.post(ASK)).status == 200
        assert names == {"kvconnect-bodies", "MainThread"}


@pytest.mark.parametrize("receipts", [False, True])
@pytest.mark.parametrize("pull", [False, True])
@on_loop
async def test_the_decode_engine_is_asked_for_a_receipt(receipts: bool, pull: bool) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    listening = Listening(receipts=receipts)
    async with bench([p], [d], listening=listening, handoff="pull" if pull else "push") as router:
        # What a client asks of engines in these parameters is dropped.
        forged = {"kv_transfer_params": {"kvconnect": {"receipt": True}}}
        await router.post(ASK | forged)
    options = {"receipt": True} if receipts else None
    assert d.asked[-1]["kv_transfer_params"].get("kvconnect") == options
    assert d.asked[-1]["kv_transfer_params"]["do_remote_prefill"] is True
    assert "kvconnect" not in p.asked[-1]["kv_transfer_params"]


@pytest.mark.parametrize("receipts", [False, True])
@on_loop
async def test_sglang_is_asked_where_cached_tokens_were(receipts: bool) -> None:
    vllm, sglang = FakeEngine(decodes), FakeEngine(decodes)
    sglang.settings = ",engine=sglang"
    listening = Listening(receipts=receipts)
    options: dict[str, Any] = {"decode_policy": RankingPolicy.ROUND_ROBIN, "handoff": "none"}
    async with bench([], [vllm, sglang], listening=listening, **options) as router:
        for _ in range(2):
            status, _, headers = await router.post(ASK)
            assert (status, headers["x-kvconnect-mode"]) == (200, "plain")
    asked = {"return_cached_tokens_details": True} if receipts else {}
    assert [body | {"rid": ""} for body in sglang.asked] == [ASK | asked | {"rid": ""}]
    options = {"kv_transfer_params": {"kvconnect": {"receipt": True}}} if receipts else {}
    assert vllm.asked == [ASK | options]


@pytest.mark.parametrize(("longest", "retained"), [(7200, 7200), (86_400, 86_400), (0, 0)])
@pytest.mark.parametrize("pull", [False, True])
@on_loop
async def test_engines_are_told_how_long_to_retain_a_prompt(
    longest: float, retained: float, pull: bool
) -> None:
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    listening = Listening(receipts=True, retention_s=longest)
    async with bench([p], [d], listening=listening, handoff="pull" if pull else "push") as router:
        forged = {"kv_transfer_params": {"kvconnect": {"pin": 9, "drop": True}}}
        await router.post(ASK | forged | {"prompt_cache_retention": "24h"})
        await router.post(ASK)
    hints = {"retain": retained} if retained else {}
    asked, plain = (one["kv_transfer_params"] for one in d.asked[-2:])
    assert asked["kvconnect"] == {**hints, "receipt": True}
    assert plain["kvconnect"] == {"receipt": True}  # control: this client does not ask
    asked, plain = (one["kv_transfer_params"] for one in p.asked[-2:])
    assert asked.get("kvconnect", {}) == hints
    assert asked["do_remote_decode"] is True and "kvconnect" not in plain
