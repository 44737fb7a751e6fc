"""A real vLLM CPU engine: what a hit below host memory saves, and whether the cost rule ever loses.

    python -m benchmarks.tiers [--rounds N]

Engines with the same model (float32) live side by side and work in turn, never at the same time:
two without a connector, one whose prompts come from host memory, one from disk, one from a Valkey
or Redis server on this machine, and one with the cost rule over a disk. Host memory of the last
three holds four prompts and more are asked for in turn, so that none is found there; all load
whatever there is but the last.

``ttft_host_over_recompute``, ``_disk_``, ``_remote_``: TTFT of a stored 2k prompt over that of the
engine without a connector on a new one. ``copy_share_disk``, ``_remote``: of the wire time of hits
there, how much was the copy from host memory to the device, which overlapping the two could save.
``cost_rule_worst``: prompts of which a share is stored, from none to all; the rule's engine over
the one that computes everything, median over rounds, the worst share. ``always_worst`` is the same
for the engine that always loads from disk, and ``cost_rule_at_0`` what looking for blocks that are
nowhere costs. ``control_worst``, ``control_at_0``: the same for a second engine without a
connector, which tells how far two engines differ by themselves. All answers must be the same
tokens; hits are checked by KVConnect's counters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.offload_engine import (
    ANSWER_TOKENS,
    CACHED_TOKENS,
    PROMPT_BLOCKS,
    Engine,
    NewPrompts,
    check_answers,
)
from benchmarks.settings import chosen
from benchmarks.valkey_server import start_server
from tests.engines.models import BLOCK_SIZE

SMALL = "136MiB"  # four prompts: fewer than are asked for in turn, and a quarter is one of them
LARGE = "400MiB"
STORED_PROMPTS = 7
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SETTLE_S = 0.3  # in which what was stored is written down
WARM_UP = 10  # prompts, until the rule knows the engine and its disk


def store(engines: list[Engine], plain: Engine, prompts: list[list[int]]) -> None:
    """Have every engine compute and store prompts."""
    for prompt in prompts:
        expected = [plain.generate([prompt], ANSWER_TOKENS, 0)[1]]
        for engine in engines:
            check_answers(engine, [prompt], expected, cached=0)
            time.sleep(
                SETTLE_S
            )  # what is written down must not pile up: here it is all to be found


def measure_hits(engines: dict[str, Engine], new: NewPrompts, rounds: int) -> dict[str, Any]:
    """TTFT of stored prompts by tier, and of new ones without a connector."""
    plain = engines["plain"]
    tiers = {name: engines[name] for name in ("host", "disk", "remote") if name in engines}
    prompts = [new.take() for _ in range(STORED_PROMPTS)]
    progress(f"{STORED_PROMPTS} prompts, computed and stored by every engine")
    store(list(tiers.values()), plain, prompts)
    samples: dict[str, list[float]] = {name: [] for name in ("plain", *tiers)}
    for number in range(rounds):
        for prompt in prompts:
            samples["plain"].append(plain.ttft(new.take(), 0))
            for name in list(tiers)[:: -1 if number % 2 else 1]:
                samples[name].append(tiers[name].ttft(prompt, CACHED_TOKENS))
        last = ", ".join(f"{name} {values[-1] * 1e3:.0f} ms" for name, values in samples.items())
        progress(f"TTFT, round {number + 1}/{rounds}: {last}")
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    shares = {}
    for name, kind in (("disk", "DISK_to_CPU"), ("remote", "REMOTE_to_CPU")):
        if name in tiers:
            copied, fetched = (
                tiers[name].counter("transfer_seconds", transfer_type=one)
                for one in ("CPU_to_GPU", kind)
            )
            shares[f"copy_share_{name}"] = copied / (copied + fetched)
    return {
        **shares,
        "ttft_recompute_ms": seconds["plain"] * 1e3,
        **{f"ttft_{name}_over_recompute": seconds[name] / seconds["plain"] for name in tiers},
        **{f"ttft_{name}_ms": seconds[name] * 1e3 for name in tiers},
    }


def measure_rule(engines: dict[str, Engine], new: NewPrompts, rounds: int) -> dict[str, Any]:
    """Prompts of which a share is on disk: with the rule, always loading, and computing."""
    plain, rule, always, control = (engines[name] for name in ("plain", "rule", "disk", "control"))
    stored = [new.take() for _ in range(STORED_PROMPTS)]
    store([rule, always], plain, stored)
    for number in range(WARM_UP):
        rule.llm.generate([{"prompt_token_ids": stored[number % STORED_PROMPTS]}], use_tqdm=False)
    ratios: dict[str, dict[float, list[float]]] = {
        name: {share: [] for share in SHARES} for name in ("rule", "disk", "control")
    }
    turn = 0
    for number in range(rounds):
        for share in SHARES:
            turn += 1
            head = stored[turn % STORED_PROMPTS][: int(share * PROMPT_BLOCKS) * BLOCK_SIZE]
            prompt = head + new.take(len(stored[0]) - len(head))
            seconds = {}
            for engine in (plain, rule, always, control)[:: -1 if number % 2 else 1]:
                seconds[engine.name] = first_token(engine, prompt)
            for name, values in ratios.items():
                values[share].append(seconds[name] / seconds["plain"])
        progress(f"cost rule, round {number + 1}/{rounds}")
    by_share = {
        name: {share: statistics.median(found) for share, found in values.items()}
        for name, values in ratios.items()
    }
    return {
        "cost_rule_worst": max(by_share["rule"].values()),
        "cost_rule_at_0": by_share["rule"][0.0],
        "cost_rule_at_100": by_share["rule"][1.0],
        "control_worst": max(by_share["control"].values()),
        "control_at_0": by_share["control"][0.0],
        "always_worst": max(by_share["disk"].values()),
        "always_at_100": by_share["disk"][1.0],
    }


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Return the seconds to the first token, however much of the prompt was cached."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        disks = [{"path": str(folder / name), "capacity": "2GiB"} for name in ("one", "two")]
        server = start_server(stack, folder)
        small, always = chosen("tiers", host_bytes=SMALL), chosen("tiers", load_when="always")
        wanted: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "control": None,
            "host": chosen("tiers", host_bytes=LARGE),
            "disk": {**small, **always, "disk": disks[0]},
            "rule": {**small, "disk": disks[1]},
        }
        if server:
            wanted["remote"] = {**small, **always, "remote": server}
        engines: dict[str, Engine] = {}
        for name, extra in wanted.items():
            engines[name] = Engine(name, "KVConnect" if extra else None, extra or {})
            stack.callback(engines[name].close)
        new = NewPrompts(seed=7)
        figures = measure_hits(engines, new, rounds)
        figures |= measure_rule(engines, new, rounds)
    emit("tiers", figures)


if __name__ == "__main__":
    sys.exit(main())
