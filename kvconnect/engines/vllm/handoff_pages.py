"""Describes the pages of vLLM's KV cache for hand-offs: rows of heads and tokens, or blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    iter_layer_specs,
)

from kvconnect.cache.pages import LayerPages, layer_pages
from kvconnect.disaggregation.sessions import GroupPages
from kvconnect.engines.vllm import translate
from kvconnect.errors import Incompatible
from kvconnect.protocol.messages import GroupHello

Views = Mapping[str, torch.Tensor]


def handoff_pages(cache: KVCacheConfig, kv_caches: Views) -> tuple[GroupPages, ...]:
    """Return, per group, each layer's pages. Layers that share another layer's cache are left out.

    A block of a group that is moved whole is one row, of one head: this rank's part.

    Raises:
        Incompatible: a layer's shape and strides do not tell its heads and tokens, or a block that
            has to be moved whole lies in several pieces.
    """
    whole = whole_groups(cache, kv_caches)
    return tuple(
        tuple(
            _whole_page(layer, kv_caches[layer], cache.num_blocks)
            if is_whole
            else _page(layer, kv_caches[layer], cache.num_blocks, group)
            for layer in _own_layers(group, kv_caches)
        )
        for group, is_whole in zip(cache.kv_cache_groups, whole, strict=True)
    )


def whole_groups(cache: KVCacheConfig, kv_caches: Views) -> tuple[bool, ...]:
    """Return for each group whether its blocks are moved whole, since there are no rows that all
    of its layers have: layers differ in their heads, or a row holds several tokens."""
    return tuple(
        not isinstance(group.kv_cache_spec, MambaSpec)
        and not _has_rows(group, kv_caches, cache.num_blocks)
        for group in cache.kv_cache_groups
    )


def _has_rows(group: KVCacheGroupSpec, kv_caches: Views, num_blocks: int) -> bool:
    ratios = {getattr(s, "tokens_per_state", 1) for s in iter_layer_specs(group.kv_cache_spec)}
    if ratios != {1}:
        return False
    layers = _own_layers(group, kv_caches)
    pages = [_page(layer, kv_caches[layer], num_blocks, group) for layer in layers]
    return len({(page.heads, page.tokens) for page in pages}) == 1


def whole_format(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Views
) -> dict[str, str | int]:
    """Return the fields that must be equal on both sides of a hand-off if blocks are moved whole:
    everything but the layers' bytes that a block depends on."""
    whole = zip(cache.kv_cache_groups, whole_groups(cache, kv_caches), strict=True)
    sizes = [str(group.kv_cache_spec.block_size) for group, is_whole in whole if is_whole]
    if not sizes:
        return {}
    return {
        "block_size": "+".join(sizes),
        "kv_cache_layout": str(config.cache_config.kv_cache_layout),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
    }


def _own_layers(group: KVCacheGroupSpec, kv_caches: Views) -> list[str]:
    """Return the first layer of each cache of a group."""
    own = {kv_caches[layer].data_ptr(): layer for layer in reversed(group.layer_names)}
    return [layer for layer in group.layer_names if own[kv_caches[layer].data_ptr()] == layer]


def _page(layer: str, view: torch.Tensor, num_blocks: int, group: KVCacheGroupSpec) -> LayerPages:
    is_state = isinstance(group.kv_cache_spec, MambaSpec)  # then it is a page of one token
    return layer_pages(
        layer,
        view.data_ptr() - view.untyped_storage().data_ptr(),
        (view.shape, view.stride(), view.element_size()),
        num_blocks,
        1 if is_state else group.kv_cache_spec.block_size,
    )


def _whole_page(layer: str, view: torch.Tensor, num_blocks: int) -> LayerPages:
    runs = translate.layer_segments(layer, view, num_blocks)
    if len(runs) > 1:
        raise Incompatible(
            f"layer {layer}: a block lies in {len(runs)} pieces and has to be moved as one: layers "
            "of its group differ in their heads, or a row holds several tokens"
        )
    (run,) = runs
    size = run.length
    return LayerPages(layer, run.offset, run.stride, size, size, heads=1, tokens=1, row_bytes=size)


def group_hellos(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Views, pages: Sequence[GroupPages]
) -> list[GroupHello]:
    """Return what this worker's Hello says of each group.

    Raises:
        Incompatible: layers of one group differ in their heads, or are not this rank's share.
    """
    ranks = config.parallel_config.tensor_parallel_size
    splittable = translate.can_split_pages(config, cache, kv_caches)
    found = []
    kinds, whole = translate.cache_groups(cache), whole_groups(cache, kv_caches)
    for number, (group, layers) in enumerate(zip(cache.kv_cache_groups, pages, strict=True)):
        kind, first, rows = kinds[number], layers[0], row_bytes(layers)
        each = rows if isinstance(rows, list) else [rows]
        total = ranks if whole[number] else total_kv_heads(config, group.kv_cache_spec)
        if first.heads != max(1, total // ranks):
            raise Incompatible(
                f"a page has {first.heads} heads, the model {total} on {ranks} ranks"
            )
        block_tokens = 1 if kind.states else kind.block_tokens
        found.append(
            GroupHello(
                block_tokens=block_tokens,
                page_tokens=block_tokens if whole[number] else first.tokens,
                window=kind.window,
                chunk=kind.chunk,
                layers=[page.name for page in layers],
                kv_heads=total,
                heads=first.heads,
                row_bytes=max(each),
                layer_row_bytes=each if len(each) > 1 else [],
                order="HNC" if first.head_stride >= first.token_stride else "NHC",
                splittable=splittable and not kind.states and not whole[number],
            )
        )
    return found


def row_bytes(layers: Sequence[LayerPages]) -> int | list[int]:
    """Return the bytes of a row of a group's layers, or of each layer if they differ."""
    sizes = [page.row_bytes for page in layers]
    return sizes if len(set(sizes)) > 1 else sizes[0]


def total_kv_heads(config: VllmConfig, spec: KVCacheSpec) -> int:
    """Return the number of KV heads of a group's layers over all ranks; 1 for MLA, whose ranks
    share one. A rank's part of a state counts as one head.

    Raises:
        Incompatible: layers have different numbers, and this rank's share fits none or several.
    """
    totals = {_layer_heads(config, layer) for layer in iter_layer_specs(spec)}
    if len(totals) != 1:
        raise Incompatible(f"layers of one group differ in their KV heads: {sorted(totals)}")
    return totals.pop()


def _layer_heads(config: VllmConfig, spec: Any) -> int:
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    if isinstance(spec, HiddenStateCacheSpec) and ranks == 1:
        return int(spec.num_kv_heads)
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        return 1
    if isinstance(spec, MambaSpec):
        return int(ranks)
    fields = model.hf_text_config.to_dict().items()
    named = {n for name, n in fields if name.endswith("key_value_heads") and isinstance(n, int)}
    totals = {int(model.get_total_num_kv_heads())} | named
    if len(totals) > 1:
        own = getattr(spec, "num_kv_heads", 0)
        totals = {total for total in totals if max(1, total // ranks) == own}
    if len(totals) != 1:
        raise Incompatible("layers differ in their KV heads")
    return totals.pop()
