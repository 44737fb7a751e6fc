"""Examines vLLM's specs of KV caches: whether the blocks of a group can be shared by their hash.

A block can be kept and loaded if vLLM's own prefix cache would share it between requests. So the
class of a spec does not decide: the manager that hands out the group's blocks does, together with
what the spec says about itself. A subclass that nobody has heard of is served if vLLM manages its
blocks like those of full, sliding-window or chunked attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    iter_layer_specs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm.states import state_group
from kvconnect.errors import Incompatible

_RUN_WITHOUT = "run without KVConnect"


def cache_group(group: KVCacheGroupSpec) -> CacheGroup:
    """Return a group as the planners need it.

    Raises:
        Incompatible: the group's blocks cannot be kept for other requests. The message names the
            spec and the cause; ``fix`` has the way out.
    """
    hisparse = group.role is not KVCacheGroupRole.DEFAULT
    if hisparse or group.host_resident or not group.enable_kv_transfer:
        raise _refusal(
            group.kv_cache_spec,
            "HiSparse keeps these blocks in host memory itself",
            "leave hisparse_config out, or run without KVConnect",
        )
    kinds = {_examined(spec) for spec in iter_layer_specs(group.kv_cache_spec)}
    if len(kinds) != 1:
        raise _refusal(group.kv_cache_spec, "its layers reach back differently far", _RUN_WITHOUT)
    return kinds.pop()


def _examined(spec: KVCacheSpec) -> CacheGroup:
    """Return the reach of one layer's attention and its tokens per block."""
    manager = KVCacheSpecRegistry.get_manager_class(spec)
    if isinstance(spec, MambaSpec) and manager and behaves_like(manager, MambaManager):
        return state_group(spec)
    known = next((kind for kind in _REACH if manager and behaves_like(manager, kind)), None)
    if known is None or not isinstance(spec, AttentionSpec):
        named = manager.__name__ if manager else "no manager"
        raise _refusal(spec, f"{named} does not manage token blocks", *_advice(spec))
    if getattr(spec, "non_causal", False):
        raise _refusal(spec, "non-causal attention, whose KV no other prompt can use", _RUN_WITHOUT)
    if not spec.prefix_cacheable:
        replay = "start vLLM with --no-swa-bounded-replay, or run without KVConnect"
        bounded = getattr(spec, "bounded_replay", False)
        fix = replay if bounded else _RUN_WITHOUT
        raise _refusal(spec, "vLLM itself computes these blocks again after a hit", fix)
    if spec.block_size < 1 or spec.block_size % spec.tokens_per_state or spec.page_size_bytes < 1:
        said = f"{spec.block_size} tokens, {spec.tokens_per_state} per row"
        raise _refusal(spec, f"a block of {said} is not a whole number of rows", _RUN_WITHOUT)
    return _REACH[known](spec)


def behaves_like(manager: type, known: type) -> bool:
    """Return whether a manager class is ``known``, or derives from it and overrides no method or
    attribute of it but the constructor."""
    if known not in manager.__mro__:
        return False
    derived = manager.__mro__[: manager.__mro__.index(known)]
    own = {name for kind in derived for name in vars(kind)} - {"_abc_impl"}
    return not any(hasattr(known, name) for name in own if not name.startswith("__"))


def _full(spec: Any) -> CacheGroup:
    return CacheGroup(spec.block_size)


def _window(spec: Any) -> CacheGroup:
    # Speculative decoding may recompute from tokens that vLLM keeps just before the window.
    return CacheGroup(spec.block_size, window=spec.sliding_window + spec.extra_retained_tokens)


def _chunk(spec: Any) -> CacheGroup:
    return CacheGroup(spec.block_size, chunk=spec.attention_chunk_size)


_REACH: dict[type, Callable[[Any], CacheGroup]] = {
    FullAttentionManager: _full,
    SlidingWindowManager: _window,
    ChunkedLocalAttentionManager: _chunk,
}
"""Managers whose blocks vLLM shares by hash, and what they keep of a prefix."""

_ADVICE: Mapping[str, tuple[str, ...]] = {
    "RSWASpec": (
        "KV of generated tokens depends on where the prompt ended",
        _RUN_WITHOUT,
    ),
    "CircularBufferSpec": (
        "one ring per request holds keys that are not compressed yet",
        _RUN_WITHOUT,
    ),
    "CrossAttentionSpec": (
        "its KV is of the request's audio or image, not of its tokens",
        _RUN_WITHOUT,
    ),
}


def _advice(spec: KVCacheSpec) -> tuple[str, ...]:
    names = (kind.__name__ for kind in type(spec).__mro__)
    return next((_ADVICE[name] for name in names if name in _ADVICE), (_RUN_WITHOUT,))


def _refusal(spec: KVCacheSpec, *parts: str) -> Incompatible:
    """Return the refusal of a spec; the last part is the way out."""
    *causes, fix = parts
    return Incompatible(f"{type(spec).__name__}: {', '.join(causes)}", fix)


def packs_pages(specs: Iterable[KVCacheSpec]) -> bool:
    """Return whether a page may hold something that does not belong to one of its tokens, such as
    scales or codes of several: those pages can be moved whole only."""
    plain = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
    return any(
        getattr(spec, "kv_quant_mode", KVQuantMode.NONE) not in plain
        or getattr(spec, "num_head_slots", None) is not None
        or getattr(spec, "tokens_per_state", 1) != 1
        for group in specs
        for spec in iter_layer_specs(group)
        if not isinstance(spec, MambaSpec)
    )
