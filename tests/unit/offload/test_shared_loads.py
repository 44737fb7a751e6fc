"""Requests wait for a load under way, rather than load the same blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvconnect.cache.groups import CacheGroup
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.messages import FailedBlock, JobReport
from kvconnect.offload.planner import LoadRequest, OffloadLimits, OffloadPlan
from kvconnect.offload.shared_loads import SharedLoads
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause

FULL = (CacheGroup(4),)
HYBRID = (CacheGroup(4, window=5), CacheGroup(4))
HASHES = [[b"a", b"b", b"c", b"d"]]
WAIT_S = 10.0


def loading(groups: tuple[CacheGroup, ...] = FULL, local: int = 0, total: int = 12) -> SharedLoads:
    """Return loads of which one is under way."""
    loads = SharedLoads(groups, WAIT_S)
    loads.began("r1", HASHES * len(groups), local, total)
    return loads


def test_a_request_waits_until_the_load_ends() -> None:
    loads = loading()
    assert loads.awaits("r2", HASHES, 0, 20, 1.0)
    assert loads.awaits("r2", HASHES, 0, 20, 2.0)
    loads.ended("r1", failed=False)
    assert not loads.awaits("r2", HASHES, 12, 20, 3.0)
    assert not loads.awaits("r3", HASHES, 0, 20, 3.0)


@pytest.mark.parametrize(
    ("hashes", "local", "num_tokens", "waits"),
    [
        ([[b"a", b"x"]], 0, 20, True),  # the first block is the same
        ([[b"x", b"y"]], 0, 20, False),
        (HASHES, 4, 20, True),
        (HASHES, 12, 20, False),  # the device has all that the load brings
        ([[b"a"]], 0, 5, True),
        ([[b"a"]], 0, 4, False),  # the engine computes the last token, and so the block
        ([[]], 0, 3, False),
    ],
)
def test_a_request_waits_only_for_what_the_device_will_give_it(
    hashes: list[list[bytes]], local: int, num_tokens: int, waits: bool
) -> None:
    assert loading().awaits("r2", hashes, local, num_tokens, 0.0) is waits


@pytest.mark.parametrize(("same", "waits"), [(1, False), (24, False), (25, True), (50, True)])
def test_a_request_waits_for_a_load_only_if_half_of_it_is_its_own(same: int, waits: bool) -> None:
    """Else it would wait for a long prompt's load for the sake of a header."""
    loads = SharedLoads(FULL, WAIT_S)
    loads.began("r1", [[b"%d" % number for number in range(100)]], 0, 400)
    row = [b"%d" % number if number < same else b"x%d" % number for number in range(50)]
    assert loads.awaits("r2", [row], 0, 201, 0.0) is waits


def test_nobody_waits_for_blocks_before_a_load_or_for_its_own() -> None:
    assert not loading(local=8).awaits("r2", HASHES, 4, 20, 0.0)
    assert loading(local=8).awaits("r2", HASHES, 8, 20, 0.0)  # control
    assert not loading().awaits("r1", HASHES, 0, 20, 0.0)


@pytest.mark.parametrize(
    ("row", "waits"), [([b"a", b"b", b"c"], True), ([b"a", b"b", b"x"], False)]
)
def test_beside_windows_the_whole_load_is_needed(row: list[bytes], waits: bool) -> None:
    """The device then has a window's blocks at the end of the load only."""
    assert loading(HYBRID).awaits("r2", [row, row], 0, 20, 0.0) is waits
    assert loading().awaits("r2", [row], 0, 20, 0.0)  # control: full attention only


def test_a_wait_has_an_end() -> None:
    loads = loading()
    assert loads.awaits("r2", HASHES, 0, 20, 1.0)
    assert loads.awaits("r2", HASHES, 0, 20, 10.9)
    assert not loads.awaits("r2", HASHES, 0, 20, 11.0)
    loads.ended("r1", failed=True)
    loads.began("r3", HASHES, 0, 12)
    assert not loads.awaits("r2", HASHES, 0, 20, 11.0)  # of all its waits together


def test_a_model_without_kv_cache_has_no_loads() -> None:
    assert not SharedLoads((), WAIT_S).awaits("r1", [], 0, 20, 1.0)


def test_waiting_for_one_of_many_loads_looks_at_that_one() -> None:
    loads, read = SharedLoads(FULL, 10.0), Counter[str]()

    class Reads(list[bytes]):
        def __getitem__(self, at: Any) -> Any:
            read["blocks"] += 1
            return super().__getitem__(at)

    for number in range(100):
        loads.began(f"r{number}", [[b"%d" % number] * 3], 0, 12)
    mine = [Reads([b"99"] * 3)]
    assert loads.awaits("waits", mine, 0, 20, 1.0)
    assert read["blocks"] == 100
    for _ in range(10):
        assert loads.awaits("waits", mine, 0, 20, 1.0)
    assert read["blocks"] == 110


@pytest.mark.parametrize("how", ["failed", "over", "loaded"])
def test_the_next_load_is_awaited_if_the_first_one_brought_nothing_by_itself(how: str) -> None:
    loads = loading()
    assert loads.awaits("r2", HASHES, 0, 20, 0.0)
    if how == "over":
        loads.finish("r1")
    else:
        loads.ended("r1", failed=how == "failed")
    loads.began("r3", HASHES, 0, 12)
    assert loads.awaits("r2", HASHES, 0, 20, 0.0) is (how != "loaded")
    if how == "loaded":  # control: more is there than before
        assert loads.awaits("r2", HASHES, 4, 20, 0.0)


def test_nothing_is_known_of_requests_that_are_over() -> None:
    loads = loading()
    loads.awaits("r2", HASHES, 0, 20, 0.0)
    for req_id in ("r1", "r2", "r2"):
        loads.finish(req_id)
    assert not loads._loads and not loads._waits


def make_plan(finds_loaded: bool) -> OffloadPlan:
    """Return a plan whose host tier has three blocks, and of which requests live."""
    index = HostIndex(8, 1, make_policy("lru", 8))
    limits = OffloadLimits(1, WAIT_S, 100, finds_loaded)
    plan = OffloadPlan(FULL, index, OffloadingConnectorStats(), limits)
    for req_id in ("r0", "r1", "r2", "r3"):
        plan.add_request(req_id)
    plan.plan_store("r0", 12, HASHES, [[1, 2, 3]])
    (job,) = plan.take(0.0).stores
    plan.on_report(JobReport(job.job), 0.0)
    return plan


def load(plan: OffloadPlan, req_id: str, sync: bool = False) -> JobReport:
    """Plan a load; return the report that it failed."""
    plan.plan_load(req_id, LoadRequest(0, 12, HASHES, [[5, 6, 7]], sync), 0.0)
    (job,) = plan.take(0.0).loads
    return JobReport(job.job, (FailedBlock(0, 5, 0, FailureCause.DEADLINE),))


@pytest.mark.parametrize(
    ("finds_loaded", "sync", "waits"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_only_blocks_that_are_named_at_the_end_of_their_load_are_awaited(
    finds_loaded: bool, sync: bool, waits: bool
) -> None:
    plan = make_plan(finds_loaded)
    load(plan, "r1", sync)
    assert plan.awaits_load("r2", HASHES, 0, 20, 0.0) is waits


@pytest.mark.parametrize("end", ["report", "failure", "abort", "reset"])
def test_a_plan_s_wait_ends_with_the_load(end: str) -> None:
    plan = make_plan(finds_loaded=True)
    failed = load(plan, "r1")
    assert plan.awaits_load("r2", HASHES, 0, 20, 0.0)
    if end == "report":
        plan.on_report(JobReport(failed.job), 0.0)
    elif end == "failure":
        plan.on_report(failed, 0.0)
    elif end == "abort":
        plan.finish_request("r1", HASHES)
    else:
        plan.reset()
    assert not plan.awaits_load("r2", HASHES, 0, 20, 0.0)


def test_who_computes_a_prefix_after_a_failed_load_waits_for_none() -> None:
    plan = make_plan(finds_loaded=True)
    plan.on_report(load(plan, "r1"), 0.0)
    load(plan, "r2")
    assert not plan.awaits_load("r1", HASHES, 0, 20, 0.0)
    assert plan.awaits_load("r3", HASHES, 0, 20, 0.0)  # control
