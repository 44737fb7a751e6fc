"""Blocks in the host memory of other real engines: SGLang's and vLLM's read one another's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE, model_dir, prompt_tokens
from tests.engines.server import Process, kv_transfer
from tests.servers import free_port
from tests.sglang.peer_servers import peers, sglang
from tests.sglang.scenario import NEW, settled
from tests.sglang.server import SglangServer
from tests.sglang.storage_server import at_work, hits
from tests.sglang.vllm_server import VLLM, Vllm

LENGTHS = (200, 330, 270)
CONNECTED_S = 60.0  # the longest pause is 5 s


def prompts(seed: int) -> list[list[int]]:
    return [prompt_tokens(length, seed + 811 * n) for n, length in enumerate(LENGTHS)]


def full(prompt: Sequence[int]) -> int:
    """Return the tokens of a prompt's whole blocks."""
    return len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def ask(running: SglangServer, prompt: list[int], **extra: Any) -> tuple[tuple[int, ...], int]:
    """Return the tokens and how many of the prompt came from the storage backend."""
    reply = json.loads(running.post("/generate", running.body(prompt, NEW, **extra)))
    details = reply["meta_info"].get("cached_tokens_details") or {}
    return tuple(reply["output_ids"]), details.get("storage", 0)


def hits_of_vllm(running: Vllm) -> float:
    return running.metric("vllm:kvconnect_hit_tokens_total", tier="peer")


def kept(running: SglangServer, blocks: int) -> bool:
    """Return whether host memory has as many blocks, and nothing is under way."""

    def there() -> bool:
        used = running.metric("sglang:kvconnect_host_blocks_used")
        return used >= blocks and not at_work(running)

    return settled(there, True)


def reaches_a_peer(running: SglangServer | Vllm) -> bool:
    """Wait until an engine has a peer to ask: one that starts later is tried again, with pauses."""
    kind = "vllm" if isinstance(running, Vllm) else "sglang"
    deadline = time.monotonic() + CONNECTED_S
    while not running.metric(f"{kind}:kvconnect_tier_available", tier="peer"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        if isinstance(running, Vllm):
            running.complete([5] * 8, 1)  # an engine at rest tells no news
    return True


@pytest.mark.usefixtures("vllm_fork_server")
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not here: make setup")
@pytest.mark.parametrize("pages", [1, 2])
def test_each_engine_reads_what_the_other_has(pages: int) -> None:
    """A block of vLLM's is one page of SGLang's, or two; the prompts' full blocks are the same."""
    ours, theirs = prompts(440_000), prompts(550_000)
    found = sum(map(full, ours))
    first, second = free_port(), free_port()
    settings = {"host_bytes": "32MiB", "load_when": "always", "listen": "off", "wait_s": 30.0}
    shared = {**peers(second, str(first)), "page_tokens": BLOCK_SIZE}
    size = ("--block-size", str(pages * BLOCK_SIZE))
    of_vllm = kv_transfer(**settings, cache_peers=shared)
    one, other = sglang(peers(first, str(second))), Vllm("llama", of_vllm, args=size)
    model_dir("llama")  # once, not by both
    engines: tuple[Process, ...] = (one, other)
    with ExitStack() as ends:
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(ends.enter_context, engines))
        assert reaches_a_peer(other)
        computed = [ask(one, prompt)[0] for prompt in ours]
        assert kept(one, sum(map(full, ours)) // BLOCK_SIZE)
        for prompt, want in zip(ours, computed, strict=True):
            salted = other.complete(prompt, NEW, cache_salt="control")
            assert (salted.tokens, salted.cached) == (want, 0)
            answer = other.complete(prompt, NEW)
            assert (answer.tokens, answer.cached) == (want, full(prompt))
        assert settled(lambda: hits_of_vllm(other), found) == found

        computed = []
        for prompt in theirs:
            computed.append(other.complete(prompt, NEW).tokens)
            other.settle()
        other.complete([5] * 8, 2)  # an engine at rest does not say what it stored last
        other.settle()
        assert reaches_a_peer(one)
        for prompt, want in zip(theirs, computed, strict=True):
            assert ask(one, prompt, cache_salt="control") == (want, 0)
            assert ask(one, prompt) == (want, full(prompt))
        found = sum(map(full, theirs))
        assert settled(lambda: hits(one, "peer"), found) == found


def test_a_server_reads_from_two_ranks_until_they_die() -> None:
    ours, then = prompts(660_000), prompts(770_000)
    found = sum(map(full, ours))
    first, second = free_port(), free_port()
    with sglang(peers(first), tp=2) as source:
        computed = [ask(source, prompt)[0] for prompt in ours + then]
        assert kept(source, sum(map(full, ours + then)) // BLOCK_SIZE)
        with sglang(peers(second, f"{first}-{first + 1}", str(second))) as reader:
            assert reaches_a_peer(reader)
            for prompt, want in zip(ours, computed, strict=False):
                assert ask(reader, prompt) == (want, full(prompt))
            assert settled(lambda: hits(reader, "peer"), found) == found
            source.kill()
            for prompt, want in zip(then, computed[len(ours) :], strict=True):
                assert ask(reader, prompt) == (want, 0)
            assert hits(reader, "peer") == found
