"""How a vLLM worker's blocks are kept in a store that engines share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvconnect.cache.layout import Geometry, GroupGeometry, view_segments
from kvconnect.config import Config
from kvconnect.engines.vllm import tier_stores, translate
from kvconnect.errors import Incompatible
from kvconnect.tiers.backends.head_sharded import HeadShardedStore
from kvconnect.tiers.backends.memory import MemoryStore

BLOCKS, TOKENS, WIDTH = 4, 16, 72


def cache(slots: int, tp: int, rank: int) -> Any:
    """A worker of a model with 8 KV heads, whose view of a layer has so many of them."""
    view = torch.zeros(BLOCKS, slots, TOKENS, WIDTH, dtype=torch.uint8)
    spec = FullAttentionSpec(TOKENS, num_kv_heads=8 // tp, head_size=64, dtype=torch.uint8)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer0"])
    parallel = SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1, rank=rank)
    text = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": 8})
    model = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: 8)
    runs = view_segments(0, view.shape, view.stride(), 1, BLOCKS)
    return tier_stores._Cache(
        SimpleNamespace(parallel_config=parallel, model_config=model),  # type: ignore[arg-type]
        SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS),  # type: ignore[arg-type]
        {"layer0": view},
        Geometry((GroupGeometry(tuple(runs), BLOCKS),)),
    )


@pytest.mark.parametrize(
    ("slots", "tp", "rank", "shared"),
    [
        (8, 1, 0, True),
        (1, 8, 7, True),
        (16, 1, 0, False),  # as FlashInfer keeps NVFP4: K and V are heads of their own
        (2, 8, 0, False),  # what has the numbers of other heads must not go by them
        (2, 8, 7, False),
        (8, 2, 0, False),
    ],
)
def test_k_and_v_as_heads_of_their_own_are_for_engines_with_the_same_ranks(
    monkeypatch: pytest.MonkeyPatch, slots: int, tp: int, rank: int, shared: bool
) -> None:
    def nobody(*_: object) -> None:
        raise Incompatible("only engines of vLLM")

    monkeypatch.setattr(tier_stores, "records_for_all", nobody)
    monkeypatch.setattr(translate, "can_split_pages", lambda *_: False)
    monkeypatch.setattr(tier_stores, "make_remote", lambda *_, **__: MemoryStore(1 << 20))
    store = tier_stores._make_remote(
        cache(slots, tp, rank), {}, Config().replace(remote={"kind": "valkey"})
    )
    assert isinstance(store, HeadShardedStore) == shared
