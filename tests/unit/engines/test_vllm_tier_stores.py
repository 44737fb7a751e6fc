"""How a vLLM worker's blocks are kept in a store that engines share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvconnect.cache.layout import Geometry, GroupGeometry, view_segments
from kvconnect.engines.vllm import tier_stores, translate
from kvconnect.errors import ConfigError, Incompatible
from kvconnect.settings.stores import ValkeySettings
from kvconnect.tiers.backends.head_sharded import HeadShardedStore
from kvconnect.tiers.backends.memory import MemoryStore

BLOCKS, TOKENS, WIDTH = 4, 16, 72


def cache(slots: int, tp: int, rank: int, tokens: int = TOKENS) -> Any:
    """A worker of a model with 8 KV heads, whose view of a layer has so many of them."""
    view = torch.zeros(BLOCKS, slots, tokens, WIDTH, dtype=torch.uint8)
    spec = FullAttentionSpec(tokens, num_kv_heads=8 // tp, head_size=64, dtype=torch.uint8)
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


def nobody(*_: object) -> None:
    raise Incompatible("only engines of vLLM")


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
    monkeypatch.setattr(tier_stores, "records_for_all", nobody)
    monkeypatch.setattr(translate, "can_split_pages", lambda *_: False)
    monkeypatch.setattr(tier_stores, "make_remote", lambda *_, **__: MemoryStore(1 << 20))
    settings = ValkeySettings(address="cache-1:6379")
    store = tier_stores._make_remote(cache(slots, tp, rank), {}, settings, None)
    assert isinstance(store, HeadShardedStore) == shared


def test_pages_have_the_form_of_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the ranks are others. The form of whole blocks, which stores have, is another."""
    monkeypatch.setattr(tier_stores, "records_for_all", nobody)
    monkeypatch.setattr(translate, "can_split_pages", lambda *_: True)
    small, large = cache(8, 1, 0), cache(8, 1, 0, 2 * TOKENS)
    fields = {"blocks": [TOKENS]}, {"blocks": [2 * TOKENS]}
    whole = tier_stores._shared_form(small, fields[0])
    paged = tier_stores._shared_form(large, fields[1], 2)
    half = tier_stores._shared_form(cache(1, 8, 3, 2 * TOKENS), fields[1], 2)
    assert whole.fingerprint == paged.fingerprint == half.fingerprint
    assert tier_stores._shared_form(large, fields[1]).fingerprint != whole.fingerprint
    ((block,),) = whole.pages(small.geometry, 1)
    ((first, second),) = paged.pages(large.geometry, 2)
    for page in (first, second):
        assert [(it.number, it.nbytes) for it in page] == [(it.number, it.nbytes) for it in block]
    rows = TOKENS * WIDTH
    assert [it.runs for it in first] == [((2 * n * rows, rows),) for n in range(8)]
    assert [it.runs for it in second] == [((2 * n * rows + rows, rows),) for n in range(8)]


def test_pages_of_tokens_that_cannot_be_told_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_stores, "records_for_all", nobody)
    monkeypatch.setattr(translate, "can_split_pages", lambda *_: False)
    with pytest.raises(ConfigError, match=r"page_tokens=8 .*cannot be told apart"):
        tier_stores._shared_form(cache(8, 1, 0), {}, 2)
    tier_stores._shared_form(cache(8, 1, 0), {})  # control
