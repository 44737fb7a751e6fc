"""Translates vLLM's objects into KVConnect's. With ``cache_specs`` and ``handoff_pages``, the only
module to change for a new version of vLLM.

Written against vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode, ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)
from vllm.v1.request import RequestStatus

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry, view_segments
from kvconnect.engines.vllm.cache_specs import cache_group, packs_pages
from kvconnect.engines.vllm.states import state_format
from kvconnect.errors import Incompatible, Refused
from kvconnect.protocol.prompts import PromptIdentity, identify

if TYPE_CHECKING:
    from vllm.v1.request import Request


def is_traced(config: VllmConfig) -> bool:
    """Return whether vLLM records spans; it has then set up OpenTelemetry in its processes."""
    return config.observability_config.otlp_traces_endpoint is not None


def engines_beside(parallel: ParallelConfig) -> int:
    """Return how many data-parallel engines were started together, over all machines.

    For models without experts, vLLM sets ``data_parallel_size`` to 1 in each engine. Only
    ``elastic_ep_max_dp_size`` keeps the number.
    """
    started: int = getattr(parallel, "elastic_ep_max_dp_size", None) or 1
    known: int = parallel.data_parallel_size
    return max(known, started)


def engines_here(parallel: ParallelConfig) -> int:
    """Return how many of :func:`engines_beside` are on this machine; all of them where vLLM does
    not say. It says 1 to an engine without experts, and where something else starts one process for
    each engine. With Ray, it says how many are on the first machine."""
    alone = parallel.data_parallel_size == 1 or envs.VLLM_DP_SIZE > 1
    unsaid = alone or parallel.data_parallel_external_lb or parallel.data_parallel_backend == "ray"
    here: int = parallel.data_parallel_size_local
    return engines_beside(parallel) if unsaid else here


def place(parallel: ParallelConfig) -> tuple[int, int]:
    """Return a worker's (pipeline rank, tensor rank)."""
    tensor = parallel.tensor_parallel_size
    return parallel.rank // tensor % parallel.pipeline_parallel_size, parallel.rank % tensor


def recompute_failed_loads(config: VllmConfig) -> None:
    """Make vLLM recompute blocks whose load failed, unless this is a decode engine.

    vLLM has one policy per engine. Its default fails the request, which is wrong for a cache: a
    block lost from the host tier is a miss. For a hand-off, recomputing would hide a broken fleet,
    so a ``kv_consumer`` keeps its setting. vLLM reads the policy after it made the connector.
    """
    if config.kv_transfer_config.kv_role != "kv_consumer":
        config.kv_transfer_config.kv_load_failure_policy = "recompute"


def scheduled_cache(config: VllmConfig, cache: KVCacheConfig) -> KVCacheConfig:
    """Return the KV-cache configuration with the blocks that the scheduler counts. With decode
    context parallelism, each rank has a part of the tokens of every block."""
    ranks = config.parallel_config.decode_context_parallel_size
    if ranks == 1:
        return cache
    groups = [
        replace(group, kv_cache_spec=resolve_dcp_kv_cache_spec(group.kv_cache_spec, ranks))
        for group in cache.kv_cache_groups
    ]
    return replace(cache, kv_cache_groups=groups)


def cache_groups(config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Return vLLM's KV-cache groups as the planners need them.

    Raises:
        Incompatible: a group cannot be offloaded.
    """
    return tuple(cache_group(group) for group in config.kv_cache_groups)


def group_hashes(
    request: Request, groups: Sequence[CacheGroup], hash_tokens: int
) -> tuple[Sequence[bytes], ...]:
    """Return, per group, the hash of each full block. vLLM's hashes cover ``hash_tokens`` tokens
    and are chained: the last hash inside a block identifies the whole prefix. Blocks that no hash
    ends with have none: vLLM shares none of them."""
    hashes = request.block_hashes
    sizes = [divmod(group.block_tokens, hash_tokens) for group in groups]
    return tuple(
        hashes if every == 1 and not rest else () if rest else hashes[every - 1 :: every]
        for every, rest in sizes
    )


def is_of_tokens(request: Request) -> bool:
    """Return whether a prompt has token ids only. With embeddings, vLLM's token ids are 0 in their
    place."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prompt_identity(request: Request, adapter: str = "", media: str = "") -> PromptIdentity:
    """Return what a prompt's KV depends on, except the model. ``adapter``: what the files of the
    request's adapter contain. ``media``: what the engine makes of media.

    Raises:
        Refused: the prompt has embeddings.
    """
    if not is_of_tokens(request):
        raise Refused("params", "prompts given as embeddings are not handed off")
    lora = request.lora_request
    items = [(item.identifier, str(item.mm_position)) for item in request.mm_features]
    context = (
        (lora.name, adapter) if lora else None,
        request.cache_salt,
        [*items, media] if items else [],
    )
    return identify(request.prompt_token_ids, context)


def cached_tokens(request: Request) -> int:
    """Return how many tokens of a scheduled request's prompt the engine did not compute."""
    stats = request.prefill_stats  # None once it has output
    return stats.num_cached_tokens if stats is not None else 0


def report_cached_tokens(request: Request, tokens: int) -> None:
    """Have vLLM report ``tokens`` as the cached ones of a request without output."""
    if request.prefill_stats is not None:
        request.prefill_stats.num_cached_tokens = min(tokens, request.num_prompt_tokens)


def hash_block_tokens(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Return the number of tokens that one of vLLM's block hashes covers."""
    tokens: int = kv_cache.hash_block_size or config.cache_config.block_size
    return tokens


def computed_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield each scheduled request's id and the number of its tokens that have KV after the step.

    Draft tokens do not count: if they are rejected, their KV is overwritten. A new request may have
    some, too: vLLM gives it placeholders when one token of its prompt is left to compute.
    """
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    befores = [(request.req_id, request.num_computed_tokens) for request in new]
    befores += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for req_id, before in befores:
        yield req_id, before + scheduled[req_id] - len(drafts.get(req_id, ()))


def ended_well(request: Request) -> bool:
    """Return whether a finished request computed its whole prompt and was not aborted."""
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
    """Return where each group's blocks are in the backing area.

    Raises:
        Incompatible: a layer's shape and strides do not tell where its bytes are, they are not as
            many as its spec says, or a group has no layers on this worker.
    """
    groups = []
    for group in config.kv_cache_groups:
        if not group.layer_names:
            raise Incompatible("a pipeline stage without layers of some KV-cache group: use fewer")
        segments: list[ByteRun] = []
        for layer in group.layer_names:
            found = layer_segments(layer, kv_caches[layer], config.num_blocks)
            _check_bytes(layer, group.kv_cache_spec, sum(run.length for run in found))
            segments += found
        groups.append(GroupGeometry(tuple(segments), config.num_blocks))
    return Geometry(tuple(groups))


def layer_segments(layer: str, view: torch.Tensor, num_blocks: int) -> tuple[ByteRun, ...]:
    """Return where one layer's blocks are in the backing area.

    Raises:
        Incompatible: the layer's shape and strides do not tell.
    """
    offset = view.data_ptr() - view.untyped_storage().data_ptr()
    try:
        return view_segments(offset, view.shape, view.stride(), view.element_size(), num_blocks)
    except Incompatible as error:
        raise Incompatible(f"layer {layer}: {error}") from error


def _check_bytes(layer: str, spec: KVCacheSpec, found: int) -> None:
    """Raise :class:`Incompatible` unless a block has as many bytes as its spec says: the rest would
    neither be stored nor loaded."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        if layer not in spec.kv_cache_specs:
            return  # it shares another layer's cache
        spec = spec.kv_cache_specs[layer]
    if isinstance(spec, MambaSpec):
        wanted = spec.real_page_size_bytes
    else:
        wanted = spec.unpadded_page_size_bytes
    if found != wanted:
        said = f"{type(spec).__name__} says {wanted}"
        raise Incompatible(f"layer {layer}: a block has {found} bytes, {said}")


def cache_layers(
    config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], geometry: Geometry
) -> dict[str, tuple[int, int]]:
    """Return, per layer, (its group, how many leading runs of the group cover its bytes)."""
    return {
        layer: (
            number,
            geometry.groups[number].reach(
                layer_segments(layer, kv_caches[layer], config.num_blocks)
            ),
        )
        for number, group in enumerate(config.kv_cache_groups)
        for layer in group.layer_names
    }


def calls_layer_hooks(config: VllmConfig, forward_context: Any) -> bool:
    """Return whether every attention layer that has a hook calls the connector in this step.

    No layer does in a full CUDA graph or in a step that computes nothing. Layers of a draft model
    may run in a CUDA graph of their own.
    """
    whole = forward_context.cudagraph_runtime_mode is CUDAGraphMode.FULL
    computes = bool(forward_context.attn_metadata)
    return computes and not whole and config.speculative_config is None


def handoff_format(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, str | int]:
    """Return the fields that must be equal on both sides of a hand-off.

    Block size, parallelism and layout are left out: they may differ and are negotiated separately.
    vLLM's version is left out too: the fields name everything in it that changes the bytes.
    """
    model = config.model_config
    types = {str(view.dtype).removeprefix("torch.") for view in kv_caches.values()}
    specs = [each for g in cache.kv_cache_groups for each in iter_layer_specs(g.kv_cache_spec)]
    computed, quantization = str(model.dtype).removeprefix("torch."), online_quantization(model)
    return {
        "model": model.model.rstrip("/").rpartition("/")[2],
        "architecture": _architecture(model.hf_config.to_dict()),
        "dtype": "+".join(sorted(types)),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "packing": "+".join(sorted(packings(config))),
        "long_rope": int(any(model.max_model_len > most for most in long_ropes(model))),
        "tokens_ahead": max(getattr(spec, "extra_retained_tokens", 0) for spec in specs),
        **({"compute_dtype": computed} if types != {computed} else {}),
        **({"quantization": quantization} if quantization else {}),
        **state_format(config, cache),
    }


def online_quantization(model: ModelConfig) -> str:
    """Return how vLLM quantises weights as it loads them; "" if it does not, or if the checkpoint
    says how they are: vLLM has several names for one checkpoint's method."""
    told, given = model.model_arch_config.quantization_config, model.quantization_config
    method = "" if told else str(model.quantization or "")
    details = hashlib.sha256(repr(given).encode()).hexdigest()[:16] if given else ""
    return f"{method} {details}".strip()


def _architecture(fields: Mapping[str, object]) -> str:
    """Return a digest of a model's configuration without private fields and versions."""
    kept = {k: v for k, v in fields.items() if not k.startswith("_") and "version" not in k}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def long_ropes(model: ModelConfig) -> list[int]:
    """Return the original context length, in tokens, of each LongRoPE of a model. If an engine
    allows longer contexts, vLLM rotates all tokens differently."""
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
    """Return the names of the page formats of the model's attention backends."""
    return {_packing(config, backend) for backend in _backends(config)}


def _packing(config: VllmConfig, backend: Any) -> str:
    """Return the backend's name; for the CPU with its instruction set, which changes the pages."""
    name: str = backend.get_name()
    if name != "CPU_ATTN":
        return name
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = config.model_config
    block, head = config.cache_config.block_size, model.get_head_size()
    isa: str = _get_attn_isa(model.dtype, block, head, config.cache_config.cache_dtype)
    return f"{name}:{isa}"


def can_split_pages(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether a page can be cut between two tokens: not if CPU kernels interleave the tokens
    or if the page includes scales for all of its tokens."""
    interleaved = any(backend.get_name() == "CPU_ATTN" for backend in _backends(config))
    opaque = any(view.dtype == torch.uint8 for view in kv_caches.values())
    packed = packs_pages(group.kv_cache_spec for group in cache.kv_cache_groups)
    return not interleaved and not opaque and not packed
