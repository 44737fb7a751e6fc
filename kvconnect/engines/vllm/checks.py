"""Checks of vLLM's settings, and which requests may reuse KV."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect import engine_versions
from kvconnect.cache import architectures
from kvconnect.errors import ConfigError, Incompatible, refusing
from kvconnect.offload.streams import check_device
from kvconnect.settings import Settings, find_settings

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger(__name__)


def checked_settings(config: VllmConfig) -> Settings:
    """Return KVConnect's settings after checking them, the engine and the model.

    Raises:
        ConfigError: a setting of KVConnect or vLLM cannot be used.
        Incompatible: the model or engine is not supported. Users see only the message.
    """
    extra = config.kv_transfer_config.kv_connector_extra_config
    settings = find_settings(extra, os.environ).settings
    with refusing(f"model {config.model_config.model}"):
        check_engine(config, settings.listen)
        _check_context_parallelism(config, settings)
        return _without_tiers(settings) if _returns_experts(config) else settings


def check_engine(config: VllmConfig, listen: str) -> None:
    """Check the engine before anything is allocated. ``listen``: KVConnect's setting.

    Raises:
        Incompatible: the vLLM version, the device or the model's kind of cache is not supported.
        ConfigError: a kind of parallelism, mode or model is not supported, or a prefill engine
            does not listen.
    """
    if not engine_versions.vllm_is_supported(vllm.__version__):
        supported = engine_versions.supported_vllm_text()
        raise Incompatible(f"vLLM {vllm.__version__} is not supported", f"install {supported}")
    check_device(config.device_config.device_type)
    check_model(config.model_config)
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        field = "prefill_context_parallel_size"
        raise ConfigError(field, parallel.prefill_context_parallel_size, "not supported: use 1")
    if config.kv_transfer_config.kv_role == "kv_producer" and listen == "off":
        fix = "a kv_producer hands KV blocks out: name an address and a port"
        raise ConfigError("listen", listen, fix)


def check_model(model: ModelConfig) -> None:
    """Check a model by its configuration, since its KV cache is known only after its weights are
    loaded.

    Raises:
        Incompatible: its cache cannot be kept, so it cannot be handed off either.
    """
    config = {**model.hf_config.to_dict(), "architectures": list(model.architectures)}
    kinds = set(architectures.kinds_of(config)) - architectures.IDLE
    found = architectures.refusal("vllm", sorted(kinds), "offload")
    if found:
        why, fix = found
        raise Incompatible(f"no offload with {why}", fix)


def _check_context_parallelism(config: VllmConfig, settings: Settings) -> None:
    """Refuse all but the host tier where a block's tokens are spread over ranks: other engines and
    later starts may spread them in another way."""
    ranks = config.parallel_config.decode_context_parallel_size
    if ranks > 1 and (settings.has_tiers or config.kv_transfer_config.kv_role != "kv_both"):
        fix = "its blocks cannot leave the engine: use 1, or kv_role kv_both with host memory only"
        raise ConfigError("decode_context_parallel_size", ranks, fix)


def _returns_experts(config: VllmConfig) -> bool:
    """Return whether requests are answered with the experts that computed their tokens. vLLM keeps
    those of the device's blocks only. 0.33 drops a hit on any other block; 0.32 raises an error
    that ends the engine."""
    if not config.aux_output_config.enable_return_routed_experts:
        return False
    if vllm.__version__.startswith("0.32."):
        fix = "vLLM 0.32 fails on every block that KVConnect brings: leave it out, or use vLLM 0.33"
        raise ConfigError("enable_return_routed_experts", True, fix)
    return True


def _without_tiers(settings: Settings) -> Settings:
    """Return settings without secondary tiers, whose blocks vLLM would not use."""
    kept = msgspec.structs.replace(settings, disk=None, remote=None, cache_peers=None)
    if kept != settings:
        logger.warning("disk, remote and cache_peers are ignored: vLLM returns routed experts")
    return kept


def why_idle(config: VllmConfig, cache: KVCacheConfig) -> str:
    """Return why nothing may be stored, loaded or handed off; empty if KVConnect can work.

    ``enable_prefix_caching`` does not decide alone. vLLM also turns it off where its own cache is
    slow (latent attention on CPUs), and users turn it off to save device memory.
    """
    if not cache.kv_cache_groups:
        return "the model has no KV cache"
    model = config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        return "the model pools what all its tokens yield, so all of them are computed"
    if envs.VLLM_BATCH_INVARIANT and not config.cache_config.enable_prefix_caching:
        return "VLLM_BATCH_INVARIANT is set and prefix caching is off"
    return ""
