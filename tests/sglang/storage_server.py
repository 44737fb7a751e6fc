"""An SGLang server with HiCache over KVConnect, and what it says of its secondary tiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.sglang.server import SglangServer, plugin_path

LENGTHS = (300, 400, 330, 480, 360)  # more than the device and HiCache hold together
STORAGE = {
    "backend_name": "kvconnect",
    "module_path": "kvconnect.engines.sglang.storage",
    "class_name": "KVConnectStorage",
    "interface_v1": 1,
    "prefetch_threshold": 16,
    "host_bytes": "64MiB",
    "digest": "full",
}
HICACHE = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "1.0", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
ARGS = (*HICACHE, "--hicache-storage-backend", "dynamic")
ENV = plugin_path(Path(__file__).with_name("hicache"))


def server(**settings: Any) -> SglangServer:
    storage = json.dumps({**STORAGE, **settings})
    args = (*ARGS, "--hicache-storage-backend-extra-config", storage)
    return SglangServer(tokens=512, args=args, env=ENV)


def attachable(tp: int) -> SglangServer:
    """Return a server without a storage backend, to which ``admin`` may attach one."""
    return SglangServer(tokens=512, tp=tp, args=(*HICACHE, "--admin-api-key", "admin"), env=ENV)


def written(running: SglangServer) -> float:
    return running.metric("sglang:kvconnect_tier_written_blocks_total")


def hits(running: SglangServer, tier: str) -> float:
    return running.metric("sglang:kvconnect_hit_tokens_total", tier=tier)


def at_work(running: SglangServer) -> float:
    return running.metric("sglang:kvconnect_tier_jobs_in_flight")
