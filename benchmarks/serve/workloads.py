"""Prompts that share prefixes, by load generators of four projects, each once per turn.

All begin with empty caches. Their working sets do not fit the device's cache but for
``random-prefill``, which shares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import progress
from benchmarks.serve.fleet import MODEL, OURS, PLAIN, Variant, ratio, turns
from benchmarks.serve.load import LoadFailed, bench_serve, guidellm, lmcache_bench, sglang_bench
from tests.engines.models import model_dir

OUTPUT = 8
"""Tokens of an answer."""
CROWD = 2
"""Requests at once."""


@dataclass(frozen=True)
class Scale:
    """How much is asked. A length is in tokens."""

    rounds: int
    prefixes: int
    prefix_length: int
    prompts_per_prefix: int
    sessions: int
    session_length: int
    session_rate: float
    """Questions per second."""
    session_s: float
    permutations: int
    context_words: int
    """A word is about three tokens of the engine."""
    prefills: int
    prefill_length: int
    limit_s: float
    """Deadline of one run of a load generator."""

    @property
    def prompts(self) -> int:
        return self.prefixes * self.prompts_per_prefix


FULL = Scale(
    rounds=2,
    prefixes=12,
    prefix_length=1000,
    prompts_per_prefix=3,
    sessions=10,
    session_length=1000,
    session_rate=0.6,
    session_s=20.0,
    permutations=10,
    context_words=64,
    prefills=12,
    prefill_length=1000,
    limit_s=300.0,
)
QUICK = Scale(
    rounds=1,
    prefixes=4,
    prefix_length=400,
    prompts_per_prefix=2,
    sessions=3,
    session_length=500,
    session_rate=1.0,
    session_s=3.0,
    permutations=2,
    context_words=16,
    prefills=3,
    prefill_length=500,
    limit_s=240.0,
)


def prefix_repetition(port: int, scale: Scale, number: int) -> dict[str, Any]:
    """vLLM's ``prefix_repetition``: new questions after a few prefixes, in any order."""
    return bench_serve(
        port,
        model_dir(MODEL),
        [
            *("--dataset-name", "prefix_repetition"),
            *("--num-prompts", str(scale.prompts)),
            *("--prefix-repetition-num-prefixes", str(scale.prefixes)),
            *("--prefix-repetition-prefix-len", str(scale.prefix_length)),
            *("--prefix-repetition-suffix-len", "32"),
            *("--prefix-repetition-output-len", str(OUTPUT)),
            *("--max-concurrency", str(CROWD), "--seed", str(number + 1)),
        ],
        scale.limit_s,
    )


def shared_prefix(port: int, scale: Scale, number: int, backend: str = "vllm") -> dict[str, Any]:
    """SGLang's ``generated-shared-prefix``: groups of questions after one system prompt each."""
    return sglang_bench(
        port,
        model_dir(MODEL),
        [
            *("--dataset-name", "generated-shared-prefix"),
            *("--num-prompts", str(scale.prompts)),
            *("--gsp-num-groups", str(scale.prefixes)),
            *("--gsp-prompts-per-group", str(scale.prompts_per_prefix)),
            *("--gsp-system-prompt-len", str(scale.prefix_length)),
            *("--gsp-question-len", "32", "--gsp-output-len", str(OUTPUT)),
            *("--max-concurrency", str(CROWD), "--seed", str(number + 1)),
        ],
        scale.limit_s,
        backend,
    )


def permutator(port: int, scale: Scale, number: int) -> dict[str, Any]:
    """LMCache's ``long-doc-permutator``: the same documents in another order each time."""
    return lmcache_bench(
        port,
        "long-doc-permutator",
        scale.prefill_length,
        [
            *("--ldp-num-contexts", "5", "--ldp-context-length", str(scale.context_words)),
            *("--ldp-system-prompt-length", "32"),
            *("--ldp-num-permutations", str(scale.permutations)),
            *("--ldp-num-inflight-requests", str(CROWD)),
            *("--ldp-max-output-length", str(OUTPUT), "--seed", str(number + 1)),
        ],
        scale.limit_s,
    )


def multi_round(port: int, scale: Scale, number: int) -> dict[str, Any]:
    """LMCache's ``multi-round-chat``: one question after the other to sessions with a history."""
    shared = 100
    return lmcache_bench(
        port,
        "multi-round-chat",
        scale.sessions * scale.session_length,
        [
            *("--mrc-shared-prompt-length", str(shared)),
            *("--mrc-chat-history-length", str(scale.session_length - shared)),
            *("--mrc-user-input-length", "16", "--mrc-output-length", str(OUTPUT)),
            *("--mrc-qps", str(scale.session_rate), "--mrc-duration", str(scale.session_s)),
            *("--seed", str(number + 1)),
        ],
        scale.limit_s,
    )


def random_prefill(port: int, scale: Scale, number: int) -> dict[str, Any]:
    """LMCache's ``random-prefill``: prompts that share nothing, all at once."""
    return lmcache_bench(
        port,
        "random-prefill",
        scale.prefills * scale.prefill_length,
        [
            *("--rp-request-length", str(scale.prefill_length)),
            *("--rp-num-requests", str(scale.prefills), "--seed", str(number + 1)),
        ],
        scale.limit_s,
    )


def guidellm_prefixes(port: int, scale: Scale, number: int) -> dict[str, Any]:
    """guidellm's ``synthetic_text``: questions after prefixes that are drawn for each of them."""
    prefixes = {"prefix_count": scale.prefixes, "prefix_tokens": scale.prefix_length}
    found = guidellm(
        port,
        model_dir(MODEL),
        {"prompt_tokens": 32, "output_tokens": OUTPUT, "prefix_buckets": [prefixes]},
        [
            *("--profile", f"kind=concurrent,streams={CROWD}"),
            *("--constraint", f"kind=max_requests,count={scale.prompts}"),
            *("--seed", f"kind=static,value={number + 1}"),
        ],
        scale.limit_s,
    )
    requests = found["request_totals"]
    return {
        "mean_ttft_ms": found["time_to_first_token_ms"]["successful"]["mean"],
        "successful_requests": requests["successful"],
        "failed_requests": scale.prompts - requests["successful"],
    }


ALL: dict[str, Callable[[int, Scale, int], dict[str, Any]]] = {
    "prefix_repetition": prefix_repetition,
    "shared_prefix": shared_prefix,
    "guidellm": guidellm_prefixes,
    "permutator": permutator,
    "multi_round": multi_round,
    "random_prefill": random_prefill,
}


def failed(found: Mapping[str, Any]) -> int:
    """Return how many requests of a load generator's result failed.

    Raises:
        LoadFailed: none was answered, so that there is no time to compare.
    """
    if "failed_requests" in found:  # LMCache's names
        failures, answered = found["failed_requests"], found["successful_requests"]
    else:
        failures, answered = sum(map(bool, found["errors"])), found["completed"]
    if not answered:
        raise LoadFailed(f"no request was answered: {found.get('errors')}")
    return int(failures)


def compare(
    name: str, variants: Mapping[str, Variant], scale: Scale
) -> dict[str, list[dict[str, Any]]]:
    """Return what a workload's runs gave by variant, with ``failed`` requests of each."""

    def work(variant: Variant, number: int) -> dict[str, Any]:
        variant.reset()
        found = ALL[name](variant.front.port, scale, number)
        found["failed"] = failed(found)
        progress(
            f"{name}, round {number + 1}, {variant.name}: TTFT {found['mean_ttft_ms']:.0f} ms, "
            f"{found['failed']} failed"
        )
        return found

    return turns([variants[which] for which in (PLAIN, OURS)], scale.rounds, work)


def shared_prompts(variants: Mapping[str, Variant], scale: Scale) -> dict[str, float]:
    """Return the ratio of mean TTFT of each workload, and failed requests of all of them."""
    found = {name: compare(name, variants, scale) for name in ALL}
    failures = sum(
        run["failed"] for each in found.values() for runs in each.values() for run in runs
    )
    return {
        **{
            f"{name}_ttft_ratio": ratio(each, OURS, PLAIN, "mean_ttft_ms")
            for name, each in found.items()
        },
        "workload_failures": failures,
    }
