"""Prefill on one vLLM CPU engine, decode on another: KVConnect, pull and push, against NIXL.

    python -m benchmarks.handoff [--quick]

Three pairs of engines with the same model (float32, 32 KiB of KV per token), one compute thread
each, hand-off only: one pair with KVConnect over its TCP transport (``pull``, ``push``), one with
KVConnect over its NIXL transport (``pull_nixl_path``, ``push_nixl_path``), and one with vLLM's
``NixlConnector`` (``nixl``); NIXL uses UCX's TCP in both. Every prompt is new and goes through all
variants in turn; the pairs that are not being asked are stopped (SIGSTOP), since even idle engines
would take time from the others. NIXL's polling sleeps 1 ms between rounds in both
(``benchmarks/nixl.py``): as it comes it takes a core per engine.

**Places.** ``loopback``; and a ``veth`` link between two network namespaces, prefill engines in
one, decode engines in the other: ``1g`` shaped to 1 Gbit/s, ``balanced`` to the rate at which the
KV of a 4k prompt takes as long as its prefill, ``free`` (KVConnect only) not shaped. Requests and
answers travel beside it. Rates take turns on the same engines. Where namespaces are not permitted,
only loopback is measured.

**Cores.** Everything is measured twice on the same engines: with all engines on all cores, and, in
keys that end in ``_apart``, with prefill and decode on cores of their own, as on machines of their
own (``benchmarks/machines.py``). The first says more about engines that fight for two cores than
about a hand-off between two machines.

**TTFT**, as a client of a proxy sees it: from sending the first request (``pull``, ``nixl``: to
the prefill engine, then to the decode engine; ``push``: to both at once) to the decode engine's
first streamed token. With concurrency 8 (``_c8``) eight new prompts are sent at once, and a sample
is their mean. Ratios are of medians over samples: ``ttft_push_over_nixl_4k_1g``; without a place,
of the shaped rate where KVConnect does worse. ``ttft_push_over_nixl_connector_4k`` is that of
``push_nixl_path``; ``ttft_push_over_pull_nixl_path_4k`` compares both ways over that transport.

**Exposed time** of a transfer, at 4k: what the link's rate adds to the time between the prefill
engine's answer and the decode engine's first token, the median at that rate less the median
``free``. ``exposed_over_wire_4k`` is that of push over the time that the prompt's KV takes at the
link's nominal rate; the worse of both rates.

``wrong_tokens``: answers that differ from another variant's for the same prompt; not 0 is an error.
So is less received KV than all prompts have. ``ttft_nixl_best_ms_...`` is NIXL's fastest sample:
where its threads are short of cores, some transfers stall for seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import emit, end_when_terminated, progress
from benchmarks.link import LOOPBACK, End, Link, Unavailable
from benchmarks.machines import APART, cores, move
from benchmarks.offload_engine import NewPrompts
from benchmarks.settings import chosen
from tests.engines import pd
from tests.engines.models import BLOCK_SIZE, model_dir
from tests.engines.scenario import block_bytes
from tests.engines.server import Server, kv_transfer
from tests.servers import free_port

MODEL = "handoff"
LENGTHS = {"256": 256, "1k": 1024, "4k": 4096}
LONGEST = "4k"
CROWD = 8
NEW = 2  # tokens: the first is timed, the second read from the KV that came
BLOCKS = (CROWD + 1) * LENGTHS[LONGEST] // BLOCK_SIZE
REFERENCE = "nixl"
GIGABIT = 1e9
FREE = "free"
WARM_UP = 64  # tokens

# Samples per (length, concurrency) and place; the exposed time needs those of (4k, 1).
FULL = {("256", 1): 5, ("1k", 1): 3, ("4k", 1): 3, ("256", 8): 2, ("1k", 8): 1, ("4k", 8): 1}
LOCAL = {("256", 1): 3, ("1k", 1): 2, ("4k", 1): 2, ("256", 8): 1, ("1k", 8): 1}
QUICK = {("256", 1): 2, ("4k", 1): 2, ("256", 8): 1}

Received = Callable[[Server], float]


class Sample(NamedTuple):
    """One request, or the means of several: seconds from the client's first to the first token,
    and from the prefill engine's whole answer to the first token."""

    ttft: float
    after_prefill: float


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
class Pair:
    """A prefill and a decode engine that take turns with others: stopped unless ``awake``."""

    p: Server
    d: Server
    variants: tuple[str, ...]
    received: Received
    expected_bytes: int = 0

    @contextmanager
    def awake(self, warm_up: list[int]) -> Iterator[None]:
        """Let the engines run, ask once for a prompt that does not count, stop them again."""
        self.signal(signal.SIGCONT)
        for variant in self.variants:
            self.ask(variant, [warm_up])
        yield
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        for pid in (*self.p.pids(), *self.d.pids()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def place(self, apart: bool) -> None:
        """Have the stopped engines run on cores of their own from now on, or both on all."""
        for server, allowed in zip((self.p, self.d), cores(2, apart), strict=True):
            move(server.pids(), allowed)

    def ask(
        self, variant: str, prompts: Sequence[list[int]]
    ) -> tuple[Sample, list[tuple[int, ...]]]:
        """Send the prompts at once; return the mean sample, and each prompt's tokens."""
        ticket = pd.standing_ticket(self.p) if variant.startswith("push") else ""
        one = partial(self._at_once, ticket) if ticket else self._in_sequence
        with ThreadPoolExecutor(len(prompts)) as pool:
            samples, tokens = zip(*pool.map(one, prompts), strict=True)
        for prompt in prompts:  # all but the last token, in whole blocks
            self.expected_bytes += -(-(len(prompt) - 1) // BLOCK_SIZE) * block_bytes(MODEL)
        return Sample(*map(statistics.mean, zip(*samples, strict=True))), list(tokens)

    def check_received(self) -> None:
        """End the benchmark if KV was computed again instead of received."""
        if self.received(self.d) < self.expected_bytes:
            found = f"{self.received(self.d):.0f} of {self.expected_bytes} bytes"
            raise SystemExit(f"{self.variants}: the decode engine received {found}")

    def _in_sequence(self, prompt: list[int]) -> tuple[Sample, tuple[int, ...]]:
        start = time.perf_counter()
        params = pd.prefill(self.p, prompt)
        prefilled = time.perf_counter() - start
        first, answer = self.d.stream(prompt, NEW, kv_transfer_params=params)
        return Sample(prefilled + first, first), answer.tokens

    def _at_once(self, ticket: str, prompt: list[int]) -> tuple[Sample, tuple[int, ...]]:
        transfer = secrets.token_hex(16)
        start = time.perf_counter()

        def prefill() -> float:
            pd.prefill(self.p, prompt, transfer)
            return time.perf_counter() - start

        with ThreadPoolExecutor(1) as pool:
            prefilling = pool.submit(prefill)
            params = pd.push_params(transfer, ticket)
            first, answer = self.d.stream(prompt, NEW, kv_transfer_params=params)
            return Sample(first, first - prefilling.result()), answer.tokens


class Run:
    """All samples taken, and what they amount to."""

    def __init__(self, seed: int) -> None:
        self._new = NewPrompts(seed)
        self._samples: dict[Cell, list[Sample]] = defaultdict(list)
        self._backwards = False
        self.rates: dict[str, float] = {}
        self.wrong_tokens = 0

    def calibrate(self, pair: Pair) -> None:
        """Choose the shaped rates: one is that at which KV takes as long as prefill."""
        with pair.awake(self._new.take(WARM_UP)):
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                pair.p.complete(self._new.take(LENGTHS[LONGEST]), 1)
                seconds.append(time.perf_counter() - start)
        balanced = _kv_bits(LONGEST) / statistics.median(seconds)
        progress(f"prefill of {LONGEST}: {statistics.median(seconds):.2f} s")
        self.rates = {"1g": GIGABIT, "balanced": balanced}

    def sample(self, pairs: Sequence[Pair], place: str, length: str, crowd: int) -> None:
        """Take one sample of every variant, together and apart, with the same new prompts."""
        prompts = [self._new.take(LENGTHS[length]) for _ in range(crowd)]
        answers: list[list[tuple[int, ...]]] = []
        order = -1 if self._backwards else 1
        self._backwards = not self._backwards
        for apart in (False, True)[::order]:
            seconds = {}
            for pair in pairs[::order]:
                pair.place(apart)
                with pair.awake(self._new.take(WARM_UP)):
                    for variant in pair.variants[::order]:
                        sample, tokens = pair.ask(variant, prompts)
                        answers.append(tokens)
                        self._samples[Cell(place, length, crowd, apart, variant)].append(sample)
                        seconds[variant] = sample.ttft
            last = ", ".join(f"{name} {seconds[name] * 1e3:.0f} ms" for name in sorted(seconds))
            progress(f"{place}, {crowd} x {length}{', apart' * apart}: {last}")
        first, *others = answers
        self.wrong_tokens += sum(sum(map(tuple.__ne__, first, other)) for other in others)

    def finish(self, pairs: Sequence[Pair]) -> None:
        """Check that all KV was received; the last request's is counted by the next one."""
        for pair in pairs:
            expected = pair.expected_bytes
            with pair.awake(self._new.take(WARM_UP)):
                pair.expected_bytes = expected
                pair.check_received()

    def figures(self) -> dict[str, Any]:
        """Return all figures by their keys."""
        times = {
            cell: Sample(*map(statistics.median, zip(*samples, strict=True)))
            for cell, samples in self._samples.items()
        }
        found: dict[str, Any] = {"wrong_tokens": self.wrong_tokens}
        found |= self._exposed(times)
        ratios = _ratios(times)
        for (variant, length, place, end), ratio in ratios.items():
            key = f"ttft_{variant}_over_{REFERENCE}_{length}"
            if place in self.rates:
                worse = max(ratios[variant, length, rate, end] for rate in self.rates)
                found[f"{key}{end}"] = worse
            found[f"{key}_{place}{end}"] = ratio
        for end in ("", APART) if self.rates else ():
            both = [
                [ratios[f"{way}_nixl_path", LONGEST, rate, end] for way in ("push", "pull")]
                for rate in self.rates
            ]
            found[f"ttft_push_over_nixl_connector_{LONGEST}{end}"] = max(push for push, _ in both)
            found[f"ttft_push_over_pull_nixl_path_{LONGEST}{end}"] = max(
                push / pull for push, pull in both
            )
        for cell, sample in times.items():
            name = f"{cell.length}_{cell.place}{cell.name}"
            found[f"ttft_{cell.variant}_ms_{name}"] = sample.ttft * 1e3
            if cell.variant == REFERENCE:
                best = min(self._samples[cell])
                found[f"ttft_{REFERENCE}_best_ms_{name}"] = best.ttft * 1e3
        return found | {f"mbit_per_s_{name}": rate / 1e6 for name, rate in self.rates.items()}

    def _exposed(self, times: Mapping[Cell, Sample]) -> dict[str, float]:
        found: dict[str, float] = {}
        for cell, sample in times.items():
            rate, free = self.rates.get(cell.place), times.get(cell._replace(place=FREE))
            if rate is None or free is None:
                continue
            added = sample.after_prefill - free.after_prefill
            over_wire = added / (_kv_bits(LONGEST) / rate)
            found[f"exposed_{cell.variant}_over_wire_{LONGEST}_{cell.place}{cell.name}"] = over_wire
        for end in ("", APART):
            pushed = [
                found[name]
                for rate in self.rates
                if (name := f"exposed_push_over_wire_{LONGEST}_{rate}{end}") in found
            ]
            if pushed:
                found[f"exposed_over_wire_{LONGEST}{end}"] = max(pushed)
        return found


def _ratios(times: Mapping[Cell, Sample]) -> dict[tuple[str, str, str, str], float]:
    """Return TTFT over the reference's by (variant, length, place, end of the name)."""
    return {
        (cell.variant, cell.length, cell.place, cell.name): sample.ttft
        / times[cell._replace(variant=REFERENCE)].ttft
        for cell, sample in times.items()
        if cell.variant != REFERENCE and cell.place != FREE
    }


def _kv_bits(length: str) -> int:
    return LENGTHS[length] // BLOCK_SIZE * block_bytes(MODEL) * 8


@contextmanager
def engines(ends: Sequence[End], key_file: Path) -> Iterator[list[Pair]]:
    """Start all pairs, prefill engines at the first end, decode engines at the second, and leave
    them stopped."""
    with ExitStack() as stack:

        def start(connectors: Sequence[str], variants: tuple[str, ...], count: Received) -> Pair:
            progress(f"starting engines for {', '.join(variants)}")
            p, d = stack.enter_context(started(ends, connectors))
            return stack.enter_context(stopped(Pair(p, d, variants, count)))

        pairs = []
        for transport, variants in (
            ("tcp", ("pull", "push")),
            ("nixl", ("pull_nixl_path", "push_nixl_path")),
        ):
            both = chosen("handoff", transport=transport, key_file=str(key_file), host_bytes="off")
            at = chosen("handoff", listen=f"{ends[0].address}:0")
            ours = [
                kv_transfer(role="kv_producer", **both, **at),
                kv_transfer(role="kv_consumer", **both),
            ]
            pairs.append(start(ours, variants, pd.received_bytes))
        theirs = [nixl_config("kv_producer"), nixl_config("kv_consumer")]
        yield [*pairs, start(theirs, (REFERENCE,), nixl_bytes)]


@contextmanager
def started(ends: Sequence[End], connectors: Sequence[str]) -> Iterator[tuple[Server, Server]]:
    """Start a prefill and a decode engine."""
    p, d = ({"connector": c, **site(end)} for end, c in zip(ends, connectors, strict=True))
    args = ("--no-enable-prefix-caching",)  # all variants compute and move every prompt whole
    max_len = LENGTHS[LONGEST] + NEW
    with pd.pair(MODEL, p, d, blocks=BLOCKS, max_len=max_len, args=args) as servers:
        yield servers


@contextmanager
def stopped(pair: Pair) -> Iterator[Pair]:
    """Stop a pair, and let it go on in the end: a stopped process does not terminate."""
    pair.signal(signal.SIGSTOP)
    try:
        yield pair
    finally:
        pair.signal(signal.SIGCONT)


def site(end: End) -> dict[str, Any]:
    """Return the arguments of a server at one end of the link."""
    return {
        "host": end.control,
        "prefix": end.inside,
        "env": {
            "OMP_NUM_THREADS": "1",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # a stopped engine is not a hung one
            "VLLM_HOST_IP": "127.0.0.1",  # of the engine's own processes among themselves
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": end.device,
            "UCX_TCP_TX_SEG_SIZE": "128k",  # fastest of what was tried for reads
            "UCX_TCP_RX_SEG_SIZE": "256k",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": end.address,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        },
    }


def nixl_config(role: str) -> str:
    config = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "benchmarks.nixl",
        "kv_role": role,
        "kv_buffer_device": "cpu",
    }
    return json.dumps(config)


def nixl_bytes(server: Server) -> float:
    return server.metric("vllm:nixl_bytes_transferred_sum")


def measure_loopback(run: Run, schedule: Mapping[tuple[str, int], int], key_file: Path) -> None:
    with engines((LOOPBACK, LOOPBACK), key_file) as pairs:
        for number in range(max(schedule.values())):
            for (length, crowd), samples in schedule.items():
                if number < samples:
                    run.sample(pairs, "loopback", length, crowd)
        run.finish(pairs)


def measure_link(run: Run, schedule: Mapping[tuple[str, int], int], key_file: Path) -> None:
    """Take all samples over the shaped link, the rates in turn.

    Raises:
        Unavailable: the system does not permit such a link.
    """
    with Link() as link, engines(link.ends, key_file) as pairs:
        run.calibrate(pairs[0])
        for number in range(max(schedule.values())):
            for name, rate in {FREE: None, **run.rates}.items():
                link.shape(rate)
                for (length, crowd), samples in schedule.items():
                    if number >= samples:
                        continue
                    if name != FREE:
                        run.sample(pairs, name, length, crowd)
                    elif (length, crowd) == (LONGEST, 1):
                        run.sample(pairs[:1], name, length, crowd)
        run.finish(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of an hour, the link only")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    end_when_terminated()
    model_dir(MODEL)  # made once, before several engines need it
    run, schedule = Run(options.seed), QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "key")
        key_file.write_text(secrets.token_hex(32))
        try:
            measure_link(run, schedule, key_file)
            on_link = True
        except Unavailable as error:
            on_link = False
            progress(f"no shaped link, only loopback: {error}")
        if not (options.quick and on_link):
            measure_loopback(run, QUICK if options.quick else LOCAL, key_file)
    figures = run.figures()
    emit("handoff", figures | {"quick": options.quick})
    if run.wrong_tokens:
        raise SystemExit(f"{run.wrong_tokens} answers have wrong tokens")


if __name__ == "__main__":
    main()
