"""The parts of vLLM's configuration that the connector reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=128
)


def engine_config(**changes: Any) -> Any:
    """The parts of vLLM's configuration that the connector reads."""
    transfer = KVTransferConfig(kv_connector="KVConnect", kv_role=changes.pop("kv_role", "kv_both"))
    model = SimpleNamespace(
        model="llama",
        architectures=changes.pop("architectures", ["LlamaForCausalLM"]),
        hf_config=SimpleNamespace(to_dict=dict),
        runner_type=changes.pop("runner_type", "generate"),
        is_prefix_caching_supported=changes.pop("is_prefix_caching_supported", True),
        multimodal_config=None,
    )
    device = SimpleNamespace(device_type=changes.pop("device_type", "cpu"))
    caching = changes.pop("enable_prefix_caching", True)
    experts = changes.pop("enable_return_routed_experts", False)
    parallel = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "elastic_ep_max_dp_size": 1,
        "data_parallel_external_lb": False,
        "data_parallel_backend": "mp",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "world_size": 1,
        "rank": 0,
        "use_ubatching": False,
        "enable_eplb": False,
        **changes,
    }
    parallel.setdefault("data_parallel_size_local", parallel["data_parallel_size"])
    parallel.setdefault("local_world_size", parallel["world_size"])
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(block_size=32, enable_prefix_caching=caching),
        model_config=model,
        device_config=device,
        max_concurrent_batches=1,
        use_v2_model_runner=False,
        kv_events_config=None,
        lora_config=None,
        speculative_config=None,
        aux_output_config=SimpleNamespace(enable_return_routed_experts=experts),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        load_config=SimpleNamespace(load_format="dummy"),
    )


def cache_config(*specs: Any, blocks: int = 4) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    tensor = KVCacheTensor(0, [group.layer_names[0] for group in groups], 0, 0)
    return KVCacheConfig(blocks, [tensor], groups)
