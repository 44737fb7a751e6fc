"""SGLang's KV pools in CPU memory, made by its own code, and what it lists of them to hand off."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import (
    build_kv_layer_ids,
    get_kv_transfer_buf_infos,
    is_mla_backend,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvconnect.engines.sglang.translate import Model
from kvconnect.types import Rank
from tests.sglang.linker_bench import (
    LAYERS,
    PAGE,
    PAGES,
    dsa_pool,
    mamba_pools,
    mha_pool,
    mla_pool,
    swa_pool,
)

ONE_RANK = Rank(0, 1, 0, 1)
FULL = frozenset({ComponentType.FULL})
FULL_SWA = frozenset({ComponentType.FULL, ComponentType.SWA})
FULL_MAMBA = frozenset({ComponentType.FULL, ComponentType.MAMBA})


class Pools(NamedTuple):
    """A pool, the components of SGLang's tree over it, and the pool of requests' states."""

    kvcache: Any
    components: frozenset[ComponentType] = FULL
    requests: Any = None


def _plain(kind: type, dtype: torch.dtype) -> Any:
    return kind(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=dtype,
        head_num=2,
        head_dim=32,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def _mla_fp4() -> Any:
    return MLATokenToKVPoolFP4(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.uint8,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def _hybrid(mla: bool = False) -> Pools:
    kvcache, requests = mamba_pools()
    if mla:
        kvcache = HybridLinearKVPool(
            size=PAGES * PAGE,
            dtype=torch.float32,
            page_size=PAGE,
            head_num=1,
            head_dim=32,
            full_attention_layer_ids=[1, 3],
            device="cpu",
            mamba_pool=requests.mamba_pool,
            use_mla=True,
            kv_lora_rank=48,
            qk_rope_head_dim=16,
        )
    return Pools(kvcache, FULL_MAMBA, requests)


def _qsa() -> Pools:
    requests = mamba_pools()[1]
    pool = QSATokenToKVPool(
        size=PAGES * PAGE,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=2,
        head_dim=32,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=requests.mamba_pool,
        qsa_index_kv_heads=1,
        qsa_index_head_dim=32,
        qsa_compress_ratio=4,
        qsa_token_topk=8,
        num_request_slots=8,
    )
    return Pools(pool, FULL_MAMBA, requests)


def dsa_with_tails(shared: bool = True) -> DSATokenToKVPool:
    """Layer 1 uses the index of layer 0 if ``shared``; indices pool four tokens, and requests have
    the open group of these."""
    return DSATokenToKVPool(
        size=8 * 256,
        page_size=256,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        kv_cache_dim=576,
        index_head_dim=128,
        index_kpool=4,
        index_kpool_compress=True,
        max_running_requests=8,
        skip_topk_layers=[False, shared, False],
    )


def _deepseek_v4() -> DeepSeekV4TokenToKVPool:
    """Layer 0 has a window only, layer 1 a row for four tokens, layer 2 a row for 128."""
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=8,
        swa_size=8 * 256,
        c4_size=8 * 64,
        c128_size=8 * 2,
        c4_state_pool_size=8 * 8,
        c128_state_pool_size=8 * 128,
        page_size=256,
        swa_page_size=256,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128],
        start_layer=0,
        end_layer=LAYERS,
    )


def _minimax() -> MiniMaxSparseKVPool:
    return MiniMaxSparseKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=2,
        head_dim=32,
        idx_head_dim=32,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2],
        device="cpu",
        disable_value_sparse_layer_ids=[1, 2],
        start_layer=0,
        end_layer=LAYERS,
    )


POOLS: dict[str, Callable[[], Pools]] = {
    "MHATokenToKVPool": lambda: Pools(mha_pool()),
    "MHATokenToKVPoolMXFP8": lambda: Pools(_plain(MHATokenToKVPoolMXFP8, torch.float8_e4m3fn)),
    "MHATokenToKVPoolFP4": lambda: Pools(_plain(MHATokenToKVPoolFP4, torch.uint8)),
    "MLATokenToKVPool": lambda: Pools(mla_pool()),
    "MLATokenToKVPoolFP4": lambda: Pools(_mla_fp4()),
    "DSATokenToKVPool": lambda: Pools(dsa_pool()),
    "DSATokenToKVPool, shared index": lambda: Pools(dsa_with_tails()),
    "DeepSeekV4TokenToKVPool": lambda: Pools(_deepseek_v4(), FULL_SWA),
    "SWAKVPool": lambda: Pools(swa_pool(), FULL_SWA),
    "HybridLinearKVPool": _hybrid,
    "HybridLinearKVPool, MLA": lambda: _hybrid(mla=True),
    "QSATokenToKVPool": _qsa,
    "MiniMaxSparseKVPool": lambda: Pools(_minimax()),
}
"""Pools that can be made without a GPU, by class."""


def transfer_args(pools: Pools, aux: torch.Tensor, dtype: str, draft: Any = None) -> KVArgs:
    """Return what SGLang lists of a pool for its transfer backends, as its own queues do."""
    args = KVArgs()
    kvcache = pools.kvcache
    lists = get_kv_transfer_buf_infos(kvcache)
    extra = draft.get_contiguous_buf_infos() if draft is not None else ([], [], [])
    ptrs, lens, items = (list(own) + list(more) for own, more in zip(lists, extra, strict=True))
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = ptrs, lens, items
    args.num_draft_entries = len(extra[0])
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=kvcache,
        draft_token_to_kv_pool=draft,
        num_draft_entries=len(extra[0]),
        num_hidden_layers=4,
    )
    args.kv_cache_dtype_str = dtype
    args.page_size = kvcache.page_size
    args.aux_data_ptrs, args.aux_data_lens = [aux.data_ptr()], [aux.nbytes]
    args.aux_item_lens = [aux[0].nbytes]
    setup_state_kv_args(args, kvcache, draft, total_kv_layers=4, req_to_token_pool=pools.requests)
    return args


def model_of(pools: Pools, args: KVArgs, rank: Rank = ONE_RANK, kv_heads: int = 2) -> Model:
    latent = is_mla_backend(pools.kvcache) or args.is_hybrid_mla_backend
    return Model("m", "float32", rank, 1 if latent else kv_heads, (0, LAYERS), latent, -1)


def memory_of(address: int, nbytes: int) -> torch.Tensor:
    """Return bytes of this process, uint8 [nbytes]."""
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8)
