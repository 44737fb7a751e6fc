"""A real server with HiCache over KVConnect: what neither the device nor HiCache has room for comes
back from the storage backend, with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.models import prompt_tokens
from tests.sglang.scenario import NEW
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
ARGS = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "1.0", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend", "dynamic"),
    *("--hicache-storage-backend-extra-config", json.dumps(STORAGE)),
)


def test_evicted_prompts_come_back_with_the_same_tokens() -> None:
    asked = [prompt_tokens(length, 170_000 + 811 * i) for i, length in enumerate(LENGTHS)]
    env = plugin_path(Path(__file__).with_name("hicache"))
    with SglangServer(tokens=512, args=ARGS, env=env) as server:

        def ask(prompt: list[int]) -> tuple[list[int], int]:
            reply = json.loads(server.post("/generate", server.body(prompt, NEW)))
            details = reply["meta_info"].get("cached_tokens_details") or {}
            return reply["output_ids"], details.get("storage", 0)

        computed = [ask(prompt) for prompt in asked]
        assert all(found == 0 for _, found in computed)
        again = [ask(prompt) for prompt in asked]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in computed]
        assert all(found for _, found in again)
