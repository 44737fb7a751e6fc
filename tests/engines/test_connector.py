"""The connector against vLLM's own classes, without starting an engine."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import (
    MambaSpec,
)

from kvconnect.cache.groups import CacheGroup
from kvconnect.engines.vllm import register, translate
from kvconnect.engines.vllm.checks import check_engine, checked_settings, why_idle
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.messages import StepInstructions, StepReports
from kvconnect.engines.vllm.states import keeps_none, kept_states
from kvconnect.engines.vllm.stats import KVConnectStats
from kvconnect.errors import ConfigError, Incompatible, Misuse
from kvconnect.offload.messages import FailedBlock, JobReport
from kvconnect.types import FailureCause, JobId
from tests.engines.vllm_configs import (
    FULL,
    WINDOW,
    cache_config,
    engine_config,
)


def test_registering_twice_is_registering_once() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KVConnect") is KVConnect


def test_the_class_is_found_by_module_path_too() -> None:
    config = KVTransferConfig(
        kv_connector="KVConnect",
        kv_role="kv_both",
        kv_connector_module_path="kvconnect.engines.vllm.connector",
    )
    assert KVConnectorFactory.get_connector_class(config) is KVConnect


def test_log_lines_appear_where_vllm_logs() -> None:
    register()
    ours, engine = logging.getLogger("kvconnect.store"), logging.getLogger("vllm")
    assert logging.getLogger("kvconnect").parent is engine
    assert ours.getEffectiveLevel() == engine.getEffectiveLevel()
    assert any(logger.handlers for logger in (engine, engine.parent))


def test_class_level_answers() -> None:
    assert supports_hma(KVConnect)
    assert KVConnect.supports_sleep_mode(engine_config().kv_transfer_config)
    assert not KVConnect.requires_kv_delivery
    assert KVConnect.build_kv_connector_stats({}).is_empty()
    assert not KVConnect.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_another_vllm_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_engine(engine_config(), "off")
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(Incompatible, match=rf"vLLM {version} is not supported"):
        check_engine(engine_config(), "off")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"kv_role": "kv_producer"}, "listen"),
    ],
)
def test_what_is_not_served_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine(engine_config(**changes), "off")
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("setting", "supported", "layout"),
    [
        ("engine", ["LBHNC", "BLHNC"], "LBHNC"),
        ("blocks_first", ["LBHNC", "BLHNC"], "BLHNC"),
        ("blocks_first", ["LBHNC"], "LBHNC"),  # the attention backend does not support it
    ],
)
def test_the_layout_is_what_the_setting_says_if_attention_supports_it(
    setting: str, supported: list[str], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config()
    transfer = config.kv_transfer_config
    transfer.kv_connector_extra_config = {"kv_layout": setting}
    config.cache_config = SimpleNamespace(kv_cache_layout=None)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda _: KVConnect)
    assert resolve_kv_cache_layout(config, [supported]).name == layout


def test_the_environment_and_a_file_say_what_the_flag_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text("lease_s: 1\nwait_s: 1\ndeadline_s: 1\n")
    variable = json.dumps({"config_file": str(path), "lease_s": 2, "wait_s": 2})
    monkeypatch.setenv("KVCONNECT_CONFIG", variable)
    config = engine_config()
    config.kv_transfer_config.kv_connector_extra_config = {"lease_s": 3}
    found = checked_settings(config)
    assert (found.lease_s, found.wait_s, found.deadline_s) == (3.0, 2.0, 1.0)
    monkeypatch.setenv("KVCONNECT_CONFIG", '{"disk": {"paht": "/x"}}')
    with pytest.raises(ConfigError, match=r"disk\.paht='/x' .*\(set in KVCONNECT_CONFIG\)"):
        KVConnect.requires_piecewise_for_cudagraph({})


def test_what_is_refused_is_refused_as_soon_as_vllm_asks_for_anything() -> None:
    """Settings before weights are loaded; the rest in the engine's own process, before its workers
    make a cache."""
    with pytest.raises(ConfigError, match="did you mean 'host_bytes'"):
        KVConnect.requires_piecewise_for_cudagraph({"host_byte": 1})
    assert not KVConnect.requires_piecewise_for_cudagraph({"host_bytes": "1GiB"})
    config = engine_config()
    assert KVConnect.get_required_kvcache_layout(config) is None
    config.kv_transfer_config.kv_connector_extra_config = {"policy": "mru"}
    with pytest.raises(ConfigError, match="policy='mru'"):
        KVConnect.get_required_kvcache_layout(config)
    for changes, fix in (({"device_type": "xpu"}, "use a CPU or an NVIDIA GPU"),):
        with pytest.raises((ConfigError, Incompatible)) as refused:
            KVConnect.get_required_kvcache_layout(engine_config(**changes))
        line = str(refused.value)
        assert line.startswith("kvconnect: ") and line.endswith(fix) and "\n" not in line


@pytest.mark.parametrize(
    ("settings", "role", "refused"),
    [
        ({}, "kv_both", False),
        ({"disk": {"path": "/tmp/kv", "capacity": "1GiB"}}, "kv_both", True),
        ({"remote": {"kind": "valkey", "address": "host:1"}}, "kv_both", True),
        ({"cache_peers": {"ask": ["127.0.0.1:5001"]}}, "kv_both", True),
        ({"listen": "127.0.0.1:5000"}, "kv_producer", True),
        ({}, "kv_consumer", True),
    ],
)
def test_blocks_that_ranks_share_out_do_not_leave_the_engine(
    settings: dict[str, Any], role: str, refused: bool
) -> None:
    """Control: without context parallelism, each of these is served."""
    for ranks in (1, 2):
        config = engine_config(kv_role=role, decode_context_parallel_size=ranks)
        config.kv_transfer_config.kv_connector_extra_config = settings
        if refused and ranks > 1:
            with pytest.raises(ConfigError, match=r"parallel_size=2 is not usable: its blocks"):
                checked_settings(config)
        else:
            checked_settings(config)


TIERS = {"disk": {"path": "/tmp/kv", "capacity": "1GiB"}, "cache_peers": {"ask": ["127.0.0.1:1"]}}


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0"])
def test_vllm_0_32_returns_no_routed_experts_and_0_33_none_from_tiers(
    version: str, experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 raises an error in the engine for each block that it has no experts of, and 0.33
    computes such blocks."""
    monkeypatch.setattr(vllm, "__version__", version)
    config = engine_config(enable_return_routed_experts=experts)
    config.kv_transfer_config.kv_connector_extra_config = TIERS
    if experts and version.startswith("0.32"):
        with pytest.raises(ConfigError) as refused:
            checked_settings(config)
        assert refused.value.field == "enable_return_routed_experts"
        assert "\n" not in str(refused.value)
        return
    assert checked_settings(config).has_tiers is not experts


@pytest.mark.parametrize("device", ["xpu", "tpu", "hpu", "rocm"])
def test_a_device_that_was_never_tried_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "rocm":  # torch calls it cuda
        monkeypatch.setattr(torch.version, "hip", "6.4")
    config = engine_config(device_type="cuda" if device == "rocm" else device)
    with pytest.raises(Incompatible) as refused:
        KVConnect(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    assert str(refused.value) == (
        f"kvconnect: model llama is not usable: device '{device}': use a CPU or an NVIDIA GPU"
    )


def test_cuda_is_not_refused() -> None:
    check_engine(engine_config(device_type="cuda"), "off")


def test_what_does_not_fit_is_said_in_one_line_with_prefix_model_cause_and_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with pytest.raises(Incompatible) as refused:
        KVConnect(engine_config(), KVConnectorRole.SCHEDULER, cache_config(FULL))
    line = str(refused.value)
    assert line.startswith("kvconnect: model llama is not usable: vLLM 0.31.2 is not supported: ")
    assert "install 0.32" in line
    assert refused.value.__suppress_context__  # the engine shows it once, not twice
    monkeypatch.undo()
    worker = KVConnect(engine_config(), KVConnectorRole.WORKER, cache_config(FULL))
    two = {"a": torch.zeros(4, 2, 32, 16), "b": torch.zeros(4, 2, 32, 16)}
    with pytest.raises(Incompatible, match=r"^kvconnect: model llama .*2 allocations.*without"):
        worker.register_kv_caches(two)


MEAN = {"runner_type": "pooling", "is_prefix_caching_supported": False}


@pytest.mark.parametrize(
    ("changes", "groups", "why"),
    [
        ({}, [FULL], ""),
        ({}, [], "no KV cache"),
        (MEAN, [FULL], "pools what all its tokens yield"),
        ({**MEAN, "enable_prefix_caching": True}, [FULL], "pools"),  # the user insists
        ({"runner_type": "pooling"}, [FULL], ""),  # only the last token's output is pooled
        ({"enable_prefix_caching": False}, [FULL], ""),  # that is the device's own
    ],
)
def test_where_kv_must_not_be_used_again(
    changes: dict[str, Any], groups: list[Any], why: str
) -> None:
    found = why_idle(engine_config(**changes), cache_config(*groups))
    assert why in found and bool(why) == bool(found)


def test_batch_invariance_goes_with_vllm_s_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns that off for kernels which compute a part of a prompt otherwise than all of it."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "BATCH_INVARIANT" in why_idle(
        engine_config(enable_prefix_caching=False), cache_config(FULL)
    )
    assert not why_idle(engine_config(), cache_config(FULL))


def test_kv_that_depends_on_later_tokens_is_refused() -> None:
    """As in prefix language models, whose attention looks ahead inside the prompt."""
    ahead = dataclasses.replace(FULL, non_causal=True)
    with pytest.raises(Incompatible, match="non-causal"):
        translate.cache_groups(cache_config(FULL, ahead))
    assert translate.cache_groups(cache_config(FULL)) == (CacheGroup(32),)


def test_only_a_decode_engine_keeps_its_failure_policy() -> None:
    for role, policy in (
        ("kv_producer", "recompute"),
        ("kv_both", "recompute"),
        ("kv_consumer", "fail"),
    ):
        config = engine_config(kv_role=role)
        KVConnect(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
        assert config.kv_transfer_config.kv_load_failure_policy == policy


def test_a_failed_load_is_recomputed_whatever_the_engine_s_default() -> None:
    config = engine_config()
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    connector = KVConnect(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    assert connector.scheduler.plan.index.slots.used == 0
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    with pytest.raises(Misuse, match="SCHEDULER connector has no WORKER part"):
        _ = connector.worker


def test_groups() -> None:
    groups = translate.cache_groups(cache_config(FULL, WINDOW))
    assert groups == (CacheGroup(32), CacheGroup(32, window=128))


def test_states_are_groups_of_their_own() -> None:
    state = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    kinds = {"none": "some", "align": "some", "all": "every"}
    for mode, states in kinds.items():
        spec = dataclasses.replace(state, mamba_cache_mode=mode)
        groups = translate.cache_groups(cache_config(FULL, spec))
        assert groups == (CacheGroup(32), CacheGroup(32, states=states))


def test_without_prefix_caching_no_state_is_kept() -> None:
    state = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    kept = {mode: dataclasses.replace(state, mamba_cache_mode=mode) for mode in ("none", "align")}
    assert keeps_none(cache_config(FULL, kept["none"]))
    assert not keeps_none(cache_config(FULL, kept["align"])) and not keeps_none(cache_config(FULL))


def test_states_inside_a_block_are_left_out() -> None:
    output = step({}, drafts={})
    output.kv_connector_block_state = KVConnectorBlockState(
        {"new"}, lambda _: ([],), {"new": [(1, 7, 64), (1, 8, 80)]}
    )
    groups = (CacheGroup(32), CacheGroup(32, states="some"))
    assert kept_states(output, groups) == {"new": [(1, 1, 7)]}


def test_hashes_of_bigger_blocks_are_those_of_their_last_part() -> None:
    request: Any = SimpleNamespace(block_hashes=[b"a", b"b", b"c", b"d", b"e"])
    groups = (CacheGroup(32), CacheGroup(64))
    small, big = translate.group_hashes(request, groups, 32)
    assert list(small) == [b"a", b"b", b"c", b"d", b"e"]
    assert list(big) == [b"b", b"d"]
    assert translate.group_hashes(request, (CacheGroup(16), CacheGroup(48)), 32) == ((), ())


def test_draft_tokens_have_no_kv_yet() -> None:
    drafted = {"new": 256, "long": 144, "drafts": 5}
    output = step(drafted, drafts={"drafts": [11, 12, 13, 14]})
    computed = dict(translate.computed_tokens(output))
    assert computed == {"new": 32 + 256, "long": 256 + 144, "drafts": 60 + 1}
    # A block that only drafts would fill stays due: 61 tokens of 64.
    assert computed["drafts"] // 32 == 1
    # Control: the same five tokens would fill it, were they no drafts.
    assert dict(translate.computed_tokens(step(drafted, drafts={})))["drafts"] == 65


def test_placeholders_of_a_new_request_have_no_kv_either() -> None:
    """vLLM adds them to a request that one token of its prompt is left of."""
    output = step({"new": 1 + 3, "long": 1, "drafts": 1}, drafts={"new": [-1, -1, -1]})
    assert dict(translate.computed_tokens(output))["new"] == 32 + 1


def step(scheduled: dict[str, int], drafts: dict[str, list[int]]) -> SchedulerOutput:
    """vLLM's own message: "new" has 32 tokens on the device, "long" 256 and "drafts" 60."""
    new = NewRequestData(
        req_id="new",
        prompt_token_ids=list(range(400)),
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1, 2, 3],),
        num_computed_tokens=32,
        lora_request=None,
    )
    cached = CachedRequestData(
        req_ids=["long", "drafts"],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None, None],
        num_computed_tokens=[256, 60],
        num_output_tokens=[0, 20],
    )
    return SchedulerOutput(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts,
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def test_geometry_of_one_allocation() -> None:
    storage = torch.arange(2 * 4 * 2 * 32 * 32, dtype=torch.float32)
    layers = storage.view(2, 4, 2, 32, 32)  # layer, block, head, token, content
    kv_caches = {"layer0": layers[0], "layer1": layers[1]}
    config = cache_config(FULL)
    config.kv_cache_groups[0].layer_names = ["layer0", "layer1"]
    geometry = translate.cache_geometry(config, kv_caches)
    area = translate.backing_area(kv_caches)
    assert area.data_ptr() == storage.data_ptr()
    assert area.numel() == storage.numel() * 4
    (group,) = geometry.groups
    found = torch.cat([area[s.offset + 2 * s.stride :][: s.length] for s in group.segments])
    wanted = torch.cat([layers[0, 2].flatten(), layers[1, 2].flatten()]).view(torch.uint8)
    assert torch.equal(found, wanted)


def test_layers_in_two_allocations_are_refused() -> None:
    two = {"a": torch.zeros(4, 2, 32, 16), "b": torch.zeros(4, 2, 32, 16)}
    with pytest.raises(Incompatible, match="2 allocations"):
        translate.backing_area(two)


def test_a_view_without_blocks_names_its_layer() -> None:
    raw = torch.zeros(7, 3)
    with pytest.raises(Incompatible, match="layer layer0"):
        translate.cache_geometry(cache_config(FULL), {"layer0": raw})


def test_messages_survive_the_trip_between_processes() -> None:
    report = JobReport(JobId(1), (FailedBlock(0, 5, 7, FailureCause.DIGEST),))
    both = StepReports([report]).aggregate(StepReports([JobReport(JobId(1))]))
    assert pickle.loads(pickle.dumps(both)).reports == [report, JobReport(JobId(1))]
    step = StepInstructions()
    assert pickle.loads(pickle.dumps(step)) == step


def test_stats_merge_as_vllm_merges_them() -> None:
    worker, scheduler = KVConnectStats(), KVConnectStats()
    worker.record_transfer("GPU_to_CPU", 100, 0.5)
    scheduler.count("lookups")
    merged = worker.aggregate(scheduler).to_dict()
    front = KVConnect.build_kv_connector_stats(merged)
    assert front.reduce() == {
        "GPU_to_CPU_total_bytes": 100,
        "GPU_to_CPU_operations": 1,
        "GPU_to_CPU_total_time": 0.5,
        "lookups": 1,
    }
