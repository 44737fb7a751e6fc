"""Every spec that vLLM's own code makes: what is served, where its bytes are, what is refused.

Caches are grouped, sized and viewed by vLLM's code, so the views are the truth here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    RSWASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.layout import GroupGeometry
from kvconnect.engines.vllm import handoff_pages, translate
from kvconnect.engines.vllm.cache_specs import behaves_like, cache_group, packs_pages
from kvconnect.errors import Incompatible, refusing
from tests.unit.engines import vllm_caches
from tests.unit.engines.vllm_caches import MODELS, area_of, block_of, full, make

TWO_LAYOUTS = {"deepseek_v4": ["BLHNC"]}
"""Layouts to try; vLLM packs these models' pages in one only."""
UNMERGED = {
    "deepseek_v4",
    "sliding latent",
    "jamba",
    "granite 4",
    "olmo hybrid",
    "kimi linear",
}
"""Models whose groups vLLM 0.32 cannot merge."""

CASES = [
    (model, layout, hybrid)
    for model in MODELS
    for layout in TWO_LAYOUTS.get(model, ["LBHNC", "BLHNC"])
    for hybrid in (True, False)
    if hybrid or model not in UNMERGED
]


def group_of(spec: KVCacheSpec, **fields: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(["layer"], spec, **fields)


# Reach -----------------------------------------------------------------------------------------


def manager_of(spec: KVCacheSpec) -> Any:
    pool = BlockPool(16, True, spec.block_size)
    kept = {
        "block_pool": pool,
        "enable_caching": True,
        "kv_cache_group_id": 0,
        "scheduler_block_size": spec.block_size,
    }
    return get_manager_for_kv_cache_spec(spec, 64, 4096, **kept)  # type: ignore[arg-type]


def reaches_as_its_manager(found: CacheGroup, spec: KVCacheSpec) -> bool:
    manager, size = manager_of(spec), spec.block_size
    return found.block_tokens == manager.block_size and all(
        found.first_block(tokens) == max(0, manager.get_num_skipped_tokens(tokens)) // size
        for tokens in range(0, 6 * size + 300)
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_group_keeps_what_vllm_keeps(model: str) -> None:
    cache = make(MODELS[model])
    found = translate.cache_groups(cache.config)
    for group, kept in zip(cache.config.kv_cache_groups, found, strict=True):
        for spec in iter_layer_specs(group.kv_cache_spec):
            assert reaches_as_its_manager(kept, spec)
            # Control: a reach that is one block shorter or longer is noticed.
            if kept.window is not None:
                for other in (kept.window - kept.block_tokens, kept.window + kept.block_tokens):
                    wrong = dataclasses.replace(kept, window=other)
                    assert not reaches_as_its_manager(wrong, spec)


def test_a_load_fills_every_group_that_vllm_then_does_not_zero() -> None:
    """vLLM takes a connector to load all groups but those that no other request can use."""
    for specs in MODELS.values():
        config = make(specs).config
        served = range(len(translate.cache_groups(config)))
        assert list(config.prefix_cacheable_group_ids) == list(served)
    # Control: such a group is left out, and refused at start.
    groups = [*config.kv_cache_groups, group_of(vllm_caches.compressor_ring())]
    more = dataclasses.replace(config, kv_cache_groups=groups)
    assert list(more.prefix_cacheable_group_ids) == list(range(len(groups) - 1))
    with pytest.raises(Incompatible, match="one ring per request"):
        translate.cache_groups(more)


# Bytes -----------------------------------------------------------------------------------------


def slot(area: torch.Tensor, group: GroupGeometry, block: int) -> torch.Tensor:
    """The bytes of a block as the host tier keeps them."""
    runs = [area[s.offset + block * s.stride :][: s.length] for s in group.segments]
    return torch.cat(runs)


def load(area: torch.Tensor, group: GroupGeometry, block: int, kept: torch.Tensor) -> None:
    start = 0
    for s in group.segments:
        area[s.offset + block * s.stride :][: s.length] = kept[start : start + s.length]
        start += s.length


@pytest.mark.parametrize(("model", "layout", "hybrid"), CASES)
def test_a_block_is_stored_and_loaded_whole_and_alone(
    model: str, layout: str, hybrid: bool
) -> None:
    cache = make(MODELS[model], layout, hybrid)
    geometry = translate.cache_geometry(cache.config, cache.views)
    area = area_of(cache)
    for group, bytes_of in zip(cache.config.kv_cache_groups, geometry.groups, strict=True):
        views = [cache.views[layer] for layer in group.layer_names]
        area.random_()  # groups lie over one another
        before = [[block_of(view, b) for b in range(vllm_caches.BLOCKS)] for view in views]
        assert bytes_of.block_bytes == sum(each[0].numel() for each in before)
        load(area, bytes_of, 3, slot(area, bytes_of, 1))
        for view, old in zip(views, before, strict=True):
            assert torch.equal(block_of(view, 3), old[1])
            assert not torch.equal(old[3], old[1])  # control: block 3 was another one
            assert all(torch.equal(block_of(view, b), old[b]) for b in (0, 1, 2, 4))


def test_a_spec_that_says_other_bytes_than_its_view_has_is_refused() -> None:
    cache = make(MODELS["deepseek_v32"])
    translate.cache_geometry(cache.config, cache.views)
    name = "model.layers.1.indexer.k_cache"
    cache.views[name] = cache.views[name][..., :128]
    with pytest.raises(Incompatible, match=rf"{name}: .* 8192 bytes, MLAAttentionSpec says 8448"):
        translate.cache_geometry(cache.config, cache.views)


def test_a_layer_that_shares_a_cache_adds_no_bytes() -> None:
    """As vLLM adds it: to its target's group, without a spec of its own."""
    cache = make(MODELS["deepseek_v32"])
    (alone,) = translate.cache_geometry(cache.config, cache.views).groups
    cache.config.kv_cache_groups[0].layer_names.append("shared")
    cache.views["shared"] = cache.views["model.layers.0.attn"]
    (both,) = translate.cache_geometry(cache.config, cache.views).groups
    assert both == alone
    (pages,) = handoff_pages.handoff_pages(cache.config, cache.views)
    assert "shared" not in [page.name for page in pages]


@pytest.mark.parametrize(
    ("model", "packed"),
    [("llama", False), ("deepseek_v32", False), ("glm5 in fp8", False)]
    + [(name, True) for name in ("nvfp4", "int8 with scales", "turboquant", "deepseek_v4")],
)
def test_pages_with_scales_are_moved_whole(model: str, packed: bool) -> None:
    groups = make(MODELS[model]).config.kv_cache_groups
    assert packs_pages(group.kv_cache_spec for group in groups) == packed


# Refused ---------------------------------------------------------------------------------------

PLAIN = {"block_size": 64, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
BOUNDED = vllm_caches.deepseek_v4(bounded_replay=True)["model.layers.0.swa"]


@pytest.mark.parametrize(
    ("spec", "cause", "fix"),
    [
        (RSWASpec(rswa_window=64, **PLAIN), "where the prompt ended", "run without"),
        (CrossAttentionSpec(**PLAIN), "audio or image", "run without"),
        (EncoderOnlyAttentionSpec(**PLAIN), "no manager", "run without"),
        (HiSparseHotSpec(block_size=64, page_size=64, blocks_per_request=2), "Hot", "run without"),
        (HiSparseResidentSpec(block_size=64, page_size=64), "Resident", "run without"),
        (vllm_caches.compressor_ring(), "one ring per request", "run without"),
        (BOUNDED, "computes these blocks again", "--no-swa-bounded-replay"),
        (full(non_causal=True), "non-causal", "run without"),
        (full(block_size=64, tokens_per_state=128), "not a whole number of rows", "run without"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(
    spec: KVCacheSpec, cause: str, fix: str
) -> None:
    with pytest.raises(Incompatible) as refused, refusing("model tiny"):
        cache_group(group_of(spec))
    line = str(refused.value)
    assert line.startswith(f"kvconnect: model tiny is not usable: {type(spec).__name__}: ")
    assert cause in line and fix in line.rpartition(": ")[2] and "\n" not in line


@pytest.mark.parametrize(
    "fields",
    [
        {"role": KVCacheGroupRole.HISPARSE_SOURCE},
        {"role": KVCacheGroupRole.HISPARSE_INDEXER},
        {"host_resident": True},
        {"enable_kv_transfer": False},
    ],
)
def test_hisparse_groups_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Incompatible, match="HiSparse") as refused:
        cache_group(group_of(full(), **fields))
    assert "hisparse_config" in refused.value.fix
    assert cache_group(group_of(full())) == CacheGroup(64)  # control


def test_layers_of_one_group_must_reach_back_equally_far() -> None:
    cache = make(MODELS["deepseek_v32"])
    (group,) = cache.config.kv_cache_groups
    specs: dict[str, KVCacheSpec] = group.kv_cache_spec.kv_cache_specs
    specs["model.layers.1.attn"] = vllm_caches.latent(64, sliding_window=100)
    with pytest.raises(Incompatible, match="reach back differently far"):
        translate.cache_groups(cache.config)


# Specs that nobody has heard of -----------------------------------------------------------------


KVCacheSpecRegistry.get_manager_class(full())  # vLLM registers its own specs before others


class RenamedManager(FullAttentionManager):
    """Manages nothing differently."""

    def own_helper(self) -> int:
        return 1


class SkippingManager(FullAttentionManager):
    """Gives blocks up that full attention keeps."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // 2


@register_kv_cache_spec(RenamedManager, FullAttentionSpec)
@dataclasses.dataclass(frozen=True, kw_only=True)
class NewFullSpec(FullAttentionSpec):
    more: int = 0


@register_kv_cache_spec(SkippingManager, FullAttentionSpec)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippingSpec(FullAttentionSpec):
    pass


@register_kv_cache_spec(SlidingWindowManager, SlidingWindowSpec)
@dataclasses.dataclass(frozen=True, kw_only=True)
class NewWindowSpec(SlidingWindowSpec):
    pass


class Unregistered(KVCacheSpec):
    """Of no base that vLLM knows."""


def test_an_unknown_spec_is_served_if_vllm_manages_it_like_a_known_one() -> None:
    assert cache_group(group_of(NewFullSpec(**PLAIN))) == CacheGroup(64)
    new_window = NewWindowSpec(sliding_window=100, **PLAIN)
    assert cache_group(group_of(new_window)) == CacheGroup(64, window=100)
    # Control: it gives up blocks that KVConnect would count on, and is refused.
    skipping = SkippingSpec(**PLAIN)
    assert not reaches_as_its_manager(CacheGroup(64), skipping)
    with pytest.raises(Incompatible, match="SkippingSpec: SkippingManager"):
        cache_group(group_of(skipping))
    with pytest.raises(Incompatible, match="Unregistered: no manager"):
        cache_group(group_of(Unregistered(64)))


def test_a_private_method_counts_as_behaviour_and_the_constructor_does_not() -> None:
    constructs = type("Constructs", (FullAttentionManager,), {"__init__": lambda _: None})
    removes = type("Removes", (FullAttentionManager,), {"_remove_blocks_in_range": None})
    assert behaves_like(constructs, FullAttentionManager)
    assert not behaves_like(removes, FullAttentionManager)
    assert not behaves_like(FullAttentionManager, SlidingWindowManager)
