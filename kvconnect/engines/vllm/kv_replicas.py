"""Which tensor-parallel ranks of vLLM have the same KV, and the memory that they share for it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from kvconnect.errors import Incompatible
from kvconnect.offload.shared_memory import NO_MEMORY, MemoryOffer, SharedMemory

logger = logging.getLogger(__name__)

_MEET_S = 300.0  # all ranks register their KV caches within seconds of one another
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
_OF_HEADS = re.compile(r"(kv|key_value)_?heads|heads_in_group|(attention|query)_groups?")
_HEADS = "num_key_value_heads"


def kv_replicas(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return how many tensor-parallel ranks in a row have the same KV in all layers: those of
    latent attention, and those of models with fewer KV heads than ranks."""
    parallel = config.parallel_config
    same: int = cache.kv_tp_replicas  # of latent attention only
    if parallel.tensor_parallel_size == 1 or same > 1 or parallel.decode_context_parallel_size > 1:
        return same
    return _ranks_of_a_head(config, cache)


def _ranks_of_a_head(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return how many ranks have the same heads; 1 if layers may differ in their number of heads:
    those of a draft model, or those of models that name it in more than one place."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    known = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    if not known or {spec.num_kv_heads for spec in specs} != {1}:
        return 1
    fields = config.model_config.hf_text_config.to_dict()
    if config.speculative_config is not None or list(_fields_of_heads(fields)) != [_HEADS]:
        return 1
    heads, ranks = fields.get(_HEADS), config.parallel_config.tensor_parallel_size
    if not isinstance(heads, int) or heads != config.model_config.get_total_num_kv_heads():
        return 1
    return 1 if ranks % heads else max(1, ranks // heads)


def _fields_of_heads(fields: Any) -> Iterator[str]:
    """Yield the names of a model's fields, at any depth, that may tell its KV heads."""
    if isinstance(fields, dict):
        yield from (str(name) for name in fields if _OF_HEADS.search(str(name)))
    if isinstance(fields, dict | list):
        for value in fields.values() if isinstance(fields, dict) else fields:
            yield from _fields_of_heads(value)


def share_memory(
    replicas: int, sizes: Callable[[int], tuple[int, int]], node: int
) -> SharedMemory | None:
    """Share memory among those of ``replicas`` ranks in a row that are on one machine; None if
    there is one only, or one of them cannot reach it. All tensor-parallel ranks call this, with the
    same numbers, and wait for one another.

    ``sizes`` returns, for a number of ranks, the bytes of their memory, and how many of these they
    allocate in parts, each on the NUMA ``node`` of its device; -1: on any.
    """
    group = get_tp_group()
    rank = group.rank_in_group
    alike = range(rank - rank % replicas, rank - rank % replicas + replicas)
    machines = _gather([_machine()])
    mates = [other for other in alike if machines[other] == machines[rank]]
    place, first = mates.index(rank), mates[0]
    nbytes, allocated = sizes(len(mates))
    own, memory = NO_MEMORY, None
    try:
        if not place and len(mates) > 1 and nbytes:
            memory = SharedMemory.make(nbytes, len(mates))
            own = memory.offer()
    except OSError as error:
        logger.warning("host tier: the system gives no shared memory: %s", error)
    said = _gather([*own, node])
    try:
        if place:
            offer = MemoryOffer._make(said[first][:-1])
            memory = SharedMemory.open(offer, nbytes, place, len(mates))
        elif memory is not None:
            memory.prefer([said[other][-1] for other in mates], allocated)
    except OSError as error:
        logger.warning("host tier: no memory of rank %d is in reach: %s", first, error)
    reached = _gather([memory is not None])
    if memory is not None:
        memory.close()
    if all(reached[other] == [1] for other in mates):
        return memory
    if len(mates) > 1 and nbytes:
        logger.warning("host tier: each of %d ranks keeps its own copy of the same", len(mates))
    return None


def _machine() -> int:
    """Return a number that differs between machines, and between containers that do not see one
    another's processes; also between processes, if the system does not say where they are."""
    with contextlib.suppress(OSError):
        place = f"{_BOOT_ID.read_text()} {_PROCESSES.stat().st_ino}"
        return int.from_bytes(blake2b(place.encode(), digest_size=7).digest(), "little")
    return int.from_bytes(os.urandom(7), "little")


def _gather(numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all tensor-parallel ranks.

    Raises:
        Incompatible: one of them does not come, as after an error of its own: this one's ends the
            wait, for which the engine has no deadline.
    """
    group = get_tp_group()
    try:
        # The group's own: torch's function refuses groups that have NCCL, too.
        group.cpu_group.monitored_barrier(timedelta(seconds=_MEET_S), wait_all_ranks=False)
    except RuntimeError as error:
        text = f"a tensor-parallel rank did not register its KV cache (limit: {_MEET_S:g} s)"
        raise Incompatible(text, f"see the log of the rank that failed ({error})") from error
    own = torch.tensor(numbers, dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, own, group=group.cpu_group)
    return [each.tolist() for each in found]
