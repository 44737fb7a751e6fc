"""Hand-off in a vLLM worker: what the cache looks like, and which hooks drive the agent."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect import versions
from kvconnect.config import Config, listen_address
from kvconnect.engines.vllm import translate
from kvconnect.errors import Incompatible
from kvconnect.types import Rank
from kvconnect.wire.messages import GroupHello, Hello
from kvconnect.worker.handoff import HandoffAgent
from kvconnect.worker.links import GroupPages
from kvconnect.worker.staging import make_memory
from kvconnect.worker.start import Cache, start_agent

logger = logging.getLogger(__name__)


def make_handoffs(
    vllm_config: VllmConfig,
    cache: KVCacheConfig,
    config: Config,
    kv_caches: Mapping[str, torch.Tensor],
    area: torch.Tensor,
) -> HandoffAgent | None:
    """Return the agent of a worker's hand-offs, listening if its role sends; None if it does
    neither send nor receive.

    Raises:
        ConfigError: an address, key or certificate that cannot be used.
        Incompatible: a cache whose pages cannot be described, on an engine made for hand-off.
    """
    transfer = vllm_config.kv_transfer_config
    sends = transfer.is_kv_producer and config.listen != "off"
    if not (sends or transfer.is_kv_consumer):
        return None
    try:
        pages = translate.handoff_pages(cache, kv_caches)
    except Incompatible as error:
        if transfer.kv_role != "kv_both":
            raise
        logger.warning("this model's KV cache can be offloaded but not handed off: %s", error)
        return None
    address = _address(vllm_config, config) if sends else None
    hello = _hello(vllm_config, cache, kv_caches, pages)
    memory = make_memory(area, config.deadline_s)
    found = Cache(hello, pages, memory, area.device)
    traced = translate.is_traced(vllm_config)
    return start_agent(config, found, address, config.deadline_s, traced=traced)


def _address(vllm_config: VllmConfig, config: Config) -> tuple[str, int]:
    """Return where to listen: each worker of each engine at a port of its own."""
    address = listen_address(config.listen)
    assert address is not None
    host, port = address
    if port:
        parallel = vllm_config.parallel_config
        port += parallel.data_parallel_index * parallel.world_size + parallel.rank
    return host, port


def _hello(
    vllm_config: VllmConfig,
    cache: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    pages: tuple[GroupPages, ...],
) -> Hello:
    """Return what this worker says of itself to others; the epoch comes with the first step."""
    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    splittable = translate.can_split_pages(vllm_config, kv_caches)
    groups = []
    kinds = translate.cache_groups(cache)
    for kind, group, layers in zip(kinds, cache.kv_cache_groups, pages, strict=True):
        first = layers[0]
        groups.append(
            GroupHello(
                block_tokens=kind.block_tokens,
                page_tokens=first.tokens,
                window=kind.window,
                chunk=kind.chunk,
                layers=[page.name for page in layers],
                kv_heads=translate.total_kv_heads(vllm_config, group.kv_cache_spec),
                heads=first.heads,
                row_bytes=first.row_bytes,
                order="HNC" if first.head_stride >= first.token_stride else "NHC",
                splittable=splittable,
            )
        )
    return Hello(
        software=f"kvconnect {versions.installed('kvconnect')}",
        engine_id=vllm_config.kv_transfer_config.engine_id,
        epoch=0,
        rank=Rank(parallel.rank % tp, tp, parallel.rank // tp % pp, pp),
        format=translate.handoff_format(vllm_config, cache, kv_caches),
        groups=groups,
    )
