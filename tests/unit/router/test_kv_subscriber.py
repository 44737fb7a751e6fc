"""KV events over ZMQ: subscribed, replayed, and cleared where they cannot be had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvconnect.router.fleet import kv_subscriber, watch
from kvconnect.router.options import Listening
from kvconnect.router.policy.ranking import RankingPolicy
from tests.fakes.engine import (
    FakeEngine,
    bench,
    decodes,
    on_loop,
    prefills,
    until,
)
from tests.fakes.event_publisher import publisher

TOLD = Listening(hit_headers=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_TIMEOUT_S", 30.0)
    monkeypatch.setattr(kv_subscriber, "LOOK_S", 0.05)


def stored(tokens: list[int], first: int = 1, parent: int | None = None, **more: Any) -> Any:
    hashes = list(range(first, first + len(tokens) // 4))
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    return event | {"token_ids": tokens, "block_size": 4, "lora_id": None, "medium": "GPU"} | more


@on_loop
async def test_prompts_go_where_events_say_they_are_cached() -> None:
    ps, d = [FakeEngine(prefills), FakeEngine(prefills)], FakeEngine(decodes)
    prompt = list(range(64))
    blocks = stored(prompt)

    async def found(engine: FakeEngine, request: Any, body: Any) -> Any:
        answer = await prefills(engine, request, body)
        said = msgspec.json.decode(answer.body)
        said["usage"] = {"prompt_tokens_details": {"cached_tokens": 60}}
        answer.body = msgspec.json.encode(said)
        return answer

    ps[1].answer = found
    async with publisher() as events:
        ps[1].settings = f",events={events.port},replay={events.replay}"
        aware = {"prefill_policy": RankingPolicy.CACHE_AWARE, "handoff": "pull", "listening": TOLD}
        async with bench(ps, [d], **aware) as router:

            async def outcome(name: str) -> float:
                labels = {"role": "prefill", "upstream": ps[1].url}
                return await router.metric("kv_events_total", **labels, outcome=name)

            async def heard() -> bool:
                await events.publish()
                return await outcome("ok") + await outcome("replayed") > 0

            await until(heard)
            await events.publish(blocks, mute=True)  # lost, then had again
            await events.publish()
            replays = await outcome("replayed")

            async def hit() -> bool:
                body = {"model": "tiny", "prompt": prompt}
                _, _, headers = await router.post(body)
                return (
                    headers["x-kvconnect-prefill-reason"] == "hit"
                    and headers["x-kvconnect-prefill"] == "1"
                    and headers.get("x-kvconnect-prefill-hit") == "64"
                )

            await until(hit)
            assert events.repeated >= 1 and replays >= 0
            assert await router.metric("hit_tokens_total", which="expected") >= 64
            assert await router.metric("hit_tokens_total", which="found") >= 60


@on_loop
async def test_text_goes_where_it_was_sent_before() -> None:
    ps, d = [FakeEngine(prefills) for _ in range(3)], FakeEngine(decodes)
    async with bench(ps, [d], prefill_policy=RankingPolicy.CACHE_AWARE, listening=TOLD) as router:
        places = {}
        for turn in range(12):
            talk = f"talk {turn % 3} " * 100
            body = {"model": "tiny", "messages": [{"role": "user", "content": talk}]}
            _, _, headers = await router.post(body, "/v1/chat/completions")
            places.setdefault(turn % 3, []).append(headers["x-kvconnect-prefill"])
            want = "hit" if turn >= 3 else "no_hit"
            assert headers["x-kvconnect-prefill-reason"] == want
        assert all(len(set(found)) == 1 for found in places.values())
        assert len({found[0] for found in places.values()}) == 3
