"""Secondary tiers of real engines: disk and a shared server."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.kv_events import Subscriber
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
    disk,
    expected,
    fill,
    hits,
    moved,
    prompts,
    settle,
    tokens,
)
from tests.engines.server import Server, ServerDied, kv_transfer
from tests.servers import Valkey

HOST = "32MiB"  # a quarter of it holds a prompt of any model: no write-back is skipped


def tiers(**extra: Any) -> str:
    """Settings of an engine that loads whatever there is: here computing is faster."""
    return kv_transfer(**{"host_bytes": HOST, "load_when": "always", "listen": "off", **extra})


def assert_right(server: Server, model: str = "llama") -> None:
    assert tokens(ask(server)) == expected(model).fresh


def test_a_hint_prefetches_what_would_be_computed(tmp_path: Path) -> None:
    settings = tiers(disk=disk(tmp_path), load_when="faster")
    with Server("llama", settings) as first:
        fill(first)
    with Server("llama", settings) as second:
        control, hinted, *_ = prompts()
        # An engine that knows no rates yet loads a few blocks at most.
        assert receipt(second, control)["disk"] < FULL
        assert receipt(second, hinted, prefetch=True)["disk"] == FULL
        assert second.metric("vllm:kvconnect_tier_decisions_total", reason="hinted") == 1
        assert second.metric("vllm:kvconnect_cache_hints_total", hint="prefetch") == 1
        settle(second)
        second.post("/reset_prefix_cache")
        assert receipt(second, hinted)["host"] == FULL
        assert_right(second)
        settle(second)
        assert_nothing_leaks(second)


def receipt(server: Server, prompt: list[int], **hints: Any) -> dict[str, Any]:
    params = {"kvconnect": {"receipt": True, **hints}}
    body = server.body(prompt, 1, kv_transfer_params=params)
    answer = json.loads(server.post("/v1/completions", body))
    found: dict[str, Any] = answer["kv_transfer_params"]["kvconnect"]["receipt"]
    return found


def test_disk_outlives_kill_9_and_flipped_bytes(tmp_path: Path) -> None:
    settings = tiers(disk=disk(tmp_path), digest="full")
    with Server("llama", settings) as first:
        fill(first)
        assert moved(first, "CPU_to_DISK") > 0
        assert_nothing_leaks(first)
        first.kill()
    with Subscriber() as events, Server("llama", settings, args=events.engine_args()) as second:
        answers = ask(second)
        assert tokens(answers) == expected("llama").fresh
        assert [answer.cached for answer in answers] == [FULL] * COUNT
        told = {tuple(event.token_ids) for event in events.of_host_tier()[0]}
        assert {tuple(prompt[:BLOCK_SIZE]) for prompt in prompts()} <= told  # they are here now
        assert len(told) >= COUNT * FULL // BLOCK_SIZE
        assert hits(second, "disk") == COUNT * FULL
        assert cached_by_source(second) == {"disk": COUNT * FULL}
        assert moved(second, "DISK_to_CPU") == moved(second, "CPU_to_GPU") > 0
        salted = second.complete(prompts()[0], NEW, cache_salt="a")
        assert (salted.tokens, salted.cached) == (expected("llama").fresh[0], 0)
        settle(second)
        second.post("/reset_prefix_cache?reset_external=true")
        settle(second)  # the workers look whether the weights have changed
        assert [answer.cached for answer in ask(second)] == [FULL] * COUNT
        assert hits(second, "disk") == 2 * COUNT * FULL, "host memory is forgotten"
        settle(second)
        assert_nothing_leaks(second)
    with Server("llama", settings) as third:
        segments = list(tmp_path.glob("*/*.seg"))  # what it read at its start was right
        assert segments
        for segment in segments:
            spoil(segment)
        assert_right(third)
        assert third.metric("vllm:kvconnect_store_failed_blocks_total", outcome="corrupt") > 0
        assert_nothing_leaks(third)


def spoil(segment: Path) -> None:
    """Change a byte in every 16 KiB behind the head."""
    with segment.open("r+b") as file:
        for place in range(3 * 4096 + 77, segment.stat().st_size, 16384):
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))


def test_negative_control_without_disk_a_restart_finds_nothing() -> None:
    with Server("llama", tiers()) as server:
        assert [answer.cached for answer in ask(server)] == [0] * COUNT


@pytest.mark.parametrize("model", ["gemma3", "deepseek_v2"])
def test_other_attention_kinds(model: str, tmp_path: Path) -> None:
    settings = tiers(disk=disk(tmp_path))
    with Server(model, settings) as first:
        fill(first, model)
    with Server(model, settings) as second:
        assert_right(second, model)
        assert hits(second, "disk") > COUNT * FULL / 2
        assert_nothing_leaks(second)
    with Server("qwen3", settings) as other:  # same folder, another model
        assert_right(other, "qwen3")
        assert hits(other, "disk") == 0


def test_engines_share_a_server_that_may_die(valkey: Valkey) -> None:
    settings = tiers(remote={"kind": "valkey", **valkey.settings(timeout_s=1)})
    with Server("llama", settings) as first:
        fill(first)
        assert moved(first, "CPU_to_REMOTE") > 0
        with Server("llama", settings, tp=2) as second:  # its ranks have half of each block
            want = expected("llama", 2).fresh
            assert tokens(ask(second)) == want
            assert hits(second, "remote") == COUNT * FULL
            assert moved(second, "REMOTE_to_CPU") > 0
            assert_nothing_leaks(second)
        valkey.kill()
        for prompt, want in zip(prompts(), expected("llama").fresh, strict=True):
            assert first.complete(prompt, NEW, cache_salt="new").tokens == want
        deadline = time.monotonic() + PATIENCE_S
        while first.metric("vllm:kvconnect_tier_available", tier="remote"):
            assert time.monotonic() < deadline, "the tier does not go"
            time.sleep(0.1)
        valkey.start()
        before = moved(first, "CPU_to_REMOTE")
        deadline = time.monotonic() + 2 * PATIENCE_S  # a trial is made once a minute at least
        while moved(first, "CPU_to_REMOTE") == before:
            assert time.monotonic() < deadline, "the tier does not come back"
            first.complete(prompts(length=PROMPT - 1)[0], NEW, cache_salt=str(time.monotonic()))
            settle(first)
        assert_nothing_leaks(first)


def test_a_full_disk_costs_nothing_but_its_use(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with Server("llama", tiers(disk=disk(tmp_path, min_free=2 * free))) as server:
        fill(server)
        assert_right(server)
        assert server.metric("vllm:kvconnect_store_failed_blocks_total", outcome="full") > 0
        assert moved(server, "DISK_to_CPU") == 0
        assert_nothing_leaks(server)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"disk": {"path": "/x", "capacity": "1MiB"}}, "disk.capacity='1MiB' is not usable: use"),
        (
            {"disk": {"paht": "/x"}},
            "kvconnect: disk.paht='/x' is not usable: unknown setting, did you mean 'disk.path'?; "
            "disk.path=None is not usable: it is missing: set it; disk.capacity=None is not usable",
        ),
        ({"remote": {"kind": "valky"}}, "remote.kind='valky' is not usable: did you"),
        ({"remote": {"address": "a:1"}}, "name its kind"),
    ],
)
def test_bad_settings_are_one_clear_error(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerDied) as died, Server("llama", tiers(**setting)):
        pass
    log = str(died.value)
    assert len([line for line in log.splitlines() if message in line]) == 1
    assert "Starting to load model" not in log
