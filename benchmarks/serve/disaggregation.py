"""The trace through routers: prefill on one engine, decode on another."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import progress
from benchmarks.machines import APART
from benchmarks.serve.fleet import NIXL, OURS, Variant, ratio, turns
from benchmarks.serve.parts import Replay, Sizes
from benchmarks.serve.trace import Request

COMPARED = {
    "ttft_p50": "p50_ttft_ms",
    "ttft_p99": "p99_ttft_ms",
    "itl_p99": "p99_itl_ms",
    "throughput": "output_throughput",
}
"""Figures' names, and those of vLLM's load generator."""


def handed_off(
    variants: Mapping[str, Variant], sizes: Sizes, requests: list[Request]
) -> dict[str, float]:
    """KVConnect behind its router, over vLLM's NixlConnector behind vllm-router: with the engines
    of each on all cores, and apart."""
    both = [variants[name] for name in (NIXL, OURS)]
    figures = {}
    for apart in (False, True):
        for variant in both:
            variant.place(apart)
        progress("prefill and decode engines " + ("apart" if apart else "on all cores"))
        with tempfile.TemporaryDirectory() as folder:
            replay = Replay(requests, sizes, Path(folder))
            replay.calibrate(variants[NIXL])
            found = turns(both, sizes.rounds, replay.work)
        figures |= {
            f"pd_{name}_ratio{APART * apart}": ratio(found, OURS, NIXL, key)
            for name, key in COMPARED.items()
        }
    return figures
