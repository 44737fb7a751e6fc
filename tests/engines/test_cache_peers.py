"""Blocks in the host memory of other real engines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE
from tests.engines.scenario import (
    COUNT,
    FULL,
    NEW,
    PATIENCE_S,
    PROMPT,
    ask,
    assert_nothing_leaks,
    cached_by_source,
    expected,
    fill,
    hits,
    moved,
    prompts,
    receipt,
    tokens,
)
from tests.engines.server import Server, kv_transfer
from tests.servers import free_port

HOST = "32MiB"
HALF = COUNT // 2


def shares(port: int, *ask: int, page_tokens: int = 0, **extra: Any) -> str:
    """Settings of an engine that serves at ``port`` and asks the engines at other ports."""
    peers = {
        "page_tokens": page_tokens,
        "listen": f"127.0.0.1:{port}",
        "ask": [f"127.0.0.1:{other}" for other in ask],
        "ask_s": 5.0,  # engines on CPUs answer when they get to it
    }
    settings = {"host_bytes": HOST, "load_when": "always", "listen": "off", "wait_s": 30.0}
    return kv_transfer(**{**settings, "cache_peers": peers, **extra})


def test_a_prompt_that_another_engine_has() -> None:
    """The reader has two ranks with half of each block, and also asks itself."""
    first, second = free_port(), free_port()
    with Server("llama", shares(first)) as source:
        fill(source)
        with Server("llama", shares(second, first, second, digest="full"), tp=2) as reader:
            want = expected("llama", 2).fresh
            salted = reader.complete(prompts()[0], NEW, cache_salt="a")  # control
            assert (salted.tokens, salted.cached) == (want[0], 0)
            assert hits(reader, "peer") == 0
            options = {"kvconnect": {"receipt": True}}
            told = receipt(reader, prompts()[0], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (FULL, PROMPT - FULL)
            for prompt, answer in zip(prompts()[:HALF], want, strict=False):
                assert reader.complete(prompt, NEW).tokens == answer
            assert hits(reader, "peer") == HALF * FULL
            assert cached_by_source(reader)["p2p"] == HALF * FULL
            assert_nothing_leaks(reader)
            source.complete([5] * 8, 2)  # an engine at rest tells no new numbers
            source.settle()
            assert moved(reader, "PEER_to_CPU") == moved(source, "CPU_to_PEER") > 0
            assert_nothing_leaks(source)
            source.kill()
            assert tokens(ask(reader)) == want
            assert hits(reader, "peer") == HALF * FULL
            assert_nothing_leaks(reader)


@pytest.mark.parametrize("model", ["gemma3", "deepseek_v2"])
def test_other_attention_kinds(model: str) -> None:
    first, second = free_port(), free_port()
    with Server(model, shares(first)) as source:
        fill(source, model)
        with Server(model, shares(second, first)) as reader:
            assert tokens(ask(reader)) == expected(model).fresh
            assert hits(reader, "peer") > COUNT * FULL / 2
            assert_nothing_leaks(reader)


def test_block_sizes_that_divide_one_another() -> None:
    """Engines with blocks of 32 and of 64 tokens, there and back; a prompt's full blocks are equal
    tokens. Control: without pages, the one with blocks of 64 finds nothing."""
    first, second = free_port(), free_port()
    large = ("--block-size", str(2 * BLOCK_SIZE))
    options = {"kvconnect": {"receipt": True}}
    want = expected("llama").fresh
    with Server("llama", shares(first, second)) as small:
        for prompt in prompts()[:HALF]:
            small.complete(prompt, NEW)
        small.settle()
        with Server("llama", shares(second, first), blocks=32, args=large) as other:
            told = receipt(other, prompts()[0], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (0, PROMPT)
        pages = shares(second, first, page_tokens=BLOCK_SIZE)
        with Server("llama", pages, blocks=32, args=large) as other:
            told = receipt(other, prompts()[0], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (FULL, PROMPT - FULL)
            for prompt, answer in zip(prompts(), want, strict=True):
                assert other.complete(prompt, NEW).tokens == answer
            assert hits(other, "peer") == HALF * FULL
            other.settle()
            end = time.monotonic() + PATIENCE_S
            while not small.metric("vllm:kvconnect_tier_available", tier="peer"):
                assert time.monotonic() < end, "the other engine cannot be asked"
                small.complete([5] * 8, 2)  # an engine at rest tells no new numbers
            told = receipt(small, prompts()[-1], kv_transfer_params=options)
            assert (told["peer"], told["computed"]) == (FULL, PROMPT - FULL)
            for prompt, answer in zip(prompts()[HALF:], want[HALF:], strict=True):
                assert small.complete(prompt, NEW).tokens == answer
            assert hits(small, "peer") == HALF * FULL
            assert_nothing_leaks(other)
            assert_nothing_leaks(small)
