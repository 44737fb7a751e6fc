"""The workloads on one engine: random prompts, questions about long documents, a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import progress
from benchmarks.serve.fleet import (
    CONTROL,
    HOST_BLOCKS,
    LMCACHE,
    MODEL,
    OURS,
    PLAIN,
    Variant,
    ratio,
    turns,
)
from benchmarks.serve.load import bench_serve, lmcache_bench
from benchmarks.serve.trace import Request, ideal_hits, spread, write
from tests.engines.models import BLOCK_SIZE, model_dir

LOAD = 0.7
"""Share of the baseline's highest rate at which a trace is replayed."""
CROWD = 8
"""Requests at once when that rate is measured."""


@dataclass(frozen=True)
class Sizes:
    """How much is asked. A length is in tokens."""

    rounds: int
    random_prompts: int
    random_input: int
    random_output: int
    documents: int
    document_length: int
    document_output: int
    many_documents: int
    trace_requests: int
    limit_s: float
    """Deadline of one run of a load generator."""


FULL = Sizes(
    rounds=3,
    random_prompts=32,
    random_input=1000,
    random_output=200,
    documents=30,
    document_length=1000,
    document_output=20,
    many_documents=100,
    trace_requests=500,
    limit_s=3600.0,
)
QUICK = Sizes(
    rounds=1,
    random_prompts=6,
    random_input=500,
    random_output=20,
    documents=12,
    document_length=1000,
    document_output=10,
    many_documents=12,
    trace_requests=12,
    limit_s=240.0,
)


def random_prompts(variants: Mapping[str, Variant], sizes: Sizes) -> dict[str, float]:
    """vLLM's ``random``: nothing is shared, all is stored. Beside two engines without KVConnect."""

    def work(variant: Variant, number: int) -> dict[str, Any]:
        found = bench_serve(
            variant.front.port,
            model_dir(MODEL),
            [
                *("--dataset-name", "random", "--num-prompts", str(sizes.random_prompts)),
                *("--random-input-len", str(sizes.random_input)),
                *("--random-output-len", str(sizes.random_output)),
                *("--max-concurrency", "4", "--seed", str(number + 1)),
            ],
            sizes.limit_s,
        )
        complete(found, sizes.random_prompts)
        progress(f"random, round {number + 1}, {variant.name}: {found['duration']:.1f} s")
        return found

    found = turns([variants[name] for name in (PLAIN, OURS, CONTROL)], sizes.rounds, work)
    return {
        "overhead_random": ratio(found, OURS, PLAIN, "duration"),
        "overhead_control": ratio(found, CONTROL, PLAIN, "duration"),
        "overhead_random_ttft": ratio(found, OURS, PLAIN, "mean_ttft_ms"),
        "overhead_control_ttft": ratio(found, CONTROL, PLAIN, "mean_ttft_ms"),
    }


def doc_qa(variants: Mapping[str, Variant], sizes: Sizes) -> dict[str, float]:
    """LMCache's ``long-doc-qa`` in tiles: all documents once, then two questions about each."""
    failures = 0

    def ask(variant: Variant, documents: int, *arguments: str) -> dict[str, Any]:
        nonlocal failures
        variant.reset()
        length = sizes.document_length
        found = lmcache_bench(
            variant.front.port,
            "long-doc-qa",
            documents * length,
            ("--ldqa-document-length", str(length), *arguments),
            sizes.limit_s,
        )
        failures += int(found["failed_requests"]) if variant.name == OURS else 0
        return found

    def work(variant: Variant, number: int) -> dict[str, Any]:
        found = ask(
            variant,
            sizes.documents,
            *("--ldqa-query-per-document", "2", "--ldqa-shuffle-policy", "tile"),
            *("--ldqa-num-inflight-requests", "5"),
            *("--ldqa-max-output-length", str(sizes.document_output)),
        )
        complete({"completed": found["successful_requests"]}, 2 * sizes.documents)
        progress(
            f"documents, round {number + 1}, {variant.name}: {found['elapsed_time']:.1f} s, "
            f"TTFT {found['mean_ttft_ms']:.0f} ms"
        )
        return found

    found = turns([variants[name] for name in (PLAIN, OURS, LMCACHE)], sizes.rounds, work)
    with variants[OURS].awake():
        crowd = ("--ldqa-query-per-document", "1", "--ldqa-num-inflight-requests", "20")
        ask(variants[OURS], sizes.many_documents, *crowd, "--ldqa-max-output-length", "1")
    progress(f"{sizes.many_documents} documents: {failures} failures")
    return {
        "doc_qa_ttft_gain": 1 - ratio(found, OURS, PLAIN, "mean_ttft_ms"),
        "doc_qa_round_gain": 1 - ratio(found, OURS, PLAIN, "elapsed_time"),
        "doc_qa_ttft_over_lmcache": ratio(found, OURS, LMCACHE, "mean_ttft_ms"),
        "doc_qa_round_over_lmcache": ratio(found, OURS, LMCACHE, "elapsed_time"),
        "doc_failures": failures,
    }


class Replay:
    """A trace that is asked for at 70 % of the rate that the baseline bears. ``texts``: its prompts
    are texts, not token ids."""

    def __init__(
        self, requests: list[Request], sizes: Sizes, folder: Path, texts: bool = False
    ) -> None:
        self._requests, self._limit_s, self._texts = requests, sizes.limit_s, texts
        self._file = folder / "trace.jsonl"

    def calibrate(self, baseline: Variant) -> None:
        """Measure how long the baseline takes for all requests, :data:`CROWD` at a time."""
        with baseline.awake():
            baseline.reset()
            self.spread_for(baseline)

    def spread_for(self, baseline: Variant) -> None:
        """The same of a baseline that is awake and has empty caches."""
        write(self._file, spread(self._requests, 0.0))
        crowd = ("--no-self-timed", "--max-concurrency", str(CROWD))
        whole = self.ask(baseline, *crowd)["duration"]
        progress(f"trace of {len(self._requests)} requests: {baseline.name} takes {whole:.0f} s")
        write(self._file, spread(self._requests, whole / LOAD))

    def work(self, variant: Variant, number: int) -> dict[str, Any]:
        """Replay the trace with empty caches; adds ``hits``, the prompt tokens that were cached."""
        variant.reset()
        before = cached_tokens(variant)
        found = self.ask(variant)
        found["hits"] = cached_tokens(variant) - before
        progress(
            f"trace, round {number + 1}, {variant.name}: TTFT mean {found['mean_ttft_ms']:.0f} ms, "
            f"p99 {found['p99_ttft_ms']:.0f} ms, {found['hits']:.0f} tokens cached"
        )
        return found

    def ask(self, variant: Variant, *arguments: str, whole: bool = True) -> dict[str, Any]:
        """Send all requests at their times; return what the load generator saves. ``whole``: end
        the benchmark if one has no answer."""
        found = bench_serve(
            variant.front.port,
            model_dir(MODEL),
            [
                *("--dataset-name", "timed_trace", "--dataset-path", str(self._file)),
                *("--timed-trace-chunk-hash-size", "16"),
                *("--timed-trace-sec-multiplier", "0.001"),
                *("--num-prompts", str(len(self._requests)), *arguments),
            ],
            self._limit_s,
            self._texts,
        )
        if whole:
            complete(found, len(self._requests))
        return found


def trace(
    variants: Mapping[str, Variant], sizes: Sizes, requests: list[Request]
) -> dict[str, float]:
    """vLLM's ``timed_trace`` with the Mooncake conversation trace, at one engine."""
    ideal = ideal_hits(requests, HOST_BLOCKS, BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(requests, sizes, Path(folder))
        replay.calibrate(variants[PLAIN])
        found = turns([variants[name] for name in (PLAIN, OURS)], sizes.rounds, replay.work)
    tokens = sum(one.input_length for one in requests)
    return {
        "trace_ttft_gain": 1 - ratio(found, OURS, PLAIN, "mean_ttft_ms"),
        "trace_p99_ratio": ratio(found, OURS, PLAIN, "p99_ttft_ms"),
        "trace_itl_ratio": ratio(found, OURS, PLAIN, "mean_itl_ms"),
        "trace_hit_over_ideal": min(each["hits"] for each in found[OURS]) / ideal,
        "trace_plain_hit_over_ideal": min(each["hits"] for each in found[PLAIN]) / ideal,
        "trace_ideal_share": ideal / tokens,
        "trace_requests": len(requests),
    }


def cached_tokens(variant: Variant) -> float:
    """Return how many prompt tokens the engines found on the device or got from a connector."""
    return sum(engine.metric("vllm:prompt_tokens_cached_total") for engine in variant.engines)


def complete(found: Mapping[str, Any], asked: int) -> None:
    """End the benchmark if not all requests were answered."""
    if found["completed"] != asked:
        errors = sorted({error for error in found.get("errors", ()) if error})
        raise SystemExit(f"{found['completed']} of {asked} requests were answered: {errors}")
