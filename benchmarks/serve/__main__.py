"""Load generators that others wrote, against real vLLM CPU engines with and without KVConnect.

    python -m benchmarks.serve [--quick] [--only PART]... [--trace FILE]

A run of some parts keeps the other parts' figures in ``results/serve.json``; ``--quick`` writes
nothing.

``scripts/setup peers`` installs LMCache's, guidellm's and vllm-router's programs, ``scripts/setup
sglang`` SGLang's. Every engine runs one tiny random model in float32 (``bench`` of
``tests/engines/models.py``), with 8,192 tokens of KV on the device. Variants take turns, round
after round; those that are not asked are stopped (SIGSTOP). Ratios are medians over rounds of
KVConnect over its peer.

Parts:

``random``: vLLM's ``bench serve``, 1,000 new tokens and 200 of an answer, four requests at once.
``overhead_random`` is the seconds for all with KVConnect over those without a connector;
``overhead_control`` compares two engines without one, and shows what can be told apart.

``doc_qa``: LMCache's ``lmcache bench engine`` with ``long-doc-qa``: 30 documents of 1,000 tokens,
each computed once, then two questions about each, five at a time. ``doc_qa_ttft_gain`` and
``doc_qa_round_gain`` are 1 less the mean TTFT, and less the seconds for all questions, over those
without a connector. ``doc_qa_ttft_over_lmcache`` and ``doc_qa_round_over_lmcache`` are the same two
over those with LMCache's server beside the engine. ``doc_failures``: failed requests with
KVConnect, also with 100 documents, 20 at a time.

``trace``: the Mooncake conversation trace (``trace.py``) by vLLM's ``timed_trace``. Times are
compressed to 70 % of the rate that the engine without a connector bears. ``trace_ttft_gain`` is 1
less the ratio of mean TTFT; ``trace_p99_ratio`` and ``trace_itl_ratio`` are those of its 99th
percentile and of the mean time between tokens. ``trace_hit_over_ideal``: prompt tokens that were
cached, over those that an LRU cache as big as the host tier could have had.

``workloads``: prompts that share prefixes, by vLLM's ``bench serve``, SGLang's ``bench_serving``,
``guidellm`` and LMCache (``workloads.py``). A ``*_ttft_ratio`` is the mean TTFT with KVConnect over
that without a connector; ``workload_failures`` are failed requests of either.

``pd``: the requests of the trace through KVConnect's router and its engines, over vllm-router and
engines with ``NixlConnector`` (``pd_*_ratio``), at 70 % of what the latter bear. No host tier.
``pd_*_ratio_apart``: prefill and decode engine on cores of their own (``benchmarks/machines.py``).

``sglang``: SGLang servers with KVConnect's linker, over those without a cache in host memory
(``sglang_shared_prefix_ttft_ratio``) and those with HiCache and its ``file`` backend
(``sglang_hicache_ttft_ratio``), by ``bench_serving`` (``sglang_servers.py``). ``sglang_failures``
are failed requests of any.

``wrong_answers``: greedy answers of KVConnect that differ from the engine's without a connector.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, emit, end_when_terminated, progress
from benchmarks.serve import parts, sglang_servers, workloads
from benchmarks.serve.answers import wrong
from benchmarks.serve.disaggregation import handed_off
from benchmarks.serve.fleet import (
    CONTROL,
    LMCACHE,
    MODEL,
    OURS,
    PLAIN,
    disaggregated,
    single_engines,
)
from benchmarks.serve.load import LoadFailed
from benchmarks.serve.trace import Request, read, sample, scaled
from tests.engines.models import model_dir

TRACE = Path(__file__).with_name("conversations.jsonl.gz")
"""500 requests of Mooncake's conversation trace (FAST '25 release, Apache-2.0), which ``sample``
drew from all 12,031 with seed 0."""
ALL = ("random", "doc_qa", "trace", "workloads", "pd", "sglang")
MUST_BE_0 = ("wrong_answers", "doc_failures", "workload_failures", "sglang_failures")


def requests(path: Path, count: int, seed: int) -> list[Request]:
    """Return the sample of the trace."""
    if not path.exists():
        raise SystemExit(f"--trace: {path} is not there")
    return scaled(sample(read(path), count, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small round of each part")
    parser.add_argument("--only", choices=ALL, action="append", help="a part; repeatable")
    parser.add_argument("--rounds", type=int, help="turns of every variant in each part")
    parser.add_argument("--requests", type=int, help="how many of the trace are asked for")
    parser.add_argument("--trace", type=Path, default=TRACE, help="conversation_trace.jsonl[.gz]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    end_when_terminated()
    chosen = tuple(name for name in ALL if name in (options.only or ALL))
    sizes = parts.QUICK if options.quick else parts.FULL
    scale = workloads.QUICK if options.quick else workloads.FULL
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
        scale = replace(scale, rounds=options.rounds)
    if options.requests:
        sizes = replace(sizes, trace_requests=options.requests)
    model_dir(MODEL)  # made once, before several engines need it
    try:
        figures = measure(chosen, sizes, scale, options)
    except LoadFailed as error:
        raise SystemExit(str(error)) from error
    if options.quick:
        rounded = {key: round(value, 4) for key, value in figures.items()}
        print(json.dumps({"benchmark": "serve", **rounded}), flush=True)
    else:
        before = None if chosen == ALL else kept()
        emit("serve", {**(before["figures"] if before else {}), **figures}, before)
    if any(map(figures.get, MUST_BE_0)):
        raise SystemExit("answers are wrong or missing")


def kept() -> dict[str, Any] | None:
    """Return the record of the last run, for the parts that this one leaves out."""
    path = RESULTS / "serve.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def measure(
    chosen: Collection[str],
    sizes: parts.Sizes,
    scale: workloads.Scale,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return the figures of the parts; fleets that none of them needs are not started."""
    figures: dict[str, float] = {"wrong_answers": 0}

    def add(found: Mapping[str, float]) -> None:
        progress(", ".join(f"{key} {value:.4g}" for key, value in found.items()))
        figures.update(found)

    if {"trace", "pd"} & set(chosen):
        asked = requests(options.trace, sizes.trace_requests, options.seed)
    if {"random", "doc_qa", "trace", "workloads"} & set(chosen):
        of_parts = {"random": CONTROL, "doc_qa": LMCACHE}
        names = (PLAIN, OURS, *(name for part, name in of_parts.items() if part in chosen))
        with single_engines(names) as variants:
            if "random" in chosen:
                add(parts.random_prompts(variants, sizes))
            if "doc_qa" in chosen:
                add(parts.doc_qa(variants, sizes))
            if "trace" in chosen:
                add(parts.trace(variants, sizes, asked))
            if "workloads" in chosen:
                add(workloads.shared_prompts(variants, scale))
            figures["wrong_answers"] += wrong(variants, options.seed)[OURS]
    if "pd" in chosen:
        with disaggregated() as variants:
            add(handed_off(variants, sizes, asked))
            figures["wrong_answers"] += wrong(variants, options.seed)[OURS]
    if "sglang" in chosen:
        with sglang_servers.servers() as servers:
            add(sglang_servers.compared(servers, scale))
            figures["wrong_answers"] += sglang_servers.wrong(servers, options.seed)
    return figures


if __name__ == "__main__":
    main()
