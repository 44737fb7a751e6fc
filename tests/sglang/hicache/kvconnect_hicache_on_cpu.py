"""An SGLang plugin that lets HiCache run on a CPU: with this folder on PYTHONPATH, its host memory
is not page-locked, it may take what the machine has, and its copies are plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.pool_host import base, common, mha
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    locked = f"{common.__name__}._cuda_host_register"
    HookRegistry.register(locked, _leave, HookType.REPLACE)
    base.host_memory_budget_bytes = lambda nbytes: nbytes  # keeps 10 GiB for others
    mha.transfer_kv_per_layer_direct_pf_lf = _load_layer
    mha.transfer_kv_all_layer_direct_lf_pf = _store_layers


def _leave(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    setattr(buffer, common._CUDA_HOST_REGISTERED_RANGES_ATTR, [])


def _load_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host pages ``[page, layer, token, ...]`` to one layer's tokens on the device."""
    pages, starts = _pages(src_indices, page_size), _starts(dst_indices, page_size)
    for page, start in zip(pages, starts, strict=True):
        for source, target in zip(src_ptrs, dst_ptrs, strict=True):
            place = target[start : start + page_size]
            place.copy_(source[page][layer_id].reshape(place.shape))


def _store_layers(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """The tokens of all layers on the device, K before V, to host pages."""
    layers = len(src_ptrs) // len(dst_ptrs)
    starts, pages = _starts(src_indices, page_size), _pages(dst_indices, page_size)
    for start, page in zip(starts, pages, strict=True):
        for number, source in enumerate(src_ptrs):
            place = dst_ptrs[number // layers][page][number % layers]
            place.copy_(source[start : start + page_size].reshape(place.shape))


def _starts(tokens: torch.Tensor, page: int) -> list[int]:
    return tokens[::page].tolist()


def _pages(tokens: torch.Tensor, page: int) -> list[int]:
    return (tokens[::page] // page).tolist()
