"""Hints on cached blocks in a real engine: what they keep and what they give up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import BLOCK_SIZE
from tests.engines.scenario import FULL, assert_nothing_leaks, block_bytes, disk, prompts, settle
from tests.engines.server import Server, kv_transfer

SLOTS = 64  # of the host tier, and blocks of the device: five prompts and a bit
BLOCKS = FULL // BLOCK_SIZE  # of one prompt


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    connector = kv_transfer(host_bytes=SLOTS * block_bytes("llama"), pin_share=0.5)
    with Server("llama", connector, blocks=SLOTS) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_stored(server: Server) -> None:
    server.settle()
    server.post("/reset_prefix_cache?reset_external=true")


def ask(server: Server, prompt: list[int], **hints: Any) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the receipt and the tokens of an answer."""
    params = {"kvconnect": {"receipt": True, **hints}}
    body = server.body(prompt, 2, kv_transfer_params=params)
    answer = json.loads(server.post("/v1/completions", body))
    return answer["kv_transfer_params"]["kvconnect"]["receipt"], answer["choices"][0]["token_ids"]


def from_host(server: Server, prompt: list[int]) -> int:
    """Return how many tokens of a prompt come from host memory, with an empty device."""
    server.settle()
    server.post("/reset_prefix_cache")
    return ask(server, prompt)[0]["host"]


def outcomes(server: Server, outcome: str) -> float:
    return server.metric("vllm:kvconnect_cache_hint_blocks_total", outcome=outcome)


def test_a_pinned_prompt_survives_what_evicts_all_others(server: Server) -> None:
    pinned, other, *rest = prompts(10)
    first = ask(server, pinned, pin=600)[1]
    ask(server, other)
    for prompt in rest:  # 96 blocks
        ask(server, prompt)
    server.settle()
    assert outcomes(server, "pinned") == BLOCKS
    assert server.metric("vllm:kvconnect_host_blocks_kept", hint="pin") == BLOCKS
    assert from_host(server, pinned) == FULL
    assert ask(server, pinned)[1] == first
    assert from_host(server, other) == 0  # control: it was not pinned


def test_a_demoted_prompt_goes_before_older_ones(server: Server) -> None:
    older, demoted, *rest = prompts(6)
    ask(server, older)
    ask(server, demoted, demote=True)
    for prompt in rest:  # 8 blocks more than there is room for
        ask(server, prompt)
    assert from_host(server, older) == FULL
    assert from_host(server, demoted) == FULL - 8 * BLOCK_SIZE
    assert outcomes(server, "demoted") == BLOCKS


def test_a_dropped_prompt_leaves_host_memory_at_once(server: Server) -> None:
    dropped, other = prompts(2)
    ask(server, dropped, pin=600)
    ask(server, other)
    assert from_host(server, dropped) == FULL
    ask(server, dropped, drop=True)
    server.settle()
    assert server.metric("vllm:kvconnect_host_blocks_used") == BLOCKS  # those of the other one
    assert from_host(server, dropped) == 0
    assert from_host(server, other) == FULL  # control
    assert outcomes(server, "dropped") == BLOCKS


def test_hints_that_are_wrong_change_nothing(server: Server) -> None:
    prompt = prompts(1)[0]
    name = "vllm:kvconnect_ignored_cache_hints_total"
    plain = ask(server, prompt)[1]
    for hints in ({"pin": 1e300}, {"drop": "yes"}, {"tokens": -1}, {"pin": [{}] * 1000}):
        assert ask(server, prompt, **hints)[1] == plain
    server.settle()
    assert server.metric(name, reason="invalid") == 4
    assert server.metric("vllm:kvconnect_host_blocks_kept", hint="pin") == 0
    assert from_host(server, prompt) == FULL


def with_disk(path: Path) -> str:
    settings = {"host_bytes": SLOTS * block_bytes("llama"), "load_when": "always"}
    return kv_transfer(**settings, disk=disk(path))


def test_a_dropped_prompt_leaves_the_disk_too(tmp_path: Path) -> None:
    dropped, evicted, other = prompts(3)
    with Server("llama", with_disk(tmp_path), blocks=SLOTS) as first:
        for prompt in (dropped, evicted, other):
            ask(first, prompt)
            settle(first)
        assert ask(first, dropped, drop=True)[0]["prompt"] == len(dropped)
        first.post("/reset_prefix_cache")
        settle(first)
        assert outcomes(first, "dropped") == BLOCKS
        assert from_host(first, dropped) == 0
        assert ask(first, dropped, drop=True)[0]["disk"] == 0  # computed, stored, dropped again
        settle(first)
        assert_nothing_leaks(first)
    with Server("llama", with_disk(tmp_path), blocks=SLOTS) as second:
        # This engine has the blocks on its disk only.
        assert ask(second, evicted, drop=True)[0]["disk"] == FULL
        settle(second)
        second.post("/reset_prefix_cache")
        for gone in (dropped, evicted):
            assert ask(second, gone)[0]["disk"] == 0
        assert ask(second, other)[0]["disk"] == FULL  # control: it was not dropped
        assert outcomes(second, "stayed") == 0


def test_a_demoted_prompt_that_is_evicted_is_on_the_disk(tmp_path: Path, server: Server) -> None:
    older, demoted, *rest = prompts(6)
    with Server("llama", with_disk(tmp_path), blocks=SLOTS) as engine:
        for with_tier in (engine, server):
            first = [ask(with_tier, older)[1], ask(with_tier, demoted, demote=True)[1]]
            for prompt in rest:
                ask(with_tier, prompt)
            settle(with_tier)
            assert outcomes(with_tier, "demoted") >= BLOCKS
            with_tier.post("/reset_prefix_cache")
            receipt, tokens = ask(with_tier, demoted)
            assert tokens == first[1]
            found = (receipt["host"], receipt["disk"])
            # Without a disk, the evicted blocks are lost.
            assert found == (FULL - 8 * BLOCK_SIZE, 8 * BLOCK_SIZE if with_tier is engine else 0)


def test_hints_of_any_size_change_nothing(server: Server) -> None:
    name = "vllm:kvconnect_ignored_cache_hints_total"
    many = {str(number): number for number in range(1_000_000)}
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    prompt = prompts(1)[0]
    plain = ask(server, prompt, pin=-1)[1]  # also makes the metric's series
    server.settle()
    before = server.metric(name, reason="invalid")
    # vLLM itself answers 400 to a longer integer, which its messages cannot hold.
    wrong = ("x" * (10 << 20), many, nested, [True] * 100_000, 2**63, 1e308, True)
    for value in wrong:
        assert ask(server, prompt, pin=value)[1] == plain
    assert ask(server, prompt, retain=True, tokens=1e308, **many)[1] == plain
    server.settle()
    assert server.metric(name, reason="invalid") == before + len(wrong) + 1
    assert server.metric("vllm:kvconnect_host_blocks_kept", hint="pin") == 0
    assert from_host(server, prompt) == FULL
