"""Scheduler half and worker half, driven as vLLM drives them in corners a CPU engine lacks."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kvconnect.config import Config
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.connector import KVConnect
from kvconnect.engines.vllm.messages import StepInstructions, StepReports, WorkerHello
from kvconnect.engines.vllm.scheduler import SchedulerHalf
from kvconnect.engines.vllm.worker import WorkerHalf
from kvconnect.errors import ConfigError
from kvconnect.plan.instructions import Instructions, Part, Report, Store
from kvconnect.types import JobId
from tests.engines.test_connector import FULL, cache_config, engine_config

BLOCKS = 8
SLOT = 2 * 2 * 32 * 16 * 4  # K and V, heads, tokens, head size, float32


@pytest.fixture(autouse=True)
def no_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need a model; ``test_handoff.py`` has one."""
    monkeypatch.setattr("kvconnect.engines.vllm.worker.make_handoffs", lambda *_: None)


def make_worker(**config: Any) -> WorkerHalf:
    worker = WorkerHalf(
        engine_config(), cache_config(FULL, blocks=BLOCKS), Config(host_bytes=8 * SLOT)
    )
    worker.register({"layer0": torch.zeros(BLOCKS, 2, 32, 32)})
    return worker


def step(*stores: Store) -> StepInstructions:
    return StepInstructions(Instructions(stores=list(stores)))


def store(job: int) -> Store:
    return Store(JobId(job), (Part(0, array("q", [job]), array("q", [job])),), 30.0)


def collect(worker: WorkerHalf, count: int) -> list[Report]:
    reports: list[Report] = []
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
    worker.begin_step(step())
    assert collect(worker, 0) == [] and worker.take_reports() is None
    worker.close()
    worker.close()


def test_a_share_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.memory.available_bytes", lambda: SLOT)
    with pytest.raises(ConfigError, match="available now for this worker's share; use less"):
        make_worker()


@pytest.mark.parametrize("field", ["data_parallel_size", "elastic_ep_max_dp_size"])
def test_engines_of_one_machine_are_added_up(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is all that is left once vLLM has told an engine that it is alone."""
    monkeypatch.setattr("kvconnect.memory.total_bytes", lambda: 100)
    groups = cache_config(FULL)
    WorkerHalf(engine_config(), groups, Config(host_bytes=60))
    with pytest.raises(ConfigError, match="in this machine for 2 engines; use less"):
        WorkerHalf(engine_config(**{field: 2}), groups, Config(host_bytes=60))


def make_scheduler(steps_in_flight: int = 1, **config: Any) -> SchedulerHalf:
    engine = engine_config()
    engine.max_concurrent_batches = steps_in_flight
    half = SchedulerHalf(engine, cache_config(FULL, blocks=BLOCKS), Config(**config))
    half.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=32)
    half.greet({(0, 0): WorkerHello(num_slots=4, slot_bytes=SLOT)})
    return half


def make_request(tokens: int = 64) -> Any:
    return SimpleNamespace(
        request_id="r1",
        block_hashes=[b"a", b"b"],
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        skip_reading_prefix_cache=False,
        lora_request=None,
        kv_transfer_params=None,
        all_token_ids=list(range(tokens)),
    )


def output(computed: int, block_ids: tuple[list[int], ...]) -> Any:
    """One scheduled request that reaches ``computed`` tokens in this step."""
    return SimpleNamespace(
        num_scheduled_tokens={"r1": computed},
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[SimpleNamespace(req_id="r1", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: block_ids),
    )


def stored(half: SchedulerHalf) -> Any:
    """Have a request computed and its two blocks stored; return the request."""
    request = make_request(65)
    half.add_request(request)
    assert half.match(request, 0) == (0, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    (job,) = half.build_step(output(64, ([1, 2],))).work.stores
    half.on_reports(StepReports([Report(job.job)]))
    return request


@pytest.mark.parametrize(("steps", "is_async"), [(1, False), (2, True)])
def test_loads_run_inside_a_step_only_where_steps_do_not_overlap(
    steps: int, is_async: bool
) -> None:
    half = make_scheduler(steps, sync_load_bytes=1 << 30)
    stored(half)
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == (64, is_async)


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
    stores = half.build_step(output(64, ([1, 2],))).work.stores
    assert bool(stores) == (not pooled)
    half.on_reports(StepReports([Report(job.job) for job in stores]))
    assert half.finish_request(request) is None
    again = make_request(65)
    again.request_id = "r2"
    half.add_request(again)
    assert half.match(again, 0) == ((0, False) if pooled else (64, True))


def test_a_model_without_kv_cache_has_an_idle_connector() -> None:
    engine = engine_config()
    engine.kv_transfer_config.kv_connector_extra_config = {"disk": {"path": "/nowhere"}}
    worker = KVConnect(engine, KVConnectorRole.WORKER, cache_config()).worker
    worker.register({})
    assert worker.hello() == WorkerHello(0, 0)
    half = KVConnect(engine, KVConnectorRole.SCHEDULER, cache_config()).scheduler
    half.greet({(0, 0): worker.hello()})
    request = make_request()
    half.add_request(request)
    assert half.match(request, 0) == (0, False)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ()), 0)
    scheduled = half.build_step(output(64, ()))
    assert scheduled.work == Instructions() and not half.busy
    worker.begin_step(scheduled)
    worker.end_step()
    assert worker.collect() == (set(), set()) and worker.take_reports() is None
    assert half.finish_request(request) is None
    half.reset()
    assert half.take_stats() is not None
    worker.close()


def test_source_blocks_are_held_until_the_copy_is_done_or_void() -> None:
    half = make_scheduler()
    request = make_request(65)
    half.add_request(request)
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    free = half.pool.get_num_free_blocks()
    half.build_step(output(64, ([1, 2],)))
    assert half.pool.get_num_free_blocks() == free - 2
    assert not half.pool.reset_prefix_cache()
    half.reset()
    assert half.pool.get_num_free_blocks() == free
    assert half.pool.reset_prefix_cache()


def test_no_peer_is_met_before_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures them after it registered the caches, and asks for addresses when it is done."""
    agent = SimpleNamespace(address=("127.0.0.1", 5), close=lambda: None)
    made: list[tuple[Any, ...]] = []

    def make(*args: Any) -> Any:
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
    agent = SimpleNamespace(layer_written=calls.append, end_step=lambda: calls.append("end"))
    worker = WorkerHalf(
        engine_config(use_ubatching=halves), cache_config(FULL), Config(host_bytes=0)
    )
    worker._agent = cast(Any, agent)
    for _ in ("first half", "second half"):
        worker.layer_written("layer0")
    worker.end_step()
    assert calls == (["end"] if halves else ["layer0", "layer0", "end"])


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
    (job,) = half.build_step(output(64, ([1, 2],))).work.stores
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
    half.on_reports(StepReports([Report(job.job)]))
    clock.now += 0.2
    ended = half.take_stats()
    assert ended is not None and ended.data["gauges"]["jobs_in_flight"]["GPU_to_CPU"] == 0


def test_a_preempted_request_is_stored_from_its_new_blocks() -> None:
    half = make_scheduler()
    request = stored(half)
    half.reset()
    half.match(request, 0)
    half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([3, 4],)), 0)
    (job,) = half.build_step(output(64, ([3, 4],))).work.stores
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
