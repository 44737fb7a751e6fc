"""What engine tests ask, what an engine without a connector answers, and what a block weighs."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.models import BLOCK_SIZE, MODELS, prompt_tokens
from tests.engines.server import Answer, Client, Server

HOST = "64MiB"
PROMPT = 400  # tokens: 12 full blocks, two chunks of prefill
FULL = PROMPT // BLOCK_SIZE * BLOCK_SIZE  # tokens of a prompt's full blocks
NEW = 16
COUNT = 8  # prompts; together 104 blocks
BLOCKS = 64  # of the device, so that some of them leave it
CROWDED = ("llama", "gemma3")  # models that serve a crowd: one KV group, and several
CROWD = 40  # requests at once, more than the device has room for
CROWD_NEW = 48  # tokens each, so that even those that it lets in outgrow it

# For loads inside the step: one that overlaps with a step whose load failed could not be undone.
ONE_STEP_AT_A_TIME = ("--no-async-scheduling",)

GPU_TO_CPU = {"transfer_type": "GPU_to_CPU"}
CPU_TO_GPU = {"transfer_type": "CPU_to_GPU"}
PATIENCE_S = 60.0


def prompts(count: int = COUNT, length: int = PROMPT) -> list[list[int]]:
    """Different real texts of the same length."""
    return [prompt_tokens(length, start=1000 * number) for number in range(count)]


def whole_prompt() -> list[int]:
    """A prompt of 10 full blocks and no more."""
    return prompts()[0][: 10 * BLOCK_SIZE]


def crowd() -> list[list[int]]:
    """Prompts that share no block with one another, nor with :func:`prompts`."""
    return [prompt_tokens(40 + 5 * number, start=900 * number + 500) for number in range(CROWD)]


class Expected(NamedTuple):
    """Tokens without a connector: of prompts computed whole, and of prompts found on the device.

    In float32 they are the same. In bfloat16 the shapes of the computation show, so what comes
    back from the host tier must equal what comes from the device's own prefix cache.
    """

    fresh: list[tuple[int, ...]]
    cached: list[tuple[int, ...]]
    whole: tuple[int, ...]
    crowd: list[tuple[int, ...]]  # empty for a model that CROWDED does not name


@cache
def expected(model: str, tp: int = 1) -> Expected:
    """What the engine answers without a connector, with room to keep every prompt, one by one."""
    with Server(model, blocks=4 * BLOCKS, tp=tp) as server:
        many = crowd() if model in CROWDED else []
        return Expected(
            fresh=tokens(ask(server)),
            cached=tokens(ask(server)),
            whole=server.complete(whole_prompt(), NEW).tokens,
            crowd=tokens([server.complete(prompt, CROWD_NEW) for prompt in many]),
        )


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def ask(server: Server) -> list[Answer]:
    return [server.complete(prompt, NEW) for prompt in prompts()]


def ask_anew(server: Server) -> list[Answer]:
    """:func:`ask`, but the device has nothing of any prompt."""
    answers = []
    for prompt in prompts():
        server.post("/reset_prefix_cache")
        answers.append(server.complete(prompt, NEW))
    return answers


def hit_tokens(server: Server) -> float:
    """Tokens that the host tier had so far."""
    return server.metric("vllm:kvconnect_hit_tokens_total", tier="host")


def receipt(server: Client, prompt: list[int], **extra: Any) -> Any:
    """The receipt in the answer to a prompt, if there is one."""
    answer = json.loads(server.post("/v1/completions", server.body(prompt, 2, **extra)))
    return ((answer["kv_transfer_params"] or {}).get("kvconnect") or {}).get("receipt")


def hits(server: Server, tier: str) -> float:
    """Tokens that a tier had so far."""
    return server.metric("vllm:kvconnect_hit_tokens_total", tier=tier)


def moved(server: Server, kind: str) -> float:
    """Bytes of one type of transfer so far."""
    return server.metric("vllm:kvconnect_transfer_bytes_total", transfer_type=kind)


def fill(server: Server, model: str = "llama") -> None:
    """Ask all prompts once, one after the other so that none of their blocks is skipped."""
    for prompt, want in zip(prompts(), expected(model).fresh, strict=True):
        answer = server.complete(prompt, NEW)
        assert (answer.tokens, answer.cached) == (want, 0)
        settle(server)


def cached_by_source(server: Server) -> dict[str, float]:
    """Prompt tokens that were not computed, by where vLLM says that they came from."""
    sources = ("device", "host", "p2p", "disk", "external_unspecified")
    name = "vllm:prompt_tokens_cached_by_source_total"
    found = {source: server.metric(name, source=source) for source in sources}
    return {source: tokens for source, tokens in found.items() if tokens}


def block_bytes(model: str) -> int:
    """Bytes of one block, all layers and ranks together, of a model with one KV group."""
    config = MODELS[model].config
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    row = 2 * config["num_key_value_heads"] * head  # keys and values of one token and layer
    itemsize = {"float32": 4, "bfloat16": 2}[MODELS[model].dtype]
    return int(config["num_hidden_layers"] * row * BLOCK_SIZE * itemsize)


def assert_moved(server: Server, model: str, *, stored: int, loaded: int) -> None:
    """Every account of the bytes moved so far is that of so many blocks, exactly."""
    for blocks, kind, verb in ((stored, GPU_TO_CPU, "store"), (loaded, CPU_TO_GPU, "load")):
        nbytes = blocks * block_bytes(model)
        assert server.metric("vllm:kvconnect_transfer_bytes_total", **kind) == nbytes
        assert server.metric(f"vllm:kv_offload_{verb}_bytes_total") == nbytes
        assert server.metric("vllm:kv_offload_total_bytes_total", **kind) == nbytes
        assert server.metric("vllm:kv_offload_size_sum", **kind) == nbytes


def assert_nothing_leaks(server: Server) -> None:
    """After quiescence no job is open, no block held, no device block in use."""
    server.settle()
    for owner in ("store", "load"):
        assert server.metric("vllm:kvconnect_ledger_held_blocks", owner=owner) == 0
    assert server.metric("vllm:kvconnect_host_blocks_pinned") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def assert_a_crowd_is_served(server: Server, want: Expected) -> None:
    """More requests than fit run at once; what the engine preempts comes back from the host.

    Its prompts must be new to the server.
    """
    preempted, hit = server.metric("vllm:num_preemptions_total"), hit_tokens(server)
    assert server.complete_all(crowd(), CROWD_NEW) == want.crowd
    assert server.metric("vllm:num_preemptions_total") > preempted
    # No two of the prompts share a block: only a request that was preempted can find anything.
    assert hit_tokens(server) > hit
    assert_nothing_leaks(server)


def assert_aborts_leave_nothing_behind(server: Server, want: Expected) -> None:
    """Requests are given up before their first token and after some."""
    for number, prompt in enumerate(prompts()):
        server.abort(prompt, after_chunks=number)
    assert tokens(ask(server)) == want.fresh
    assert_nothing_leaks(server)


def disk(path: Path, **extra: Any) -> dict[str, Any]:
    return {"path": str(path), "capacity": "64MiB", "min_free": 0, **extra}


def settle(server: Server) -> None:
    """Wait until nothing is being written down or brought up."""
    server.settle()
    deadline = time.monotonic() + PATIENCE_S
    while server.metric("vllm:kvconnect_tier_jobs_in_flight"):
        assert time.monotonic() < deadline, "write-backs go on and on"
        time.sleep(0.1)
