"""Hints of vLLM's requests on their cached blocks, given to the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvconnect.cache.keys import tenant_of
from kvconnect.offload.planner import OffloadPlan
from kvconnect.protocol.cache_hints import (
    ACTION_TYPE,
    ACTION_VERSION,
    HintsRead,
    IgnoredHint,
    read_hints,
)
from kvconnect.protocol.options import OPTIONS_KEY
from kvconnect.stats import OffloadingConnectorStats

if TYPE_CHECKING:
    from vllm.v1.request import Request

Hashes = Callable[["Request"], Sequence[Sequence[bytes]]]


def drop_invalid_params(request: Request, stats: OffloadingConnectorStats) -> None:
    """Remove a new request's ``kv_transfer_params`` if they are no object: clients can pass any
    value in ``vllm_xargs``, and vLLM's scheduler expects an object."""
    params: object = request.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        request.kv_transfer_params = None
        stats.count("ignored_cache_hints", label=IgnoredHint.INVALID.value)


def add_hints(plan: OffloadPlan, request: Request, hashes: Hashes, now: float) -> None:
    """Give the plan a new request's hints, if it has some."""
    params = request.kv_transfer_params
    options = params.get(OPTIONS_KEY) if params else None
    if options is None and request.kv_hints is None:
        return
    read = HintsRead(None) if options is None else read_hints(options)
    if request.kv_hints is not None:
        read = _with_envelope(read, request)
    tenant = tenant_of(request.cache_salt or "")
    tokens = request.num_prompt_tokens
    plan.hints.add(request.request_id, read, tenant, hashes(request), tokens, now)


def _with_envelope(read: HintsRead, request: Request) -> HintsRead:
    """Return the hints in vLLM's ``kv_hints``, unless ``kv_transfer_params`` has some. Actions of
    other types are for other components."""
    assert request.kv_hints is not None
    hints, ignored = read
    for action in request.kv_hints.actions:
        if action.action_type != ACTION_TYPE:
            continue
        if action.action_version != ACTION_VERSION:
            ignored = (*ignored, IgnoredHint.UNKNOWN)
        elif hints is not None:
            ignored = (*ignored, IgnoredHint.CONFLICT)
        else:
            found = read_hints(action.payload)
            hints, ignored = found.hints, ignored + found.ignored
    return HintsRead(hints, ignored)
