"""SGLang and vLLM on one Valkey server: each loads what the other has computed, with its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.server import kv_transfer
from tests.servers import Valkey
from tests.sglang.scenario import NEW, settled
from tests.sglang.storage_server import at_work, server, written
from tests.sglang.vllm_server import VLLM, Vllm

VLLM_AT_WORK = "vllm:kvconnect_tier_jobs_in_flight"
LENGTHS = (200, 330, 270)


def prompts(seed: int) -> list[list[int]]:
    return [prompt_tokens(length, seed + 811 * n) for n, length in enumerate(LENGTHS)]


def full_blocks(asked: Sequence[Sequence[int]]) -> int:
    return sum(len(prompt) // BLOCK_SIZE for prompt in asked)


@pytest.mark.usefixtures("vllm_fork_server")
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not here: make setup")
def test_each_engine_loads_what_the_other_computed(valkey: Valkey) -> None:
    ours, theirs = prompts(220_000), prompts(330_000)
    remote = {"kind": "valkey", **valkey.settings()}
    with sglang(remote) as running:
        computed = [ask(running, prompt)[0] for prompt in ours]
        assert settled(lambda: written(running) >= full_blocks(ours) and not at_work(running), True)

    settings = kv_transfer(host_bytes="32MiB", load_when="always", listen="off", remote=remote)
    with Vllm("llama", settings) as running:
        for prompt, want in zip(ours, computed, strict=True):
            salted = running.complete(prompt, NEW, cache_salt="control")
            assert (salted.tokens, salted.cached) == (want, 0)
            answer = running.complete(prompt, NEW)
            assert (answer.tokens, answer.cached) == (want, len(prompt) // BLOCK_SIZE * BLOCK_SIZE)
        found = running.metric("vllm:kvconnect_hit_tokens_total", tier="remote")
        assert found == full_blocks(ours) * BLOCK_SIZE
        computed = []
        for prompt in theirs:
            computed.append(running.complete(prompt, NEW).tokens)
            running.settle()
            assert settled(lambda: not running.metric(VLLM_AT_WORK), True)

    with sglang(remote) as running:
        for prompt, want in zip(theirs, computed, strict=True):
            assert ask(running, prompt) == (want, len(prompt) // BLOCK_SIZE * BLOCK_SIZE)


def sglang(remote: dict[str, Any]) -> Any:
    running = server(remote=remote)
    running.args += ("--page-size", str(BLOCK_SIZE))
    running.tokens = 2048
    return running


def ask(running: Any, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """Return the tokens and how many of the prompt came from the storage backend."""
    reply = json.loads(running.post("/generate", running.body(prompt, NEW)))
    details = reply["meta_info"].get("cached_tokens_details") or {}
    return tuple(reply["output_ids"]), details.get("storage", 0)
