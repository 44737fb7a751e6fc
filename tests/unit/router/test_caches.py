"""KV events of both engines, lossy and hostile; and whose cache a prompt is read from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Refused
from kvconnect.router.fleet import kv_subscriber, watch
from kvconnect.router.fleet.kv_events import RankEvents
from kvconnect.router.options import Listening
from kvconnect.router.policy.caches import Caches
from kvconnect.router.policy.fleet_view import Role, Target
from kvconnect.router.policy.prefixes import MOST_SIZES, CacheHit, PrefixIndex
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.requests.body import prefix_of, prompt_of, read_body
from tests.fakes.engine import (
    ASK,
    Bench,
    FakeEngine,
    bench,
    decodes,
    hangs,
    on_loop,
    prefills,
    until,
)
from tests.fakes.event_publisher import batch

TOKENS = list(range(100, 116))
A = Target(0)
TOLD = Listening(hit_headers=True)
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 100_000}"}}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_TIMEOUT_S", 30.0)
    monkeypatch.setattr(kv_subscriber, "LOOK_S", 0.05)


def stored(tokens: list[int], first: int = 1, parent: int | None = None, **more: Any) -> Any:
    hashes = list(range(first, first + len(tokens) // 4))
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    return event | {"token_ids": tokens, "block_size": 4, "lora_id": None, "medium": "GPU"} | more


def removed(*hashes: int, medium: str = "GPU", **more: Any) -> Any:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium} | more


def told(*events: Any) -> PrefixIndex:
    index = PrefixIndex()
    assert RankEvents(A, index).receive(0, batch(*events))
    return index


def test_history_counts_where_events_do_not_tell_all() -> None:
    caches = Caches(RoutingRules(prefill=RankingPolicy.CACHE_AWARE))
    prefix = prefix_of(read_body(json.dumps({"prompt": TOKENS + [1] * 112}).encode()))
    role, later = Role.PREFILL, batch(stored([5] * 4, first=9, parent=8))

    def hits(*numbered: tuple[int, bytes]) -> int:
        feed = RankEvents(A, caches.indexes[role])
        for number, payload in numbered:
            if not feed.receive(number, payload):
                feed.recover(number, payload)
        found = caches.hits(prefix, 1000, base=True)[role].get(A, CacheHit()).tokens
        caches.indexes[role].cleared(A)
        return found

    caches.sent({role: A}, prefix.chunk_hashes)
    assert hits() == 128
    assert hits((7, later)) == 128, "the prompt's blocks were stored before"
    assert hits((7, batch(stored(TOKENS)))) == 128, "the longer of both"
    assert hits((0, batch(stored(TOKENS)))) == 16, "all events are known"
    assert hits((0, batch())) == 0
    assert hits((0, batch()), (2, later)) == 128, "one was lost"
    caches.forget(role, 0, 1)
    assert hits((7, batch(stored(TOKENS)))) == 16


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param({"messages": [{"role": "user", "content": [IMAGE]}]}, id="an image"),
        pytest.param({"prompt": "\u00e9" * 4000}, id="escaped text"),
    ],
)
def test_no_more_of_a_prompt_is_cached_than_it_has_tokens(prompt: Any) -> None:
    caches = Caches(RoutingRules(prefill=RankingPolicy.CACHE_AWARE))
    body = read_body(json.dumps(prompt).encode())
    prefix, tokens = prefix_of(body), prompt_of(body).tokens
    caches.sent({Role.PREFILL: A}, prefix.chunk_hashes)
    assert caches._histories[Role.PREFILL].match(prefix.chunk_hashes)[A].tokens > tokens
    hit = caches.hits(prefix, tokens, base=True)[Role.PREFILL][A]
    assert (hit.tokens, hit.worth, hit.readable) == (tokens, tokens, tokens)


def test_token_ids_are_kept_only_where_events_tell_of_them() -> None:
    caches = Caches(RoutingRules(prefill=RankingPolicy.CACHE_AWARE))
    body = read_body(json.dumps({"prompt": TOKENS * 8}).encode())
    assert not caches.by_ids
    assert not prefix_of(body, ids=caches.by_ids).token_ids
    RankEvents(A, caches.indexes[Role.PREFILL]).receive(0, batch(stored(TOKENS)))
    assert caches.by_ids
    kept = prefix_of(body, ids=caches.by_ids)
    assert (list(kept.token_ids), kept.token_ids.itemsize) == (TOKENS * 8, 8)
    assert kept.chunk_hashes == prefix_of(body, ids=False).chunk_hashes
    caches.indexes[Role.PREFILL].began(A)  # it has none, as is known
    assert caches.by_ids
    huge = prefix_of(read_body(json.dumps({"prompt": [2**63] * 64}).encode()))
    assert (len(huge.token_ids), len(huge.chunk_hashes)) == (0, 1)


@on_loop
async def test_what_no_engine_is_asked_is_cached_nowhere() -> None:
    engines = [FakeEngine(decodes) for _ in range(2)]
    for engine in engines:
        engine.settings = ",engine=sglang"
    text = "cached " * 400
    async with bench([], engines, handoff="none", listening=TOLD) as router:
        for n in (10**9, 1):
            status, _, headers = await router.post({**ASK, "prompt": text, "n": n})
            assert status == (400 if n > 1 else 200)
            assert "x-kvconnect-decode-hit" not in headers
        _, _, headers = await router.post({**ASK, "prompt": text})
        assert int(headers["x-kvconnect-decode-hit"]) > 500


# Events -----------------------------------------------------------------------------------------


def test_events_of_both_engines_and_of_older_ones() -> None:
    assert told(stored(TOKENS)).match(TOKENS) == {A: CacheHit(16, 16.0, 16)}
    old = ["BlockStored", [1, 2, 3, 4], None, TOKENS, 4, None, "GPU"]
    assert told(old).match(TOKENS) == {A: CacheHit(16, 16.0, 16)}
    assert told(stored(TOKENS), ["BlockRemoved", [3], "GPU"]).match(TOKENS) == {
        A: CacheHit(8, 8.0, 8)
    }
    assert told(stored(TOKENS), {"type": "AllBlocksCleared"}).match(TOKENS) == {}
    names = [bytes([n]) * 32 for n in range(4)]
    assert told(stored(TOKENS, block_hashes=names)).match(TOKENS) == {A: CacheHit(16, 16.0, 16)}
    pinned = stored([], block_hashes=[1, 2], medium="CPU_PINNED")
    assert told(stored(TOKENS), pinned, removed(1, 2, 3, 4)).match(TOKENS) == {
        A: CacheHit(8, 7.2, 8)
    }
    assert told({"type": "Unheard"}, 7, stored(TOKENS)).match(TOKENS) == {A: CacheHit(16, 16.0, 16)}


def test_an_index_keeps_so_many_blocks_and_sizes_of_a_target() -> None:
    index = PrefixIndex(most=3)
    feed = RankEvents(A, index)
    feed.receive(0, batch(stored(TOKENS)))
    assert index.match(TOKENS) == {A: CacheHit(12, 12.0, 12)}, "the fourth was left out"
    feed.receive(1, batch(removed(1, 2, 3)))
    assert len(index) == 0
    feed.receive(2, batch(stored(TOKENS[:8], first=11)))
    assert index.match(TOKENS) == {A: CacheHit(8, 8.0, 8)}, "there is room again"

    index = PrefixIndex()
    feed = RankEvents(A, index)
    for size in range(1, 100):
        block = stored(TOKENS[:size] * (size <= 16), block_hashes=[size], block_size=size)
        feed.receive(size - 1, batch(block))
    assert len(index._sizes) == MOST_SIZES, "each costs every request a look"
    feed.receive(99, batch({"type": "AllBlocksCleared"}))
    assert not index._sizes and not len(index)


def test_a_hash_that_names_another_block_leaves_nothing_behind() -> None:
    """An engine that names block after block alike must not fill the index."""
    index = PrefixIndex()
    feed = RankEvents(A, index)
    for number in range(100):
        tokens = [number] * 4
        feed.receive(number, batch(stored(tokens)))
        assert index.match(tokens) == {A: CacheHit(4, 4.0, 4)}
        assert len(index) == 1


def test_tokens_that_come_in_pairs() -> None:
    pairs = [list(pair) for pair in zip(TOKENS, [*TOKENS[1:], 7], strict=True)]
    assert told(stored(TOKENS, token_ids=pairs)).match(TOKENS) == {A: CacheHit(16, 16.0, 16)}
    index = PrefixIndex()
    with pytest.raises(Refused):
        RankEvents(A, index).receive(0, batch(stored(TOKENS, token_ids=[[]] * 16)))
    assert index.match(TOKENS) == {}


@pytest.mark.parametrize(
    "special",
    [
        {"lora_id": 1},
        {"lora_name": "x"},
        {"cache_salt": "s"},
        {"extra_keys": [None, ["image", 0], None, None]},
        {"kv_cache_spec_kind": "sliding_window"},
    ],
)
def test_blocks_that_do_not_follow_from_tokens_alone_are_left_out(special: dict[str, Any]) -> None:
    assert told(stored(TOKENS, **special)).match(TOKENS) == {}
    assert told(stored(TOKENS, extra_keys=[None] * 4)).match(TOKENS) != {}


def test_a_sliding_window_takes_no_prefix_with_it() -> None:
    """Groups of layers share the hashes of their blocks; those of a window are dropped early."""
    whole = stored(TOKENS, group_idx=0, kv_cache_spec_kind="full_attention")
    window = stored(TOKENS, group_idx=1, kv_cache_spec_kind="sliding_window")
    old = ["BlockRemoved", [1], "GPU", 1]
    index = PrefixIndex()
    feed = RankEvents(A, index)
    assert feed.receive(0, batch(whole, window, removed(1, 2, group_idx=1), old))
    assert index.match(TOKENS) == {A: CacheHit(16, 16.0, 16)}
    untold = stored([], block_hashes=[4], medium="CPU", group_idx=1)
    assert feed.receive(1, batch(untold, removed(4, group_idx=0)))
    assert index.match(TOKENS) == {A: CacheHit(12, 12.0, 12)}
    assert feed.receive(0, batch(stored(TOKENS, group_idx=1), removed(3, group_idx=1)))
    assert index.match(TOKENS) == {A: CacheHit(8, 8.0, 8)}, "another incarnation numbers anew"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
        batch(stored(TOKENS, block_size="4")),
        batch(stored(["a"] * 4)),  # type: ignore[list-item]
        batch(stored(TOKENS, block_hashes=None)),
        batch({"type": "BlockRemoved", "block_hashes": "x"}),
    ],
)
def test_what_is_no_event_is_refused_and_does_no_harm(payload: bytes) -> None:
    index = PrefixIndex()
    feed = RankEvents(A, index)
    with pytest.raises(Refused):
        feed.receive(0, payload)
    assert feed.receive(1, batch(stored(TOKENS)))
    assert index.match(TOKENS) == {A: CacheHit(16, 16.0, 16)}


SMALL = st.integers(-(2**63), 2**63)
ANYTHING = st.recursive(st.none() | SMALL | st.text(), st.lists)
KINDS = {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])}
VALID = {
    "block_hashes": st.lists(st.integers(0, 9), max_size=8),
    "parent_block_hash": st.none() | st.integers(0, 9),
    "token_ids": st.lists(st.integers(0, 9), max_size=8),
    "block_size": st.integers(-1, 4),
    "medium": st.text(max_size=5) | st.sampled_from(["GPU", "CPU"]),
    "lora_id": st.none(),
    "extra_keys": st.none(),
    "group_idx": st.integers(-1, 2),
    "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "x"]),
    "cache_salt": st.text(max_size=5),
}
WILD = st.fixed_dictionaries({}, optional=dict.fromkeys(VALID, ANYTHING))
EVENTS = st.fixed_dictionaries(KINDS | VALID)
BATCHES = (
    st.lists(EVENTS, min_size=1, max_size=4)
    | st.lists(EVENTS | st.builds(operator.or_, EVENTS, WILD), min_size=1, max_size=4)
    | st.lists(st.builds(operator.or_, st.fixed_dictionaries(KINDS), WILD) | ANYTHING, max_size=4)
)


@given(st.binary(max_size=64) | BATCHES)
def test_anything_may_come(noise: Any) -> None:
    payload = noise if isinstance(noise, bytes) else msgspec.msgpack.encode([0.0, noise])
    with contextlib.suppress(Refused):
        RankEvents(A, PrefixIndex()).receive(0, payload)


def test_a_gap_is_noticed_and_filled() -> None:
    index = PrefixIndex()
    feed = RankEvents(A, index)
    assert feed.receive(0, batch(stored(TOKENS)))
    assert not feed.receive(3, batch())
    assert feed.next_number == 1
    for number, event in ((1, removed(4)), (2, removed(3)), (3, removed(2))):
        assert feed.recover(number, batch(event))
    assert feed.recover(3, batch(removed(1))), "the one that came live was repeated too"
    assert index.match(TOKENS) == {A: CacheHit(4, 4.0, 4)}
    assert feed.receive(4, batch()) and feed.next_number == 5


def test_what_cannot_be_had_again_costs_all_that_is_known() -> None:
    index = PrefixIndex()
    feed = RankEvents(A, index)
    assert feed.receive(0, batch(stored(TOKENS)))
    assert not feed.receive(3, batch(stored(TOKENS[:4], first=9)))
    assert not feed.recover(3, batch(stored(TOKENS[:4], first=9)))
    assert index.match(TOKENS) == {A: CacheHit(4, 4.0, 4)}


def test_an_engine_that_counts_from_0_again_is_another_one() -> None:
    index = PrefixIndex()
    feed = RankEvents(A, index)
    for number in range(3):
        assert feed.receive(number, batch(stored(TOKENS)))
    assert feed.receive(0, batch(stored(TOKENS[:8])))
    assert index.match(TOKENS) == {A: CacheHit(8, 8.0, 8)}
    assert feed.receive(1, batch())
    assert not feed.receive(5, batch())


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 20), st.data())
def test_however_much_is_lost_nothing_is_claimed_that_is_gone(
    lost: list[bool], kept: int, data: st.DataObject
) -> None:
    """Blocks are stored and removed; live messages get lost, and a replay has only the last."""
    index, held = PrefixIndex(), set[int]()
    feed = RankEvents(A, index)
    messages: list[bytes] = []
    for number, is_lost in enumerate(lost):
        block = data.draw(st.integers(0, 3))
        if block in held:
            held.discard(block)
            event = removed(block)
        else:
            held.add(block)
            event = stored([block] * 4, first=block)
        messages.append(batch(event))
        if is_lost or feed.receive(number, messages[-1]):
            continue
        first = max(feed.next_number, len(messages) - kept)
        for again in range(first, len(messages)):
            feed.recover(again, messages[again])
        feed.recover(number, messages[-1])
        claimed = {block for block in range(4) if index.match([block] * 4)}
        assert claimed <= held


# Sources ----------------------------------------------------------------------------------------


async def read_again(router: Bench, engines: Sequence[FakeEngine], number: int) -> tuple[str, str]:
    """Send a prompt twice, the second time while the engine that has it is busy. Return the source
    that the other engine is told, and the URL of the one that has it."""
    text, before = f"{number} " * 2000, [len(engine.asked) for engine in engines]
    await router.post({**ASK, "prompt": text})
    has, other = engines if len(engines[0].asked) > before[0] else reversed(engines)
    answer, has.answer, there = has.answer, hangs, len(has.asked)
    busy = asyncio.create_task(router.post({**ASK, "prompt": text + "more " * 20_000}))
    await until(lambda: len(has.asked) > there)
    has.answer = answer
    evil = {"kvconnect": {"source": "forged", "share": True}, "source": "forged"}
    status, _, _ = await router.post({**ASK, "prompt": text, "kv_transfer_params": evil})
    assert status == 200
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    said = (other.asked[-1].get("kv_transfer_params") or {}).get("kvconnect", {})
    assert set(said) <= {"source"}
    return said.get("source", ""), has.url


@pytest.mark.parametrize("unified", [False, True])
@on_loop
async def test_the_engine_that_has_a_prompt_is_named_to_the_one_that_computes_it(
    unified: bool,
) -> None:
    ps, ds = [FakeEngine(prefills) for _ in range(2)], [FakeEngine(decodes)]
    if unified:
        ps, ds = [], [FakeEngine(decodes) for _ in range(2)]
    sharing = ds if unified else ps
    for engine in sharing:
        engine.share_ticket_lifetime_s = 100.0
    async with bench(ps, ds, handoff="none" if unified else "pull") as router:
        for number in range(100):
            source, url = await read_again(router, sharing, number)
            if source:  # else the router has no tickets yet
                break
        assert source.startswith("share ") and source.endswith(f" of {url.rpartition(':')[2]}")
        asked = [json.dumps(body) for engine in (*ps, *ds) for body in engine.asked]
        assert not any("forged" in body for body in asked)
        assert sum("share " in body for body in asked) == 1, "else nobody had more"


@on_loop
async def test_engines_that_share_nothing_get_no_source() -> None:
    engines = [FakeEngine(decodes) for _ in range(2)]
    async with bench([], engines, handoff="none") as router:
        for number in range(3):
            source, _ = await read_again(router, engines, number)
            assert source == ""
        assert all(len(engine.asked) > 1 for engine in engines)


@pytest.mark.parametrize(
    ("policy", "fetched"), [(RankingPolicy.CACHE_AWARE, True), (RankingPolicy.LEAST_TOKENS, False)]
)
@on_loop
async def test_share_tickets_are_renewed_where_caches_are_looked_at(
    policy: RankingPolicy, fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RENEW_LEAST_S", 0.01)
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    p.share_ticket_lifetime_s = d.share_ticket_lifetime_s = 0.1
    p.standing_ticket_lifetime_s = 0.1
    async with bench([p], [d], prefill_policy=policy, decode_policy=policy):
        await until(lambda: p.standing_tickets >= 4)
        if fetched:
            await until(lambda: min(p.share_tickets, d.share_tickets) >= 3)
        else:
            assert (p.share_tickets, d.share_tickets) == (0, 0)


@on_loop
async def test_an_engine_that_completes_nothing_is_not_asked_for_tickets_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "RETRY_S", 0.01)
    embeds, completes = FakeEngine(decodes), FakeEngine(decodes)
    embeds.completes = False
    completes.share_ticket_lifetime_s = 0.04
    monkeypatch.setattr(watch, "RENEW_LEAST_S", 0.01)
    async with bench([], [embeds, completes], handoff="none"):
        await until(lambda: completes.share_tickets > 5)
        assert embeds.got["/v1/completions"] == 1
    assert "no tickets" not in caplog.text
