"""Which tensor-parallel ranks of vLLM have the same KV, and the memory that they share for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from kvconnect.engines.vllm.handoff_pages import total_kv_heads
from kvconnect.errors import Incompatible
from kvconnect.offload.shared_memory import NO_MEMORY, SharedMemory

logger = logging.getLogger(__name__)


def kv_replicas(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return how many tensor-parallel ranks in a row, on one machine, have the same KV in all
    layers: those of latent attention, and those of models with fewer KV heads than ranks."""
    parallel = config.parallel_config
    same: int = cache.kv_tp_replicas  # of latent attention only
    if same == 1 and parallel.decode_context_parallel_size == 1:
        same = _ranks_of_a_head(config, cache)
    return math.gcd(same, parallel.local_world_size)


def _ranks_of_a_head(config: VllmConfig, cache: KVCacheConfig) -> int:
    if config.speculative_config is not None:  # the draft model's heads may be others
        return 1
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if not all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs):
        return 1
    try:
        heads = {total_kv_heads(config, spec) for spec in specs}
    except Incompatible:  # layers differ
        return 1
    ranks = config.parallel_config.tensor_parallel_size
    if any(ranks % total for total in heads):
        return 1
    return math.gcd(*(ranks // total for total in heads))


def share_memory(replicas: int, slots_bytes: int, nbytes: int, node: int) -> SharedMemory | None:
    """Share ``nbytes`` of memory among ``replicas`` ranks; None if one of them cannot reach it. All
    tensor-parallel ranks call this, with the same numbers, and wait for one another.

    Each of them allocates a part of the first ``slots_bytes``, on the NUMA ``node`` of its device;
    -1: on any.
    """
    group = get_tp_group()
    place = group.rank_in_group % replicas
    first = group.rank_in_group - place
    own, memory = NO_MEMORY, None
    try:
        if not place:
            memory = SharedMemory.make(nbytes, replicas)
            own = memory.offer()
    except OSError as error:
        logger.warning("host tier: the system gives no shared memory: %s", error)
    offers = _gather([*own, node])[first : first + replicas]
    try:
        if place:
            memory = SharedMemory.open(type(own)(*offers[0][:-1]), nbytes, place, replicas)
        elif memory is not None:
            memory.prefer([offer[-1] for offer in offers], slots_bytes)
    except OSError as error:
        logger.warning("host tier: no memory of rank %d is in reach: %s", first, error)
    agreed = all(found for (found,) in _gather([memory is not None])[first : first + replicas])
    if memory is not None:
        memory.close()
    if not agreed:
        logger.warning("host tier: each rank keeps its own copy of what %d ranks have", replicas)
    return memory if agreed else None


def _gather(numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all tensor-parallel ranks."""
    group = get_tp_group()
    own = torch.tensor(numbers, dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, own, group=group.cpu_group)
    return [each.tolist() for each in found]
