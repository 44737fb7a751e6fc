"""What an engine with default settings makes of a disk tier: what it learns, and what it loads.

    python -m benchmarks.tiers_default [--rounds N]

One vLLM CPU engine in this process, with a disk tier and else default settings: ``load_when`` is
``faster``. It gets 50 mixed requests: new prompts, stored ones, stored heads with new tails, and
short ones that decode, alone and two at a time. Then it is asked in turn, by the cost model's
choice, with the choice taken away (as ``load_when: always``), and for new prompts.

``learned_over_true``: what the cost model expects of computing a 2k prompt, over what that takes:
the TTFT of new prompts without that of prompts of one block. ``ttft_default_over_always`` and
``ttft_default_over_recompute``: TTFT of stored 2k prompts. ``always_over_recompute`` tells whether
loading pays here. ``default_loads``: the share of those prompts of which all stored tokens were
loaded.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.offload_engine import CACHED_TOKENS, PROMPT_TOKENS, Engine, NewPrompts
from benchmarks.settings import chosen
from benchmarks.tiers import SETTLE_S, SMALL, STORED_PROMPTS
from tests.engines.models import BLOCK_SIZE

MIXED = 50


class Model:
    """The cost model of an engine in this process, which can be taken away and put back."""

    def __init__(self, engine: Engine) -> None:
        core: Any = engine.llm.llm_engine.engine_core
        self._tiers = core.engine_core.scheduler.connector.scheduler.tiers
        self._model = self._tiers._cost

    def turn(self, on: bool) -> None:
        self._tiers._cost = self._model if on else None

    def seconds(self, tokens: int) -> float:
        """Return what it expects of computing so many tokens of a prompt."""
        found: float | None = self._model.compute_seconds(tokens, 0)
        if found is None:
            raise SystemExit("the cost model has learned nothing")
        return found


def ask(engine: Engine, prompts: list[list[int]], tokens: int = 1) -> tuple[float, list[int]]:
    """Return the seconds that the prompts take together, and their cached tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = engine.llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, [output.num_cached_tokens or 0 for output in outputs]


def mix(engine: Engine, new: NewPrompts, stored: list[list[int]]) -> None:
    """Send the mixed requests."""
    rng = random.Random(5)
    for number in range(MIXED):
        head = stored[number % len(stored)]
        shared = rng.randrange(1, CACHED_TOKENS // BLOCK_SIZE) * BLOCK_SIZE
        kinds = [
            (new.take(), 1),
            (head, 1),
            (head[:shared] + new.take(PROMPT_TOKENS - shared), 1),
            (new.take(rng.randrange(10, 300)), 12),
        ]
        kind = number % len(kinds)
        prompt, tokens = kinds[kind]
        beside = [new.take(rng.randrange(10, 300))] if number % 3 == 0 else []
        ask(engine, [prompt, *beside], tokens)


def measure(engine: Engine, model: Model, new: NewPrompts, rounds: int) -> dict[str, Any]:
    """Learn from the mixed requests, then compare."""
    stored = [new.take() for _ in range(STORED_PROMPTS)]
    for prompt in stored:
        ask(engine, [prompt])
        time.sleep(SETTLE_S)
    progress(f"{MIXED} mixed requests")
    mix(engine, new, stored)
    learned = model.seconds(PROMPT_TOKENS)
    samples: dict[str, list[float]] = {
        name: [] for name in ("default", "always", "recompute", "one block")
    }
    loaded: list[int] = []
    for number in range(rounds * STORED_PROMPTS):
        names = list(samples)[:: -1 if number % 2 else 1]
        for place, name in enumerate(names):
            model.turn(on=name == "default")
            prompt = stored[(number + place) % STORED_PROMPTS]
            if name in ("recompute", "one block"):
                prompt = new.take(BLOCK_SIZE if name == "one block" else PROMPT_TOKENS)
            seconds, (cached,) = ask(engine, [prompt])
            samples[name].append(seconds)
            if name == "always" and cached != CACHED_TOKENS:
                raise SystemExit(f"{cached} tokens were loaded, not {CACHED_TOKENS}")
            if name == "default":
                loaded.append(cached)
        last = ", ".join(f"{name} {values[-1] * 1e3:.0f} ms" for name, values in samples.items())
        progress(f"TTFT: {last}")
    seconds_of = {name: statistics.median(values) for name, values in samples.items()}
    true = seconds_of["recompute"] - seconds_of["one block"]
    return {
        "learned_over_true": learned / true,
        "ttft_default_over_always": seconds_of["default"] / seconds_of["always"],
        "ttft_default_over_recompute": seconds_of["default"] / seconds_of["recompute"],
        "always_over_recompute": seconds_of["always"] / seconds_of["recompute"],
        "default_loads": loaded.count(CACHED_TOKENS) / len(loaded),
        "ttft_recompute_ms": seconds_of["recompute"] * 1e3,
        "learned_ms": learned * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its cost model is to be in this process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:
        disk = {"path": folder, "capacity": "2GiB"}
        settings = {**chosen("tiers_default", host_bytes=SMALL), "disk": disk}
        engine = Engine("default settings", "KVConnect", settings)
        try:
            figures = measure(engine, Model(engine), NewPrompts(seed=11), rounds)
        finally:
            engine.close()
    emit("tiers_default", figures)


if __name__ == "__main__":
    main()
