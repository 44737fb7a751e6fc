"""Hints in vLLM's requests: nothing that a client sends makes its request fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm import hints
from kvconnect.engines.vllm.hints import add_hints
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.planner import OffloadLimits, OffloadPlan
from kvconnect.protocol.cache_hints import ACTION_TYPE, ACTION_VERSION
from kvconnect.protocol.options import OPTIONS_KEY
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block

TOKENS, SLOTS = 4, 8
HASHES = [[b"a", b"b"]]
NAMES = st.sampled_from(["pin", "retain", "demote", "drop", "prefetch", "tokens", "receipt"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner),
    max_leaves=8,
)
HINTS = st.dictionaries(NAMES, st.integers(-1, 10) | st.booleans() | JSON)


def plan_of_few_blocks() -> OffloadPlan:
    index = HostIndex(SLOTS, 1, make_policy("lru", SLOTS), 0.5)
    limits = OffloadLimits(1, 10.0, SLOTS)
    return OffloadPlan((CacheGroup(TOKENS),), index, OffloadingConnectorStats(), limits)


def sent(plan: OffloadPlan, params: Any, actions: list[KvHintAction] | None) -> None:
    """A request comes, its blocks are stored, and it ends."""
    envelope = None if actions is None else KvHintsEnvelope("1", "m", actions)
    request: Any = SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        kv_hints=envelope,
        cache_salt=None,
        num_prompt_tokens=2 * TOKENS,
    )
    add_hints(plan, request, lambda _: HASHES, 0.0)
    slots = [plan.index.reserve(0, block_hash) for block_hash in HASHES[0]]
    plan.index.commit([slot for slot in slots if slot is not None])
    plan.hints.settled([Block(0, block_hash) for block_hash in HASHES[0]], [], 0.0)
    plan.hints.finish("r", 0.0)
    plan.check()


@given(
    st.none() | st.dictionaries(st.just(OPTIONS_KEY) | st.text(max_size=3), HINTS | JSON),
    st.none() | st.lists(HINTS, max_size=3),
)
def test_whatever_is_sent_a_request_is_served(params: Any, payloads: Any) -> None:
    plan = plan_of_few_blocks()
    actions = None
    if payloads is not None:
        ours = ACTION_TYPE, ACTION_VERSION
        actions = [KvHintAction(str(n), *ours, payload) for n, payload in enumerate(payloads)]
    sent(plan, params, actions)
    plan.hints.expire(86_400.0)
    gauges = {label: value for _, value, label in plan.hints.gauges()}
    assert not any(gauges.values())


def test_a_reader_that_trusts_what_is_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    trusting = lambda options: hints.HintsRead(None, (options["pin"],))  # noqa: E731
    monkeypatch.setattr(hints, "read_hints", trusting)
    with pytest.raises((KeyError, TypeError, AttributeError)):
        sent(plan_of_few_blocks(), {OPTIONS_KEY: {}}, None)
