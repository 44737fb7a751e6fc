"""Makes the scheduler's plans from vLLM's configuration, and bounds what they may load."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect.cache.groups import CacheGroup, keeps_prefix
from kvconnect.engines.vllm.adapters import Adapters
from kvconnect.engines.vllm.messages import WorkerHello
from kvconnect.engines.vllm.shares import ShareTickets
from kvconnect.engines.vllm.tiers import TierScheduler
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.planner import OffloadLimits, OffloadPlan
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_STORE_SHARE = 0.25  # of device blocks that stores may hold; the rest is for the engine


def most_tokens(request: Request, groups: Sequence[CacheGroup]) -> int:
    """Return how many of a request's tokens a load may bring.

    The engine computes the last token to sample from it. With a windowed group, the load must end
    before that token, so that the window before it is there.
    """
    most: int = request.num_tokens - (not all(group.is_full for group in groups))
    return most


def limits_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
) -> OffloadLimits:
    held_blocks = max(1, int(kv_cache_config.num_blocks * _STORE_SHARE))
    workers = vllm_config.parallel_config.world_size
    finds_loaded = bool(vllm_config.cache_config.enable_prefix_caching)
    return OffloadLimits(workers, settings.deadline_s, held_blocks, finds_loaded)


def make_plan(
    groups: Sequence[CacheGroup],
    num_slots: int,
    settings: Settings,
    stats: OffloadingConnectorStats,
    limits: OffloadLimits,
    numbers: Iterator[int],
) -> OffloadPlan:
    policy = make_policy(settings.policy, num_slots)
    index = HostIndex(num_slots, len(groups), policy, settings.pin_share)
    return OffloadPlan(groups, index, stats, limits, numbers)


def make_tiers(
    settings: Settings,
    plan: OffloadPlan,
    hellos: Mapping[tuple[int, int], WorkerHello],
    adapters: Adapters,
    shares: ShareTickets,
) -> TierScheduler | None:
    if not settings.has_tiers:
        return None
    storing = [hello.slot_bytes for hello in hellos.values() if hello.stores]
    sizes = len(storing), sum(storing)
    return TierScheduler(settings, plan, sizes, adapters, shares)


def settings_for(vllm_config: VllmConfig, settings: Settings) -> Settings:
    """Return ``settings``, without loads inside the step where a failed one gives wrong tokens.

    If steps overlap, the next one would sample from bad blocks. vLLM's model runner V2 goes on
    behind the blocks of such a load, although the scheduler has the request compute them.
    """
    overlap, v2 = vllm_config.max_concurrent_batches != 1, vllm_config.use_v2_model_runner
    if not settings.sync_load_bytes or not (overlap or v2):
        return settings
    if settings.sync_load_bytes != "auto":
        why = "steps overlap (async scheduling)" if overlap else "vLLM uses its model runner V2"
        logger.warning("sync_load_bytes is ignored: %s", why)
    return msgspec.structs.replace(settings, sync_load_bytes=0)


def inside_step(
    plan: OffloadPlan, tokens: int, slot_bytes: int, most: int | Literal["auto"], others: int
) -> bool:
    """Return whether a load runs inside the step. If a failed load makes the request start over, it
    does not: the engine restarts parked requests only."""
    if not tokens or not keeps_prefix(plan.groups):
        return False
    blocks = tokens // plan.groups[0].block_tokens
    if most == "auto":
        return plan.load_mode.inside(blocks, others)
    return blocks * slot_bytes <= most
