"""The linker under SGLang's own radix tree: stored as the tree grows, found again, loaded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from tests.sglang.linker_bench import PAGE, Bench, mha_pool

TOKENS = 6 * PAGE


class Tree:
    """SGLang's cache over a bench, and one prompt in it."""

    def __init__(self, core: str) -> None:
        self.bench = Bench(mha_pool())
        self.bench.params.tree_core_backend = core
        self.cache = UnifiedRadixCache(self.bench.params)
        self.cache.init_cache_linker(self.bench.linker)
        self.allocator = self.bench.params.token_to_kv_pool_allocator
        self.slots = self.compute(self.key())
        self.settle()

    def key(self, first: int = 0) -> RadixKey:
        return RadixKey(array("q", range(first, first + TOKENS)))

    def compute(self, key: RadixKey) -> torch.Tensor:
        """Put a prompt in the tree, as a prefill does; return its token slots."""
        slots = self.allocator.alloc(TOKENS)
        assert slots is not None
        self.cache.insert(InsertParams(key=key, value=slots.clone()))
        return slots

    def settle(self) -> None:
        """Wait for the stores, and let the tree take note."""
        for tier in self.bench.linker.tiers.values():
            tier.drain()
        self.cache.check_hicache_events()

    def content(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[slots].clone() for pool in self.bench.buffers.values() for buffer in pool]

    def evict(self) -> None:
        self.cache.evict(EvictParams(num_tokens=TOKENS))
        assert self.allocator.available_size() == self.allocator.size
        self.bench.wipe()

    def request(self, key: RadixKey) -> tuple[SimpleNamespace, Any]:
        """Return a request for a prompt, and what the tree says of it."""
        req = SimpleNamespace(rid="req", session=None, extra_key=None, swa_branching_seqlen=None)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.last_node = match.last_device_node
        return req, match

    def load(self, req: SimpleNamespace, match: Any) -> torch.Tensor:
        """Load what was found, as a forward does; return the token slots."""
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
        loaded, _ = self.cache.init_load_back(params)
        assert loaded == match.host_hit_length
        slots = self.cache.linker.private_load_indices["req"]
        self.bench.linker.layer_done_counter.set_consumer(self.cache.ready_to_load_host_cache())
        return slots


@pytest.fixture(params=["rust", "python"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    tree = Tree(request.param)
    yield tree
    tree.cache.release_host_resources()
    tree.bench.check()
    reset_context()


def test_an_evicted_prompt_comes_back(tree: Tree) -> None:
    wanted = tree.content(tree.slots)
    tree.evict()
    req, match = tree.request(tree.key())
    assert (match.device_prefix_len, match.host_hit_length) == (0, TOKENS)
    slots = tree.load(req, match)
    assert tree.cache.finish_external_linker_loads([req]) == []
    found = tree.content(slots)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_another_prompt_is_not_found(tree: Tree) -> None:
    tree.evict()
    _, match = tree.request(tree.key(first=1))
    assert match.host_hit_length == 0


def test_what_was_loaded_is_offered_again_and_not_stored_again(tree: Tree) -> None:
    tree.evict()
    slots = tree.load(*tree.request(tree.key()))
    assert tree.cache.finish_external_linker_loads([]) == []
    tree.bench.spies[0].calls.clear()
    tree.cache.insert(InsertParams(key=tree.key(), value=slots.clone()))
    tree.settle()
    assert tree.bench.spies[0].calls == []
    assert tree.cache.linker.pending_offloads == []


def test_a_damaged_copy_ends_the_request_and_the_next_one_computes(tree: Tree) -> None:
    tree.evict()
    index = tree.bench.tier.index
    tree.bench.flip(index.hash_of(0).decode())
    req, match = tree.request(tree.key())
    tree.load(req, match)
    assert tree.cache.finish_external_linker_loads([req]) == [req]
    assert req.discard_output_reason.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert req.skip_radix_cache_insert
    _, again = tree.request(tree.key())
    assert again.host_hit_length < TOKENS


def test_a_request_that_leaves_gives_its_queued_load_back(tree: Tree) -> None:
    tree.evict()
    req, match = tree.request(tree.key())
    tree.cache.init_load_back(
        InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
    )
    assert tree.bench.tier.jobs.ledger.held == 6
    tree.cache.linker.release_request("req")
    assert tree.bench.tier.jobs.ledger.held == 0
    assert tree.cache.ready_to_load_host_cache() == -1


def test_a_reset_tree_finds_nothing(tree: Tree) -> None:
    tree.compute(tree.key(first=1000))  # its stores are under way
    tree.cache.reset()
    for first in (0, 1000):
        _, match = tree.request(tree.key(first))
        assert (match.device_prefix_len, match.host_hit_length) == (0, 0)
    assert tree.cache.linker.pending_offloads == []
