"""How evenly prompts of very different lengths are spread over data-parallel ranks, and what that
does to the time to first token: minimum tokens against `bootstrap_room % dp_size`.

A discrete simulation that runs the router's own decisions: 8 prefill ranks compute prompts one
after the other, at a fixed rate. 90 % of prompts have 512 tokens, 10 % 16,384. Then the same trace,
shorter, through a real router and fake servers that take as long as the simulation says.

    python -m benchmarks.balance [--no-run]

imbalance: busiest rank over the mean of all, of the tokens there (waiting and being computed),
averaged over time. Instantaneous: the same ratio at each moment, then averaged.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from benchmarks.common import emit, progress
from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prefixes import CacheHit, CacheTier, PrefixIndex, StoredBlocks
from kvconnect.router.policy.ranking import Candidate, RankingJob, RankingPolicy, pick
from tests.servers import free_port

RANKS = 8
RATE = 20_000.0  # tokens per second that a rank computes
SHORT, LONG, LONG_SHARE = 512, 16_384, 0.1
UTILISATION = 0.8
REQUESTS = 20_000
SEEDS = 5
REAL_REQUESTS = 3000  # 50 seconds
CACHED_SEEDS, CACHED_REQUESTS = 3, 3000
START_S = 60.0
BLOCK = 64
GROUPS = 64  # shared prefixes in that trace


class Request(NamedTuple):
    """``prefix`` names what its first ``shared`` tokens are."""

    at: float
    tokens: int
    prefix: int = 0
    shared: int = 0


def skewed(seed: int, requests: int, utilisation: float = UTILISATION) -> list[Request]:
    """Return a Poisson trace of short and long prompts."""
    draw = random.Random(seed)
    mean = SHORT * (1 - LONG_SHARE) + LONG * LONG_SHARE
    gap = mean / (RANKS * RATE * utilisation)
    at, trace = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(1 / gap)
        trace.append(Request(at, LONG if draw.random() < LONG_SHARE else SHORT))
    return trace


def shared(seed: int, requests: int, share: float) -> list[Request]:
    """Return a trace in which ``share`` of all tokens are prefixes seen before."""
    draw = random.Random(seed)
    tokens = 2048
    gap = tokens / (RANKS * RATE * UTILISATION)
    at, trace = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(1 / gap)
        own = int(tokens * share) // BLOCK * BLOCK
        trace.append(Request(at, tokens, draw.randrange(GROUPS), own))
    return trace


@dataclass
class Rank:
    """One rank: a queue, served in order, and the prefixes it has cached (least recent first)."""

    waiting: int = 0  # tokens not done
    free_at: float = 0.0
    area: float = 0.0  # token seconds
    cached: dict[int, int] = field(default_factory=dict)


Chooser = Callable[[int, Request, float], int]


class Outcome(NamedTuple):
    """What became of a trace."""

    ttft: list[float]
    imbalance: float
    instantaneous: float


class Fleet:
    """The ranks, and the clock."""

    def __init__(self) -> None:
        self.ranks = [Rank() for _ in range(RANKS)]
        self.now = 0.0
        self._ratio = 0.0  # of the busiest to the mean, times seconds
        self._busy = 0.0  # seconds in which there was any load
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self._order), what))

    def advance(self, when: float) -> None:
        """Let time pass, and what happens in it happen."""
        while self.events and self.events[0][0] <= when:
            moment, _, what = heapq.heappop(self.events)
            self._pass(moment)
            what()
        self._pass(when)

    def _pass(self, when: float) -> None:
        span, loads = when - self.now, [rank.waiting for rank in self.ranks]
        for rank in self.ranks:
            rank.area += span * rank.waiting
        if any(loads):
            self._ratio += span * max(loads) / (sum(loads) / RANKS)
            self._busy += span
        self.now = when

    def outcome(self, ttft: list[float]) -> Outcome:
        areas = [rank.area for rank in self.ranks]
        return Outcome(ttft, max(areas) / statistics.mean(areas), self._ratio / self._busy)


def simulate(
    trace: Sequence[Request],
    choose: Chooser,
    fleet: Fleet,
    ended: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run a trace; ``ended(number, rank)`` is called when a request is done."""
    ttft: list[float] = []
    for number, request in enumerate(trace):
        fleet.advance(request.at)
        place = choose(number, request, fleet.now)
        rank = fleet.ranks[place]
        hit = request.shared if request.prefix in rank.cached else 0
        work = request.tokens - hit
        if request.shared:
            rank.cached.pop(request.prefix, None)
            rank.cached[request.prefix] = request.shared
        start = max(fleet.now, rank.free_at)
        rank.free_at = start + work / RATE
        rank.waiting += work
        ttft.append(rank.free_at - request.at)

        def done(rank: Rank = rank, work: int = work, n: int = number, p: int = place) -> None:
            rank.waiting -= work
            if ended is not None:
                ended(n, p)

        fleet.at(rank.free_at, done)
    fleet.advance(max(rank.free_at for rank in fleet.ranks))
    return fleet.outcome(ttft)


# Who decides ------------------------------------------------------------------------------------


def modulo(trace: Sequence[Request], seed: int) -> Outcome:
    """SGLang's own: the rank that a random room falls on."""
    draw = random.Random(seed)

    def choose(number: int, request: Request, now: float) -> int:  # noqa: ARG001
        return draw.getrandbits(63) % RANKS

    return simulate(trace, choose, Fleet())


class Kind(NamedTuple):
    """What a router is told: its policy, seconds between reports, how many routers there are, and
    by how much it misjudges the length of a prompt (it has text, not tokens)."""

    policy: RankingPolicy = RankingPolicy.LEAST_TOKENS
    interval: float = 1.0
    routers: int = 1
    error: float = 0.0


class Decider:
    """One router process: its loads, its reports, its policy."""

    def __init__(self, kind: Kind, fleet: Fleet, seed: int) -> None:
        self.kind, self.fleet, self.interval = kind, fleet, kind.interval
        self.loads = Loads(stale_s=10 * kind.interval)
        self.draw = random.Random(seed)
        self.index = PrefixIndex()
        self.begun: dict[int, int] = {}
        self._ask()

    def _ask(self) -> None:
        asked = self.loads.ask(self.fleet.now)
        self.loads.report(asked, {r: rank.waiting for r, rank in enumerate(self.fleet.ranks)})
        # A router that starts with others hears of each engine at another time.
        pause = self.interval * (1 if self.fleet.now else self.draw.random())
        self.fleet.at(self.fleet.now + pause, self._ask)

    def choose(self, number: int, request: Request, now: float) -> int:
        prompt = list(prefix_tokens(request)) if request.shared else []
        hits = self.index.match(prompt)
        some = [
            Candidate(Target(0, rank), load, "w", hits.get(Target(0, rank), CacheHit()).worth)
            for rank, load in enumerate(self.loads.at(now))
        ]
        tokens = int(request.tokens * (1 + self.kind.error * self.draw.uniform(-1, 1)))
        job = RankingJob(tokens, number, self.draw.random())
        target = pick(self.kind.policy, some, job).candidate.target
        assert target.rank is not None
        self.begun[number] = tokens - hits.get(target, CacheHit()).tokens
        self.loads.begin(target.rank, self.begun[number], now)
        if prompt:  # the engine's event, at once
            hashes = [request.prefix * 10**6 + n for n in range(len(prompt) // BLOCK)]
            self.index.stored(target, StoredBlocks(hashes, None, prompt, BLOCK, CacheTier.DEVICE))
        return target.rank

    def ended(self, number: int, rank: int) -> None:
        self.loads.end(rank, self.begun.pop(number))


def prefix_tokens(request: Request) -> Iterator[int]:
    for place in range(request.shared):
        yield request.prefix * 65_536 + place


def routed(kind: Kind, trace: Sequence[Request], seed: int) -> Outcome:
    """The router's own decisions."""
    fleet = Fleet()
    deciders = [Decider(kind, fleet, seed + n) for n in range(kind.routers)]

    def choose(number: int, request: Request, now: float) -> int:
        return deciders[number % kind.routers].choose(number, request, now)

    def ended(number: int, rank: int) -> None:
        deciders[number % kind.routers].ended(number, rank)

    outcome = simulate(trace, choose, fleet, ended)
    for decider in deciders:
        assert not decider.begun and sum(decider.loads.own) == 0, "in-flight returns to zero"
    return outcome


def compare(seeds: int, requests: int) -> dict[str, float]:
    """Return the figures of the skewed trace."""
    kinds = {
        "modulo": None,
        "round_robin": Kind(RankingPolicy.ROUND_ROBIN),
        "power_of_two": Kind(RankingPolicy.POWER_OF_TWO),
        "minimum": Kind(),
        "minimum_10s": Kind(interval=10.0),
        "minimum_misjudged": Kind(error=0.5),
        "minimum_2_routers": Kind(routers=2),
        "minimum_10s_2_routers": Kind(interval=10.0, routers=2),
    }
    figures: dict[str, float] = {}
    base: list[float] = []
    for name, kind in kinds.items():
        found = [
            modulo(skewed(seed, requests), seed)
            if kind is None
            else routed(kind, skewed(seed, requests), seed)
            for seed in range(seeds)
        ]
        means = [statistics.mean(outcome.ttft) for outcome in found]
        base = base or means
        figures[f"imbalance_{name}"] = statistics.median(o.imbalance for o in found)
        figures[f"instantaneous_{name}"] = statistics.median(o.instantaneous for o in found)
        figures[f"ttft_s_{name}"] = statistics.median(means)
        figures[f"ttft_p99_s_{name}"] = statistics.median(
            statistics.quantiles(o.ttft, n=100)[98] for o in found
        )
        gains = [1 - mean / first for mean, first in zip(means, base, strict=True)]
        figures[f"ttft_gain_{name}"] = statistics.median(gains)
        mine = {k: round(v, 3) for k, v in figures.items() if k.endswith(f"_{name}")}
        progress(f"{name}: {mine}")
    return figures


def cached(seeds: int, requests: int) -> dict[str, float]:
    """Cache-aware against round robin, by the share of tokens in prefixes seen before."""
    figures = {}
    for share in (0.0, 0.26, 0.5, 0.9):
        ratios = []
        for seed in range(seeds):
            trace = shared(seed, requests, share)
            aware, turns = (
                statistics.mean(routed(Kind(policy), trace, seed).ttft)
                for policy in (RankingPolicy.CACHE_AWARE, RankingPolicy.ROUND_ROBIN)
            )
            ratios.append(aware / turns)
        figures[f"cache_aware_over_round_robin_{round(100 * share)}"] = max(ratios)
        progress(f"cache aware at {share:.0%}: {[round(ratio, 3) for ratio in ratios]}")
    return figures


# A real run -------------------------------------------------------------------------------------


async def drive(
    trace: Sequence[Request], url: str | None, prefill: int, decode: int
) -> list[float]:
    """Send a trace in real time; return the times to the answer. ``url`` None: to both servers
    directly, with a random room, as SGLang's own balancer does."""
    loop = asyncio.get_running_loop()
    draw = random.Random(1)
    begin = loop.time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def post(to: str, body: dict[str, object]) -> None:
            async with client.post(f"{to}/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        async def ask(request: Request) -> float:
            await asyncio.sleep(begin + request.at - loop.time())
            start, body = loop.time(), {"input_ids": [1] * request.tokens}
            if url is not None:
                await post(url, body)
            else:
                met = {**body, "bootstrap_room": draw.getrandbits(62)}
                servers = (f"http://127.0.0.1:{port}" for port in (prefill, decode))
                await asyncio.gather(*(post(server, met) for server in servers))
            return loop.time() - start

        return list(await asyncio.gather(*(ask(request) for request in trace)))


def real(requests: int) -> dict[str, float]:
    """Return the figures of a real router between fake servers."""
    figures: dict[str, float] = {}
    trace = skewed(1, requests)
    for name, interval in (("modulo", 0.0), ("minimum", 1.0), ("minimum_10s", 10.0)):
        with ExitStack() as ends:
            prefill, decode, at = (free_port() for _ in range(3))
            ports = [str(prefill), str(decode)]
            fakes = [sys.executable, "-m", "benchmarks.fake_engines", *ports]
            ends.enter_context(process([*fakes, "--ranks", str(RANKS), "--rate", str(RATE)]))
            urls = [f"http://127.0.0.1:{port},engine=sglang" for port in (prefill, decode)]
            router = [sys.executable, "-m", "kvconnect.cli", "router", "--port", str(at)]
            router += ["--prefill", urls[0], "--decode", urls[1]]
            router += ["--worker-load-check-interval", str(interval)]
            url = None
            if interval:
                ends.enter_context(process(router))
                url = f"http://127.0.0.1:{at}"
            for port in (prefill, decode, at) if interval else (prefill, decode):
                wait_for(port)
            ttft = asyncio.run(drive(trace, url, prefill, decode))
            with urllib.request.urlopen(f"http://127.0.0.1:{prefill}/v1/loads") as answer:
                areas = [load["area"] for load in json.load(answer)["loads"]]
        figures[f"real_imbalance_{name}"] = max(areas) / statistics.mean(areas)
        figures[f"real_ttft_s_{name}"] = statistics.mean(ttft)
        progress(f"real run, {name}: {figures}")
    for name in ("minimum", "minimum_10s"):
        gain = 1 - figures[f"real_ttft_s_{name}"] / figures["real_ttft_s_modulo"]
        figures[f"real_ttft_gain_{name}"] = gain
    return figures


def wait_for(port: int) -> None:
    """Wait until a server says that it is healthy.

    Raises:
        SystemExit: it does not within :data:`START_S`.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        time.sleep(0.1)
    raise SystemExit(f"port {port}: not healthy after {START_S:.0f} s")


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block is left."""
    silent = subprocess.DEVNULL  # standard output is for the figures
    with subprocess.Popen(command, stdout=silent, stderr=silent) as running:
        try:
            yield running
        finally:
            running.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-run", action="store_true", help="only the simulation")
    arguments = parser.parse_args()
    figures = compare(SEEDS, REQUESTS) | cached(CACHED_SEEDS, CACHED_REQUESTS)
    if not arguments.no_run:
        figures |= real(REAL_REQUESTS)
    figures["imbalance"], figures["ttft_gain"] = (
        max(figures["imbalance_minimum"], figures["imbalance_minimum_10s"]),
        min(figures["ttft_gain_minimum"], figures["ttft_gain_minimum_10s"]),
    )
    emit("balance", figures)


if __name__ == "__main__":
    main()
