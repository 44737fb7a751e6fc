"""The connector in a real engine: right tokens after every way a block can come and go.

Each test compares greedy float32 tokens with those of the same engine without a connector.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconnect.types import PromptSource
from tests.engines.kv_events import Subscriber
from tests.engines.models import BLOCK_SIZE
from tests.engines.scenario import (
    BLOCKS,
    COUNT,
    CPU_TO_GPU,
    FULL,
    GPU_TO_CPU,
    HOST,
    NEW,
    ONE_STEP_AT_A_TIME,
    PROMPT,
    ask,
    assert_a_crowd_is_served,
    assert_aborts_leave_nothing_behind,
    assert_moved,
    assert_nothing_leaks,
    cached_by_source,
    expected,
    hit_tokens,
    prompts,
    receipt,
    tokens,
    whole_prompt,
)
from tests.engines.server import Server, kv_transfer

FULL_BLOCKS = COUNT * (FULL // BLOCK_SIZE)  # of all prompts; their answers fill no block more
OFFLOAD = kv_transfer(host_bytes=HOST, digest="full")
FAULTY = "tests.engines.faulty"


@pytest.fixture(scope="module")
def llama() -> Iterator[Server]:
    want = expected("llama")
    assert len(set(want.fresh)) == COUNT  # else equality would prove little
    assert want.fresh == want.cached
    with Server("llama", kv_transfer(host_bytes=HOST, digest="full")) as server:
        yield server


class TestLlama:
    """One engine, one life: the order of these tests matters, as it does to a real server."""

    def test_every_series_exists_before_its_first_event(self, llama: Server) -> None:
        for kind in (GPU_TO_CPU, CPU_TO_GPU):
            assert llama.metric("vllm:kvconnect_transfer_bytes_total", **kind) == 0
            assert llama.metric("vllm:kv_offload_total_bytes_total", **kind) == 0
        assert llama.metric("vllm:kvconnect_failed_blocks_total", cause="digest") == 0
        assert llama.metric("vllm:kvconnect_host_blocks_capacity") == 0
        with pytest.raises(KeyError):
            llama.metric("vllm:kvconnect_no_such_thing")

    def test_fresh_prompts(self, llama: Server) -> None:
        answers = ask(llama)
        assert tokens(answers) == expected("llama").fresh
        assert [answer.cached for answer in answers] == [0] * COUNT

    def test_stored_bytes_are_those_of_every_full_block(self, llama: Server) -> None:
        llama.settle()
        # The last sampled token is never computed, so its KV does not exist.
        assert COUNT * ((PROMPT + NEW - 1) // BLOCK_SIZE) == FULL_BLOCKS
        assert_moved(llama, "llama", stored=FULL_BLOCKS, loaded=0)
        assert llama.metric("vllm:kvconnect_host_blocks_used") == FULL_BLOCKS
        assert 0 < llama.metric("vllm:kvconnect_transfer_seconds_total", **GPU_TO_CPU) < 60

    def test_evicted_prompts_come_back_from_host(self, llama: Server) -> None:
        answers = ask(llama)
        assert tokens(answers) == expected("llama").fresh
        assert [answer.cached for answer in answers] == [FULL] * COUNT
        llama.settle()
        # Before a prompt's turn comes again, the others have taken all of its device blocks.
        assert llama.metric("vllm:prefix_cache_hits_total") == 0
        assert hit_tokens(llama) == COUNT * FULL
        assert_moved(llama, "llama", stored=FULL_BLOCKS, loaded=FULL_BLOCKS)
        asked = llama.metric("vllm:kvconnect_query_tokens_total")
        assert asked == 2 * COUNT * PROMPT
        assert asked == COUNT * FULL + llama.metric("vllm:kvconnect_miss_tokens_total")
        assert llama.metric("vllm:kvconnect_lookups_total") == 2 * COUNT
        assert llama.metric("vllm:external_prefix_cache_hits_total") == COUNT * FULL
        assert cached_by_source(llama) == {"host": COUNT * FULL}

    def test_a_whole_prompt_can_be_loaded(self, llama: Server) -> None:
        ask(llama)  # the prompt whose beginning it is has left the device again
        hit = hit_tokens(llama)
        whole = llama.complete(whole_prompt(), NEW)
        assert whole.cached == len(whole_prompt())
        assert whole.tokens == expected("llama").whole
        assert hit_tokens(llama) == hit + len(whole_prompt())

    def test_many_at_once_with_preemption(self, llama: Server) -> None:
        assert_a_crowd_is_served(llama, expected("llama"))

    def test_aborts_at_any_point_leave_nothing_behind(self, llama: Server) -> None:
        assert_aborts_leave_nothing_behind(llama, expected("llama"))

    def test_salted_prompts_find_only_what_has_their_salt(self, llama: Server) -> None:
        prompt = prompts()[0]
        for salt in ("a", "b"):  # the host has this prompt's blocks, without salt and with another
            ask(llama)
            hit = hit_tokens(llama)
            fresh = llama.complete(prompt, NEW, cache_salt=salt)
            assert (fresh.cached, hit_tokens(llama)) == (0, hit)
            assert fresh.tokens == expected("llama").fresh[0]
        ask(llama)
        hit = hit_tokens(llama)
        again = llama.complete(prompt, NEW, cache_salt="a")
        assert (again.cached, hit_tokens(llama)) == (FULL, hit + FULL)
        assert again.tokens == expected("llama").fresh[0]

    def test_receipts_say_where_a_prompt_came_from(self, llama: Server) -> None:
        ask(llama)  # the prompt that is asked for now has left the device
        prompt, asks = prompts()[0], {"kvconnect": {"receipt": True}}
        before = [counted_prompt(llama, source) for source in PromptSource]
        found = [receipt(llama, prompt, kv_transfer_params=asks) for _ in range(2)]
        assert [(one["device"], one["host"]) for one in found] == [(0, FULL), (FULL, 0)]
        for one in found:
            assert sum(one[source.value] for source in PromptSource) == one["prompt"] == PROMPT
        llama.settle()
        for source, old in zip(PromptSource, before, strict=True):
            assert counted_prompt(llama, source) - old == sum(one[source.value] for one in found)
        assert receipt(llama, prompt) is None  # control: nobody asks

    def test_reset_forgets_the_host_tier(self, llama: Server) -> None:
        llama.settle()
        llama.post("/reset_prefix_cache?reset_external=true")
        before = hit_tokens(llama)
        answers = ask(llama)
        assert [answer.cached for answer in answers] == [0] * COUNT
        assert tokens(answers) == expected("llama").fresh
        assert hit_tokens(llama) == before

    def test_no_block_ever_failed(self, llama: Server) -> None:
        for cause in ("digest", "copy", "deadline", "missing"):
            assert llama.metric("vllm:kvconnect_failed_blocks_total", cause=cause) == 0


def counted_prompt(server: Server, source: PromptSource) -> float:
    return server.metric("vllm:kvconnect_prompt_tokens_total", source=source.value)


@pytest.mark.parametrize("model", ["qwen3", "mistral", "deepseek_v2", "lfm2"])
def test_other_attention_kinds(model: str) -> None:
    want = expected(model)
    blocks = 32 if model == "mistral" else BLOCKS  # its short window leaves room for others
    with Server(model, OFFLOAD, blocks) as server:
        assert tokens(ask(server)) == want.fresh
        assert tokens(ask(server)) == want.cached
        server.settle()
        assert hit_tokens(server) > 0
        assert server.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU) > 0
        if model == "qwen3":
            assert_moved(server, model, stored=FULL_BLOCKS, loaded=FULL_BLOCKS)
        assert_nothing_leaks(server)


def test_several_groups() -> None:
    want = expected("gemma3")
    with Server("gemma3", OFFLOAD) as server:
        assert tokens(ask(server)) == want.fresh
        assert tokens(ask(server)) == want.cached
        server.settle()
        assert hit_tokens(server) > 0
        assert server.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU) > 0
        assert_a_crowd_is_served(server, want)
        assert_aborts_leave_nothing_behind(server, want)


def test_two_ranks() -> None:
    want = expected("llama", tp=2)
    with Server("llama", OFFLOAD, tp=2) as server:
        assert tokens(ask(server)) == want.fresh
        assert tokens(ask(server)) == want.fresh
        server.settle()
        assert hit_tokens(server) == COUNT * FULL
        # Each rank holds half of the heads, so together they move what one would.
        assert_moved(server, "llama", stored=FULL_BLOCKS, loaded=FULL_BLOCKS)
        assert_a_crowd_is_served(server, want)
        assert_aborts_leave_nothing_behind(server, want)


def test_ranks_with_the_same_kv_keep_it_once(tmp_path: Path) -> None:
    """Latent attention has no heads to divide: one rank stores, and both load."""
    want = expected("deepseek_v2", tp=2)
    disk = {"path": str(tmp_path), "capacity": "256MiB"}
    connector = kv_transfer(host_bytes=HOST, digest="full", disk=disk)
    with Server("deepseek_v2", connector, tp=2) as server:
        assert tokens(ask(server)) == want.fresh
        assert tokens(ask(server)) == want.cached
        server.settle()
        assert hit_tokens(server) == COUNT * FULL
        stored = server.metric("vllm:kvconnect_transfer_bytes_total", **GPU_TO_CPU)
        assert server.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU) == 2 * stored
        assert_nothing_leaks(server)
    assert [folder.name for folder in tmp_path.iterdir()] == ["dp0-rank0"]


@pytest.mark.parametrize("tp", [1, 2])
def test_negative_control_ranks_that_share_their_files_get_other_tokens(
    tp: int, tmp_path: Path
) -> None:
    """vLLM's ``ExampleConnector`` names a file by prompt and layer, not by rank: of two ranks,
    each with its half of the heads, one overwrites the other's file, and both load the same."""
    connector = kv_transfer("ExampleConnector", shared_storage_path=str(tmp_path))
    short = prompts(length=200)  # it stores the first chunk of prefill only
    with Server("llama", connector, blocks=34, tp=tp) as server:
        fresh = [server.complete(prompt, NEW) for prompt in short]
        loaded = [server.complete(prompt, NEW) for prompt in short]
        assert server.metric("vllm:external_prefix_cache_hits_total") > 0
    assert (tokens(loaded) == tokens(fresh)) == (tp == 1)


def test_synchronous_loads() -> None:
    connector = kv_transfer(host_bytes=HOST, sync_load_bytes=HOST)
    with Server("llama", connector, args=ONE_STEP_AT_A_TIME) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) == expected("llama").fresh
        whole = server.complete(whole_prompt(), NEW)
        assert whole.cached == len(whole_prompt())  # it was parked: one token must remain
        assert whole.tokens == expected("llama").whole
        server.settle()
        assert hit_tokens(server) == COUNT * FULL + whole.cached
        loaded = FULL_BLOCKS + whole.cached // BLOCK_SIZE
        assert_moved(server, "llama", stored=FULL_BLOCKS, loaded=loaded)
        assert_nothing_leaks(server)


def test_layers_of_a_synchronous_load_are_waited_for_one_by_one() -> None:
    connector = kv_transfer("LayersComeLate", FAULTY, host_bytes=HOST, sync_load_bytes=HOST)
    with Server("llama", connector, args=ONE_STEP_AT_A_TIME) as server:
        for _ in range(2):
            assert tokens(ask(server)) == expected("llama").fresh
        server.settle()
        assert hit_tokens(server) == COUNT * FULL
        assert_nothing_leaks(server)


def test_negative_control_a_forward_that_waits_for_no_layer_gets_other_tokens() -> None:
    connector = kv_transfer("NobodyWaits", FAULTY, host_bytes=HOST, sync_load_bytes=HOST)
    with Server("llama", connector, args=ONE_STEP_AT_A_TIME) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) != expected("llama").fresh


def test_a_full_tier_with_events() -> None:
    """Eviction under another policy; subscribers can follow what the tier holds."""
    with Subscriber() as events:
        connector = kv_transfer(host_bytes="4MiB", policy="s3fifo")
        with Server("llama", connector, args=events.engine_args()) as server:
            for _ in range(3):
                assert tokens(ask(server)) == expected("llama").fresh
            assert_nothing_leaks(server)
            evicted = server.metric("vllm:kvconnect_evicted_blocks_total", tier="host")
            used = server.metric("vllm:kvconnect_host_blocks_used")
        stored, removed = events.of_host_tier()
    assert evicted > 0
    assert len(removed) == evicted
    assert len(stored) - len(removed) == used
    assert {event.block_hashes[0] for event in removed} <= {e.block_hashes[0] for e in stored}
    first = next(event for event in stored if event.parent_block_hash is None)
    assert first.token_ids in [prompt[:BLOCK_SIZE] for prompt in prompts()]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "off"])
def test_without_a_home_for_a_key_blocks_are_offloaded_and_not_handed_off(
    listen: str, tmp_path: Path
) -> None:
    """As in a container with a read-only root. The variables are those of vLLM's own files."""
    own = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR")
    env = {name: str(tmp_path / name) for name in own}
    env |= {"HOME": "/proc/1", "XDG_RUNTIME_DIR": "", "XDG_CACHE_HOME": ""}
    with Server("llama", kv_transfer(host_bytes=HOST, listen=listen), env=env) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) == expected("llama").fresh
        assert hit_tokens(server) == COUNT * FULL
        offered = server.body(prompts()[0], 1, kv_transfer_params={"do_remote_decode": True})
        with server.open("/v1/completions", offered) as reply:
            assert not json.load(reply).get("kv_transfer_params")
        assert_nothing_leaks(server)
        log = server.log.read_text()
        assert "offloaded but not handed off" in log and "key_file" in log


def test_a_tier_of_one_block_still_serves() -> None:
    with Server("llama", kv_transfer(host_bytes="64KiB")) as server:
        said = [line for line in server.log.read_text().splitlines() if " on vLLM " in line]
        (start,) = said  # one line, with what is not the default
        assert '"host_bytes":65536' in start
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) == expected("llama").fresh
        assert server.metric("vllm:kvconnect_host_blocks_capacity") == 1
        assert server.metric("vllm:kvconnect_skipped_store_blocks_total", reason="no_space") > 0
        assert_nothing_leaks(server)
