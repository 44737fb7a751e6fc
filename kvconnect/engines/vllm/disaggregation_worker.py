"""Hand-offs in a vLLM worker: describes its KV cache and starts its agent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect import engine_versions
from kvconnect.disaggregation.agent import HandoffAgent, WorkerCache, start_agent
from kvconnect.disaggregation.sessions import GroupPages
from kvconnect.disaggregation.staging import make_memory
from kvconnect.engines.vllm import handoff_pages, translate
from kvconnect.errors import ConfigError, Incompatible
from kvconnect.protocol.identity import Identity
from kvconnect.protocol.messages import HandoffHello
from kvconnect.settings import Settings
from kvconnect.settings.addresses import listen_address
from kvconnect.transport.security import NoLocalKey
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import Rank

logger = logging.getLogger(__name__)


class FormerAgent(NamedTuple):
    """Where a worker's agent listened before it was closed, and the engine's epoch."""

    address: tuple[str, int] | None
    epoch: int


def make_handoffs(
    vllm_config: VllmConfig,
    cache: KVCacheConfig,
    settings: Settings,
    kv_caches: Mapping[str, torch.Tensor],
    port: SharedPort,
    identity: Identity,
    former: FormerAgent | None = None,
) -> HandoffAgent | None:
    """Start a worker's hand-off agent, which listens if the role sends; return None if the worker
    neither sends nor receives. ``port``: the process's own. ``identity``: the weights that the
    worker has.

    Raises:
        ConfigError: an address, key or certificate cannot be used.
        NoLocalKey, Incompatible: there is no key, or the cache's pages cannot be described, and the
            role is only for hand-offs.
    """
    transfer = vllm_config.kv_transfer_config
    sends = transfer.is_kv_producer and settings.listen != "off"
    splits_blocks = vllm_config.parallel_config.decode_context_parallel_size > 1
    if splits_blocks or not (sends or transfer.is_kv_consumer):
        return None
    try:
        pages = handoff_pages.handoff_pages(cache, kv_caches)
        hello = _hello(vllm_config, cache, kv_caches, pages, identity)
        if former is not None:
            hello.epoch = former.epoch
    except Incompatible as error:
        if transfer.kv_role != "kv_both":
            raise
        logger.warning("this model's KV cache can be offloaded but not handed off: %s", error)
        return None
    address = former.address if former is not None else None
    if sends and address is None:
        address = _address(vllm_config, settings)
    area = translate.backing_area(kv_caches)
    memory = make_memory(area)
    found = WorkerCache(hello, pages, memory, area.device)
    traced, reads = translate.is_traced(vllm_config), transfer.is_kv_consumer
    start = partial(start_agent, settings, found, traced=traced, port=port, reads=reads)
    try:
        return start(address, settings.deadline_s)
    except NoLocalKey as error:
        if transfer.kv_role != "kv_both":
            raise
        logger.warning("blocks can be offloaded but not handed off: %s", error)
        return None
    except ConfigError as error:
        if former is None or error.field != "listen":
            raise
        logger.error("the caches are back, but %s; until it sleeps again, nobody reads here", error)
        return start(None, settings.deadline_s)


def _address(vllm_config: VllmConfig, settings: Settings) -> tuple[str, int]:
    """Return (host, port) to listen at. Each worker of each engine has its own port."""
    address = listen_address(settings.listen)
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
    identity: Identity,
) -> HandoffHello:
    """Return this worker's Hello; each step sets the epoch.

    Raises:
        Incompatible: layers of one group differ in their heads, or are not this rank's share.
    """
    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return HandoffHello(
        software=f"kvconnect {engine_versions.installed('kvconnect')}",
        engine_id=vllm_config.kv_transfer_config.engine_id,
        epoch=0,
        rank=Rank(parallel.rank % tp, tp, parallel.rank // tp % pp, pp),
        identity=identity,
        format={
            **translate.handoff_format(vllm_config, cache, kv_caches),
            **handoff_pages.whole_format(vllm_config, cache, kv_caches),
        },
        groups=handoff_pages.group_hellos(vllm_config, cache, kv_caches, pages),
    )
