"""SGLang servers with and without a cache in host memory, asked by SGLang's own load generator.

All have the same model, one core, 8,192 tokens on the device and pages of 64 tokens. ``none`` has
only its radix cache; ``file`` has HiCache with its own storage backend of this name; ``kvconnect``
has the linker. Host memory of the last two is equal. HiCache's copies need CUDA; a plugin
(``tests/sglang/hicache``) makes them plain torch here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import progress
from benchmarks.offload_engine import NewPrompts
from benchmarks.serve.answers import NEW, Tokens, differing, prompts
from benchmarks.serve.fleet import (
    DEVICE_BLOCKS,
    HOST_BYTES,
    MODEL,
    OURS,
    Variant,
    ratio,
    stopped,
    turns,
)
from benchmarks.serve.load import SGLANG, LoadFailed
from benchmarks.serve.workloads import Scale, failed, shared_prefix
from benchmarks.settings import chosen
from tests.engines.models import BLOCK_SIZE
from tests.sglang.pd import side_by_side
from tests.sglang.server import SglangServer, plugin_path

NONE, FILE = "none", "file"
DEVICE_TOKENS = DEVICE_BLOCKS * BLOCK_SIZE
HOST_RATIO = 8
"""``HOST_BYTES`` over the bytes of the device's cache: 16 KiB per token."""
FILLERS = 10
"""New prompts of 1,000 tokens that leave no room on the device for others."""


@dataclass
class CpuServer(SglangServer):
    """A server in SGLang's environment, with its tokenizer, since load generators send texts."""

    def command(self) -> list[str]:
        own = {sys.executable: str(SGLANG), "--skip-tokenizer-init": ""}
        return [part for each in super().command() if (part := own.get(each, each))]


@dataclass
class SglangVariant(Variant):
    """One SGLang server."""

    engines: Sequence[Any]

    def reset(self) -> None:
        for engine in self.engines:
            engine.forget()
            if self.name == FILE:
                engine.post("/hicache/storage-backend/clear")


def server(args: Sequence[str], **env: str) -> CpuServer:
    """Return a server that is not started yet."""
    return CpuServer(
        model=MODEL,
        tokens=DEVICE_TOKENS,
        chunk=512,
        args=("--page-size", "64", "--watchdog-timeout", "86400", *args),
        env={
            **plugin_path(Path(__file__).parents[2] / "tests" / "sglang" / "hicache"),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),
            **env,
        },
    )


def hicache(folder: str) -> CpuServer:
    """Return a server with HiCache over its storage backend ``file``."""
    args = (
        *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        *("--hicache-storage-backend", "file"),
    )
    return server(args, SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=folder)


def linked() -> CpuServer:
    """Return a server with KVConnect's linker."""
    config = {
        "linker": "KVConnectLinker",
        "linker_module_path": "kvconnect.engines.sglang.linker",
        "linker_extra_config": chosen("serve", host_bytes=HOST_BYTES),
    }
    args = (
        "--enable-unified-cache-external-linker",
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
    )
    return server(args)


@contextmanager
def servers() -> Iterator[dict[str, SglangVariant]]:
    """Start the three servers and leave them stopped."""
    if not SGLANG.exists():
        raise LoadFailed(f"{SGLANG} is not there: run scripts/setup sglang")
    progress("starting SGLang servers")
    with tempfile.TemporaryDirectory() as folder:
        made = {NONE: server(()), FILE: hicache(folder), OURS: linked()}
        with side_by_side(*made.values()):
            variants = {name: SglangVariant(name, [each]) for name, each in made.items()}
            with stopped(variants.values()):
                yield variants


def compared(variants: Mapping[str, SglangVariant], scale: Scale) -> dict[str, float]:
    """Ask for prompts that share prefixes; return ratios of TTFT and the failed requests."""

    def work(variant: Variant, number: int) -> dict[str, Any]:
        variant.reset()
        found = shared_prefix(variant.front.port, scale, number, backend="sglang")
        found["failed"] = failed(found)
        progress(
            f"sglang, round {number + 1}, {variant.name}: TTFT {found['mean_ttft_ms']:.0f} ms, "
            f"{found['failed']} failed"
        )
        return found

    found = turns(list(variants.values()), scale.rounds, work)
    return {
        "sglang_shared_prefix_ttft_ratio": ratio(found, OURS, NONE, "mean_ttft_ms"),
        "sglang_hicache_ttft_ratio": ratio(found, OURS, FILE, "mean_ttft_ms"),
        "sglang_failures": sum(run["failed"] for runs in found.values() for run in runs),
    }


def wrong(variants: Mapping[str, SglangVariant], seed: int) -> int:
    """Ask each server for prompts: new, from its caches, and after others took their place on the
    device. Return how many answers of KVConnect differ from the first of the server without."""
    progress("checking SGLang's answers")
    asked = prompts(seed)
    got: dict[str, list[Tokens]] = {}
    for name in (NONE, OURS):
        new = NewPrompts(seed + 1)
        with variants[name].awake():
            variants[name].reset()
            front = variants[name].front
            early = [front.complete(prompt, NEW) for prompt in asked * 2]
            for _ in range(FILLERS):
                front.complete(new.take(1000), 1)
            last = [front.complete(prompt, NEW) for prompt in asked]
        got[name] = [answer.tokens for answer in (*early, *last)]
        if name == OURS and not any(answer.cached for answer in last):
            raise SystemExit("KVConnect loaded nothing on SGLang")
    return differing(got[NONE][: len(asked)] * 3, got[OURS])
