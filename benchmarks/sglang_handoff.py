"""Prefill on one SGLang CPU server, decode on another: KVConnect against the built-in backends.

    python -m benchmarks.sglang_handoff [--quick]        # in .venv-sglang; make bench-sglang

All servers have the same model (float32, 32 KiB of KV per token) and one compute thread. Those with
KVConnect: two prefill servers, one that pushes layer by layer and one that pushes chunk by chunk,
and two decode servers, one that takes pages over TCP and one over NIXL; any of the first talks to
any of the second (``tcp_layerwise``, ``tcp``, ``nixl_path_layerwise``, ``nixl_path``). Then a pair
with SGLang's own ``nixl`` (UCX over TCP), and one with ``mooncake_tcp`` where that is installed.
Every prompt is new and goes through all variants in turn; servers that are not being asked are
stopped (SIGSTOP). What the built-in backends need on a CPU is in ``benchmarks/sglang_plugin``:
NIXL's polling sleeps 1 ms between rounds in all variants.

**Places.** ``loopback``; and a ``veth`` link between two network namespaces, prefill servers in
one, decode servers in the other: ``1g`` shaped to 1 Gbit/s, ``balanced`` to the rate at which the
KV of a 4k prompt takes as long as its prefill, ``free`` not shaped. Requests and answers travel
beside it. Rates take turns on the same servers. Where namespaces are not permitted, only loopback
is measured.

**Cores.** Everything is measured twice on the same servers: with all servers on all cores, and, in
keys that end in ``_apart``, with prefill and decode on cores of their own
(``benchmarks/machines.py`` says why).

**TTFT**: from sending a request to both servers, as a router does, to the decode server's first
streamed token. With concurrency 8 (``_c8``) eight new prompts are sent at once, and a sample is
their mean. Ratios are of medians over samples: ``ttft_tcp_layerwise_over_nixl_4k_1g``; without a
place, of the shaped rate where KVConnect does worse. ``ttft_layerwise_over_nixl_4k`` is that of
``tcp_layerwise``, ``ttft_256_over_nixl`` the worst of all variants and places at 256 tokens.

**Exposed time** of a transfer, at 4k on the ``balanced`` link: what the rate adds to TTFT, the
median at that rate less the median ``free``. ``exposed_over_wire_4k`` is that of ``tcp_layerwise``
over the time that the prompt's KV takes at the nominal rate; ``..._tcp`` and so on, the others'.

``hook_us``: what the hooks of layer-wise push add to one attention layer of one forward
(``benchmarks/sglang_hooks.py``).

``wrong_tokens``: answers that differ from another variant's for the same prompt; not 0 is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import emit, end_when_terminated, progress
from benchmarks.link import LOOPBACK, End, Link, Unavailable
from benchmarks.machines import APART, cores, move
from benchmarks.offload_engine import NewPrompts
from benchmarks.settings import chosen
from benchmarks.sglang_hooks import hook_us
from tests.engines.models import BLOCK_SIZE, model_dir
from tests.engines.scenario import block_bytes
from tests.engines.server import ServerDied
from tests.sglang.pd import LAYERWISE, decode_server, prefill_server, room, side_by_side
from tests.sglang.server import SglangServer, plugin_path

MODEL = "handoff"
LENGTHS = {"256": 256, "1k": 1024, "4k": 4096}
LONGEST = "4k"
CHUNK = 512  # tokens
CROWD = 8
NEW = 2  # tokens: the first is timed, the second read from the KV that came
TOKENS = 3 * LENGTHS[LONGEST]
REFERENCE, BEST = "nixl", "tcp_layerwise"
OURS = (BEST, "tcp", "nixl_path_layerwise", "nixl_path")
GIGABIT = 1e9
FREE, BALANCED, LOCAL = "free", "balanced", "loopback"
WARM_UP = 64  # tokens
HOOK_ROUNDS = 100
PLUGIN = Path(__file__).with_name("sglang_plugin")

# Samples per (length, concurrency) and place; the exposed time needs those of (4k, 1).
FULL = {("256", 1): 5, ("1k", 1): 3, ("4k", 1): 3, ("256", 8): 2}
SHORT = {("256", 1): 2, ("4k", 1): 2}
Schedule = Mapping[tuple[str, int], int]


class Cell(NamedTuple):
    """What a sample was taken of."""

    place: str
    length: str
    crowd: int
    apart: bool
    variant: str

    @property
    def name(self) -> str:
        """How its figures' names end, without a place."""
        return (f"_c{self.crowd}" if self.crowd > 1 else "") + APART * self.apart


@dataclass
class Group:
    """Servers that run while others are stopped, and the pairs among them, by variant."""

    pairs: dict[str, tuple[SglangServer, SglangServer]]

    @contextmanager
    def awake(self, warm_up: list[int]) -> Iterator[None]:
        """Let the servers run, ask once each way for a prompt that does not count, stop them."""
        self.signal(signal.SIGCONT)
        for variant in self.pairs:
            self.ask(variant, [warm_up])
        yield
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        servers = {id(server): server for pair in self.pairs.values() for server in pair}
        for server in servers.values():
            for pid in server.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def place(self, apart: bool) -> None:
        """Have the stopped servers run on cores of their own from now on, those of prefill and
        those of decode, or all on all."""
        for p, d in self.pairs.values():
            for server, allowed in zip((p, d), cores(2, apart), strict=True):
                move(server.pids(), allowed)

    def ask(
        self, variant: str, prompts: Sequence[list[int]]
    ) -> tuple[float, list[tuple[int, ...]]]:
        """Send the prompts at once; return the mean TTFT in seconds, and each one's tokens."""
        p, d = self.pairs[variant]

        def one(prompt: list[int]) -> tuple[float, tuple[int, ...]]:
            meeting = room(p)
            with ThreadPoolExecutor(1) as pool:
                prefilling = pool.submit(p.complete, prompt, NEW, **meeting)
                first, answer = d.stream(prompt, NEW, **meeting)
                prefilling.result()
            return first, answer.tokens

        with ThreadPoolExecutor(len(prompts)) as pool:
            seconds, tokens = zip(*pool.map(one, prompts), strict=True)
        return statistics.mean(seconds), list(tokens)


class Run:
    """All samples taken, and what they amount to."""

    def __init__(self, seed: int) -> None:
        self._new = NewPrompts(seed)
        self._samples: dict[Cell, list[float]] = defaultdict(list)
        self._backwards = False
        self.rates: dict[str, float] = {}
        self.wrong_tokens = 0

    def calibrate(self, group: Group) -> None:
        """Choose the shaped rates: one is that at which KV takes as long as prefill."""
        with group.awake(self._new.take(WARM_UP)):
            seconds = [group.ask(BEST, [self._new.take(LENGTHS[LONGEST])])[0] for _ in range(2)]
        self.rates = {"1g": GIGABIT, BALANCED: _kv_bits(LONGEST) / min(seconds)}
        progress(f"prefill of {LONGEST}: {min(seconds):.2f} s")

    def sample(self, groups: Sequence[Group], place: str, length: str, crowd: int) -> None:
        """Take one sample of every variant, together and apart, with the same new prompts."""
        prompts = [self._new.take(LENGTHS[length]) for _ in range(crowd)]
        answers: list[list[tuple[int, ...]]] = []
        order = -1 if self._backwards else 1
        self._backwards = not self._backwards
        for apart in (False, True)[::order]:
            taken = {}
            for group in groups[::order]:
                group.place(apart)
                with group.awake(self._new.take(WARM_UP)):
                    for variant, (p, _) in list(group.pairs.items())[::order]:
                        p.forget()  # it may have computed the prompt for another variant
                        seconds, tokens = group.ask(variant, prompts)
                        answers.append(tokens)
                        self._samples[Cell(place, length, crowd, apart, variant)].append(seconds)
                        taken[variant] = seconds
            last = ", ".join(f"{name} {taken[name] * 1e3:.0f} ms" for name in sorted(taken))
            progress(f"{place}, {crowd} x {length}{', apart' * apart}: {last}")
        first, *others = answers
        self.wrong_tokens += sum(sum(map(tuple.__ne__, first, other)) for other in others)

    def figures(self) -> dict[str, Any]:
        """Return all figures by their keys."""
        times = {cell: statistics.median(samples) for cell, samples in self._samples.items()}
        found: dict[str, Any] = {"wrong_tokens": self.wrong_tokens}
        ratios = {
            cell: seconds / times[cell._replace(variant=REFERENCE)]
            for cell, seconds in times.items()
            if cell.variant != REFERENCE and cell._replace(variant=REFERENCE) in times
        }
        for cell, ratio in ratios.items():
            key = f"ttft_{cell.variant}_over_{REFERENCE}_{cell.length}"
            found[f"{key}_{cell.place}{cell.name}"] = ratio
            if cell.place in self.rates:
                shaped = [ratios[cell._replace(place=rate)] for rate in self.rates]
                found[f"{key}{cell.name}"] = max(shaped)
        for end in ("", APART):
            found[f"ttft_256_over_{REFERENCE}{end}"] = max(
                ratio
                for cell, ratio in ratios.items()
                if cell.length == "256" and cell.name == end and cell.variant in OURS
            )
            if self.rates:
                found[f"ttft_layerwise_over_{REFERENCE}_{LONGEST}{end}"] = found[
                    f"ttft_{BEST}_over_{REFERENCE}_{LONGEST}{end}"
                ]
        if self.rates:
            found |= self._exposed(times)
        for cell, seconds in times.items():
            place = f"{cell.length}_{cell.place}{cell.name}"
            found[f"ttft_{cell.variant}_ms_{place}"] = seconds * 1e3
        return found

    def _exposed(self, times: Mapping[Cell, float]) -> dict[str, float]:
        wire = _kv_bits(LONGEST) / self.rates[BALANCED]
        found = {"prefill_s_4k": wire, "rate_balanced_mbit": self.rates[BALANCED] / 1e6}
        for cell, seconds in times.items():
            if cell[:3] == (BALANCED, LONGEST, 1):
                share = (seconds - times[cell._replace(place=FREE)]) / wire
                found[f"exposed_over_wire_{LONGEST}_{cell.variant}{cell.name}"] = share
                if cell.variant == BEST:
                    found[f"exposed_over_wire_{LONGEST}{cell.name}"] = share
        return found


def _kv_bits(length: str) -> int:
    return LENGTHS[length] // BLOCK_SIZE * block_bytes(MODEL) * 8


@contextmanager
def servers(ends: Sequence[End]) -> Iterator[list[Group]]:
    """Start all groups, prefill servers at the first end, decode servers at the second, and leave
    them stopped."""
    source, target = ({"model": MODEL, "tokens": TOKENS, "chunk": CHUNK, **site(e)} for e in ends)
    with ExitStack() as stack:
        groups = [kvconnect_group(stack, source, target)]
        for variant, backend in ((REFERENCE, "nixl"), ("mooncake", "mooncake_tcp")):
            if variant == "mooncake" and importlib.util.find_spec("mooncake") is None:
                progress("mooncake is not installed, left out")
                continue
            p = prefill_server(backend=backend, **source)
            d = decode_server(backend=backend, **target)
            with suppress_missing(variant):
                groups.append(started(stack, {variant: (p, d)}))
        yield groups


@contextmanager
def suppress_missing(variant: str) -> Iterator[None]:
    """Leave out a contender that does not start here, but not the reference."""
    try:
        yield
    except ServerDied as error:
        if variant == REFERENCE:
            raise
        progress(f"{variant} does not start, left out: {str(error).strip().splitlines()[-1]}")


def kvconnect_group(stack: ExitStack, source: dict[str, Any], target: dict[str, Any]) -> Group:
    networks = [f"{end['address']}/32" for end in (source, target)]
    peers = chosen("sglang_handoff", peers=networks)
    settings = {**peers, **chosen("sglang_handoff", listen=f"{source['address']}:0")}
    layers = prefill_server(settings=settings, **with_env(source, LAYERWISE))
    chunks = prefill_server(settings=settings, **source)
    receivers = {
        kind: decode_server(
            settings={**peers, **chosen("sglang_handoff", transport=transport)}, **target
        )
        for kind, transport in (("tcp", "tcp"), ("nixl_path", "nixl"))
    }
    pairs = {
        f"{kind}{suffix}": (p, receivers[kind])
        for kind, (suffix, p) in product(receivers, (("_layerwise", layers), ("", chunks)))
    }
    return started(stack, pairs)


def started(stack: ExitStack, pairs: dict[str, tuple[SglangServer, SglangServer]]) -> Group:
    """Start the servers of a group, let them connect, and stop them until they are needed."""
    progress(f"starting servers for {', '.join(pairs)}")
    distinct = {id(server): server for pair in pairs.values() for server in pair}
    stack.enter_context(side_by_side(*distinct.values()))
    group = Group(pairs)
    stack.callback(group.signal, signal.SIGCONT)  # a stopped process does not terminate
    for variant in pairs:
        group.ask(variant, [list(range(10, 10 + WARM_UP))])
    group.signal(signal.SIGSTOP)
    return group


def site(end: End) -> dict[str, Any]:
    """Return the arguments of a server at one end of the link."""
    environment = {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": end.device,
        "UCX_TCP_TX_SEG_SIZE": "128k",
        "UCX_TCP_RX_SEG_SIZE": "256k",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "86400",  # a stopped server is not a dead one
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "600",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "600",
        **plugin_path(PLUGIN),
    }
    return {
        "host": end.control,
        "address": end.address,
        "prefix": end.inside,
        "env": environment,
        "args": ("--watchdog-timeout", "86400"),
    }


def with_env(arguments: dict[str, Any], more: Mapping[str, str]) -> dict[str, Any]:
    return {**arguments, "env": {**arguments["env"], **more}}


def measure_loopback(run: Run, schedule: Schedule) -> None:
    with servers((LOOPBACK, LOOPBACK)) as groups:
        for number in range(max(schedule.values())):
            for (length, crowd), samples in schedule.items():
                if number < samples:
                    run.sample(groups, LOCAL, length, crowd)


def measure_link(run: Run, schedule: Schedule) -> None:
    """Take all samples over the shaped link, the rates in turn.

    Raises:
        Unavailable: the system does not permit such a link.
    """
    with Link() as link, servers(link.ends) as groups:
        run.calibrate(groups[0])
        for number in range(max(schedule.values())):
            for name, rate in {FREE: None, **run.rates}.items():
                link.shape(rate)
                for (length, crowd), samples in schedule.items():
                    if number < samples and (name != FREE or (length, crowd) == (LONGEST, 1)):
                        run.sample(groups, name, length, crowd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half an hour, the link only")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    end_when_terminated()
    model_dir(MODEL)  # made once, before several servers need it
    cost = hook_us(HOOK_ROUNDS)
    progress(f"hooks: {cost:.1f} us per layer and forward")
    run, schedule = Run(options.seed), SHORT if options.quick else FULL
    try:
        measure_link(run, schedule)
        on_link = True
    except Unavailable as error:
        on_link = False
        progress(f"no shaped link, only loopback: {error}")
    if not (options.quick and on_link):
        measure_loopback(run, SHORT)
    figures = run.figures()
    emit("sglang_handoff", figures | {"hook_us": cost, "quick": options.quick})
    if run.wrong_tokens:
        raise SystemExit(f"{run.wrong_tokens} answers have wrong tokens")


if __name__ == "__main__":
    main()
