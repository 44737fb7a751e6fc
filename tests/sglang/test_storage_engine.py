"""Real servers with HiCache over KVConnect: what neither the device nor HiCache has room for comes
back from the storage backend, with the same tokens; with a disk, also after kill -9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.models import prompt_tokens
from tests.sglang.scenario import NEW, moved_bytes, settled
from tests.sglang.server import PAGE, SglangServer, plugin_path

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
ARGS = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "1.0", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend", "dynamic"),
)
ASKED = [prompt_tokens(length, 170_000 + 811 * i) for i, length in enumerate(LENGTHS)]


class Reply(NamedTuple):
    tokens: list[int]
    found: int  # tokens of the prompt that came from the storage backend


def server(**settings: Any) -> SglangServer:
    storage = json.dumps({**STORAGE, **settings})
    args = (*ARGS, "--hicache-storage-backend-extra-config", storage)
    env = plugin_path(Path(__file__).with_name("hicache"))
    return SglangServer(tokens=512, args=args, env=env)


def ask_all(running: SglangServer) -> list[Reply]:
    """Ask one after the other."""
    replies = []
    for prompt in ASKED:
        reply = json.loads(running.post("/generate", running.body(prompt, NEW)))
        details = reply["meta_info"].get("cached_tokens_details") or {}
        replies.append(Reply(reply["output_ids"], details.get("storage", 0)))
    return replies


def test_evicted_prompts_come_back_with_the_same_tokens() -> None:
    with server() as running:
        computed = ask_all(running)
        assert all(reply.found == 0 for reply in computed)
        again = ask_all(running)
        assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
        assert all(reply.found for reply in again)
        running.kill()
        running.restart()
        lost = ask_all(running)  # the control: there is no disk
        assert [reply.tokens for reply in lost] == [reply.tokens for reply in computed]
        assert all(reply.found == 0 for reply in lost)


def test_pages_on_disk_outlive_kill_9(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path), "capacity": "64MiB", "min_free": 0}
    with server(disk=disk) as running:
        computed = ask_all(running)
        assert all(reply.found == 0 for reply in computed)
        pages = sum(length // PAGE for length in LENGTHS)
        assert settled(lambda: written(running) >= pages and not at_work(running), True)
        assert moved_bytes(running, "DISK_to_CPU") == 0
        running.kill()
        running.restart()
        again = ask_all(running)
        assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
        assert all(reply.found for reply in again)
        found = sum(reply.found for reply in again)
        assert settled(lambda: hits(running, "disk") >= found, True)
        assert moved_bytes(running, "DISK_to_CPU") > 0


def written(running: SglangServer) -> float:
    return running.metric("sglang:kvconnect_tier_written_blocks_total")


def hits(running: SglangServer, tier: str) -> float:
    return running.metric("sglang:kvconnect_hit_tokens_total", tier=tier)


def at_work(running: SglangServer) -> float:
    return running.metric("sglang:kvconnect_tier_jobs_in_flight")
