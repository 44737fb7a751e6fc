"""Real vLLM CPU engines that read blocks from one another's host memory.

    python -m benchmarks.sharing [--rounds N] [--requests N]

Six servers with the same model (float32), one compute thread each; those that are not asked are
stopped (SIGSTOP). ``plain`` has no connector, ``host`` its own host tier only. ``source`` and
``reader`` share and load whatever there is. ``reader`` copies from ``source``'s memory, as engines
on one machine do; ``network`` reads over TCP, as those on two machines do. ``rule`` reads from
``source`` what the cost rule says.

Times to the first token, of the server that is read from and of the cost rule are measured twice:
with all servers on all cores, and, in keys that end in ``_apart``, with ``source`` on cores of its
own (``benchmarks/machines.py`` says why).

``ttft_peer_over_recompute_2k``, ``ttft_peer_over_host_2k``: TTFT of ``reader`` on a prompt of 2k
tokens that ``source`` has, over that of ``plain`` on a new one, and over that of ``host`` on one in
its own host memory, with ``source`` awake beside it; ``ttft_peer_over_host_alone_2k``: with
``host`` alone on the machine; ``ttft_network_over_host_2k``: that of ``network``.
``server_slowdown``: 99th percentile of the time between ``source``'s tokens while ``reader`` reads
prompts from it, over that while ``host`` loads them from its own memory;
``server_slowdown_network``: while ``network`` does. ``late_loads``: the share of these prompts that
were computed, since ``source`` took too long. ``trace_hit_over_shared_ideal``: requests of the
Mooncake trace, one after the other, to ``source`` or ``reader`` at random; prompt tokens that were
not computed, over those that one cache as big as both host tiers could have had.
``trace_control``: the same where they do not share.
``cost_rule_worst``: ``rule`` over ``plain`` on prompts of which ``source`` has a share, the worst
share, ``source`` awake in both; ``control_worst`` compares ``plain`` with itself.
``prefetch_ttft_over_host``: TTFT of ``rule`` on prompts that the hint ``prefetch`` has brought from
``source``, over that of ``host`` on prompts in its own host memory. ``pin_kept``: the share of a
pinned prompt's blocks that ``host`` still has after more prompts than its host tier holds,
``pin_control`` of one that is not pinned. ``receipt_mismatch``: receipts that do not add up to the
prompt. ``wrong_tokens``: answers that differ from those of ``plain``.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.machines import APART, cores, move
from benchmarks.offload_engine import NewPrompts
from benchmarks.serve.fleet import Variant, engine, reset, stopped
from benchmarks.serve.trace import Request, ideal_hits, prompt_of, read, sample, scaled
from benchmarks.settings import chosen
from kvconnect.types import PromptSource
from tests.engines import pd
from tests.engines.models import BLOCK_SIZE
from tests.engines.server import Server, events, kv_transfer
from tests.servers import free_port

PROMPT_BLOCKS = 64
CACHED = PROMPT_BLOCKS * BLOCK_SIZE
PROMPT = CACHED + 8
HOST_BYTES, HOST_BLOCKS = "512MiB", 1024  # 16 prompts
CYCLE = 8  # prompts in turn: no device has the next one
STREAM = 300  # tokens
DROP = {"kvconnect": {"drop": True}}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
TRACE = Path(__file__).parent / "serve" / "conversations.jsonl.gz"
CONTINUE, STOP = signal.SIGCONT, signal.SIGSTOP
SOURCES = {source.value for source in PromptSource}
CONNECT_S = 120.0
ASK_S = 2.0  # an engine on a CPU answers when it gets to it
POLLS_S = 1.3
"""For a second after a step, vLLM's processes poll for the next one, each on a core."""


class Fleet:
    """The six servers, and what came out wrong so far."""

    def __init__(self) -> None:
        port, other = free_port(), free_port()
        settings = chosen("sharing", host_bytes=HOST_BYTES)
        always = {**settings, **chosen("sharing", load_when="always")}
        source = {"listen": f"127.0.0.1:{port}", "ask": [f"127.0.0.1:{other}"], "ask_s": ASK_S}
        reader = {"listen": f"127.0.0.1:{other}", "ask": [f"127.0.0.1:{port}"], "ask_s": ASK_S}
        rule = {"ask": [f"127.0.0.1:{port}"], "ask_s": ASK_S}
        network = {**rule, "same_machine": "network"}
        self.plain = engine(None, 1)
        self.host = engine(kv_transfer(**settings), 1)
        self.source = engine(kv_transfer(**always, cache_peers=source), 1)
        self.reader = engine(kv_transfer(**always, cache_peers=reader), 1)
        self.network = engine(kv_transfer(**always, cache_peers=network), 1)
        self.rule = engine(kv_transfer(**settings, cache_peers=rule), 1)
        self.wrong = self.mismatched = 0
        self.apart = False
        """Whether ``source`` has cores of its own."""

    @property
    def servers(self) -> list[Server]:
        return [self.plain, self.host, self.source, *self.readers]

    @property
    def readers(self) -> list[Server]:
        return [self.reader, self.network, self.rule]

    @contextmanager
    def awake(self, *servers: Server) -> Iterator[None]:
        """Let some servers run, each warmed up by prompts that do not count until its peers are
        connected again: they give up one that has been stopped for long. Beside the last server,
        the others are idle."""
        of_source, of_others = cores(2, self.apart)
        for server in servers:
            move(server.pids(), of_source if server is self.source else of_others)
            Variant("", [server]).signal(CONTINUE)
        deadline = time.monotonic() + CONNECT_S
        for server in servers:
            server.complete([5] * 8, 2)
            while server in self.readers and self.source in servers:
                if server.metric("vllm:kvconnect_tier_available", tier="peer"):
                    break
                if time.monotonic() > deadline:
                    raise SystemExit(f"not connected within {CONNECT_S:.0f} s")
                time.sleep(0.2)
                server.complete([5] * 8, 2)
        if len(servers) > 1:
            time.sleep(POLLS_S)
            servers[-1].complete([5] * 8, 2)
        yield
        for server in servers:
            Variant("", [server]).signal(STOP)


def fill(fleet: Fleet, prompt: list[int]) -> None:
    """Store a prompt in the host memory of ``host``, whose device forgets it, and of ``source``."""
    with fleet.awake(fleet.host):
        fleet.host.complete(prompt, 1)
        fleet.host.settle()
        reset(fleet.host, external=False)
    with fleet.awake(fleet.source):
        fleet.source.complete(prompt, 1)
        fleet.source.settle()


def ttft(fleet: Fleet, new: NewPrompts, rounds: int) -> dict[str, float]:
    """TTFT of prompts that a peer has, that the own host memory has, and that nobody has."""
    names = ("plain", "alone", "host", "peer", "network")
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        prompt = new.take(PROMPT)
        fill(fleet, prompt)
        seconds = {}
        with fleet.awake(fleet.plain):
            seconds["plain"], want = fleet.plain.stream(prompt, 4)
        with fleet.awake(fleet.host):
            seconds["alone"], alone = fleet.host.stream(prompt, 4)
            reset(fleet.host, external=False)
        with fleet.awake(fleet.source, fleet.host):
            seconds["host"], host = fleet.host.stream(prompt, 4)
        with fleet.awake(fleet.source, fleet.reader):
            seconds["peer"], peer = fleet.reader.stream(prompt, 4)
        with fleet.awake(fleet.source, fleet.network):
            seconds["network"], network = fleet.network.stream(prompt, 4)
        for answer in (alone, host, peer, network):
            if answer.cached != CACHED:
                raise SystemExit(f"{answer.cached} cached tokens, expected {CACHED}")
            fleet.wrong += answer.tokens != want.tokens
        progress(", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in seconds.items()))
        if number:  # the first connection and the first large copy do not count
            for name, value in seconds.items():
                samples[name].append(value)
    middle = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "ttft_peer_over_recompute_2k": middle["peer"] / middle["plain"],
        "ttft_peer_over_host_2k": middle["peer"] / middle["host"],
        "ttft_peer_over_host_alone_2k": middle["peer"] / middle["alone"],
        "ttft_network_over_host_2k": middle["network"] / middle["host"],
        "ttft_peer_ms": middle["peer"] * 1e3,
    }


def slowdown(fleet: Fleet, new: NewPrompts, rounds: int) -> dict[str, float]:
    """The time between the source's tokens while a peer reads from it, and while another engine
    loads as much from its own host memory."""
    prompts = [new.take(PROMPT) for _ in range(CYCLE)]
    for server in (fleet.source, fleet.host):
        with fleet.awake(server):
            for prompt in prompts:
                server.complete(prompt, 1)
                server.settle()
    ratios: dict[str, list[float]] = {"": [], "_network": []}
    loads, late = 0, 0
    for number in range(rounds):
        found: dict[int, float] = {}
        for server in (fleet.reader, fleet.host, fleet.network)[:: -1 if number % 2 else 1]:
            with fleet.awake(fleet.source, server), ThreadPoolExecutor(1) as pool:
                gaps = pool.submit(intervals, fleet.source, new.take(64))
                for prompt in cycle(prompts):
                    if gaps.done():
                        break
                    reads = server is not fleet.host
                    # Dropped, so that it reads the prompt again the next time.
                    hint = {"kv_transfer_params": DROP} if reads else {}
                    cached = server.complete(prompt, 1, **hint).cached
                    loads += reads
                    late += reads and cached != CACHED
                found[server.port] = percentile(gaps.result(), 0.99)
        own = found[fleet.host.port]
        for name, server in (("", fleet.reader), ("_network", fleet.network)):
            ratios[name].append(found[server.port] / own)
        shown = [f"{found[it.port] * 1e3:.0f}" for it in (fleet.reader, fleet.network, fleet.host)]
        progress(
            f"p99 between tokens: {' and '.join(shown[:2])} ms while read from, else {shown[2]}"
        )
    slow = {f"server_slowdown{name}": statistics.median(ratios[name]) for name in ratios}
    return {**slow, "late_loads": late / loads}


def intervals(server: Server, prompt: list[int]) -> list[float]:
    """Return the seconds between the tokens of a stream."""
    times: list[float] = []
    with server.open("/v1/completions", server.body(prompt, STREAM, stream=True)) as reply:
        for chunk in events(reply):
            if chunk["choices"]:
                times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def trace(fleet: Fleet, requests: Sequence[Request], seed: int) -> dict[str, float]:
    """Requests of the trace to two engines at random, sharing or not."""
    prompts = [prompt_of(one) for one in requests]
    ideal = ideal_hits(requests, 2 * HOST_BLOCKS, BLOCK_SIZE)
    cached: dict[str, int] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for name, salted in (("shared", False), ("apart", True)):
        rng = random.Random(seed)
        cached[name], answers[name] = 0, []
        with fleet.awake(fleet.source, fleet.reader):
            for server in (fleet.source, fleet.reader):
                reset(server, external=False)
            for prompt in prompts:
                number = rng.randrange(2)
                server = (fleet.source, fleet.reader)[number]
                # With a salt of its own, an engine finds nothing of the other one.
                salt = f"engine {number}" if salted else "both"
                reply = ask(server, prompt, salt)
                receipt = reply["kv_transfer_params"]["kvconnect"]["receipt"]
                sources = {key: value for key, value in receipt.items() if key in SOURCES}
                fleet.mismatched += not sum(sources.values()) == receipt["prompt"] == len(prompt)
                cached[name] += receipt["prompt"] - receipt["computed"]
                answers[name].append(tuple(reply["choices"][0]["token_ids"]))
        progress(f"trace, {name}: {cached[name]} tokens cached, {ideal} is the ideal")
    with fleet.awake(fleet.plain):
        for place, prompt in enumerate(prompts):
            want = fleet.plain.complete(prompt, 4).tokens
            fleet.wrong += sum(answers[name][place] != want for name in answers)
    return {
        "trace_hit_over_shared_ideal": cached["shared"] / ideal,
        "trace_control": cached["apart"] / ideal,
    }


def ask(server: Server, prompt: list[int], salt: str) -> dict[str, Any]:
    """Return the reply to a prompt, with its receipt."""
    params = {"kvconnect": {"receipt": True}}
    body = server.body(prompt, 4, cache_salt=salt, kv_transfer_params=params)
    with server.open("/v1/completions", body) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def rule(fleet: Fleet, new: NewPrompts, rounds: int) -> dict[str, float]:
    """Prompts of which the source has a share: with the rule, and computed."""
    ratios: dict[float, list[float]] = {share: [] for share in SHARES}
    control: dict[float, list[float]] = {share: [] for share in SHARES}
    for number in range(-1, rounds):  # until the rule knows engine and peer
        for share in SHARES:
            prompt = new.take(PROMPT)
            with fleet.awake(fleet.source):
                fleet.source.complete(prompt[: int(share * PROMPT_BLOCKS) * BLOCK_SIZE + 1], 1)
                fleet.source.settle()
            with fleet.awake(fleet.source, fleet.plain):
                first, want = fleet.plain.stream(prompt, 4)
            with fleet.awake(fleet.source, fleet.rule):
                seconds, answer = fleet.rule.stream(prompt, 4)
            with fleet.awake(fleet.source, fleet.plain):
                again, _ = fleet.plain.stream(new.take(PROMPT), 4)
            fleet.wrong += answer.tokens != want.tokens
            if number >= 0:
                ratios[share].append(seconds / first)
                control[share].append(again / first)
        progress(f"cost rule, round {number + 1}/{rounds}")
    return {
        "cost_rule_worst": max(map(statistics.median, ratios.values())),
        "cost_rule_at_0": statistics.median(ratios[0.0]),
        "cost_rule_at_100": statistics.median(ratios[1.0]),
        "control_worst": max(map(statistics.median, control.values())),
    }


def prefetch(fleet: Fleet, new: NewPrompts, rounds: int) -> dict[str, float]:
    """TTFT of prompts that a hint brought from a peer to host memory, and of prompts that were in
    host memory anyway. The engine that is given the hint weighs loads against computing."""
    ratios: list[float] = []
    hint = {"kvconnect": {"prefetch": True}}
    for number in range(rounds + 1):
        prompt = new.take(PROMPT)
        fill(fleet, prompt)
        with fleet.awake(fleet.source, fleet.rule):
            came = fleet.rule.complete(prompt, 1, kv_transfer_params=hint).cached
            fleet.rule.settle()
            reset(fleet.rule, external=False)
        if came != CACHED:
            raise SystemExit(f"{came} tokens were prefetched, expected {CACHED}")
        with fleet.awake(fleet.host):
            host_s, host = fleet.host.stream(prompt, 4)
        with fleet.awake(fleet.rule):
            hinted_s, hinted = fleet.rule.stream(prompt, 4)
        fleet.wrong += hinted.tokens != host.tokens
        progress(f"prefetch: {hinted_s * 1e3:.0f} ms, host memory {host_s * 1e3:.0f} ms")
        if number:  # the first large copy does not count
            ratios.append(hinted_s / host_s)
    return {"prefetch_ttft_over_host": statistics.median(ratios)}


def pins(fleet: Fleet, new: NewPrompts) -> dict[str, float]:
    """A pinned prompt and one that is not, after more prompts than the host tier holds."""
    pinned, other = new.take(PROMPT), new.take(PROMPT)
    with fleet.awake(fleet.host):
        hint = {"kvconnect": {"pin": 3600}}
        fleet.host.complete(pinned, 1, kv_transfer_params=hint)
        fleet.host.complete(other, 1)
        for _ in range(HOST_BLOCKS // PROMPT_BLOCKS + 4):
            fleet.host.complete(new.take(PROMPT), 1)
            fleet.host.settle()
        kept = fleet.host.complete(pinned, 1).cached
        lost = fleet.host.complete(other, 1).cached
    return {"pin_kept": kept / CACHED, "pin_control": lost / CACHED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="of the trace")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    requests = scaled(sample(read(TRACE), options.requests, options.seed))
    fleet, new = Fleet(), NewPrompts(options.seed)
    variants = [Variant("", [server]) for server in fleet.servers]
    with pd.side_by_side(*fleet.servers), stopped(variants):
        figures = {}
        for apart in (True, False):
            fleet.apart, end = apart, APART * apart
            for part in (ttft, slowdown, rule):
                found = part(fleet, new, options.rounds)
                figures |= {f"{name}{end}": value for name, value in found.items()}
        figures |= prefetch(fleet, new, options.rounds)
        figures |= trace(fleet, requests, options.seed)
        figures |= pins(fleet, new)
    figures |= {"receipt_mismatch": fleet.mismatched, "wrong_tokens": fleet.wrong}
    emit("sharing", figures)


if __name__ == "__main__":
    main()
