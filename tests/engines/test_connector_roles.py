"""Scheduler half and worker half, driven as vLLM drives them in corners a CPU engine lacks."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvconnect.disaggregation.messages import ReceiveReport
from kvconnect.engines.vllm import handoff_pages, sleep, translate
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.device_blocks import DeviceBlocks
from kvconnect.engines.vllm.disaggregation_worker import FormerAgent, make_handoffs
from kvconnect.engines.vllm.idle import IdleScheduler
from kvconnect.engines.vllm.messages import (
    LookAtWeights,
    LookedAtWeights,
    StepInstructions,
    StepReports,
    WorkerHello,
)
from kvconnect.engines.vllm.scheduler import ConnectorScheduler
from kvconnect.engines.vllm.worker import ConnectorWorker
from kvconnect.errors import ConfigError, Incompatible
from kvconnect.offload.load_mode import LoadMode
from kvconnect.offload.messages import (
    FailedBlock,
    GroupBlocks,
    JobReport,
    OffloadInstructions,
    StoreBlocks,
)
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.settings import Settings, check_settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import DiskSettings
from kvconnect.tiers.messages import ABSENT, REMOVED, RemovalAnswer, TierAnswer
from kvconnect.types import FailureCause, JobId, Tier
from tests.engines.vllm_configs import FULL, cache_config, engine_config

BLOCKS = 8
SLOT = 2 * 2 * 32 * 16 * 4  # K and V, heads, tokens, head size, float32


@pytest.fixture(autouse=True)
def no_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need a model; ``test_handoff.py`` has one."""
    monkeypatch.setattr("kvconnect.engines.vllm.worker.make_handoffs", lambda *_, **__: None)


def make_worker(**config: Any) -> ConnectorWorker:
    worker = ConnectorWorker(
        engine_config(), cache_config(FULL, blocks=BLOCKS), check_settings({"host_bytes": 8 * SLOT})
    )
    worker.register({"layer0": torch.zeros(BLOCKS, 2, 32, 32)})
    return worker


def step(*stores: StoreBlocks) -> StepInstructions:
    return StepInstructions(OffloadInstructions(stores=list(stores)))


def store(job: int) -> StoreBlocks:
    return StoreBlocks(JobId(job), (GroupBlocks(0, array("q", [job]), array("q", [job])),), 30.0)


def collect(worker: ConnectorWorker, count: int) -> list[JobReport]:
    reports: list[JobReport] = []
    deadline = time.monotonic() + 30
    while len(reports) < count and time.monotonic() < deadline:
        worker.collect()
        taken = worker.take_reports()
        reports += taken.reports if taken else []
    return reports


def test_stores_survive_a_step_that_ends_without_asking_for_them() -> None:
    """As on all pipeline stages but the last, when a speculator is configured."""
    worker = make_worker()
    worker.begin_step(step(store(1)))
    worker.begin_step(step(store(2)))
    worker.end_step()
    assert [report.job for report in collect(worker, 2)] == [1, 2]
    worker.end_step()  # negative control: nothing is submitted twice
    worker.begin_step(step(store(3)))
    worker.end_step()
    assert [report.job for report in collect(worker, 1)] == [3]
    worker.close()
    worker.close()


def test_nothing_is_copied_between_sleep_and_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache's memory is gone then. Peers find the worker where they found it before."""
    made: list[dict[str, Any]] = []
    closed: list[Any] = []

    def make(*_: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        agent: Any = SimpleNamespace(
            address=("127.0.0.1", 5),
            begin_step=lambda *_: None,
            end_step=lambda: None,
            poll=lambda *_, **__: ([], []),
        )
        agent.close = lambda: closed.append(agent)
        return agent

    monkeypatch.setattr("kvconnect.engines.vllm.worker.make_handoffs", make)
    worker = make_worker()
    worker.hello()
    worker.begin_step(StepInstructions(epoch=7))
    for _ in range(2):  # vLLM may say so twice
        worker.release_caches()
    assert len(closed) == 1 and worker._agent is None
    worker.begin_step(StepInstructions(step(store(1)).offload, epoch=7))
    worker.end_step()
    worker.collect()
    assert worker.take_reports() is None
    assert worker.tier.executor._state.name == "PAUSED"
    for _ in range(2):
        worker.restore_caches()
    assert [report.job for report in collect(worker, 1)] == [1]
    same = {"identity": Identity()}
    assert made == [same, {**same, "former": FormerAgent(("127.0.0.1", 5), 7)}]
    worker.close()
    assert len(closed) == 2


def test_a_port_that_another_process_took_meanwhile_does_not_keep_a_worker_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvconnect.engines.vllm.worker.make_handoffs", make_handoffs)
    monkeypatch.setattr(translate, "handoff_format", lambda *_: {})
    monkeypatch.setattr(handoff_pages, "group_hellos", lambda *_: ())

    def transports() -> int:
        return sum(thread.name.startswith("kvconnect-tcp") for thread in threading.enumerate())

    worker = make_worker()
    address = worker.hello().address
    assert address is not None
    worker.begin_step(StepInstructions(epoch=7))
    worker.release_caches()
    before = transports()
    with socket.create_server(address):
        worker.restore_caches()
        assert worker._agent is not None and worker._agent.address is None
        worker.release_caches()
        assert transports() == before
    worker.restore_caches()
    assert worker._agent is not None and worker._agent.address == address
    worker.close()


def test_caches_that_are_registered_again_replace_those_before() -> None:
    worker = make_worker()
    first = worker.tier
    worker.begin_step(step(store(1)))
    worker.end_step()
    collect(worker, 1)
    worker.register({"layer0": torch.ones(BLOCKS, 2, 32, 32)})
    assert not first.executor._thread.is_alive()
    worker.begin_step(step(store(1)))
    worker.end_step()
    assert [report.failures for report in collect(worker, 1)] == [()]
    assert set(worker.tier.store.view(1, SLOT).cast("f")) == {1.0}
    worker.close()


def test_a_second_greeting_forgets_what_was_stored() -> None:
    half = make_scheduler()
    stored(half)
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == (64, True)  # control
    plan, hello = half.plan, WorkerHello(num_slots=4, slot_bytes=SLOT)
    half.greet({(0, 0): hello})
    assert half.plan is plan, "reports of copies may still come"
    assert half.match(again, 0) == (0, False)
    half.greet({(0, 0): WorkerHello(num_slots=2, slot_bytes=SLOT)})
    assert len(half.plan.index.slots) == 2


def test_vllm_0_32_says_when_its_workers_sleep() -> None:
    events: list[Any] = []

    class Worker:
        def sleep(self, level: int = 1) -> None:
            events.append(("sleep", level))

        def discard(self, tags: tuple[str, ...]) -> None:
            events.append(("discard", tags))

        def wake_up(self, tags: list[str] | None = None) -> None:
            events.append(("wake", tags))

    class Told:
        def unregister_kv_caches(self) -> None:
            events.append("unregister")

        def restore_kv_caches(self) -> None:
            events.append("restore")

    told, worker = Told(), Worker()
    for _ in range(2):
        sleep.extend(Worker)
    sleep._told.add(told)
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    worker.wake_up(["kv_cache"])
    worker.discard(tags=("kv_cache",))
    worker.discard(("other",))
    worker.wake_up()
    sleep._told.discard(told)
    worker.sleep()
    assert events == [
        *("unregister", ("sleep", 2)),
        *(("wake", ["weights"]), ("wake", ["kv_cache"]), "restore"),
        *("unregister", ("discard", ("kv_cache",)), ("discard", ("other",))),
        *(("wake", None), "restore", ("sleep", 1)),
    ]


def test_a_share_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.memory.available_bytes", lambda: SLOT)
    with pytest.raises(ConfigError, match="available now for this worker's share; use less"):
        make_worker()


@pytest.mark.parametrize("field", ["data_parallel_size", "elastic_ep_max_dp_size"])
def test_engines_of_one_machine_are_added_up(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is all that is left once vLLM has told an engine that it is alone."""
    monkeypatch.setattr("kvconnect.memory.total_bytes", lambda: 100)
    groups = cache_config(FULL)
    ConnectorWorker(engine_config(), groups, check_settings({"host_bytes": 60}))
    with pytest.raises(ConfigError, match="in this machine for 2 engines; use less"):
        ConnectorWorker(engine_config(**{field: 2}), groups, check_settings({"host_bytes": 60}))


@pytest.mark.parametrize(
    ("parallel", "engines"),
    [
        ({"data_parallel_size": 16, "data_parallel_size_local": 8}, 8),
        ({"data_parallel_size": 16, "data_parallel_size_local": 16}, 16),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1}, 1),
        # One process for each engine, and Ray: vLLM does not say how many are here.
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 1,
                "data_parallel_external_lb": True,
            },
            4,
        ),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_backend": "ray",
            },
            4,
        ),
    ],
)
def test_engines_of_other_machines_take_none_of_this_one_s_memory(
    parallel: dict[str, Any], engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvconnect.memory.total_bytes", lambda: 160)
    engine, groups = engine_config(**parallel), cache_config(FULL)
    fits = 160 // engines
    ConnectorWorker(engine, groups, check_settings({"host_bytes": fits}))
    with pytest.raises(ConfigError, match=f"in this machine for {engines} engines; use less"):
        ConnectorWorker(engine, groups, check_settings({"host_bytes": fits + 1}))


def test_processes_that_were_started_one_for_each_engine_are_all_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM reads their number from the environment, and takes each one for alone on its machine."""
    parallel = engine_config(data_parallel_size=2, data_parallel_size_local=1).parallel_config
    assert translate.engines_here(parallel) == 1
    monkeypatch.setattr(translate, "envs", SimpleNamespace(VLLM_DP_SIZE=2))
    assert translate.engines_here(parallel) == 2


def test_workers_on_other_machines_take_none_of_this_one_s_memory() -> None:
    """Of an engine that two machines have together, each one's workers share what is there."""
    engine = engine_config(world_size=4, local_world_size=2, tensor_parallel_size=4)
    settings = check_settings({"host_bytes": 8 * SLOT})
    worker = ConnectorWorker(engine, cache_config(FULL, blocks=BLOCKS), settings)
    worker.register({"layer0": torch.zeros(BLOCKS, 2, 32, 32)})
    assert worker.tier.store.num_slots == 4
    worker.close()


def make_scheduler(
    steps_in_flight: int = 1, *, v2: bool = False, **config: Any
) -> ConnectorScheduler:
    engine = engine_config()
    engine.max_concurrent_batches, engine.use_v2_model_runner = steps_in_flight, v2
    half = ConnectorScheduler(engine, cache_config(FULL, blocks=BLOCKS), Settings(**config))
    half.device = DeviceBlocks(BlockPool(BLOCKS, enable_caching=True, hash_block_size=32))
    half.greet({(0, 0): WorkerHello(num_slots=4, slot_bytes=SLOT)})
    return half


def make_request(tokens: int = 64) -> Any:
    return SimpleNamespace(
        request_id="r1",
        block_hashes=[b"a", b"b"],
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_output_tokens=0,
        num_computed_tokens=0,
        skip_reading_prefix_cache=False,
        lora_request=None,
        kv_transfer_params=None,
        kv_hints=None,
        cache_salt=None,
        all_token_ids=list(range(tokens)),
    )


def output(computed: int, block_ids: tuple[list[int], ...]) -> Any:
    """One scheduled request that reaches ``computed`` tokens in this step."""
    return SimpleNamespace(
        num_scheduled_tokens={"r1": computed},
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[SimpleNamespace(req_id="r1", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        kv_connector_block_state=KVConnectorBlockState(set(), lambda _: block_ids, {}),
    )


def stored(half: ConnectorScheduler) -> Any:
    """Have a request computed and its two blocks stored; return the request."""
    request = make_request(65)
    half.add_request(request)
    assert half.match(request, 0) == (0, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).offload.stores
    half.on_reports(StepReports([JobReport(job.job)]))
    request.num_computed_tokens = 64
    return request


@pytest.mark.parametrize("store_first", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_load_voids_its_step_s_stores_in_any_order(fails: bool, store_first: bool) -> None:
    half = make_scheduler(sync_load_bytes=2**30)
    stored(half)
    request = make_request(97)
    request.request_id, request.block_hashes = "r2", [b"a", b"b", b"c"]
    half.add_request(request)
    assert half.match(request, 0) == (64, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],)), 64)
    step = output(32, ([3, 4, 5],))
    step.num_scheduled_tokens = {"r2": 32}
    step.scheduled_new_reqs = [SimpleNamespace(req_id="r2", num_computed_tokens=64)]
    offload = half.build_step(step).offload
    (load,), (store,) = offload.loads, offload.stores
    failures = (FailedBlock(0, 4, 1, FailureCause.MISSING),) if fails else ()
    reports = [JobReport(load.job, failures), JobReport(store.job)]
    half.on_reports(StepReports(reports[::-1] if store_first else reports))
    used = half.plan.index.slots.used
    assert used == (2 if fails else 3), "a block that was computed on a failed one"


@pytest.mark.parametrize("mixed", [False, True])
def test_blocks_get_the_name_of_a_version_only_without_kv_of_former_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    half, names = with_disk(tmp_path), list[bytes]()
    assert half.tiers is not None
    monkeypatch.setattr(half.tiers, "name_by", names.append)
    new = Identity(weights=Weights(version="7"))

    def answered(mixed: bool) -> None:
        order = half.build_step(output(32, ([1],))).weights
        assert order is not None
        half.on_reports(StepReports(identities={(0, 0): LookedAtWeights(order.number, new, mixed)}))

    half.weights_declared("7")
    answered(mixed)
    assert len(names) == (not mixed)
    half.reset()
    answered(mixed=False)
    assert len(set(names)) == 1


def test_a_worker_knows_whether_its_engine_has_kv_of_former_weights() -> None:
    worker = make_worker()
    worker.weights_updating(draft=False)  # before anything was computed
    for step, mixed in (
        (StepInstructions(computes=True), False),
        (StepInstructions(), True),
        (StepInstructions(computes=True, weights=LookAtWeights(1, "7")), True),
        (StepInstructions(computes=True, weights=LookAtWeights(2, "", reset=True)), False),
    ):
        worker.begin_step(step)
        worker.end_step()
        reports = worker.take_reports()
        if reports is not None:
            assert [each.mixed for each in reports.identities.values()] == [mixed]
        worker.weights_updating(draft=False)
        reports = worker.take_reports()
        assert reports is not None
        assert [each.mixed for each in reports.identities.values()] == [True]
    worker.close()


def hinted(half: ConnectorScheduler, **told: Any) -> Any:
    """Have a request with hints computed and its blocks stored; return its response's params."""
    request = make_request(65)
    request.status = RequestStatus.FINISHED_STOPPED
    for name, value in told.items():
        setattr(request, name, value)
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).offload.stores
    half.on_reports(StepReports([JobReport(job.job)]))
    return half.finish_request(request)


def envelope(version: str = "1", **payload: Any) -> KvHintsEnvelope:
    other = KvHintAction("1", "somebody.else", "1", {"pin": 60})
    ours = KvHintAction("2", "kvconnect.cache", version, payload)
    return KvHintsEnvelope("1", "m", [other, ours])


def counted(half: ConnectorScheduler, name: str) -> Any:
    return half.plan.stats.data["counters"].get(name, {})


def test_hints_of_a_request_reach_its_blocks() -> None:
    asks = {"kvconnect": {"pin": 60, "tokens": 40, "receipt": True}}
    half = make_scheduler(pin_share=0.5)
    answer = hinted(half, kv_transfer_params=asks)
    assert answer["kvconnect"]["hints"] == {"pinned": 1}
    assert answer["kvconnect"]["receipt"]["prompt"] == 65
    assert dict(g[::2] for g in half.plan.hints.gauges()) == {"host_blocks_kept": "retain"}
    assert [value for _, value, _ in half.plan.hints.gauges()] == [1, 0]
    half.reset()
    assert [value for _, value, _ in half.plan.hints.gauges()] == [0, 0]
    plain = hinted(make_scheduler(), kv_transfer_params={"kvconnect": {"receipt": True}})
    assert "hints" not in plain["kvconnect"]  # control: nobody asks


def released(half: ConnectorScheduler, hint: str, stored_first: bool) -> tuple[Any, int]:
    """Have a request with a hint computed, and its blocks stored before or after its end. Return
    the outcomes in its response, and the write-back of an engine with a disk."""
    request = make_request(65)
    request.status = RequestStatus.FINISHED_STOPPED
    request.mm_features, request.prompt_embeds = [], None
    request.prompt_token_ids = request.all_token_ids
    request.kv_transfer_params = {"kvconnect": {hint: True, "receipt": True}}
    half.add_request(request)
    assert half.match(request, 0) == (None, False)  # the disk is asked
    (lookup,) = half.build_step(output(0, ([1, 2],))).tiers.lookups
    half.on_reports(StepReports(answers=[TierAnswer(lookup.job, bytes(len(lookup.keys)))]))
    assert half.match(request, 0) == (0, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).offload.stores
    reports = StepReports([JobReport(job.job)])
    if stored_first:
        half.on_reports(reports)
    outcomes = half.finish_request(request)["kvconnect"]["hints"]
    if not stored_first:
        half.on_reports(reports)
    return outcomes, half.plan.index.slots.used


def with_disk(path: Path) -> ConnectorScheduler:
    disk = DiskSettings(path=str(path), capacity=64 << 20)
    half = make_scheduler(disk=disk, load_when="always")
    # A quarter of the slots may wait for the disk.
    half.greet({(0, 0): WorkerHello(num_slots=8, slot_bytes=SLOT)})
    return half


@pytest.mark.parametrize("stored_first", [True, False])
def test_a_drop_goes_to_the_disk_and_is_counted_once(tmp_path: Path, stored_first: bool) -> None:
    half = with_disk(tmp_path)
    outcomes, used = released(half, "drop", stored_first)
    assert (outcomes, used) == ({"dropped" if stored_first else "pending": 2}, 0)
    work = half.build_step(output(0, ([],))).tiers
    assert not work.write_backs and half.busy
    (removal,) = work.removals
    assert len(set(removal.keys)) == 2
    answer = RemovalAnswer(removal.job, bytes([REMOVED, ABSENT]))
    half.on_reports(StepReports(answers=[answer]))
    assert counted(half, "cache_hint_blocks") == {"dropped": 2}
    assert not half.build_step(output(0, ([],))).tiers.removals and not half.busy


@pytest.mark.parametrize("hint", ["drop", "pin"])
def test_what_is_dropped_while_it_is_stored_is_not_served_to_others(hint: str) -> None:
    half = make_scheduler(cache_peers=PeerSettings(serve=True))
    assert half.tiers is not None
    request = make_request(65)
    request.status = RequestStatus.FINISHED_STOPPED
    request.mm_features, request.prompt_embeds = [], None
    request.prompt_token_ids = request.all_token_ids
    request.kv_transfer_params = {"kvconnect": {"drop": True} if hint == "drop" else {"pin": 60}}
    half.add_request(request)
    assert half.match(request, 0) == (0, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).offload.stores
    half.finish_request(request)
    half.on_reports(StepReports([JobReport(job.job)]))
    served = half.tiers.take(time.monotonic()).served
    assert len(served) == (0 if hint == "drop" else 2)


@pytest.mark.parametrize("stored_first", [True, False])
def test_a_demotion_waits_for_the_write_back(tmp_path: Path, stored_first: bool) -> None:
    half = with_disk(tmp_path)
    outcomes, used = released(half, "demote", stored_first)
    assert (outcomes, used) == ({"demoted" if stored_first else "pending": 2}, 2)
    waits = len(half.plan.hints._demoting)
    (job,) = half.build_step(output(0, ([],))).tiers.write_backs
    assert (waits, len(half.plan.hints._demoting), len(job.keys)) == (2, 2, 2)
    assert counted(half, "cache_hint_blocks") == {"demoted": 2}
    assert half.plan.index.policy.evict(half.plan.index.slots.pins) is None  # they are read
    half.on_reports(StepReports(answers=[TierAnswer(job.job, b"\1\1")]))
    assert not half.plan.hints._demoting
    assert half.plan.index.policy.evict(half.plan.index.slots.pins) == job.slots[1]


def test_hints_come_in_vllm_s_envelope_too() -> None:
    half = make_scheduler(pin_share=0.5)
    assert hinted(half, kv_hints=envelope(drop=True)) is None
    assert counted(half, "cache_hint_blocks") == {"dropped": 2}
    assert half.plan.index.slots.used == 0
    both = make_scheduler(pin_share=0.5)
    params = {"kvconnect": {"retain": 9}}
    hinted(both, kv_hints=envelope(drop=True), kv_transfer_params=params)
    assert counted(both, "cache_hint_blocks") == {"retained": 1, "refused_tenant": 1}
    assert counted(both, "ignored_cache_hints") == {"conflict": 1}
    newer = make_scheduler()
    hinted(newer, kv_hints=envelope("2", drop=True))
    assert counted(newer, "ignored_cache_hints") == {"unknown": 1}
    assert newer.plan.index.slots.used == 2


@pytest.mark.parametrize("options", [7, "pin", {"pin": "long"}, {"pin": 1e300}, {"tokens": -1}])
def test_a_hostile_hint_changes_nothing_and_is_counted(options: Any) -> None:
    half = make_scheduler(pin_share=0.5)
    assert hinted(half, kv_transfer_params={"kvconnect": options}) is None
    assert counted(half, "ignored_cache_hints") == {"invalid": 1}
    assert half.plan.index.slots.used == 2


@pytest.mark.parametrize(
    ("steps", "v2", "is_async"), [(1, False, False), (2, False, True), (1, True, True)]
)
def test_loads_run_inside_a_step_only_where_a_failed_one_is_computed(
    steps: int, v2: bool, is_async: bool
) -> None:
    """Not where steps overlap, and not with vLLM's model runner V2."""
    half = make_scheduler(steps, v2=v2, sync_load_bytes=1 << 30)
    stored(half)
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == (64, is_async)


def test_by_default_what_was_measured_decides() -> None:
    half = make_scheduler()
    first = stored(half)  # lives on: another request that a load inside would hold up
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == (64, True)  # nothing is known yet
    half.plan.load_mode = LoadMode()  # without the steps of this test
    half.plan.load_mode.began(0.0, plain=True)
    half.plan.load_mode.ended(1e-3)
    half.plan.load_mode.loaded(2, 0.9e-3)
    assert half.match(again, 0) == (64, False)  # a load of two blocks is shorter than a step
    half.plan.load_mode.loaded(2, 9.0)
    assert half.match(again, 0) == (64, True)
    half.finish_request(first)
    assert half.match(again, 0) == (64, False)  # nobody waits


def test_a_load_and_a_step_are_measured() -> None:
    half = make_scheduler()
    seen: list[tuple[int, float]] = []
    half.plan.load_mode.loaded = lambda *args: seen.append(args)  # type: ignore[method-assign]
    stored(half)
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    half.match(again, 0)
    half.after_alloc(again, SimpleNamespace(get_block_ids=lambda: ([3, 4],)), 64)
    (load,) = half.build_step(output(0, ([3, 4],))).offload.loads
    half.on_reports(StepReports([JobReport(load.job, seconds=0.25)]))
    assert seen[-1] == (2, 0.25)


@pytest.mark.parametrize("pooled", [True, False])
def test_pooling_of_all_tokens_is_never_given_a_part_of_them(pooled: bool) -> None:
    """Nor by a client that says it has blocks elsewhere. Control: other models are."""
    engine = engine_config(runner_type="pooling", is_prefix_caching_supported=not pooled)
    cache = cache_config(FULL, blocks=BLOCKS)
    connector = KVConnect(engine, KVConnectorRole.SCHEDULER, cache)
    connector.bind_gpu_block_pool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=32))
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerHello(4, SLOT)})
    half = connector.scheduler
    request = make_request(65)
    request.kv_transfer_params = {"do_remote_prefill": True} if pooled else None
    request.status = RequestStatus.FINISHED_STOPPED
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    stores = half.build_step(output(64, ([1, 2],))).offload.stores
    assert bool(stores) == (not pooled)
    half.on_reports(StepReports([JobReport(job.job) for job in stores]))
    assert half.finish_request(request) is None
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0)[0] == (0 if pooled else 64)


def test_a_model_without_kv_cache_has_an_idle_connector() -> None:
    engine = engine_config()
    engine.kv_transfer_config.kv_connector_extra_config = {
        "disk": {"path": "/nowhere", "capacity": "1GiB"}
    }
    worker = KVConnect(engine, KVConnectorRole.WORKER, cache_config()).worker
    worker.register({})
    assert worker.hello() == WorkerHello(0, 0)
    half = KVConnect(engine, KVConnectorRole.SCHEDULER, cache_config()).scheduler
    half.device = DeviceBlocks(BlockPool(1, enable_caching=False, hash_block_size=32))
    half.greet({(0, 0): worker.hello()})
    request = make_request()
    half.add_request(request)
    assert half.match(request, 0) == (0, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ()), 0)
    scheduled = half.build_step(output(64, ()))
    given = {"epoch": 0, "idle": False, "computes": False, "greet": False}
    assert replace(scheduled, **given) == StepInstructions()
    assert not half.busy
    worker.begin_step(scheduled)
    worker.end_step()
    assert worker.collect() == (set(), set()) and worker.take_reports() is None
    assert half.finish_request(request) is None
    half.reset()
    assert half.take_stats() is not None
    worker.close()


@pytest.mark.parametrize("alone", [True, False])
def test_workers_say_who_they_are_where_vllm_does_not_ask(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """MultiConnector hands over what the workers of one child say, to all of them."""
    cache = cache_config(FULL, blocks=BLOCKS)
    transfer = engine_config()
    transfer.kv_transfer_config.kv_connector_extra_config = {"host_bytes": 4 * SLOT}
    worker = KVConnect(transfer, KVConnectorRole.WORKER, cache)
    worker.register_kv_caches({"layer0": torch.zeros(BLOCKS, 2, 32, 32)})
    group = worker if alone else object()
    monkeypatch.setattr("kvconnect.engines.vllm.connector.get_kv_transfer_group", lambda: group)
    handed: Any = worker.get_handshake_metadata()
    assert (handed is None) == (not alone)
    scheduler = KVConnect(transfer, KVConnectorRole.SCHEDULER, cache)
    scheduler.bind_gpu_block_pool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=32))
    # Another child's, if this one has said nothing.
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handed or SimpleNamespace()})
    assert scheduler.has_pending_push_work() == (not alone)  # so the engine steps
    early = make_request(65)
    scheduler.on_new_request(early)  # before it is known what there is
    nothing = output(0, ())
    nothing.num_scheduled_tokens, nothing.scheduled_new_reqs = {}, []
    worker.bind_connector_metadata(scheduler.build_connector_meta(nothing))
    reports = worker.build_connector_worker_meta()
    assert (reports is None) == alone
    told: Any = SimpleNamespace(kv_connector_worker_meta=reports, invalid_block_ids=set())
    scheduler.update_connector_output(told)
    assert not scheduler.has_pending_push_work()
    plan = scheduler.scheduler.plan
    scheduler.update_connector_output(told)  # of a step that overlapped with the first
    assert scheduler.scheduler.plan is plan
    assert len(scheduler.scheduler.plan.index.slots) == 4
    assert worker.build_connector_worker_meta() is None  # once
    scheduler.get_num_new_matched_tokens(early, 0)
    scheduler.update_state_after_alloc(early, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    early.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished_all_groups(early, ([1, 2],))
    worker.shutdown()


@pytest.mark.parametrize("groups", ["one", "all"])
def test_a_request_is_forgotten_however_vllm_says_that_it_ended(groups: str) -> None:
    """MultiConnector asks for one group's blocks where a sibling knows no more."""
    connector = KVConnect(
        engine_config(), KVConnectorRole.SCHEDULER, cache_config(FULL, blocks=BLOCKS)
    )
    connector.bind_gpu_block_pool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=32))
    request = make_request()
    connector.on_new_request(request)
    assert request.request_id in connector.scheduler._requests
    request.status = RequestStatus.FINISHED_STOPPED
    ended = (
        connector.request_finished(request, [1, 2])
        if groups == "one"
        else connector.request_finished_all_groups(request, ([1, 2],))
    )
    assert ended == (False, None)
    assert not connector.scheduler._requests


def test_hellos_of_several_workers_add_up() -> None:
    first, second = WorkerHello(4, SLOT), WorkerHello(3, SLOT)
    told = StepReports(hellos={(0, 0): first}).aggregate(StepReports(hellos={(0, 1): second}))
    assert told.hellos == {(0, 0): first, (0, 1): second}
    half = ConnectorScheduler(engine_config(world_size=2), cache_config(FULL), Settings())
    with pytest.raises(Incompatible, match="1 of 2 workers"):
        half.greet({(0, 0): first})
    half.device = DeviceBlocks(BlockPool(BLOCKS, enable_caching=True, hash_block_size=32))
    half.on_reports(told)
    assert len(half.plan.index.slots) == 3


def test_an_adapter_with_other_weights_is_not_served_from_the_tier(tmp_path: Path) -> None:
    """Its name and path are those of the weights before, and so are its blocks' hashes."""
    half = make_scheduler()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")

    def ask(name: str, change: bytes = b"", **adapter: Any) -> tuple[Any, list[StoreBlocks]]:
        """Run a request whose adapter's weights change after it was admitted."""
        request = make_request(65)
        request.request_id = name
        if adapter:
            request.lora_request = LoRARequest("poet", 1, str(tmp_path), **adapter)
        half.add_request(request)
        found = half.match(request, 0)
        half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), found[0] or 0)
        if change:
            (tmp_path / "adapter_model.safetensors").write_bytes(change)
        step = output(64, ([1, 2],))
        step.num_scheduled_tokens = {name: 64}
        step.scheduled_new_reqs = [SimpleNamespace(req_id=name, num_computed_tokens=0)]
        work = half.build_step(step).offload
        numbers = [*(each.job for each in work.stores), *(each.job for each in work.loads)]
        half.on_reports(StepReports([JobReport(number) for number in numbers]))
        half.finish_request(request)
        return found[0], work.stores

    found, stores = ask("r1", load_inplace=False)
    assert not found and stores
    assert ask("r2", load_inplace=False) == (64, [])  # control: it is there
    assert ask("r3", load_inplace=True) == (0, [])
    assert ask("r4", load_inplace=False) == (0, [])  # loaded anew from the same path
    assert ask("r5") == (64, [])  # others are as before (this fake's hashes are all the same)
    half.reset()
    assert ask("r6", b"other", load_inplace=True) == (0, [])  # they change while it runs
    assert ask("r7", load_inplace=True) == (0, [])
    half.reset()
    found, stores = ask("r8", load_inplace=True)
    assert not found and stores
    assert ask("r9", load_inplace=True) == (64, [])  # control: no file has changed


def test_source_blocks_are_held_until_the_copy_is_done_or_void() -> None:
    half = make_scheduler()
    request = make_request(65)
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    free = half.device._pool.get_num_free_blocks()
    half.build_step(output(64, ([1, 2],)))
    assert half.device._pool.get_num_free_blocks() == free - 2
    assert not half.device._pool.reset_prefix_cache()
    half.reset()
    assert half.device._pool.get_num_free_blocks() == free
    assert half.device._pool.reset_prefix_cache()


def test_with_decode_context_parallelism_a_block_holds_tokens_of_all_ranks() -> None:
    engine = engine_config(decode_context_parallel_size=2, tensor_parallel_size=2, world_size=2)
    engine.cache_config.prefix_match_unit = None
    cache = cache_config(FULL, blocks=BLOCKS)
    cache.hash_block_size = resolve_kv_cache_block_sizes(cache, engine)[1]
    half = ConnectorScheduler(engine, translate.scheduled_cache(engine, cache), Settings())
    assert cache.kv_cache_groups[0].kv_cache_spec.block_size == 32, "a worker's part of a block"
    half.device = DeviceBlocks(BlockPool(BLOCKS, enable_caching=True, hash_block_size=64))
    hello = WorkerHello(num_slots=4, slot_bytes=SLOT)
    half.greet({(0, 0): hello, (0, 1): hello})
    request = make_request(129)
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    planned = [half.build_step(output(computed, ([1, 2],))) for computed in (63, 127, 128)]
    jobs = [step.offload.stores for step in planned]
    blocks = [[list(part.block_ids) for job in made for part in job.parts] for made in jobs]
    assert blocks == [[], [[1]], [[2]]]
    for (job,) in jobs[1:]:
        for _ in range(2):  # each worker stored its part
            half.on_reports(StepReports([JobReport(job.job)]))
    again = make_request(129)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0)[0] == 128
    # Control: a single rank's blocks are half as large.
    alone = engine_config()
    assert translate.scheduled_cache(alone, cache) is cache


def test_no_peer_is_met_before_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures them after it registered the caches, and asks for addresses when it is done."""
    agent = SimpleNamespace(address=("127.0.0.1", 5), close=lambda: None)
    made: list[tuple[Any, ...]] = []

    def make(*args: Any, **_: Any) -> Any:
        made.append(args)
        return agent

    monkeypatch.setattr("kvconnect.engines.vllm.worker.make_handoffs", make)
    worker = make_worker()
    assert not made
    assert worker.hello().address == ("127.0.0.1", 5)
    assert worker.hello().receives and len(made) == 1  # vLLM may ask again
    worker.close()


@pytest.mark.parametrize("halves", [False, True])
def test_layers_of_a_batch_that_is_cut_in_two_are_handed_off_at_the_end_of_the_step(
    halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half calls a layer's hook, and the first call comes before the second half is there."""
    calls: list[str] = []
    agent = SimpleNamespace(
        offering=True, layer_written=calls.append, end_step=lambda: calls.append("end")
    )
    worker = ConnectorWorker(engine_config(use_ubatching=halves), cache_config(FULL), Settings())
    worker._agent = cast(Any, agent)
    for _ in ("first half", "second half"):
        worker.layer_written("layer0")
    worker.end_step()
    assert calls == (["end"] if halves else ["layer0", "layer0", "end"])


def running(half: ConnectorScheduler) -> tuple[Any, StoreBlocks]:
    """Return a request that is computed in this step, and the job that stores its two blocks."""
    request = make_request(65)
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).offload.stores
    return request, job


def test_a_device_where_nothing_is_computed_can_be_reset() -> None:
    """Also where nobody steps the engine without a request, as in the caller's own process."""
    half = make_scheduler()
    pool = half.device._pool
    free = pool.get_num_free_blocks()
    request, job = running(half)
    assert pool.get_num_free_blocks() == free - 2  # another request may be given them
    half.finish_request(request)
    assert pool.get_num_free_blocks() == free
    assert pool.reset_prefix_cache()
    later = make_request(65)
    later.request_id = "r2"
    half.add_request(later)
    assert pool.get_num_free_blocks() == free - 2  # the copy may still read them
    half.on_reports(StepReports([JobReport(job.job)]))
    assert pool.get_num_free_blocks() == free
    assert half.match(later, 0)[0] == 64  # and nothing of it was lost
    half.finish_request(later)
    half.finish_request(later)  # once is enough
    assert pool.get_num_free_blocks() == free
    assert not half.busy


def test_a_reset_with_the_tier_takes_back_what_is_in_flight() -> None:
    half = make_scheduler()
    request, job = running(half)
    half.finish_request(request)
    half.reset()
    half.add_request(request)
    half.on_reports(StepReports([JobReport(job.job)]))
    assert half.match(request, 0) == (0, False)
    assert half.device._pool.get_num_free_blocks() == BLOCKS - 1


@pytest.mark.parametrize("failed", [{1}, set()])
def test_what_was_computed_from_another_connector_s_failed_load_is_not_stored(
    failed: set[int],
) -> None:
    """A sibling under MultiConnector loads inside the step, which hears of the failure too late.
    Control: without a failure, it is."""
    half = make_scheduler()
    request, job = running(half)
    half.on_reports(StepReports([JobReport(job.job)]), failed)
    assert half.device._pool.get_num_free_blocks() == BLOCKS - 1
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == ((0, False) if failed else (64, True))
    half.finish_request(again)
    half.finish_request(request)


def test_an_own_failed_load_takes_back_nothing_but_itself() -> None:
    half = make_scheduler()
    _, job = running(half)
    failure = FailedBlock(0, 5, 3, FailureCause.COPY)
    half.on_reports(StepReports(arrivals=[ReceiveReport(JobId(99), (failure,))]), {5})
    half.on_reports(StepReports([JobReport(job.job)]))
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == (64, True)


@pytest.mark.parametrize(
    ("hits", "sources"),
    [
        ({Tier.HOST: 64}, {CacheHitSource.HOST: 64}),
        (
            {Tier.DISK: 32, Tier.REMOTE: 16, Tier.HOST: 16},
            {
                CacheHitSource.DISK: 32,
                CacheHitSource.EXTERNAL_UNSPECIFIED: 16,
                CacheHitSource.HOST: 16,
            },
        ),
        ({Tier.DISK: 64, Tier.HOST: 0}, {CacheHitSource.DISK: 64}),
        ({}, {CacheHitSource.P2P: 64}),  # a hand-off
    ],
)
def test_vllm_is_told_where_tokens_come_from(
    monkeypatch: pytest.MonkeyPatch, hits: Any, sources: Any
) -> None:
    connector = KVConnect(engine_config(), KVConnectorRole.SCHEDULER, cache_config(FULL))
    monkeypatch.setattr(connector.scheduler, "after_alloc", lambda *_: hits)
    request, blocks = make_request(), SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    connector.update_state_after_alloc(request, blocks, 64)
    assert connector.get_external_cache_hit_sources(request, 64) == sources
    monkeypatch.undo()
    connector.bind_gpu_block_pool(BlockPool(BLOCKS, enable_caching=True, hash_block_size=32))
    connector.on_new_request(request)
    connector.update_state_after_alloc(request, blocks, 0)
    assert connector.get_external_cache_hit_sources(request, 0) == {}


class Clock:
    """Stands for the module ``time`` of the scheduler's half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("kvconnect.engines.vllm.scheduler.time", self)

    def monotonic(self) -> float:
        return self.now


def test_gauges_come_together_so_that_quotients_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    half = make_scheduler()
    first = half.take_stats()
    assert first is not None and half.take_stats() is None  # nothing moved since
    stored(half)
    clock.now += 0.2
    moved = half.take_stats()
    assert moved is not None
    assert set(moved.data["gauges"]) == set(first.data["gauges"])
    assert moved.data["gauges"]["host_blocks_used"] == {"": 2}


def test_gauges_are_not_read_in_every_step_but_when_the_engine_comes_to_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    half = make_scheduler()
    half.take_stats()
    request = stored(half)
    clock.now += 0.05
    working = half.take_stats()
    assert working is None or not working.data["gauges"]
    half.finish_request(request)
    rest = half.take_stats()
    assert rest is not None and rest.data["gauges"]["host_blocks_used"] == {"": 2}


def test_a_step_that_only_waits_publishes_nothing_but_an_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    half = make_scheduler()
    request = make_request(65)
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).offload.stores
    begun = half.take_stats()
    assert begun is not None and begun.data["gauges"]["jobs_in_flight"]["GPU_to_CPU"] == 1
    waiting = output(64, ([1, 2],))
    waiting.num_scheduled_tokens, waiting.scheduled_new_reqs = {}, []
    for _ in range(3):
        clock.now += 0.2
        half.build_step(waiting)
        half.on_reports(None)
        assert half.take_stats() is None
    clock.now += 5
    aged = half.take_stats()
    assert aged is not None and aged.data["gauges"]["ledger_oldest_hold_seconds"][""] >= 4
    half.on_reports(StepReports([JobReport(job.job)]))
    clock.now += 0.2
    ended = half.take_stats()
    assert ended is not None and ended.data["gauges"]["jobs_in_flight"]["GPU_to_CPU"] == 0


def test_a_preempted_request_is_stored_from_its_new_blocks() -> None:
    half = make_scheduler()
    request = stored(half)
    half.reset()
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([3, 4],)), 0)
    (job,) = half.build_step(output(64, ([3, 4],))).offload.stores
    assert list(job.parts[0].block_ids) == [3, 4]


def context(attn_metadata: object, mode: CUDAGraphMode = CUDAGraphMode.NONE) -> SimpleNamespace:
    return SimpleNamespace(attn_metadata=attn_metadata, cudagraph_runtime_mode=mode)


def test_hooks_are_relied_on_only_where_every_layer_has_its_own() -> None:
    config, batch = engine_config(), {"layer0": object()}
    assert translate.calls_layer_hooks(config, context(batch))
    assert translate.calls_layer_hooks(config, context([batch, batch]))  # two halves of a batch
    assert translate.calls_layer_hooks(config, context(batch, CUDAGraphMode.PIECEWISE))
    assert not translate.calls_layer_hooks(config, context(batch, CUDAGraphMode.FULL))
    assert not translate.calls_layer_hooks(config, context(None))
    config.speculative_config = SimpleNamespace()
    assert not translate.calls_layer_hooks(config, context(batch))


def test_a_worker_knows_where_each_layer_ends() -> None:
    worker = make_worker()
    assert worker.tier.executor.sync.layers == {"layer0": (0, 1)}
    worker.close()


@pytest.mark.parametrize("params", ["x", 7, ["x"], True, [], ""])
@pytest.mark.parametrize("idle", [False, True])
def test_params_that_are_no_object_are_dropped(params: Any, idle: bool) -> None:
    """vLLM takes any value from ``vllm_xargs``, and calls ``get`` of it in the engine's loop."""
    half = make_scheduler()
    if idle:
        half = IdleScheduler(engine_config(), cache_config(FULL, blocks=BLOCKS), Settings())
    request = make_request(65)
    request.kv_transfer_params = params
    half.add_request(request)
    assert request.kv_transfer_params is None
    assert counted(half, "ignored_cache_hints") == {"invalid": 1}
    control = make_request(65)
    control.request_id, control.kv_transfer_params = "r2", {"other": 1}
    half.add_request(control)
    assert control.kv_transfer_params == {"other": 1}


class News:
    """Counts who waits for it."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def clear(self) -> None:
        pass


@pytest.mark.parametrize(
    ("parallel", "waits"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 1),
        ({"pipeline_parallel_size": 4}, 0),
        ({"data_parallel_size": 2}, 0),
    ],
)
def test_a_step_without_tokens_waits_only_where_no_other_step_waits_for_it(
    parallel: dict[str, int], waits: int
) -> None:
    worker = ConnectorWorker(
        engine_config(**parallel), cache_config(FULL, blocks=BLOCKS), Settings()
    )
    news: Any = News()
    worker._news = news
    for idle in (False, True):  # a step that computes never waits
        worker.begin_step(StepInstructions(idle=idle))
        worker.collect()
    assert len(news.waits) == waits


class Prefills:
    """What a cost model is told of steps: (tokens, seconds)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def prefilled(self, tokens: int, seconds: float, context: float) -> None:
        self.seen.append((tokens, round(seconds, 3)))


def measured_steps(half: ConnectorScheduler) -> list[tuple[int, float]]:
    """Have prompts computed in 0.1 s each, and steps without tokens beside them in 0.001 s. vLLM
    passes on the reports of steps with tokens, and of others only if there are some."""
    assert half.tiers is not None
    tiers, prefills, worker, now = half.tiers, Prefills(), make_worker(), 0.0
    tiers._cost = cast("Any", prefills)
    for computed in (64, 0, 0, 32, 0, 0, 0, 1, 0, 16, 0, 48):
        scheduled = output(computed, ([],))
        if not computed:
            scheduled.num_scheduled_tokens, scheduled.scheduled_new_reqs = {}, []
        worker.begin_step(StepInstructions(timed=tiers.time_step(scheduled, now)))
        worker.collect()
        reports = worker.take_reports()
        now += 0.1 if computed else 0.001
        if computed or reports is not None:
            tiers.step_ended(reports.timed if reports else 0, now)
    worker.close()
    return prefills.seen


@pytest.mark.parametrize("numbered", [True, False])
def test_the_cost_model_is_given_each_prompt_with_the_time_of_its_own_step(
    numbered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: if every step is measured and reports are taken in turn, the times are of others."""
    half = with_disk(tmp_path)
    if not numbered:
        assert half.tiers is not None
        waiting: list[tuple[int, float]] = []
        monkeypatch.setattr(
            half.tiers,
            "time_step",
            lambda out, now: waiting.append((sum(out.num_scheduled_tokens.values()), now)) or 0,
        )
        monkeypatch.setattr(
            half.tiers,
            "step_ended",
            lambda _, now: half.tiers._cost.prefilled(*_since(*waiting.pop(0), now), 0.0),
        )
    right = [(64, 0.1), (32, 0.1), (16, 0.1), (48, 0.1)]
    assert (measured_steps(half) == right) is numbered


def _since(tokens: int, began: float, now: float) -> tuple[int, float]:
    return tokens, now - began


def test_a_step_is_measured_only_where_its_own_report_comes(tmp_path: Path) -> None:
    """Steps overlap, and a report may be lost. With several workers, each marks its report."""
    half = with_disk(tmp_path)
    assert half.tiers is not None
    tiers, prefills = half.tiers, Prefills()
    assert tiers.time_step(output(64, ([],)), 0.0) == 0  # nothing is measured without a cost model
    tiers._cost = cast("Any", prefills)
    first, second = (tiers.time_step(output(n, ([],)), at) for n, at in ((64, 0.0), (32, 0.1)))
    both = StepReports(timed=first).aggregate(StepReports())
    tiers.step_ended(both.timed, 0.5)
    tiers.step_ended(second, 0.75)  # it began when the first one ended
    assert prefills.seen == [(64, 0.5), (32, 0.25)]
    lost, third = (tiers.time_step(output(n, ([],)), 1.0) for n in (16, 48))
    tiers.step_ended(0, 1.0)
    tiers.step_ended(third, 2.0)
    assert lost and prefills.seen[2:] == [(48, 1.0)] and not tiers._steps


def sharing(half: ConnectorScheduler, name: str) -> Any:
    """Return a request whose first two blocks the host tier has."""
    request = make_request(97)
    request.request_id, request.block_hashes = name, [b"a", b"b", name.encode()]
    half.add_request(request)
    return request


@pytest.mark.parametrize("end", ["loaded", "failed", "aborted"])
def test_who_shares_a_prefix_waits_for_its_load(end: str) -> None:
    """vLLM names the blocks of a load when it has ended."""
    half = make_scheduler()
    stored(half)
    first, second, third = (sharing(half, name) for name in ("r2", "r3", "r4"))
    assert half.match(first, 0) == (64, True)
    half.after_alloc(first, SimpleNamespace(get_block_ids=lambda: ([3, 4],)), 64)
    (load,) = half.build_step(output(0, ([3, 4],))).offload.loads
    for _ in range(2):  # at each step
        assert half.match(second, 0) == half.match(third, 0) == (None, False)
    assert half.match(second, 64) == (0, False)  # control: the device has what is loaded
    failures = (FailedBlock(0, 3, 0, FailureCause.DEADLINE),) if end == "failed" else ()
    if end == "aborted":
        first.status = RequestStatus.FINISHED_ABORTED
        half.finish_request(first)
    else:
        half.on_reports(StepReports([JobReport(load.job, failures)]))
    assert half.match(second, 0) == (64, True)
    assert counted(half, "lookups") == {"": 2}, "of the requests that were admitted"


def test_without_a_prefix_cache_on_the_device_nobody_waits_for_another_s_load() -> None:
    engine = engine_config(enable_prefix_caching=False)
    half = ConnectorScheduler(engine, cache_config(FULL, blocks=BLOCKS), Settings())
    half.device = DeviceBlocks(BlockPool(BLOCKS, enable_caching=False, hash_block_size=32))
    half.greet({(0, 0): WorkerHello(num_slots=4, slot_bytes=SLOT)})
    stored(half)
    first, second = (sharing(half, name) for name in ("r2", "r3"))
    assert half.match(first, 0) == (64, True)
    half.after_alloc(first, SimpleNamespace(get_block_ids=lambda: ([3, 4],)), 64)
    half.build_step(output(0, ([3, 4],)))
    assert half.match(second, 0) == (64, True)
