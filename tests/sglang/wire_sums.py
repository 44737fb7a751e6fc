"""What an SGLang server has published of one side of hand-offs."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sglang.scenario import settled
from tests.sglang.server import SglangServer

OURS = "sglang:kvcache_transfer_latency"
SENT = {"role": "send", "transfer_type": "SEND"}
GOT = {"role": "recv", "transfer_type": "RECV"}


def sums(server: SglangServer, side: dict[str, str]) -> dict[str, float]:
    """What a server has published of one side of the wire."""
    role, kind = {"role": side["role"]}, {"transfer_type": side["transfer_type"]}
    return {
        "requests": server.metric(f"{OURS}_count", **role),
        "request seconds": server.metric(f"{OURS}_sum", **role),
        "wire seconds": server.metric("sglang:kvconnect_transfer_seconds_total", **kind),
        "bytes": server.metric("sglang:kvconnect_transfer_bytes_total", **kind),
        "their requests": theirs(server, "sglang:kv_transfer_total_mb_count"),
        "their seconds": theirs(server, "sglang:kv_transfer_latency_ms_sum") / 1000,
        "their bytes": theirs(server, "sglang:kv_transfer_total_mb_sum") * 2**20,
    }


def theirs(server: SglangServer, name: str) -> float:
    """A series of SGLang's own, which is not there before its first event."""
    try:
        return server.metric(name)
    except KeyError:
        return 0.0


def added(server: SglangServer, side: dict[str, str], before: dict[str, float], n: int) -> Any:
    """What was added to the sums, once ``n`` requests are in them."""
    want = before["requests"] + n
    settled(partial(server.metric, f"{OURS}_count", role=side["role"]), want)
    return {name: value - before[name] for name, value in sums(server, side).items()}
