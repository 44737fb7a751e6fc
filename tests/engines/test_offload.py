"""The connector in a real engine: right tokens after every way a block can come and go.

Each test compares greedy float32 tokens with those of the same engine without a connector.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.engines.models import BLOCK_SIZE, MODELS, prompt_tokens
from tests.engines.server import Answer, Server, kv_transfer

HOST = "64MiB"
PROMPT = 400  # tokens: 12 full blocks, two chunks of prefill
NEW = 16
COUNT = 8  # prompts; together 104 blocks
BLOCKS = 64  # of the device, so that some of them leave it

GPU_TO_CPU = {"transfer_type": "GPU_to_CPU"}
CPU_TO_GPU = {"transfer_type": "CPU_to_GPU"}


def prompts(count: int = COUNT, length: int = PROMPT) -> list[list[int]]:
    """Different real texts of the same length."""
    return [prompt_tokens(length, start=1000 * number) for number in range(count)]


class Expected(NamedTuple):
    """Tokens without a connector: of prompts computed whole, and of prompts found on the device.

    In float32 they are the same. In bfloat16 the shapes of the computation show, so what comes
    back from the host tier must equal what comes from the device's own prefix cache.
    """

    fresh: list[tuple[int, ...]]
    cached: list[tuple[int, ...]]


@cache
def expected(model: str, tp: int = 1) -> Expected:
    """What the engine answers without a connector, with room to keep every prompt."""
    args = ("--tensor-parallel-size", str(tp))
    with Server(model, blocks=4 * BLOCKS, args=args) as server:
        return Expected(tokens(ask(server)), tokens(ask(server)))


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def ask(server: Server) -> list[Answer]:
    return [server.complete(prompt, NEW) for prompt in prompts()]


def assert_nothing_leaks(server: Server) -> None:
    """After quiescence no job is open, no block held, no device block in use."""
    server.settle()
    for owner in ("store", "load"):
        assert server.metric("vllm:kvconnect_ledger_held_blocks", owner=owner) == 0
    assert server.metric("vllm:kvconnect_host_blocks_pinned") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


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
        blocks = COUNT * ((PROMPT + NEW - 1) // BLOCK_SIZE)
        config = MODELS["llama"].config
        head = config["hidden_size"] // config["num_attention_heads"]
        layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
        block_bytes = layers * 2 * kv_heads * head * BLOCK_SIZE * 4
        stored = llama.metric("vllm:kvconnect_transfer_bytes_total", **GPU_TO_CPU)
        assert stored == blocks * block_bytes
        assert llama.metric("vllm:kv_offload_store_bytes_total") == stored
        assert llama.metric("vllm:kv_offload_total_bytes_total", **GPU_TO_CPU) == stored
        assert llama.metric("vllm:kv_offload_size_sum", **GPU_TO_CPU) == stored
        assert llama.metric("vllm:kvconnect_host_blocks_used") == blocks
        assert 0 < llama.metric("vllm:kvconnect_transfer_seconds_total", **GPU_TO_CPU) < 60

    def test_evicted_prompts_come_back_from_host(self, llama: Server) -> None:
        answers = ask(llama)
        assert tokens(answers) == expected("llama").fresh
        full = PROMPT // BLOCK_SIZE * BLOCK_SIZE
        assert [answer.cached for answer in answers] == [full] * COUNT
        llama.settle()
        hit = llama.metric("vllm:kvconnect_hit_tokens_total", tier="host")
        block_bytes = self._block_bytes(llama)
        loaded = llama.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU)
        assert hit > 0
        assert loaded == hit // BLOCK_SIZE * block_bytes
        assert llama.metric("vllm:kv_offload_load_bytes_total") == loaded
        asked = llama.metric("vllm:kvconnect_query_tokens_total")
        assert asked == hit + llama.metric("vllm:kvconnect_miss_tokens_total")
        assert llama.metric("vllm:external_prefix_cache_hits_total") == hit

    def test_a_whole_prompt_can_be_loaded(self, llama: Server) -> None:
        whole = prompts()[0][: 10 * BLOCK_SIZE]
        llama.complete(whole, 1)  # may still be on the device
        ask(llama)  # evicts it
        first = llama.complete(whole, NEW)
        assert first.cached == len(whole)
        again = llama.complete(whole, NEW)
        assert first.tokens == again.tokens

    def test_many_at_once_with_preemption(self, llama: Server) -> None:
        before = llama.metric("vllm:num_preemptions_total")
        many = [prompts()[number % COUNT][: 200 + number] for number in range(40)]
        answers = llama.complete_all(many, max_tokens=48)
        assert llama.metric("vllm:num_preemptions_total") > before
        with Server("llama") as plain:
            alone = [plain.complete(prompt, 48) for prompt in many]
        assert tokens(answers) == tokens(alone)
        assert_nothing_leaks(llama)

    def test_aborts_at_any_point_leave_nothing_behind(self, llama: Server) -> None:
        for number, prompt in enumerate(prompts()):
            llama.abort(prompt, after_chunks=number)
        assert tokens(ask(llama)) == expected("llama").fresh
        assert_nothing_leaks(llama)

    def test_reset_forgets_the_host_tier(self, llama: Server) -> None:
        llama.settle()
        llama.post("/reset_prefix_cache?reset_external=true")
        before = llama.metric("vllm:kvconnect_hit_tokens_total", tier="host")
        answers = ask(llama)
        assert [answer.cached for answer in answers] == [0] * COUNT
        assert tokens(answers) == expected("llama").fresh
        assert llama.metric("vllm:kvconnect_hit_tokens_total", tier="host") == before

    def test_no_block_ever_failed(self, llama: Server) -> None:
        for cause in ("digest", "copy", "deadline", "missing"):
            assert llama.metric("vllm:kvconnect_failed_blocks_total", cause=cause) == 0

    @staticmethod
    def _block_bytes(server: Server) -> float:
        used = server.metric("vllm:kvconnect_host_blocks_used")
        return server.metric("vllm:kvconnect_transfer_bytes_total", **GPU_TO_CPU) / used


@pytest.mark.parametrize("model", ["qwen3", "mistral", "gemma3", "deepseek_v2"])
def test_other_attention_kinds(model: str) -> None:
    want = expected(model)
    blocks = 32 if model == "mistral" else BLOCKS  # its short window leaves room for others
    with Server(model, kv_transfer(host_bytes=HOST, digest="full"), blocks) as server:
        assert tokens(ask(server)) == want.fresh
        assert tokens(ask(server)) == want.cached
        server.settle()
        assert server.metric("vllm:kvconnect_hit_tokens_total", tier="host") > 0
        assert server.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU) > 0
        assert_nothing_leaks(server)


def test_two_ranks() -> None:
    want = expected("llama", tp=2)
    args = ("--tensor-parallel-size", "2")
    with Server("llama", kv_transfer(host_bytes=HOST, digest="full"), args=args) as server:
        assert tokens(ask(server)) == want.fresh
        assert tokens(ask(server)) == want.fresh
        server.settle()
        hit = server.metric("vllm:kvconnect_hit_tokens_total", tier="host")
        assert hit > 0
        # Each rank holds half of the heads, so together they move what one would.
        loaded = server.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU)
        assert loaded == hit // BLOCK_SIZE * 4 * 2 * 2 * 32 * BLOCK_SIZE * 4
        assert_nothing_leaks(server)


def test_synchronous_loads() -> None:
    with Server("llama", kv_transfer(host_bytes=HOST, sync_load_bytes="64MiB")) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) == expected("llama").fresh
        whole = prompts()[0][: 10 * BLOCK_SIZE]
        assert server.complete(whole, NEW).cached == 9 * BLOCK_SIZE  # one token must remain
        assert server.metric("vllm:kvconnect_hit_tokens_total", tier="host") > 0
        assert_nothing_leaks(server)


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


class Subscriber:
    """Collects what the engine publishes about its KV cache."""

    def __enter__(self) -> Subscriber:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close(linger=0)

    def engine_args(self) -> tuple[str, ...]:
        endpoint = f"tcp://127.0.0.1:{self._port}"
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        return ("--kv-events-config", json.dumps(config))

    def of_host_tier(self) -> tuple[list[BlockStored], list[BlockRemoved]]:
        """Everything published so far about the host tier."""
        events = []
        while self._socket.poll(500):
            _, _, payload = self._socket.recv_multipart()
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        stored = [e for e in events if isinstance(e, BlockStored) and e.medium == "CPU"]
        removed = [e for e in events if isinstance(e, BlockRemoved) and e.medium == "CPU"]
        return stored, removed


def test_a_tier_of_one_block_still_serves() -> None:
    with Server("llama", kv_transfer(host_bytes="64KiB")) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) == expected("llama").fresh
        assert server.metric("vllm:kvconnect_host_blocks_capacity") == 1
        assert server.metric("vllm:kvconnect_skipped_store_blocks_total", reason="no_space") > 0
        assert_nothing_leaks(server)
