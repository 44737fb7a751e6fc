"""What KVConnect costs a vLLM CPU engine when every block is stored and nothing hits.

    python -m benchmarks.overhead

Two processes of the same program differ by up to a tenth for as long as they live. So one engine,
in this process, does the same work with its connector and twice without: at rest, the connector is
taken from the scheduler and the worker, and put back. The thread that computes also does all that
KVConnect does in a step, which in a server is partly another process's work.

The work: `prefill` is a new prompt of 264 tokens, `batch` eight of them in one step, `decode` eight
new prompts of 40 tokens and 24 tokens more of each. The host tier is full, so each block that is
stored pushes another one out. The tokens must be the same with and without.

`overhead_NAME`: time with KVConnect over time without, median over rounds; `overhead_no_hit` is the
worst of them. `overhead_control_NAME`: time without over time without; an overhead below its
distance from 1 cannot be told from none. `overhead_cpu_NAME`: the same of the CPU seconds that the
computing thread had.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from benchmarks.common import emit, progress
from benchmarks.offload_engine import HOST_BYTES, Engine, NewPrompts
from benchmarks.settings import chosen

# Name -> (tokens of a prompt, prompts, tokens of an answer, rounds)
WORK = {"prefill": (264, 1, 1, 60), "batch": (264, 8, 1, 9), "decode": (40, 8, 24, 24)}
WITH, WITHOUT, CONTROL = "with", "without", "control"


class Switch:
    """Takes the connector of an engine of this process away, and puts it back."""

    def __init__(self, engine: Engine) -> None:
        core: Any = engine.llm.llm_engine.engine_core
        self._engine, self._scheduler = engine, core.engine_core.scheduler
        self._connector = self._scheduler.connector
        self._worker_half: Any = None

    def turn(self, on: bool) -> None:
        """Have the next work done with or without it. What is being stored is stored first."""
        from vllm.distributed.kv_transfer import kv_transfer_state as state

        while self._connector.has_pending_push_work():
            self._engine.llm.llm_engine.step()
        self._worker_half = self._worker_half or state._KV_CONNECTOR_AGENT
        state._KV_CONNECTOR_AGENT = self._worker_half if on else None
        self._scheduler.connector = self._connector if on else None


def measure(engine: Engine, switch: Switch, new: NewPrompts, name: str) -> dict[str, float]:
    """Do one kind of work round after round."""
    length, prompts, answer, rounds = WORK[name]
    seconds: dict[str, list[float]] = {WITH: [], WITHOUT: [], CONTROL: []}
    cpu: dict[str, list[float]] = {WITH: [], WITHOUT: [], CONTROL: []}
    order = list(seconds)
    for number in range(rounds + 1):
        asked = [new.take(length) for _ in range(prompts)]
        tokens = {}
        order = order[1:] + order[:1] if number % 3 else order[::-1]
        for way in order:
            switch.turn(way == WITH)
            engine.llm.reset_prefix_cache()  # of the device
            before = engine.step_seconds()
            took, tokens[way] = engine.generate(asked, answer, 0)
            if number:  # the first round does not count
                seconds[way].append(took)
                cpu[way].append(engine.step_seconds() - before)
        if any(each != tokens[WITHOUT] for each in tokens.values()):
            raise SystemExit("KVConnect changed the tokens of a request without a hit")
    switch.turn(True)
    figures = {
        f"overhead_{name}": over(seconds[WITH], seconds[WITHOUT] + seconds[CONTROL]),
        f"overhead_control_{name}": over(seconds[CONTROL], seconds[WITHOUT]),
        f"overhead_cpu_{name}": over(cpu[WITH], cpu[WITHOUT] + cpu[CONTROL]),
    }
    progress(", ".join(f"{key} {value:.4f}" for key, value in figures.items()))
    return figures


def over(ours: list[float], theirs: list[float]) -> float:
    """Return the median over rounds of ours over theirs; theirs may be several times as many."""
    times = len(theirs) // len(ours)
    return statistics.median(a / b for a, b in zip(ours * times, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Before vLLM is imported. The other cores are for the copies.
    threads = max(1, (os.cpu_count() or 2) - 1)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    new = NewPrompts(options.seed)
    engine = Engine("kvconnect", "KVConnect", chosen("overhead", host_bytes=HOST_BYTES))
    switch = Switch(engine)
    progress("filling the host tier")
    while not engine.counter("evicted_blocks"):
        engine.generate([new.take()], 1, 0)
    switch.turn(True)
    names = ("evicted_blocks", "skipped_store_blocks", "hit_tokens")
    before, figures = [engine.counter(name) for name in names], {}
    for name in WORK:
        figures |= measure(engine, switch, new, name)
    evicted, skipped, hits = (engine.counter(n) - b for n, b in zip(names, before, strict=True))
    if hits:
        raise SystemExit("a new prompt hit the host tier")
    if not evicted or skipped:
        raise SystemExit(f"{evicted:g} blocks were evicted and {skipped:g} not stored")
    engine.close()
    worst = max(figures[f"overhead_{name}"] for name in WORK)
    emit("overhead", {"overhead_no_hit": worst, **figures, "evicted_blocks": evicted})


if __name__ == "__main__":
    main()
