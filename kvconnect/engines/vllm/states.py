"""States of recurrent layers in vLLM: Mamba, linear attention, short convolutions.

With prefix caching, vLLM keeps the states at some block boundaries (mode ``align``) or at all of
them (``all``). Without it (``none``), it keeps the newest state only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from kvconnect.cache.groups import CacheGroup
from kvconnect.offload.planner import KeptStates

if TYPE_CHECKING:
    from vllm.v1.request import Request


def state_group(spec: MambaSpec) -> CacheGroup:
    """Return a group of states as the planners need it."""
    return CacheGroup(spec.block_size, states="every" if spec.mamba_cache_mode == "all" else "some")


def keeps_none(cache: KVCacheConfig) -> bool:
    """Return whether the model has states and vLLM keeps none for other requests."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return any(isinstance(s, MambaSpec) and s.mamba_cache_mode == "none" for s in specs)


def kept_states(output: SchedulerOutput, groups: Sequence[CacheGroup]) -> dict[str, KeptStates]:
    """Return, by request, the states that this step writes and vLLM keeps. States inside a block
    are left out."""
    state = output.kv_connector_block_state
    if state is None or not state.boundary_state_offloads:
        return {}
    return {
        req_id: [
            (group, tokens // groups[group].block_tokens - 1, block_id)
            for group, block_id, tokens in kept
            if tokens % groups[group].block_tokens == 0
        ]
        for req_id, kept in state.boundary_state_offloads.items()
    }


def state_format(config: VllmConfig, cache: KVCacheConfig) -> dict[str, str | int]:
    """Return the fields that must be equal on both sides of a hand-off, for a model with states.

    Ranks divide a state, and its parts cannot be divided anew.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if not states:
        return {}
    shapes = "; ".join(f"{s.mamba_type.name} {s.shapes} {s.dtypes}" for s in states)
    order = envs.VLLM_SSM_CONV_STATE_LAYOUT or "default"
    tp = config.parallel_config.tensor_parallel_size
    return {"states": f"{order} {shapes}"[:1024], "state_tp": tp}


def asks_one_token(request: Request) -> bool:
    """Return whether a request wants its prompt computed and nothing more."""
    return request.max_tokens == 1 and not request.skip_reading_prefix_cache


def drop_last_token(request: Request) -> None:
    """Shorten the prompt of a new request by a token, so that its last state is the one before
    that token. vLLM's own hand-offs do the same. The token that it samples is of no use."""
    assert request.prompt_token_ids is not None
    del request.prompt_token_ids[-1], request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.block_hashes.clear()
    request.update_block_hashes()
