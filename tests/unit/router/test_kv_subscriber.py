"""KV events over ZMQ: subscribed, replayed, and cleared where they cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvconnect.router.engine_spec import engine_spec
from kvconnect.router.fleet import kv_subscriber, watch
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.options import Listening
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prefixes import PrefixIndex
from kvconnect.router.policy.prompt_times import PromptTimer
from kvconnect.router.policy.ranking import RankingPolicy
from tests.fakes.engine import (
    FakeEngine,
    bench,
    decodes,
    on_loop,
    prefills,
    until,
)
from tests.fakes.event_publisher import batch, publisher

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
            before = await outcome("replayed")
            await events.publish(blocks, mute=True)  # lost, then had again
            await events.publish()

            async def replayed() -> bool:
                return await outcome("replayed") > before

            await until(replayed)

            async def hit() -> bool:
                body = {"model": "tiny", "prompt": prompt}
                _, _, headers = await router.post(body)
                return (
                    headers["x-kvconnect-prefill-reason"] == "hit"
                    and headers["x-kvconnect-prefill"] == "1"
                    and headers.get("x-kvconnect-prefill-hit") == "64"
                )

            await until(hit)
            assert events.repeated >= 1
            assert await router.metric("hit_tokens_total", which="expected") >= 64
            assert await router.metric("hit_tokens_total", which="found") >= 60


@contextlib.asynccontextmanager
async def following(port: int, replay: int = 0) -> AsyncIterator[tuple[Engine, PrefixIndex, Any]]:
    """Follow an engine that is up; also yield the outcomes of its messages."""
    settings = f",events={port}" + (f",replay={replay}" if replay else "")
    spec, index, outcomes = engine_spec("test", f"http://127.0.0.1:1{settings}"), PrefixIndex(), []
    engine = Engine(Role.PREFILL, 0, spec, Loads(60.0), lambda _: None, PromptTimer())
    engine.mark(up=True)
    subscriber = kv_subscriber.Subscriber(engine, index, lambda *said: outcomes.append(said[-1]))
    running = asyncio.create_task(subscriber.run())
    try:
        yield engine, index, outcomes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@on_loop
async def test_no_block_outlives_its_engine_however_far_the_next_one_has_counted() -> None:
    old, new = list(range(16)), list(range(100, 116))
    async with publisher() as events, following(events.port, events.replay) as at:
        engine, index, outcomes = at

        async def heard() -> bool:
            await events.publish()
            return bool(outcomes)

        events.sent.append(batch(stored(old)))
        await until(heard)
        await until(lambda: index.match(old) != {})
        count = len(events.sent)
        engine.mark(up=False)
        await until(lambda: len(index) == 0)
        engine.mark(up=True)
        # The numbers go on as if nothing had been: only the replay is of the new engine.
        events.sent[:] = [batch(stored(new)), *[batch()] * count]

        async def replayed() -> bool:
            await events.publish()
            return index.match(new) != {}

        await until(replayed)
        assert index.match(old) == {}


class Cable:
    """A connection to a port that can be cut so that neither end is told."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._copies: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.StreamWriter] = []
        self.connections = 0

    async def connected(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.connections += 1
        far, there = await asyncio.open_connection("127.0.0.1", self._to)
        self._ends += [back, there]
        ways = ((near, there), (far, back))
        self._copies += [asyncio.create_task(self._copy(*way)) for way in ways]

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)

    def cut(self) -> None:
        for copy in self._copies:
            copy.cancel()

    async def close(self) -> None:
        self.cut()
        for end in self._ends:
            end.close()
        await asyncio.gather(
            *self._copies, *(end.wait_closed() for end in self._ends), return_exceptions=True
        )


@on_loop
async def test_a_connection_that_was_cut_without_a_word_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_subscriber, "HEARTBEAT_MS", 50)
    async with publisher() as events:
        cable = Cable(events.port)
        server = await asyncio.start_server(cable.connected, "127.0.0.1", 0)
        async with server, following(server.sockets[0].getsockname()[1]) as (_, _, outcomes):

            async def heard(more: int) -> bool:
                await events.publish()
                return len(outcomes) > more

            await until(lambda: heard(0))
            cable.cut()
            await until(lambda: cable.connections > 1)
            count = len(outcomes)
            await until(lambda: heard(count))
        await cable.close()


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


class Backlog:
    """A socket that has messages, and then none: receiving them never waits."""

    def __init__(self, *messages: list[bytes]) -> None:
        self._left = list(messages)

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def subscribe(self, _: bytes) -> None:
        pass

    connect = subscribe

    async def recv_multipart(self) -> list[bytes]:
        if not self._left:
            await asyncio.Event().wait()
        return self._left.pop(0)


@on_loop
async def test_others_have_their_turn_between_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [[b"kv", number.to_bytes(8, "big"), batch()] for number in range(50)]
    context = SimpleNamespace(socket=lambda _: Backlog(*messages))
    monkeypatch.setattr(kv_subscriber.zmq.asyncio.Context, "instance", lambda: context)
    turns: list[int] = []
    async with following(1) as (_, _, outcomes):
        while len(outcomes) < 50:
            turns.append(len(outcomes))
            await asyncio.sleep(0)
    assert all(after - before <= 1 for before, after in itertools.pairwise(turns))
