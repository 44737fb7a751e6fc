"""vLLM's objects in KVConnect's words. The only file that changes with vLLM's version.

Written against vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry, view_segments
from kvconnect.cache.pages import LayerPages, layer_pages
from kvconnect.errors import ConfigError, Incompatible, Refused

if TYPE_CHECKING:
    from vllm.v1.request import Request


def is_traced(config: VllmConfig) -> bool:
    """Whether vLLM makes spans, and so has set OpenTelemetry up in its processes."""
    return config.observability_config.otlp_traces_endpoint is not None


def engines_beside(parallel: ParallelConfig) -> int:
    """Return how many data-parallel engines were started together, this one included.

    For models without experts, vLLM tells each engine that it is the only one; only this field
    still has the number. On several machines it counts those of all.
    """
    started: int = getattr(parallel, "elastic_ep_max_dp_size", None) or 1
    known: int = parallel.data_parallel_size
    return max(known, started)


def place(parallel: ParallelConfig) -> tuple[int, int]:
    """Return a worker's (pipeline rank, tensor rank)."""
    tensor = parallel.tensor_parallel_size
    return parallel.rank // tensor % parallel.pipeline_parallel_size, parallel.rank % tensor


def recompute_failed_loads(config: VllmConfig) -> None:
    """Have vLLM recompute blocks that could not be loaded, unless this is a decode engine.

    vLLM has one policy per engine, and its default is to fail the request. That is right for a
    hand-off, where recomputing hides a broken fleet, so ``kv_consumer`` keeps what is set. It is
    wrong for a cache: a block lost from the host tier is a miss. The scheduler reads this after
    it made the connector.
    """
    if config.kv_transfer_config.kv_role != "kv_consumer":
        config.kv_transfer_config.kv_load_failure_policy = "recompute"


def cache_groups(config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Return the plan's view of vLLM's KV-cache groups.

    Raises:
        ConfigError: a group whose cache is not addressed by blocks of tokens.
    """
    return tuple(_cache_group(group.kv_cache_spec) for group in config.kv_cache_groups)


def _cache_group(spec: KVCacheSpec) -> CacheGroup:
    layers = [spec]
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = list(spec.kv_cache_specs.values())
    kinds = {_attention(layer) for layer in layers}
    if len(kinds) > 1:
        raise ConfigError("model", type(spec).__name__, "its layers reach back differently far")
    return kinds.pop()


def _attention(spec: KVCacheSpec) -> CacheGroup:
    if getattr(spec, "non_causal", False):
        fix = "non-causal attention, whose KV no other prompt can use: run without KVConnect"
        raise ConfigError("model", type(spec).__name__, fix)
    # Exact types: subclasses of these reuse the fields but not the meaning of a block.
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return CacheGroup(spec.block_size)
    if type(spec) is SlidingWindowSpec:
        # Speculative decoding may keep, and compute again from, tokens just below the window.
        below = getattr(spec, "extra_retained_tokens", 0)
        return CacheGroup(spec.block_size, window=spec.sliding_window + below)
    if type(spec) is ChunkedLocalAttentionSpec:
        return CacheGroup(spec.block_size, chunk=spec.attention_chunk_size)
    raise ConfigError(
        "model",
        type(spec).__name__,
        "this kind of KV cache cannot be offloaded; run without KVConnect",
    )


def group_hashes(
    request: Request, groups: Sequence[CacheGroup], hash_tokens: int
) -> tuple[Sequence[bytes], ...]:
    """Return, per group, the hash of each full block. Hashes are chained, so the last one inside
    a block names the whole prefix."""
    hashes = request.block_hashes
    return tuple(
        hashes
        if group.block_tokens == hash_tokens
        else hashes[group.block_tokens // hash_tokens - 1 :: group.block_tokens // hash_tokens]
        for group in groups
    )


def is_of_tokens(request: Request) -> bool:
    """Whether a prompt is made of tokens alone. Where one has embeddings among them, its tokens
    there are all 0."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prompt_content(request: Request) -> bytes:
    """Return a digest of all that a prompt's KV depends on, beside the model.

    Raises:
        Refused: a prompt that is not made of tokens.
    """
    if not is_of_tokens(request):
        raise Refused("params", "prompts given as embeddings are not handed off")
    lora = request.lora_request
    parts = (
        lora.name if lora else None,
        request.cache_salt,
        [(item.identifier, str(item.mm_position)) for item in request.mm_features],
    )
    tokens = array("q", request.prompt_token_ids).tobytes()
    return hashlib.sha256(tokens + json.dumps(parts).encode()).digest()


def hash_block_tokens(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Return how many tokens one of vLLM's block hashes covers."""
    tokens: int = kv_cache.hash_block_size or config.cache_config.block_size
    return tokens


def computed_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield each scheduled request and how many of its tokens have KV after this step.

    Draft tokens do not count: they may be rejected and their KV overwritten.
    """
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for req_id, before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield req_id, before + scheduled[req_id] - len(drafts.get(req_id, ()))


def ended_well(request: Request) -> bool:
    """Whether a request that is over computed its whole prompt and was not aborted."""
    ends = (
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    )
    return request.status in ends


def backing_area(kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the one allocation behind all layers as uint8 ``[bytes]``, without copying.

    Raises:
        Incompatible: the layers do not share one allocation.
    """
    tensors = list(kv_caches.values())
    starts = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(starts) != 1:
        raise Incompatible(f"the KV cache lies in {len(starts)} allocations, expected one")
    area = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return area.set_(tensors[0].untyped_storage())


def cache_geometry(config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> Geometry:
    """Return where each group's blocks lie in the backing area.

    Raises:
        Incompatible: naming the layer whose bytes cannot be told from shape and strides.
    """
    groups = []
    for group in config.kv_cache_groups:
        if not group.layer_names:
            raise Incompatible("a pipeline stage without layers of some KV-cache group: use fewer")
        segments: list[ByteRun] = []
        for layer in group.layer_names:
            segments += _layer_segments(layer, kv_caches[layer], config.num_blocks)
        groups.append(GroupGeometry(tuple(segments), config.num_blocks))
    return Geometry(tuple(groups))


def _layer_segments(layer: str, view: torch.Tensor, num_blocks: int) -> tuple[ByteRun, ...]:
    offset = view.data_ptr() - view.untyped_storage().data_ptr()
    try:
        return view_segments(offset, view.shape, view.stride(), view.element_size(), num_blocks)
    except Incompatible as error:
        raise Incompatible(f"layer {layer}: {error}") from error


def cache_layers(
    config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], geometry: Geometry
) -> dict[str, tuple[int, int]]:
    """Return, per layer, its group and how many leading runs of the group hold all its bytes."""
    return {
        layer: (
            number,
            geometry.groups[number].reach(
                _layer_segments(layer, kv_caches[layer], config.num_blocks)
            ),
        )
        for number, group in enumerate(config.kv_cache_groups)
        for layer in group.layer_names
    }


def calls_layer_hooks(config: VllmConfig, forward_context: Any) -> bool:
    """Whether all attention layers that ever call the connector do so in this step.

    They do not from a graph of the whole forward, nor in a step that computes nothing; and layers
    of a draft model may run in a graph of their own.
    """
    whole = forward_context.cudagraph_runtime_mode is CUDAGraphMode.FULL
    computes = bool(forward_context.attn_metadata)
    return computes and not whole and config.speculative_config is None


def handoff_format(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, str | int]:
    """Return what must be equal on both sides of a hand-off, field by field.

    Block size, parallelism and layout are not in it: they may differ and are agreed upon apart.
    vLLM's version is not, either: what of it matters to the bytes is named here.
    """
    model = config.model_config
    first = next(iter(kv_caches.values()))
    return {
        "model": model.model.rstrip("/").rpartition("/")[2],
        "architecture": _architecture(model.hf_config.to_dict()),
        "dtype": str(first.dtype).removeprefix("torch."),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "packing": "+".join(sorted(packings(config))),
        "long_rope": int(any(model.max_model_len > most for most in long_ropes(model))),
        "tokens_ahead": max(
            getattr(group.kv_cache_spec, "extra_retained_tokens", 0)
            for group in cache.kv_cache_groups
        ),
    }


def _architecture(fields: Mapping[str, object]) -> str:
    """Return a digest of a model's configuration, where it is stored left out."""
    kept = {k: v for k, v in fields.items() if not k.startswith("_") and "version" not in k}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def long_ropes(model: ModelConfig) -> list[int]:
    """Return after how many tokens each kind of LongRoPE that a model has rotates otherwise: vLLM
    does so for all tokens, if there may be more than that."""
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]


def _backends(config: VllmConfig) -> list[Any]:
    found: list[Any] = get_current_attn_backends(config)
    return found


def packings(config: VllmConfig) -> set[str]:
    """Return the names of how the model's attention kernels arrange bytes inside a page."""
    return {_packing(config, backend) for backend in _backends(config)}


def _packing(config: VllmConfig, backend: Any) -> str:
    """Return the name of how a backend arranges bytes inside a page."""
    name: str = backend.get_name()
    if name != "CPU_ATTN":
        return name
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = config.model_config
    block, head = config.cache_config.block_size, model.get_head_size()
    isa: str = _get_attn_isa(model.dtype, block, head, config.cache_config.cache_dtype)
    return f"{name}:{isa}"


def can_split_pages(config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether a page is tokens one after the other, so that it may be cut between two: not
    where the CPU kernels interleave them, nor where scales of a whole page are packed in."""
    interleaved = any(backend.get_name() == "CPU_ATTN" for backend in _backends(config))
    opaque = any(view.dtype == torch.uint8 for view in kv_caches.values())
    return not interleaved and not opaque


def handoff_pages(
    cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[tuple[LayerPages, ...], ...]:
    """Return, per group, each layer's pages. Layers that share another layer's cache are left
    out: their bytes are that layer's.

    Raises:
        Incompatible: a layer whose heads and tokens cannot be told from shape and strides, or
            layers of one group that differ.
    """
    base = next(iter(kv_caches.values())).untyped_storage().data_ptr()
    groups = []
    for group in cache.kv_cache_groups:
        pages: dict[int, LayerPages] = {}
        for layer in group.layer_names:
            view = kv_caches[layer]
            pages.setdefault(
                view.data_ptr(),
                layer_pages(
                    layer,
                    view.data_ptr() - base,
                    (view.shape, view.stride(), view.element_size()),
                    cache.num_blocks,
                    group.kv_cache_spec.block_size,
                ),
            )
        shapes = {(p.heads, p.tokens, p.row_bytes) for p in pages.values()}
        if len(shapes) > 1:
            raise Incompatible(f"layers of one KV-cache group differ in (heads, ...): {shapes}")
        groups.append(tuple(pages.values()))
    return tuple(groups)


def total_kv_heads(config: VllmConfig, spec: KVCacheSpec) -> int:
    """Return the KV heads of a layer over all ranks; 1 where every rank has the same.

    Raises:
        Incompatible: layers differ in them, and a rank's share does not say which these are.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if isinstance(spec, MLAAttentionSpec):
        return 1
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    fields = model.hf_text_config.to_dict().items()
    named = {n for name, n in fields if name.endswith("key_value_heads") and isinstance(n, int)}
    totals = {int(model.get_total_num_kv_heads())} | named
    if len(totals) > 1:
        own = getattr(spec, "num_kv_heads", 0)
        totals = {total for total in totals if max(1, total // ranks) == own}
    if len(totals) != 1:
        raise Incompatible("layers differ in their KV heads")
    return totals.pop()
