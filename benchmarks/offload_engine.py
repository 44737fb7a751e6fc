"""A real vLLM CPU engine: what a host hit saves.

    python -m benchmarks.offload_engine

Engines with the same model (float32) live side by side and work in turn, never at the same time:
one without a connector, one with KVConnect as it comes, one with KVConnect loading inside the step
(``sync_load_bytes``), and one with vLLM's ``ExampleConnector``, which keeps blocks in files (here
in the page cache). Their device cache holds four prompts of 2k tokens; stored prompts are asked for
again after enough others that nothing of them is left on the device.

TTFT is the time of ``generate`` with one output token. Hits are checked by the engine's count of
cached tokens and by KVConnect's own counters, and every engine's answers must be the same tokens.

``ttft_hit_over_recompute``, ``_over_example``, ``_over_device_hit``: KVConnect's TTFT on a host
hit over that of the engine without connector on a new prompt, of ``ExampleConnector`` on a hit,
and of KVConnect's engine on a prompt that is still on the device. ``ttft_sync_hit_over_...`` are
the same for the engine that loads inside the step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.settings import chosen
from tests.engines.models import BLOCK_SIZE, engine_args

PROMPT_BLOCKS = 64
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE + 8  # the tail is computed in any case
CACHED_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE
DEVICE_BLOCKS = 4 * PROMPT_BLOCKS + 8  # stores may hold a quarter of them: a whole prompt
STORED_PROMPTS = 6  # asked for in turn: five others, and more blocks than the device has, between
HOST_BYTES = "224MiB"  # seven prompts
ANSWER_TOKENS = 16


class Engine:
    """One vLLM engine, with a connector and its configuration or none."""

    def __init__(self, name: str, connector: str | None, extra: dict[str, Any]) -> None:
        from prometheus_client import REGISTRY
        from vllm import LLM

        progress(f"starting engine {name!r}")
        others = set(workers())
        self.name = name
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        self.llm = LLM(
            **engine_args("bench")
            | {
                "max_model_len": PROMPT_TOKENS + BLOCK_SIZE,
                "max_num_batched_tokens": 4096,  # ExampleConnector stores whole prompts only
                "num_gpu_blocks_override": DEVICE_BLOCKS,
                "kv_transfer_config": transfer if connector else None,
                "disable_log_stats": False,
            }
        )
        # Or it computes in this process.
        self._worker = next(iter(set(workers()) - others), os.getpid())
        # The next engine of this process takes its series out of the registry.
        self._collectors = list(REGISTRY._collector_to_names)

    def generate(
        self, prompts: list[list[int]], tokens: int, cached: int
    ) -> tuple[float, list[list[int]]]:
        """Return (seconds, output tokens); each prompt must have had ``cached`` cached tokens."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.num_cached_tokens != cached:
                found = f"{output.num_cached_tokens} cached tokens, expected {cached}"
                raise SystemExit(f"{self.name}: {found}")
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]

    def ttft(self, prompt: list[int], cached: int) -> float:
        return self.generate([prompt], 1, cached)[0]

    def counter(self, name: str, **labels: str) -> float:
        """Return the sum of a KVConnect counter over its other labels."""
        return sum(
            sample.value
            for collector in self._collectors
            for family in collector.collect()
            for sample in family.samples
            if sample.name == f"vllm:kvconnect_{name}_total"
            and labels.items() <= sample.labels.items()
        )

    def step_seconds(self) -> float:
        """Return the CPU seconds that the thread which computes has had so far."""
        spent = Path(f"/proc/{self._worker}/task/{self._worker}/schedstat").read_text().split()[0]
        return int(spent) / 1e9

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def workers() -> list[int]:
    """Return the ids of the processes in which engines compute."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and b"VLLM::Worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended
    return found


class NewPrompts:
    """Prompts that share no block with any other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def take(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self._random.randrange(10, 2000) for _ in range(tokens)]


def measure_hits(engines: dict[str, Engine], new: NewPrompts, rounds: int) -> dict[str, Any]:
    """TTFT on hits: every stored prompt once per round; of recompute: one new prompt per round."""
    plain, ours = engines["plain"], engines["kvconnect"]
    hitting = [engines[name] for name in ("example", "sync", "kvconnect")]
    stored = [new.take() for _ in range(STORED_PROMPTS)]
    progress(f"{STORED_PROMPTS} prompts, computed and stored by every engine")
    expected = [plain.generate([prompt], ANSWER_TOKENS, 0)[1] for prompt in stored]
    for engine in hitting:
        check_answers(engine, stored, expected, cached=0)
    samples: dict[str, list[float]] = {
        name: [] for name in ("plain", "example", "sync", "kvconnect", "device")
    }
    for number in range(rounds):
        samples["plain"].append(plain.ttft(new.take(), 0))
        for prompt in stored:
            for engine in hitting[:: -1 if number % 2 else 1]:
                samples[engine.name].append(engine.ttft(prompt, CACHED_TOKENS))
            samples["device"].append(ours.ttft(prompt, CACHED_TOKENS))
        last = ", ".join(f"{name} {values[-1] * 1e3:.0f} ms" for name, values in samples.items())
        progress(f"TTFT, round {number + 1}/{rounds}: {last}")
    hits = rounds * STORED_PROMPTS * CACHED_TOKENS
    if ours.counter("hit_tokens") != hits:
        raise SystemExit(f"{ours.counter('hit_tokens')} tokens hit the host tier, expected {hits}")
    for engine in hitting:
        check_answers(engine, stored, expected, cached=CACHED_TOKENS)
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "ttft_hit_over_recompute": seconds["kvconnect"] / seconds["plain"],
        "ttft_hit_over_example": seconds["kvconnect"] / seconds["example"],
        "ttft_hit_over_device_hit": seconds["kvconnect"] / seconds["device"],
        "ttft_sync_hit_over_example": seconds["sync"] / seconds["example"],
        "ttft_sync_hit_over_device_hit": seconds["sync"] / seconds["device"],
        "ttft_recompute_ms": seconds["plain"] * 1e3,
        "ttft_hit_ms": seconds["kvconnect"] * 1e3,
        "ttft_sync_hit_ms": seconds["sync"] * 1e3,
        "ttft_example_hit_ms": seconds["example"] * 1e3,
        "ttft_device_hit_ms": seconds["device"] * 1e3,
    }


def check_answers(
    engine: Engine, prompts: list[list[int]], expected: list[list[list[int]]], cached: int
) -> None:
    """Let an engine continue prompts; the tokens must be those of the engine without connector."""
    for prompt, answer in zip(prompts, expected, strict=True):
        if engine.generate([prompt], ANSWER_TOKENS, cached)[1] != answer:
            raise SystemExit(f"{engine.name}: other tokens, with {cached} cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    # Before vLLM is imported, and inherited by its processes. Computing leaves one core to the
    # frontend and the copies, which is how vLLM lays out a CPU server by itself.
    threads = max(1, (os.cpu_count() or 2) - 1)
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    new = NewPrompts(options.seed)
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as files:
        sized = chosen("offload_engine", host_bytes=HOST_BYTES)
        inside = chosen("offload_engine", sync_load_bytes=HOST_BYTES)
        # The one with KVConnect's counters comes last: vLLM keeps the metrics of one engine.
        setups: list[tuple[str, str | None, dict[str, Any]]] = [
            ("plain", None, {}),
            ("example", "ExampleConnector", {"shared_storage_path": files}),
            ("sync", "KVConnect", {**sized, **inside}),
            ("kvconnect", "KVConnect", sized),
        ]
        try:
            for name, connector, extra in setups:
                engines[name] = Engine(name, connector, extra)
            figures = measure_hits(engines, new, options.rounds)
        finally:
            for engine in engines.values():
                engine.close()
    emit("offload_engine", figures | {"compute_threads": threads})


if __name__ == "__main__":
    main()
