"""A hand-off, decode alone, or what is expected sooner: the router's ``--disaggregate``.

    python -m benchmarks.disaggregate [--rounds N] [--requests N] [--seed N]

One prefill and one decode engine with KVConnect, each on a core of its own
(``benchmarks/machines.py``), default settings. Two workloads: ``trace``, the Mooncake conversation
trace (``benchmarks/serve``), whose prompts are mostly cached from the turn before; ``mixed``, short
and long prompts that nothing has cached. Each is asked at 70 % of the rate that the engines bear
with ``always``. ``always``, ``never`` and ``auto`` take turns, round after round, each with empty
caches and a router that has just been started, so ``auto`` begins without any measured time.

``ttft_auto_over_best_p50_W`` of workload W: the median time to first token of ``auto`` over the
lesser one of ``always`` and ``never``, the median over rounds of ratios within one round;
``ttft_auto_over_best_p50``: the greater one of both workloads. ``itl_p99_auto_over_always_W``: the
same of the 99th percentile of the time between tokens, which prompts on the decode engine delay.
``ttft_p50_ms_W_R``, ``ttft_p99_ms_W_R``, ``itl_p99_ms_W_R``: of rule R, medians over rounds.
``handed_off_W``: share of the prompts that ``auto`` handed off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.choosing import HOST_BYTES, TRACE, OurRouter, behind, introduce
from benchmarks.common import emit, end_when_terminated, progress
from benchmarks.serve import parts
from benchmarks.serve.fleet import MODEL, Variant, engine
from benchmarks.serve.load import LoadFailed
from benchmarks.serve.parts import Replay
from benchmarks.serve.trace import ID_TOKENS, Request, read, sample, scaled
from benchmarks.settings import chosen
from tests.engines.models import model_dir
from tests.engines.server import kv_transfer

ALWAYS, NEVER, AUTO = RULES = ("always", "never", "auto")
FIGURES = {
    "ttft_p50_ms": "p50_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p99_ms": "p99_itl_ms",
}
"""Figures, and their names in what vLLM's load generator saves."""
HANDED_OFF = "handed_off"
SHORT, LONG = (16, 128), (1024, 2048)
OUTPUT = (8, 64)
"""Fewest and most tokens of mixed prompts, and of their answers."""

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""What was saved of each rule and round."""


def mixed(count: int, seed: int) -> list[Request]:
    """Return short and long prompts that share nothing, at random times."""
    rng, made = random.Random(seed), list[Request]()
    now_ms, names = 0.0, 0
    for number in range(count):
        length = rng.randint(*(LONG if number % 2 else SHORT))
        ids = -(-length // ID_TOKENS)
        made.append(Request(now_ms, length, rng.randint(*OUTPUT), tuple(range(names, names + ids))))
        names += ids
        now_ms += rng.expovariate(1.0)
    return made


@contextmanager
def started() -> Iterator[Variant]:
    """Start both engines, and a router that hands everything off."""
    sized = chosen("disaggregate", host_bytes=HOST_BYTES)
    with ExitStack() as stack:
        p, d = (
            engine(kv_transfer(role=role, **sized), 1) for role in ("kv_producer", "kv_consumer")
        )
        progress("starting a prefill and a decode engine")
        fleet = behind(stack, ALWAYS, [p, d], OurRouter([p], [d]))
        introduce(fleet)
        yield fleet


def turn(fleet: Variant, rule: str, replay: Replay) -> dict[str, Any]:
    """Ask for a workload with empty caches, and a router of its own."""
    fleet.reset()
    p, d = fleet.engines
    with OurRouter([p], [d], ("--disaggregate", rule)) as router:
        introduce(Variant(rule, fleet.engines, router))
        saved = replay.ask(Variant(rule, fleet.engines, router))
        name = "kvconnect_router_handoff_decisions_total"
        handed, alone = (router.metric(name, decision=each) for each in (HANDED_OFF, "alone"))
    return {**saved, HANDED_OFF: handed / max(1.0, handed + alone)}


def measure(fleet: Variant, requests: list[Request], rounds: int) -> Found:
    """Return what was saved of rules that take turns."""
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(requests, parts.FULL, Path(folder))
        fleet.reset()
        replay.spread_for(fleet)
        for number in range(rounds):
            for rule in RULES[:: -1 if number % 2 else 1]:
                saved = turn(fleet, rule, replay)
                found[rule].append(saved)
                shown = ", ".join(f"{name} {saved[theirs]:.1f}" for name, theirs in FIGURES.items())
                progress(f"round {number + 1} of {rounds}, {rule}: {shown}")
    return found


def figures(workload: str, found: Found) -> dict[str, float]:
    """Return medians, and the ratios of ``auto``, of one workload."""
    result = {
        f"{name}_{workload}_{rule}": statistics.median(one[theirs] for one in saved)
        for rule, saved in found.items()
        for name, theirs in FIGURES.items()
    }

    def ratio(theirs: str, others: Sequence[str]) -> float:
        each = zip(*(found[rule] for rule in (AUTO, *others)), strict=True)
        return statistics.median(
            auto[theirs] / min(other[theirs] for other in rest) for auto, *rest in each
        )

    best = ratio(FIGURES["ttft_p50_ms"], (ALWAYS, NEVER))
    result[f"ttft_auto_over_best_p50_{workload}"] = best
    result[f"itl_p99_auto_over_always_{workload}"] = ratio(FIGURES["itl_p99_ms"], (ALWAYS,))
    handed_off = statistics.median(one[HANDED_OFF] for one in found[AUTO])
    return {**result, f"{HANDED_OFF}_{workload}": handed_off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40, help="of each workload")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end_when_terminated()
    asked = {
        "trace": scaled(sample(read(TRACE), options.requests, options.seed)),
        "mixed": mixed(options.requests, options.seed),
    }
    model_dir(MODEL)  # made once, before both engines need it
    result: dict[str, Any] = {}
    try:
        with started() as fleet:
            for workload, requests in asked.items():
                progress(f"{workload}: {len(requests)} requests")
                result |= figures(workload, measure(fleet, requests, options.rounds))
    except LoadFailed as error:
        raise SystemExit(str(error)) from error
    worst = max(result[f"ttft_auto_over_best_p50_{workload}"] for workload in asked)
    counts = {"requests": options.requests, "rounds": options.rounds}
    emit("disaggregate", {"ttft_auto_over_best_p50": worst, **result, **counts})


if __name__ == "__main__":
    main()
