"""The trace through routers: prefill on one engine, decode on another."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.serve.fleet import NIXL, OURS, Variant, ratio, turns
from benchmarks.serve.parts import Replay, Sizes
from benchmarks.serve.trace import Request


def handed_off(
    variants: Mapping[str, Variant], sizes: Sizes, requests: list[Request]
) -> dict[str, float]:
    """KVConnect behind its router, over vLLM's NixlConnector behind vllm-router."""
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(requests, sizes, Path(folder))
        replay.calibrate(variants[NIXL])
        found = turns([variants[name] for name in (NIXL, OURS)], sizes.rounds, replay.work)
    return {
        f"pd_{name}_ratio": ratio(found, OURS, NIXL, key)
        for name, key in {
            "ttft_p50": "p50_ttft_ms",
            "ttft_p99": "p99_ttft_ms",
            "itl_p99": "p99_itl_ms",
            "throughput": "output_throughput",
        }.items()
    }
