"""The same over sockets: a router's background tasks beside an engine that answers one question
wrongly and the others well, and that publishes frames that are none.

Each question goes on to be asked, no task ends with an error, and what comes after the wrong answer
is read again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import zmq

from kvconnect.router import supervisor
from kvconnect.router.connections.pool import ConnectionPool
from kvconnect.router.engine_spec import engine_spec
from kvconnect.router.fleet import watch
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.fleet.kv_subscriber import Subscriber
from kvconnect.router.fleet.receipts import OwedReceipts
from kvconnect.router.fleet.watch import Watcher
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.policy.fleet_view import Role, Target
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prefixes import PrefixIndex
from kvconnect.router.policy.prompt_times import PromptTimer
from kvconnect.router.supervisor import Supervisor, TaskKind
from tests.hostile import Outcome
from tests.hostile.engines import NASTY

LATE_S = 60.0
_QUICK = {"PROBE_EVERY_S": 0.02, "LEARN_EVERY_S": 0.01, "RETRY_S": 0.01}
_STANDING_TICKET = {"kvconnect_card": "c", "kvconnect_card_expires_in": 0.05}
_LOADS = [{"dp_rank": 0, "num_used_tokens": 1}]
_GOOD: dict[str, bytes] = {
    "/health": b"",
    "/v1/models": json.dumps({"data": [{"id": "m"}]}).encode(),
    "/version": b'{"version": "1"}',
    "/server_info": b'{"version": "1"}',
    "/metrics/": b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="100"} 1\n',
    "/v1/loads": json.dumps({"loads": _LOADS}).encode(),
    "/v1/completions": json.dumps({"choices": [], "kv_transfer_params": _STANDING_TICKET}).encode(),
}
_WRAPPED = {
    "/v1/models": '{"data": [{"id": %s}]}',
    "/version": '{"version": %s}',
    "/metrics/": 'vllm:kv_cache_usage_perc{engine="%s"} 0.5\n',
    "/v1/loads": '{"loads": [{"dp_rank": 0, "num_used_tokens": 1, "num_total_tokens": %s}]}',
    "/v1/completions": '{"kv_transfer_params": {"kvconnect_card": "c", '
    '"kvconnect_card_expires_in": %s}}',
}
_FRAMES: tuple[list[bytes], ...] = (
    *([b""], [b"", b""], [b"", b"", b"", b""], [b"", b"", b""], [b"", b"\xff" * 8, b""]),
    *([b"", b"\x00" * 7, b"\x90"], [b"", b"\x7f" + b"\xff" * 7, b"\x90"], [b"x" * 10**6] * 3),
    *([b"", b"1" * 10**6, b"\x90"], [b"", bytes(8), b"\x91" * 100_000]),
)


class _Answering:
    """A server whose answers can be exchanged; ``asked`` counts questions by path."""

    def __init__(self) -> None:
        self.bodies = dict(_GOOD)
        self.asked: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ")[1].partition("?")[0]
            body = self.bodies[path]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            self.asked[path] += 1
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


async def run(limit: int | None = None) -> Outcome:
    """Play the cases; see :mod:`tests.hostile`."""
    outcome, answering = Outcome(), _Answering()
    server = await asyncio.start_server(answering.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    metrics, index, context = RouterMetrics(), PrefixIndex(), zmq.Context()
    events = context.socket(zmq.PUB)
    events.linger = 0
    events.bind("tcp://127.0.0.1:0")
    published = events.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    named = (
        f"http://127.0.0.1:{port},events={published}",
        f"http://localhost:{port},engine=sglang",
    )
    upstreams = []
    for number, name in enumerate(named):
        spec, loads, timer = engine_spec("x", name), Loads(60.0), PromptTimer()
        upstream = Engine(Role.PREFILL, number, spec, loads, _nothing, timer)
        metrics.add_engine(Role.PREFILL, upstream.url)
        upstreams.append(upstream)
    watchers = [
        Watcher(upstream, ConnectionPool(60.0), metrics, shares=True) for upstream in upstreams
    ]
    tasks = Supervisor(metrics.count)
    owed = OwedReceipts(lambda outcome: None)
    subscriber = Subscriber(upstreams[0], index, metrics.count, owed)
    reading = tasks.keep(TaskKind.EVENTS, "x", subscriber.run)
    with ExitStack() as ends:
        for name, value in _QUICK.items():
            ends.callback(setattr, watch, name, getattr(watch, name))
            setattr(watch, name, value)
        ends.callback(setattr, supervisor, "PAUSE_FIRST_S", supervisor.PAUSE_FIRST_S)
        supervisor.PAUSE_FIRST_S = 0.01
        for watcher in watchers:
            await watcher.probe()
            watcher.start(0.01)
        try:
            await _play(outcome, limit, answering, metrics)
            await _publish(outcome, limit, events, index)
            _count(outcome, metrics, "at the end")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            for watcher in watchers:
                await watcher.stop()
            server.close()
            events.close()
            context.destroy(linger=0)
    return outcome


async def _play(
    outcome: Outcome, limit: int | None, answering: _Answering, metrics: RouterMetrics
) -> None:
    cases = [(path, nasty) for nasty in NASTY for path in _WRAPPED]
    for path, nasty in cases[:limit]:
        outcome.cases += 1
        name = f"{path}: {nasty[:30]}"
        for body in (nasty, _WRAPPED[path].replace("%s", nasty)):
            answering.bodies[path] = body.encode()
            # Two more: the first may have been on its way before.
            wanted = answering.asked[path] + 2
            if not await _until(lambda p=path, w=wanted: answering.asked[p] >= w):
                outcome.hangs += 1
                outcome.notes.append(f"{name}: not asked again")
        answering.bodies[path] = _GOOD[path]
        _count(outcome, metrics, name)


async def _publish(outcome: Outcome, limit: int | None, events: Any, index: PrefixIndex) -> None:
    """Frames that are none between good messages: each of those is heard."""
    target, number = Target(0), 0
    for frames in _FRAMES[:limit]:
        outcome.cases += 1
        number += 1
        tokens = [number, number]
        event = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None}
        event |= {"token_ids": tokens, "block_size": 2}
        batch = msgspec.msgpack.encode([0.0, [event], 0])
        deadline = time.monotonic() + LATE_S
        while target not in index.match(tokens):
            events.send_multipart(frames)
            events.send_multipart([b"", number.to_bytes(8, "big"), batch])
            number += 1
            await asyncio.sleep(0.01)
            if time.monotonic() > deadline:
                outcome.hangs += 1
                outcome.notes.append(f"frames {[frame[:8] for frame in frames]}: deaf since then")
                break


def _count(outcome: Outcome, metrics: RouterMetrics, name: str) -> None:
    """Count the tasks that ended with an error since the last look."""
    failed = sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "kvconnect_router_task_failures_total"
    )
    if failed > outcome.crashes:
        outcome.crashes = int(failed)
        outcome.notes.append(f"{name}: a task ended with an error")


async def _until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LATE_S
    while not true():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.002)
    return True


def _nothing(upstream: Engine) -> None:
    """Nobody wants to know that it is up or down."""
