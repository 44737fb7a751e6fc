"""Prefill and decode that read one request as two prompts: refused at once, with both values."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.adapters import LORA, RUNTIME, load, write
from tests.engines.models import BLOCK_SIZE, prompt_tokens
from tests.engines.pd import (
    Pair,
    assert_quiet,
    one_clean_error,
    pair,
    push_params,
    raw,
    refused,
    standing_ticket,
)
from tests.engines.server import Server

LENGTH, NEW = 60, 8
SAME = prompt_tokens(LENGTH, start=8000)
POET = {"model": "poet"}
# What prefill and decode are asked with, and how their prompts differ.
CASES: dict[str, tuple[dict[str, Any], list[int], dict[str, Any], str]] = {
    "ids": ({}, prompt_tokens(LENGTH, start=9000), {}, "token ids"),
    "longer": ({}, prompt_tokens(LENGTH + 3 * BLOCK_SIZE, start=8000), {}, "token ids"),
    "shorter": ({}, SAME[: LENGTH - BLOCK_SIZE], {}, "token ids"),
    "salt": ({"cache_salt": "a"}, SAME, {"cache_salt": "b"}, "media, adapter or salt"),
    "no adapter": (POET, SAME, {}, "media, adapter or salt"),
    "other files of an adapter": (POET, SAME, POET, "media, adapter or salt"),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines with the same model, and an adapter of one name with other weights."""
    with pair(args=LORA, env=RUNTIME) as (p, d):
        for server, seed in ((p, 1), (d, 2)):
            load(server, "poet", write(Path(tmp_path_factory.mktemp("poet")) / "poet", seed))
        yield p, d


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_another_prompt_is_refused_and_both_sides_say_why(
    mode: str, case: str, engines: Pair
) -> None:
    p, d = engines
    of_prefill, other, of_decode, what = CASES[case]
    hand_off(mode, p, d, (SAME, {}), (SAME, {}))  # control: one prompt
    before = counts(p, d)
    with one_clean_error():
        hand_off(mode, p, d, (SAME, of_prefill), (other, of_decode))
    assert counts(p, d) == [count + 1 for count in before]
    for log in (p.log.read_text(), d.log.read_text()):
        said = [line for line in log.splitlines() if "the prompts differ" in line][-1]
        assert f"differ in their {what}: prefill has {LENGTH} tokens" in said
        assert f"decode has {len(other)} tokens" in said
    assert_quiet(p, d)


def hand_off(
    mode: str,
    p: Server,
    d: Server,
    of_prefill: tuple[list[int], dict[str, Any]],
    of_decode: tuple[list[int], dict[str, Any]],
) -> None:
    """Ask both sides, each with its own prompt and fields."""
    transfer, (prompt, fields) = secrets.token_hex(16), of_prefill
    wanted = {"do_remote_decode": True, "transfer_id": transfer}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(raw, p, prompt, 1, kv_transfer_params=wanted, **fields)
        if mode == "pull":
            params = first.result()["kv_transfer_params"]
        else:
            params = push_params(transfer, standing_ticket(p))
        prompt, fields = of_decode
        raw(d, prompt, NEW, kv_transfer_params=params, **fields)


def counts(p: Server, d: Server) -> list[float]:
    p.settle()
    d.settle()
    failed = d.metric("vllm:kvconnect_handoff_failures_total", cause="prompt")
    return [refused(p, "prompt"), failed]
