"""Which ranks of vLLM share one host tier, and how they agree on its memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect.engines.vllm import kv_replicas as replicas
from kvconnect.engines.vllm.kv_replicas import kv_replicas, share_memory
from kvconnect.errors import Incompatible
from kvconnect.offload.shared_memory import MemoryOffer, SharedMemory
from tests.unit.engines.vllm_caches import MODELS, full, make, mixed, window

try:
    from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

PAGES = 1 << 16
LATENT = {
    *("deepseek_v32", "deepseek_v32 with MTP", "deepseek_v4", "glm5 in fp8"),
    *("sliding latent", "longcat"),
}


def found(
    specs: Any,
    tp: int = 8,
    heads: int = 2,
    dcp: int = 1,
    drafts: object = None,
    more: Mapping[str, Any] | None = None,
) -> int:
    cache = make(specs).config
    cache.kv_tp_replicas = kv_cache_groups_tp_replicas(cache.kv_cache_groups, tp, dcp)
    fields = {"num_attention_heads": 64, "num_key_value_heads": heads, **(more or {})}
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=lambda: fields),
        get_total_num_kv_heads=lambda: heads,
    )
    parallel = SimpleNamespace(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
    config: Any = SimpleNamespace(
        model_config=model, parallel_config=parallel, speculative_config=drafts
    )
    return kv_replicas(config, cache)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_of_latent_attention_share(model: str) -> None:
    # Heads are as many as ranks, so that only latent attention has replicas.
    assert found(MODELS[model], heads=8) == (8 if model in LATENT else 1)
    assert found(MODELS[model], tp=1) == 1


@pytest.mark.parametrize(("heads", "expected"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (3, 1)])
def test_ranks_with_the_same_head_share(heads: int, expected: int) -> None:
    each = max(1, heads // 8)
    specs = {"layers.0": full(each), "layers.1": full(each)}
    assert found(specs, heads=heads) == expected
    assert found(mixed(window(each), full(each)), heads=heads) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"num_global_key_value_heads": 4},
        {"attention_other_setting": {"num_attention_groups": 8}},
        {"block_configs": [{"attention": {"n_heads_in_group": 16}}]},
        {"num_key_value_heads": [2, 4]},
    ],
)
def test_ranks_do_not_share_where_layers_may_differ_in_their_heads(more: dict[str, Any]) -> None:
    assert found({"layers.0": full(1)}) == 4
    assert found({"layers.0": full(1)}, more=more) == 1


def test_ranks_do_not_share_where_their_heads_are_not_known() -> None:
    specs = {"layers.0": full(1)}
    assert found(specs) == 4
    assert found(specs, drafts=object()) == 1
    assert found(specs, dcp=2) == 1
    assert found({"layers.0": full(2)}) == 1
    assert found(MODELS["llama4"]) == 1


class Ranks:
    """Tensor-parallel ranks, as threads that wait for one another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number = number
        self._own = threading.local()
        self._said: list[Sequence[int]] = [()] * number
        self._wait = threading.Barrier(number, timeout=30)
        monkeypatch.setattr(replicas, "get_tp_group", self._group)
        monkeypatch.setattr(replicas, "_gather", self._gather)

    @property
    def rank(self) -> int:
        """That of this thread."""
        rank: int = self._own.rank
        return rank

    def _group(self) -> SimpleNamespace:
        return SimpleNamespace(rank_in_group=self.rank, world_size=self.number)

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self._said[self.rank] = numbers
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


def sizes(ranks: int) -> tuple[int, int]:
    return PAGES * ranks, PAGES * ranks - 4096


def test_ranks_in_a_row_get_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[tuple[list[int], int]] = []
    monkeypatch.setattr(SharedMemory, "prefer", lambda self, *args: nodes.append(args))
    ranks = Ranks(monkeypatch, 4)
    memories = ranks.each(lambda rank: share_memory(2, sizes, rank % 2))
    places = []
    for number, memory in enumerate(memories):
        assert memory is not None
        places.append((memory.place, memory.places, len(memory.mapping)))
        if not memory.place:
            memory.mapping[:1] = bytes([number])
    assert places == [(0, 2, 2 * PAGES), (1, 2, 2 * PAGES)] * 2
    assert [memory.mapping[0] for memory in memories if memory] == [0, 0, 2, 2]
    assert nodes == [([0, 1], 2 * PAGES - 4096)] * 2


def test_ranks_of_each_machine_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(monkeypatch, 8)
    monkeypatch.setattr(replicas, "_machine", lambda: (0, 0, 0, 1, 1, 2, 2, 2)[ranks.rank])
    memories = ranks.each(lambda rank: share_memory(4, sizes, -1))
    found = [(memory.place, memory.places) if memory else None for memory in memories]
    assert found == [(0, 3), (1, 3), (2, 3), None, None, (0, 3), (1, 3), (2, 3)]
    assert not caplog.records, "one rank of a machine keeps nobody's copy"


def test_nobody_shares_where_one_rank_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, opened = Ranks(monkeypatch, 4), SharedMemory.open

    def open_here(offer: MemoryOffer, *args: int) -> SharedMemory:
        if ranks.rank == 3:
            raise PermissionError("it is hidden")
        return opened(offer, *args)

    monkeypatch.setattr(SharedMemory, "open", open_here)
    memories = ranks.each(lambda rank: share_memory(2, sizes, -1))
    assert [memory is not None for memory in memories] == [True, True, False, False]
    assert "no memory of rank 2 is in reach: it is hidden" in caplog.text
    assert "each of 2 ranks keeps its own copy of the same" in caplog.text


def test_nobody_shares_where_the_system_gives_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> SharedMemory:
        raise OSError("not permitted")

    monkeypatch.setattr(SharedMemory, "make", refuse)
    ranks = Ranks(monkeypatch, 2)
    assert ranks.each(lambda rank: share_memory(2, sizes, -1)) == [None, None]
    assert "the system gives no shared memory: not permitted" in caplog.text


def test_a_share_without_a_slot_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    assert ranks.each(lambda rank: share_memory(2, lambda _: (0, 0), -1)) == [None, None]


JOINS = """
import sys, torch.distributed as group
group.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
sys.stdin.read()
"""


def test_a_rank_that_does_not_register_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/store"
    with subprocess.Popen([sys.executable, "-c", JOINS, place], stdin=subprocess.PIPE):
        torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=2)
        try:
            world = torch.distributed.group.WORLD
            group = SimpleNamespace(rank_in_group=0, world_size=2, cpu_group=world)
            monkeypatch.setattr(replicas, "get_tp_group", lambda: group)
            monkeypatch.setattr(replicas, "_MEET_S", 0.5)
            monkeypatch.setattr(torch.distributed, "monitored_barrier", None)  # not of all groups
            with pytest.raises(Incompatible, match="did not register its KV cache"):
                share_memory(2, sizes, -1)
        finally:
            torch.distributed.destroy_process_group()


def test_containers_of_a_machine_are_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = replicas._machine()
    assert replicas._machine() == here
    monkeypatch.setattr(replicas, "_PROCESSES", tmp_path)  # the processes of another one
    assert replicas._machine() != here
