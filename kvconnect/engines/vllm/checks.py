"""What vLLM is set to do that KVConnect cannot serve, and where KV must not be used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect import versions
from kvconnect.config import Config, parse_config
from kvconnect.errors import ConfigError, Incompatible, refusing
from kvconnect.offload.streams import check_device

if TYPE_CHECKING:
    from vllm.v1.request import Request


def checked_settings(config: VllmConfig) -> Config:
    """Return KVConnect's settings, if this engine and its model can be served with them.

    Raises:
        ConfigError: a setting of either that cannot be used.
        Incompatible: the model, or the engine. The message is the one line that users see.
    """
    settings = parse_config(config.kv_transfer_config.kv_connector_extra_config)
    with refusing(f"model {config.model_config.model}"):
        check_engine(config, settings.network.listen)
    return settings


def check_engine(config: VllmConfig, listen: str) -> None:
    """Refuse what cannot work, before anything is allocated. ``listen`` is the setting.

    Raises:
        Incompatible: a vLLM version or a device that this library was not written for.
        ConfigError: a kind of parallelism or a mode that is not served, or a prefill engine that
            nobody can read from.
    """
    if not versions.vllm_is_supported(vllm.__version__):
        supported = versions.supported_vllm_text()
        raise Incompatible(f"vLLM {vllm.__version__} is not supported", f"install {supported}")
    check_device(config.device_config.device_type)
    if config.model_config.enable_sleep_mode:  # vLLM 0.32 does not ask supports_sleep_mode
        fix = "weights may change in sleep, and stored KV would be stale: turn it off"
        raise ConfigError("enable_sleep_mode", True, fix)
    if config.model_config.is_hybrid:  # its KV cache says so, too, but only when it is made
        fix = "Mamba or linear attention, whose state is not made of token blocks"
        raise ConfigError("model", config.model_config.model, f"{fix}: run without KVConnect")
    parallel = config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            raise ConfigError(field, getattr(parallel, field), "context parallelism: use 1")
    if config.kv_transfer_config.kv_role == "kv_producer" and listen == "off":
        fix = "a kv_producer hands KV blocks out: name an address and a port"
        raise ConfigError("listen", listen, fix)


def why_idle(config: VllmConfig, cache: KVCacheConfig) -> str:
    """Return why nothing may be stored, loaded or handed off; empty where it may.

    ``enable_prefix_caching`` is not the reason: vLLM also turns it off where its own cache is slow
    (latent attention on CPUs), and users do to spare the device's memory.
    """
    if not cache.kv_cache_groups:
        return "the model has no KV cache"
    model = config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        return "the model pools what all its tokens yield, so all of them are computed"
    if envs.VLLM_BATCH_INVARIANT and not config.cache_config.enable_prefix_caching:
        return "VLLM_BATCH_INVARIANT is set and prefix caching is off"
    return ""


# The requests of an engine that live, and what they may use again.


MOST_RELOADED = 1024


class LiveRequests(dict[str, "Request"]):
    """By their ids. Owned by the scheduler's thread.

    An adapter that is loaded again in place has new weights under the hashes of the old ones, and a
    request does not tell which. So from the first one on that says so (``load_inplace``), what
    goes by such an adapter's name and path is neither stored nor loaded.
    """

    def __init__(self) -> None:
        self._reloaded: set[tuple[str, str]] = set()

    def may_reuse(self, request: Request) -> bool:
        """Whether KV of a request is that of all who have its hashes."""
        lora = request.lora_request
        if lora is None:
            return True
        adapter = lora.lora_name, lora.lora_path
        if lora.load_inplace and len(self._reloaded) < MOST_RELOADED:
            self._reloaded.add(adapter)
        # Where too many were reloaded to know them, no adapter is trusted.
        return adapter not in self._reloaded and len(self._reloaded) < MOST_RELOADED
