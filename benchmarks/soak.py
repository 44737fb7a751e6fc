"""Everything that comes and goes, for as long as you like: does anything stay?

    python -m benchmarks.soak [--minutes 10] [--seed 1]

One process has a router whose engines, clients, tenants and adapters change all the time; a host
tier's plan with requests of ever new adapters; a prefill engine's hand-off agent whose decode
engines come and go over loopback TCP; and a disk tier that is opened, filled and closed. Engines
are fakes, the rest is real.

After each round everything rests, and what is left is counted: resident memory, file descriptors,
threads, and the entries of every container that can be reached from these parts, by class and
attribute. The first rounds are a warm-up: a container with a bound fills up to it. After that
nothing may grow. ``container_growth`` adds up the entries of all containers that did, in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import socket
import tempfile
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import MethodType
from typing import Protocol

import aiohttp
import msgspec
import zmq

from benchmarks.common import emit, progress
from benchmarks.fake_engines import MODEL
from benchmarks.fake_engines import Engine as FakeEngine
from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import scope_of
from kvconnect.disaggregation.messages import (
    DisaggregationInstructions,
    OfferBlocks,
    Receive,
    Withdraw,
)
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.messages import JobReport
from kvconnect.offload.planner import LoadRequest, OffloadLimits, OffloadPlan
from kvconnect.router import server
from kvconnect.router.app import RouterApp
from kvconnect.router.fleet import membership, watch
from kvconnect.router.fleet.sources import file
from kvconnect.router.options import Intervals, RouterOptions, Sources
from kvconnect.router.policy.prompt_history import History
from kvconnect.router.policy.ranking import RankingPolicy
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends import make_store
from kvconnect.types import FailureCause, JobId, Span, TransferId
from tests.fakes.handoff_engine import Engine as HandoffEngine

WARM_UP, WARM_ROUNDS = 0.4, 10  # of the time; and at least
SETTLED = 8  # rounds in each half at least: what goes up and down by chance must not look grown
KEPT = 64  # samples at most, or they would be what grows
PATIENCE_S = 60.0
_CONTAINERS = (dict, list, set, deque, tuple, frozenset)
_WALKED = ("kvconnect.", "benchmarks.", "tests.")


class Part(Protocol):
    """Something that is used round after round."""

    async def turn(self, number: int) -> None:
        """Have things come and go; return when nothing is under way any more."""

    def roots(self) -> Iterable[object]:
        """Return what its containers can be reached from."""

    async def close(self) -> None:
        """End it."""


# What is left ------------------------------------------------------------------------------------


def census(roots: Iterable[object]) -> Counter[str]:
    """Count the entries of all containers that objects of ours hold, by class and attribute."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("root", root) for root in roots]
    while stack:
        name, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            if not isinstance(value, tuple | frozenset):
                found[name] += len(value)
            inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            stack += [(f"{name}[]", each) for each in inner if not isinstance(each, str | int)]
        elif isinstance(value, MethodType):
            stack.append((name, value.__self__))
        elif type(value).__module__.startswith(_WALKED):
            kind = type(value).__name__
            stack += [(f"{kind}.{attribute}", each) for attribute, each in _attributes(value)]
    return found


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


@dataclass(frozen=True)
class Sample:
    """What there was when everything rested."""

    at: float
    rss: int
    fds: int
    threads: int
    entries: Mapping[str, int]


def sample(roots: Iterable[object]) -> Sample:
    """Look, after what is unreachable was collected and what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    entries = census(roots)
    rss = pages * os.sysconf("SC_PAGE_SIZE")
    return Sample(
        time.monotonic(), rss, len(os.listdir("/proc/self/fd")), threading.active_count(), entries
    )


def growth(samples: Sequence[Sample], key: Callable[[Sample], int]) -> int:
    """Return by how much the least of the later half of rounds is above the most of the first."""
    half = len(samples) // 2
    last, first = map(key, samples[half:]), map(key, samples[:half])
    return max(0, min(last) - max(first))


def slope(samples: Sequence[Sample]) -> float:
    """Return the growth of resident memory in MiB per hour, by least squares."""
    times = [each.at / 3600 for each in samples]
    sizes = [each.rss / 2**20 for each in samples]
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((at - mean_time) ** 2 for at in times)
    pairs = zip(times, sizes, strict=True)
    return sum((at - mean_time) * (size - mean_size) for at, size in pairs) / (spread or 1.0)


def judged(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the figures of the rounds after the warm-up, and say which containers grew."""
    names = {name for each in samples for name in each.entries}
    grown = {name: growth(samples, lambda each, n=name: each.entries.get(n, 0)) for name in names}
    for name, entries in sorted(grown.items()):
        if entries:
            progress(f"{name} grew by {entries} entries")
    return {
        "rss_growth_mib_per_hour": max(0.0, slope(samples)),
        "fd_growth": growth(samples, lambda each: each.fds),
        "thread_growth": growth(samples, lambda each: each.threads),
        "container_growth": sum(grown.values()),
    }


# The parts ---------------------------------------------------------------------------------------


@dataclass
class _Member:
    """A fake engine that publishes what it has cached."""

    role: str
    server: asyncio.Server
    events: zmq.Socket[bytes]
    said: count[int] = field(default_factory=count)

    @property
    def line(self) -> str:
        """The engine as a file of engines names it."""
        port = self.server.sockets[0].getsockname()[1]
        events = self.events.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"{self.role} http://127.0.0.1:{port},events={events}"

    def tell(self, tokens: list[int], size: int) -> None:
        """Publish that some blocks are there, and that those before are gone."""
        hashes = list(range(len(tokens) // size))
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
        event |= {"token_ids": tokens[: len(hashes) * size], "block_size": size, "medium": "GPU"}
        gone = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
        number = next(self.said).to_bytes(8, "big")
        self.events.send_multipart([b"", number, msgspec.msgpack.encode([0.0, [gone, event], 0])])


class RouterPart:
    """A router: each round one engine of each role comes and one goes, and clients of new tenants
    ask for new adapters, or hang up."""

    MEMBERS = 3  # of each role

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._file = folder / "engines"
        self._members: deque[_Member] = deque()
        self._ends = AsyncExitStack()
        self._context = zmq.Context()
        self._edge: RouterApp
        self._url = ""

    async def open(self) -> None:
        """Start it, without engines."""
        self._file.write_text("")
        options = RouterOptions(
            *((), ()),
            sources=Sources(str(self._file)),
            prefill_policy=RankingPolicy.CACHE_AWARE,
            decode_policy=RankingPolicy.CACHE_AWARE,
            intervals=Intervals(0.05, 1.0),
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        served = server.serving(options, listener, 1.0)
        self._edge = await self._ends.enter_async_context(served)
        for history in [each for each in gc.get_objects() if type(each) is History]:
            history._most = 256  # or it takes a quarter of a million pieces of prompts to fill it

    async def turn(self, number: int) -> None:
        while len(self._members) <= 2 * self.MEMBERS:
            for role in ("prefill", "decode"):
                self._members.append(await self._new(role))
        leaving = [self._members.popleft() for _ in ("prefill", "decode")]
        self._file.write_text("\n".join(member.line for member in self._members))
        await self._until(self._settled)
        tokens = [self._random.randrange(1000) for _ in range(256)]
        for member in self._members:
            member.tell(tokens, self._random.choice((8, 16, 32)))
        async with aiohttp.ClientSession() as client:
            await asyncio.gather(*(self._ask(client, f"{number}-{n}", tokens) for n in range(12)))
        for member in leaving:
            await self._end(member)
        await self._until(self._settled)

    def roots(self) -> Iterable[object]:
        series = list(self._edge._metrics.registry.collect())  # takes up what was counted
        yield self._edge
        yield {"series": series}

    async def close(self) -> None:
        await self._ends.aclose()
        for member in self._members:
            await self._end(member)
        self._context.destroy(linger=0)  # whoever has left does not read what was told

    async def _new(self, role: str) -> _Member:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: FakeEngine(3, None), "127.0.0.1", 0)
        socket = self._context.socket(zmq.PUB)
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:0")
        return _Member(role, server, socket)

    async def _end(self, member: _Member) -> None:
        member.events.close()
        member.server.close()

    async def _ask(self, client: aiohttp.ClientSession, name: str, tokens: list[int]) -> None:
        tenant = self._random.choice((tokens, f"the prompt of {name} " * 40))
        body = {"model": MODEL, "prompt": tenant, "max_tokens": 3, "cache_salt": name}
        body["stream"] = self._random.random() < 0.5
        if self._random.random() < 0.2:
            body["model"] = f"adapter {name}"
        limit = aiohttp.ClientTimeout(0.001 if self._random.random() < 0.2 else PATIENCE_S)
        headers = {"Authorization": f"Bearer {name}", "X-Session-ID": name}
        try:
            url = f"{self._url}/v1/completions"
            async with client.post(url, json=body, headers=headers, timeout=limit) as answer:
                await answer.read()
        except (TimeoutError, aiohttp.ClientError):
            return  # it hung up

    def _settled(self) -> bool:
        fleet = self._edge._fleet
        there = {f"{each.role.value} {each.url}" for each in fleet.all()}
        wanted = {member.line.partition(",")[0] for member in self._members}
        idle = all(each.up and not each.open and each.info.models for each in fleet.all())
        return there == wanted and idle

    async def _until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError("the router's engines are not those of its file")
            await asyncio.sleep(0.01)


class PlanPart:
    """The plan of a host tier: requests of ever new adapters store, load and evict blocks."""

    BLOCKS, ROUND = 64, 20

    def __init__(self) -> None:
        index = HostIndex(self.BLOCKS, 1, make_policy("lru", self.BLOCKS))
        self._plan = OffloadPlan(
            (CacheGroup(16),), index, OffloadingConnectorStats(), OffloadLimits(1, 10.0, 10_000)
        )

    async def turn(self, number: int) -> None:
        plan = self._plan
        for one in range(self.ROUND):
            adapter = scope_of(f"adapter {number} {one}".encode(), b"")
            hashes = [adapter + bytes([block]) for block in range(8)]
            for name in (f"{number}-{one}-first", f"{number}-{one}-second"):
                plan.add_request(name)
                found = plan.match(name, [hashes], 0, 128)
                if found:
                    wanted = LoadRequest(0, found, [hashes], [list(range(8))], False)
                    plan.plan_load(name, wanted, 0.0)
                plan.plan_store(name, 128, [hashes], [list(range(8))])
                work = plan.take(0.0)
                jobs = [*(each.job for each in work.loads), *(each.job for each in work.stores)]
                for job in jobs:
                    plan.on_report(JobReport(job), 0.0)
                plan.finish_request(name, [hashes])
        plan.take_removed()
        plan.stats.take()

    def roots(self) -> Iterable[object]:
        yield self._plan

    async def close(self) -> None:
        """Nothing is open."""


class HandoffPart:
    """A prefill engine's agent: each round new decode engines connect, fetch a transfer, ask for
    one that is not there, and leave."""

    ROUND = 2

    def __init__(self) -> None:
        self._prefill = HandoffEngine(sends=True)
        self._ends = ExitStack()
        self._ends.enter_context(self._prefill)

    async def turn(self, number: int) -> None:
        await asyncio.to_thread(self._turn, number)

    def roots(self) -> Iterable[object]:
        yield self._prefill.agents

    async def close(self) -> None:
        self._ends.close()

    def _turn(self, number: int) -> None:
        prefill, (agent,) = self._prefill, self._prefill.agents
        for one in range(self.ROUND):
            blocks = array("q", range(1, 9))
            transfer, absent = (
                TransferId(f"{number:07}{one}{kind}".encode().ljust(16)) for kind in "ab"
            )
            prefill.step(offers=[OfferBlocks(transfer, (Span(0, 0, blocks),))])
            with HandoffEngine() as decode:
                spans = (Span(0, 0, blocks),)
                receives = [
                    Receive(JobId(n), "r", of, prefill.source(), spans, ((0, 128),), False, 5.0)
                    for n, of in enumerate((transfer, absent))
                ]
                decode.step(receives=receives)
                reports: list[JobReport] = []
                self._until(decode, partial(_all_there, reports, receives), reports)
            prefill.step(withdrawals=[Withdraw(transfer, FailureCause.GONE)])
        self._until(prefill, lambda: not agent._sessions._sessions, [])

    def _until(
        self, engine: HandoffEngine, true: Callable[[], bool], reports: list[JobReport]
    ) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError("a hand-off did not end")
            for agent in engine.agents:
                agent.news.wait(0.003)
                reports += [report for report, _ in agent.poll()[0]]
                agent.run(DisaggregationInstructions())
                agent.take_stats()
            for agent in self._prefill.agents:
                agent.poll()
                agent.take_stats()


def _all_there(reports: list[JobReport], receives: list[Receive]) -> bool:
    return len(reports) == len(receives)


class DiskPart:
    """A disk tier: new blocks push out old ones, and now and then it is opened again."""

    ROUND, BYTES, AGAIN = 20, 1 << 18, 10

    def __init__(self, folder: Path) -> None:
        self._settings = {"path": str(folder / "disk"), "capacity": "16MiB"}
        (folder / "disk").mkdir(mode=0o700)
        self._store = make_store("disk", self._settings, b"f")

    async def turn(self, number: int) -> None:
        keys = [f"{number}-{one}".encode() for one in range(self.ROUND)]
        payload = memoryview(bytearray(self.BYTES))
        for key in keys:
            self._store.put([key], [payload])
        self._store.get(keys[:1], [memoryview(bytearray(self.BYTES))])
        self._store.remove(keys[:4])
        self._store.take_stats()
        if number % self.AGAIN == self.AGAIN - 1:
            self._store.close()
            self._store = make_store("disk", self._settings, b"f")

    def roots(self) -> Iterable[object]:
        yield self._store

    async def close(self) -> None:
        self._store.close()


async def soak(parts: Sequence[Part], seconds: float) -> list[Sample]:
    """Use all parts in turn for so long, and at least twice ``SETTLED`` rounds after the warm-up;
    return what was there after rounds since then, at even distances."""
    began, samples, step = time.monotonic(), [], 1
    for number in count():
        for part in parts:
            await part.turn(number)
        now = sample([root for part in parts for root in part.roots()])
        if number >= WARM_ROUNDS and now.at - began > seconds * WARM_UP and number % step == 0:
            samples.append(now)
        if len(samples) == KEPT:
            samples, step = samples[1::2], 2 * step
        if now.at - began > seconds and len(samples) >= 2 * SETTLED:
            return samples
        if number % 20 == 0:
            progress(f"round {number}: {now.rss / 2**20:.1f} MiB, {sum(now.entries.values())}")
    raise AssertionError


async def run(seconds: float, seed: int = 1, more: Sequence[Part] = ()) -> dict[str, float]:
    """Soak all parts for so long; return the figures."""
    quick = {(file, "FILE_EVERY_S"): 0.02, (membership, "DRAIN_LOOK_S"): 0.01}
    quick |= {(watch, "PROBE_EVERY_S"): 0.1, (watch, "PROBE_FIRST_S"): 0.05}
    kept = {place: getattr(*place) for place in quick}
    async with AsyncExitStack() as ends:
        for (module, name), value in quick.items():
            setattr(module, name, value)
            ends.callback(setattr, module, name, kept[module, name])
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        router = RouterPart(folder, seed)
        ends.push_async_callback(router.close)
        await router.open()
        parts: list[Part] = [router, PlanPart(), HandoffPart(), DiskPart(folder), *more]
        for part in parts[1:]:
            ends.push_async_callback(part.close)
        samples = await soak(parts, seconds)
        return {"samples": len(samples), **judged(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    figures = asyncio.run(run(60 * args.minutes, args.seed))
    emit("soak", {"minutes": args.minutes, **figures})


if __name__ == "__main__":
    main()
