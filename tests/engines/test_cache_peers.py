"""Blocks in the host memory of other real engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.scenario import (
    COUNT,
    FULL,
    NEW,
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


def shares(port: int, *ask: int, **extra: Any) -> str:
    """Settings of an engine that serves at ``port`` and asks the engines at other ports."""
    peers = {
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


def test_tenants_share_with_themselves_alone() -> None:
    """Equal prompts under other salts are computed; under the same salt they are read."""
    first, second = free_port(), free_port()
    mine, plain = prompts()[:2]
    with (
        Server("llama", shares(first)) as source,
        Server("llama", shares(second, first)) as reader,
    ):
        want = source.complete(mine, NEW, cache_salt="a").tokens
        source.complete(plain, NEW)
        source.settle()
        for prompt, salt in ((mine, {}), (mine, {"cache_salt": "b"}), (plain, {"cache_salt": "a"})):
            assert reader.complete(prompt, NEW, **salt).cached == 0
        assert hits(reader, "peer") == 0
        shared = reader.complete(mine, NEW, cache_salt="a")  # control
        assert (shared.tokens, shared.cached) == (want, FULL)
        assert hits(reader, "peer") == FULL
        assert reader.complete(plain, NEW).cached == FULL
        assert_nothing_leaks(source)
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
