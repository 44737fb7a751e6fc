"""KV caches as vLLM's own code makes them, in host memory: specs, groups, configuration, views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as Dtypes
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v41.compressor import CompressorStateCache as CompressorRing
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)

from kvconnect.engines.vllm import translate

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

BLOCKS = 5
Specs = dict[str, KVCacheSpec]


class Cache(NamedTuple):
    """A cache: vLLM's configuration of it, and each layer's view."""

    config: KVCacheConfig
    views: dict[str, torch.Tensor]


@cache
def _engine() -> VllmConfig:
    return VllmConfig()


def engine(block: int, layout: str = "BLHNC", cache_dtype: str = "auto") -> Any:
    """Return vLLM's configuration without a model, with blocks of ``block`` tokens."""
    config = _engine()
    config.cache_config.block_size = block
    config.cache_config.kv_cache_layout = layout
    config.cache_config.cache_dtype = cache_dtype  # type: ignore[assignment]
    config.cache_config.num_gpu_blocks_override = BLOCKS
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.compilation_config.static_forward_context.clear()
    return config


def make(specs: Specs, layout: str = "BLHNC", hybrid: bool = True, block: int = 64) -> Cache:
    """Group the layers, size the cache and view it as vLLM does, filled with random bytes."""
    config = engine(block, layout)
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    groups = get_kv_cache_groups(config, dict(specs))
    cache = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    raw = torch.randint(-128, 128, (cache.kv_cache_tensors[0].size,), dtype=torch.int8)
    views: dict[str, torch.Tensor] = {}
    for tensor in cache.kv_cache_tensors:
        spec = _spec_of(cache, tensor.layers[0])
        resolved = config.cache_config.get_resolved_kv_cache_layout()
        made = create_kv_cache_views(raw, spec, cache.num_blocks, resolved, tensor)
        views.update(zip(tensor.layers, made, strict=True))
    return Cache(cache, views)


def _spec_of(cache: KVCacheConfig, layer: str) -> KVCacheSpec:
    spec = next(g.kv_cache_spec for g in cache.kv_cache_groups if layer in g.layer_names)
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def area_of(cache: Cache) -> torch.Tensor:
    """Return the bytes that all views are of."""
    return translate.backing_area(cache.views)


def block_of(view: torch.Tensor, block: int) -> torch.Tensor:
    """Return the bytes of a block."""
    return view[block].clone(memory_format=torch.contiguous_format).view(torch.uint8)


# Specs of models -------------------------------------------------------------------------------


def latent(block: int, **changes: Any) -> KVCacheSpec:
    """What a layer of latent attention says."""
    fields = {
        "kv_cache_dtype": "auto",
        "head_size": 576,
        "sliding_window": None,
        "indexer": None,
        "non_causal_multi_token_decode": False,
        "topk_buffer_width": None,  # since vLLM 0.33
    }
    layer = SimpleNamespace(**(fields | changes))
    config = engine(block, cache_dtype=layer.kv_cache_dtype)
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    try:
        return MLAAttention.get_kv_cache_spec(layer, config)
    finally:
        config.model_config = None


def deepseek_v32(dtype: str = "auto", layers: int = 3) -> Specs:
    """Latent attention with its indexer's cache in each layer; also GLM-5."""
    specs: Specs = {}
    for number in range(layers):
        specs[f"model.layers.{number}.attn"] = latent(64, kv_cache_dtype=dtype, indexer=object())
        with set_current_vllm_config(config := engine(64)):
            name = f"model.layers.{number}.indexer.k_cache"
            indexer = DeepseekV32IndexerCache(132, torch.uint8, name, config.cache_config)
            specs[name] = indexer.get_kv_cache_spec(config)
    return specs


def deepseek_v4(bounded_replay: bool = False) -> Specs:
    """Windows of latent attention, compressed attention by 4 and by 128, its indexer, and the
    states of the compressors."""
    specs: Specs = {}
    for number, ratio in enumerate((1, 4, 128, 4, 128)):
        config = engine(256, cache_dtype="fp8_ds_mla")
        with set_current_vllm_config(config):
            name = f"model.layers.{number}"
            caches = config.cache_config
            kept: dict[str, Any] = {
                "swa": DeepseekV4SWACache(
                    512, 128, torch.uint8, f"{name}.swa", caches, bounded_replay=bounded_replay
                )
            }
            if ratio > 1:
                width = 2 * 512 * (2 if ratio == 4 else 1)
                kept["state"] = CompressorStateCache(width, torch.float32, ratio, f"{name}.state")
                layer = SimpleNamespace(
                    compress_ratio=ratio,
                    kv_cache_dtype="fp8_ds_mla",
                    head_dim=512,
                    kv_cache_torch_dtype=torch.uint8,
                )
                spec = DeepseekV4Attention.get_kv_cache_spec(layer, config)
                assert spec is not None
                specs[f"{name}.attn"] = spec
            if ratio == 4:
                kept["indexer"] = DeepseekV4IndexerCache(
                    132, torch.uint8, f"{name}.indexer", caches, ratio
                )
            specs |= {f"{name}.{n}": each.get_kv_cache_spec(config) for n, each in kept.items()}
    return specs


def compressor_ring() -> KVCacheSpec:
    """The ring of keys that DeepSeek V4.1 has not compressed yet."""
    with set_current_vllm_config(config := engine(256)):
        return CompressorRing(64, torch.float32, "ring").get_kv_cache_spec(config)


def states(
    kind: str,
    shapes: Iterable[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    beside: KVCacheSpec | None = None,
) -> KVCacheSpec:
    """What a recurrent layer says whose states vLLM keeps at boundaries.

    Args:
        kind: name in :class:`MambaAttentionBackendEnum`.
        shapes: of the parts of a state.
        dtypes: of these parts.
        beside: the attention layers' spec, whose pages are as large as vLLM makes a state's.
    """
    layer = SimpleNamespace(
        get_state_shape=lambda: shapes,
        get_state_dtype=lambda: dtypes,
        mamba_type=MambaAttentionBackendEnum[kind],
        is_kv_cache_tp_replicated=False,
    )
    config = engine(64)
    config.cache_config.mamba_block_size = beside.block_size if beside else 64
    config.cache_config.mamba_page_size_padded = beside.page_size_bytes if beside else None
    config.cache_config.mamba_cache_mode = "align"
    spec = MambaBase.get_kv_cache_spec(layer, config)  # type: ignore[arg-type]
    assert spec is not None
    return spec


def hybrid(recurrent: KVCacheSpec, attention: KVCacheSpec) -> Specs:
    """Three recurrent layers for each layer of attention."""
    kinds = (recurrent, recurrent, recurrent, attention) * 2
    return {f"model.layers.{number}": spec for number, spec in enumerate(kinds)}


def mamba1(beside: KVCacheSpec | None = None) -> KVCacheSpec:
    """A convolution's state and a Mamba layer's."""
    shapes = Shapes.mamba1_state_shape(1, 64, 16, 4)
    return states("MAMBA1", shapes, Dtypes.mamba1_state_dtype(BF16, "auto", "auto"), beside)


def mamba2(beside: KVCacheSpec) -> KVCacheSpec:
    """A convolution's state and a Mamba-2 layer's, whose type may be another one."""
    shapes = Shapes.mamba2_state_shape(1, 64, 1, 4, 16, 16, 4)
    return states("MAMBA2", shapes, Dtypes.mamba2_state_dtype(BF16, "auto", "float32"), beside)


def gated_delta(beside: KVCacheSpec) -> KVCacheSpec:
    """A convolution's state and that of a gated delta net."""
    shapes = Shapes.gated_delta_net_state_shape(1, 2, 4, 16, 16, 4)
    dtypes = Dtypes.gated_delta_net_state_dtype(BF16, "auto", "float32")
    return states("GDN_ATTN", shapes, dtypes, beside)


def kimi_delta(beside: KVCacheSpec) -> KVCacheSpec:
    """A convolution's state and that of Kimi's delta attention."""
    shapes = Shapes.kda_state_shape(1, 4, 16)
    return states("GDN_ATTN", shapes, Dtypes.kda_state_dtype(BF16, "auto"), beside)


def hidden_states() -> Specs:
    """Full attention and a layer that keeps hidden states for extraction."""
    with set_current_vllm_config(config := engine(64)):
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        try:
            layer = SimpleNamespace(num_heads=3, head_size=48, kv_cache_torch_dtype=torch.bfloat16)
            spec = CacheOnlyAttentionLayer.get_kv_cache_spec(layer, config)
        finally:
            config.model_config = None
    return {"layers.0": full(), "layers.1": full(), "hidden": spec}


def full(heads: int = 2, head: int = 32, **fields: Any) -> FullAttentionSpec:
    """Full attention in blocks of 64 tokens."""
    fields = {"dtype": torch.bfloat16, "block_size": 64} | fields
    return FullAttentionSpec(num_kv_heads=heads, head_size=head, **fields)


def window(heads: int = 2, head: int = 32, tokens: int = 100, **fields: Any) -> SlidingWindowSpec:
    """Attention to the last tokens, in blocks of 64."""
    return SlidingWindowSpec(
        block_size=64,
        num_kv_heads=heads,
        head_size=head,
        dtype=torch.bfloat16,
        sliding_window=tokens,
        **fields,
    )


def mixed(local: KVCacheSpec, whole: KVCacheSpec) -> Specs:
    """Two local layers for each layer of full attention."""
    kinds = (local, local, whole) * 2
    return {f"model.layers.{number}": spec for number, spec in enumerate(kinds)}


def with_head(target: Specs, head: KVCacheSpec) -> Specs:
    """A model and its draft head, whose layer vLLM numbers like one more of the model."""
    return {**target, f"model.layers.{len(target)}": head}


CHUNKS = ChunkedLocalAttentionSpec(
    block_size=64, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, attention_chunk_size=192
)
SINKS = SinkFullAttentionSpec(
    block_size=64, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sink_len=64
)
NVFP4 = full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4, state_content_bytes=36)
SCALED = full(
    dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=72
)
TURBO = full(
    dtype=torch.uint8,
    kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC,
    num_head_slots=2,
    state_content_bytes=40,
)

BF16 = torch.bfloat16

LLAMA: Specs = {f"model.layers.{n}": full() for n in range(3)}

MODELS: Mapping[str, Specs] = {
    "llama": LLAMA,
    "llama4": mixed(CHUNKS, full()),
    "gemma3": mixed(window(), full()),
    "gemma3 with several draft modules": mixed(window(extra_retained_tokens=3), full()),
    "gemma4": mixed(window(heads=4, head=32), full(heads=2, head=128)),
    "mimo": mixed(window(heads=8), full(heads=4)),
    "mimo with K != V": mixed(window(heads=8, head_size_v=16), full(heads=4, head_size_v=16)),
    "gemma3 with EAGLE": with_head(mixed(window(), full()), full()),
    "gemma4 with EAGLE": with_head(mixed(window(heads=4, head=32), full(head=128)), full(head=64)),
    "llama with wider EAGLE": with_head(
        {f"model.layers.{n}": full() for n in range(3)}, full(2, 64)
    ),
    "llama with EAGLE of more heads": with_head(
        {f"model.layers.{n}": full() for n in range(3)}, full(4)
    ),
    "deepseek_v32": deepseek_v32(),
    "deepseek_v32 with MTP": deepseek_v32(layers=4),
    "glm5 in fp8": deepseek_v32("fp8_ds_mla"),
    "sliding latent": mixed(latent(64, sliding_window=100), latent(64)),
    "deepseek_v4": deepseek_v4(),
    "longcat": {f"model.layers.{n}.attn.{part}": latent(64) for n in range(2) for part in (0, 1)},
    "mamba": {f"model.layers.{n}": mamba1() for n in range(3)},
    "jamba": hybrid(mamba1(full(4)), full(4)),
    "granite 4": hybrid(mamba2(full(4)), full(4)),
    "olmo hybrid": hybrid(gated_delta(full(4)), full(4)),
    "kimi linear": hybrid(kimi_delta(latent(64)), latent(64)),
    "openpangu": {f"layers.{n}": SINKS for n in range(3)},
    "hidden states": hidden_states(),
    "nvfp4": {f"layers.{n}": NVFP4 for n in range(2)} | {"layers.2": full()},
    "int8 with scales": {f"layers.{n}": SCALED for n in range(3)},
    "turboquant": {f"layers.{n}": TURBO for n in range(2)} | {"layers.2": full()},
}
"""Per model, what its layers say; those with code of their own by that code."""
