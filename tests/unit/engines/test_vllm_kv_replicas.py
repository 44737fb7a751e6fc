"""Which ranks of vLLM share one host tier, and how they agree on its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvconnect.engines.vllm import kv_replicas as replicas
from kvconnect.engines.vllm.kv_replicas import kv_replicas, share_memory
from kvconnect.offload.shared_memory import MemoryOffer, SharedMemory
from tests.unit.engines.vllm_caches import MODELS, full, make, mixed, window

try:
    from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

NBYTES = 1 << 16
LATENT = {
    *("deepseek_v32", "deepseek_v32 with MTP", "deepseek_v4", "glm5 in fp8"),
    *("sliding latent", "longcat"),
}


def found(
    specs: Any, tp: int = 8, heads: int = 2, here: int = 0, dcp: int = 1, drafts: object = None
) -> int:
    cache = make(specs).config
    cache.kv_tp_replicas = kv_cache_groups_tp_replicas(cache.kv_cache_groups, tp, dcp)
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads}),
        get_total_num_kv_heads=lambda: heads,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        local_world_size=here or tp,
    )
    config: Any = SimpleNamespace(
        model_config=model, parallel_config=parallel, speculative_config=drafts
    )
    return kv_replicas(config, cache)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_of_latent_attention_share(model: str) -> None:
    # Heads are as many as ranks, so that only latent attention has replicas.
    assert found(MODELS[model], heads=8) == (8 if model in LATENT else 1)


@pytest.mark.parametrize(("heads", "expected"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (3, 1)])
def test_ranks_with_the_same_head_share(heads: int, expected: int) -> None:
    specs = {"layers.0": full(max(1, heads // 8)), "layers.1": full(max(1, heads // 8))}
    assert found(specs, heads=heads) == expected
    assert found(mixed(window(1), full(1)), heads=heads) == (expected if heads <= 8 else 1)


def test_ranks_do_not_share_where_their_heads_are_not_known() -> None:
    specs = {"layers.0": full(1)}
    assert found(specs) == 4
    assert found(specs, drafts=object()) == 1
    assert found(specs, dcp=2) == 1
    assert found(MODELS["llama4"]) == 1


def test_ranks_of_several_machines_share_on_each() -> None:
    assert found(MODELS["deepseek_v32"], tp=16, here=8) == 8
    assert found({"layers.0": full(1)}, tp=16, here=4) == 4


class Ranks:
    """Tensor-parallel ranks, as threads that wait for one another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number = number
        self._own = threading.local()
        self._said: list[Sequence[int]] = [()] * number
        self._wait = threading.Barrier(number, timeout=30)
        monkeypatch.setattr(replicas, "get_tp_group", self._group)
        monkeypatch.setattr(replicas, "_gather", self._gather)

    def _group(self) -> SimpleNamespace:
        return SimpleNamespace(rank_in_group=self._own.rank, world_size=self.number)

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self._said[self._own.rank] = numbers
        self._wait.wait()
        found = [list(map(int, said)) for said in self._said]
        self._wait.wait()
        return found

    def each(self, call: Callable[[int], SharedMemory | None]) -> list[SharedMemory | None]:
        def run(rank: int) -> SharedMemory | None:
            self._own.rank = rank
            return call(rank)

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(run, range(self.number)))


def test_ranks_in_a_row_get_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[tuple[list[int], int]] = []
    monkeypatch.setattr(SharedMemory, "prefer", lambda self, *args: nodes.append(args))
    ranks = Ranks(monkeypatch, 4)
    memories = ranks.each(lambda rank: share_memory(2, NBYTES - 4096, NBYTES, rank % 2))
    places = []
    for number, memory in enumerate(memories):
        assert memory is not None
        places.append((memory.place, memory.places))
        if not memory.place:
            memory.mapping[:1] = bytes([number])
    assert places == [(0, 2), (1, 2)] * 2
    assert [memory.mapping[0] for memory in memories if memory] == [0, 0, 2, 2]
    assert nodes == [([0, 1], NBYTES - 4096)] * 2


def test_nobody_shares_where_one_rank_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, opened = Ranks(monkeypatch, 4), SharedMemory.open

    def open_here(rank: int, offer: MemoryOffer, *args: int) -> SharedMemory:
        if rank == 3:
            raise PermissionError("it is hidden")
        return opened(offer, *args)

    def share(rank: int) -> SharedMemory | None:
        return share_memory(2, NBYTES, NBYTES, -1)

    monkeypatch.setattr(
        SharedMemory, "open", lambda *args: partial(open_here, ranks._own.rank)(*args)
    )
    shared = [memory is not None for memory in ranks.each(share)]
    assert shared == [True, True, False, False]
    assert "no memory of rank 2 is in reach: it is hidden" in caplog.text
    assert "each rank keeps its own copy of what 2 ranks have" in caplog.text


def test_nobody_shares_where_the_system_gives_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> SharedMemory:
        raise OSError("not permitted")

    monkeypatch.setattr(SharedMemory, "make", refuse)
    ranks = Ranks(monkeypatch, 2)
    assert ranks.each(lambda rank: share_memory(2, NBYTES, NBYTES, -1)) == [None, None]
    assert "the system gives no shared memory: not permitted" in caplog.text
