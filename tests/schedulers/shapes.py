"""Configurations of vLLM for engines whose model is only a fingerprint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

HEADS, HEAD_SIZE = 2, 16
ROW = 2 * HEAD_SIZE  # elements of a token's K and V, of one head
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
WINDOW = 40  # tokens
LONGEST = 4096  # tokens of a request
_PAGE = 4096  # host slots are whole pages

Kind = Literal["full", "windows", "states"]


@dataclass(frozen=True)
class EngineShape:
    """What an engine is like. Both layers are of full attention, or the second one has a window or
    states. ``slots``: blocks of the host tier. With ``tp`` 4, two ranks have the same KV.
    ``overlap``: asynchronous scheduling. ``settings``: KVConnect's."""

    kind: Kind = "full"
    blocks: int = 40
    slots: int = 60
    tp: int = 1
    block_tokens: int = 16
    overlap: bool = False
    order: Literal["fcfs", "priority"] = "fcfs"
    step_tokens: int = 48
    drafts: int = 0
    role: str = "kv_both"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """Heads of a rank."""
        return max(1, HEADS // self.tp)

    @property
    def replicas(self) -> int:
        """Ranks that share a host tier. Those of models with states or drafts do not."""
        alone = self.kind == "states" or self.drafts
        return 1 if alone else max(1, self.tp // HEADS)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block of one layer, on one rank."""
        return self.heads * self.block_tokens * ROW * 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of one rank."""
        layers = len(LAYERS) if self.kind == "full" else 1
        return -(-self.layer_bytes * layers // _PAGE) * _PAGE


class _Layer(AttentionLayerBase):
    """A layer whose backend keeps K and V of a token side by side, as on GPUs."""

    def get_attn_backend(self) -> Any:
        return FlashAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


@cache
def model_folder() -> Path:
    """Return the folder of a model with two layers, in which nothing but the sizes matters."""
    folder = Path(tempfile.mkdtemp(prefix="kvconnect-model-")) / "model"
    folder.mkdir()
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 1000,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({"weight": torch.arange(64.0)}, folder / "model.safetensors")
    return folder


@cache
def _model() -> ModelConfig:
    return ModelConfig(
        model=str(model_folder()),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=LONGEST,
        enable_prompt_embeds=True,
    )


def vllm_config(shape: EngineShape) -> VllmConfig:
    """Return vLLM's configuration of an engine. Its host tier has ``shape.slots`` slots."""
    settings = {
        "host_bytes": shape.slot_bytes * shape.slots * shape.tp // shape.replicas,
        "deadline_s": 3.0,
        "lease_s": 1.0,
        "transport": "tcp",
        **shape.settings,
    }
    config = VllmConfig(
        model_config=_model(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=shape.step_tokens,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=shape.order,
            async_scheduling=shape.overlap,
        ),
        cache_config=CacheConfig(block_size=shape.block_tokens, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVConnect",
            kv_connector_module_path="kvconnect.engines.vllm.connector",
            kv_role=shape.role,
            kv_connector_extra_config=settings,
        ),
        parallel_config=ParallelConfig(),
    )
    # vLLM checks these against the machine's devices, of which there are none.
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = shape.tp
    config.scheduler_config.async_scheduling = shape.overlap
    config.cache_config.block_size = shape.block_tokens
    config.cache_config.num_gpu_blocks = shape.blocks
    if shape.kind == "states":
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = shape.block_tokens
    if shape.drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=shape.drafts,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    context = config.compilation_config.static_forward_context
    context.update({layer: _Layer() for layer in LAYERS})
    return config


def cache_config(shape: EngineShape) -> KVCacheConfig:
    """Return the KV cache of each rank. Where layers are of two kinds, they share their memory, as
    in vLLM: a block belongs to one group at a time."""
    tokens, heads = shape.block_tokens, shape.heads
    full = FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(list(LAYERS), full)]
    stride = full.page_size_bytes * shape.blocks
    if shape.kind != "full":
        groups = [KVCacheGroupSpec([LAYERS[0]], full), KVCacheGroupSpec([LAYERS[1]], _other(shape))]
        stride = 0
    size = stride * len(LAYERS) or full.page_size_bytes * shape.blocks
    tensor = KVCacheTensor(size, list(LAYERS), stride, full.page_size_bytes)
    return KVCacheConfig(shape.blocks, [tensor], groups)


def _other(shape: EngineShape) -> KVCacheSpec:
    tokens, heads = shape.block_tokens, shape.heads
    if shape.kind == "windows":
        return SlidingWindowSpec(
            block_size=tokens,
            num_kv_heads=heads,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            sliding_window=WINDOW,
        )
    return MambaSpec(
        block_size=tokens,
        shapes=((heads, tokens, ROW),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
