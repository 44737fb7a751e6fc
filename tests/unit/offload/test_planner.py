"""The plan of the host tier, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnect.cache.groups import CacheGroup
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.ledger import Owner
from kvconnect.offload.messages import FailedBlock, JobReport, LoadBlocks, StoreBlocks
from kvconnect.offload.planner import (
    LoadRequest,
    OffloadLimits,
    OffloadPlan,
    count_lookup,
    gauges,
    hits_by_tier,
)
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block, FailureCause, Tier

FULL = (CacheGroup(4),)
HYBRID = (CacheGroup(4), CacheGroup(4, window=5))
STATES = (CacheGroup(4), CacheGroup(4, states="some"))


def make_plan(
    slots: int = 8,
    groups: tuple[CacheGroup, ...] = FULL,
    workers: int = 1,
    held: int = 100,
    policy: Any = "lru",
) -> OffloadPlan:
    index = HostIndex(slots, len(groups), make_policy(policy, slots))
    return OffloadPlan(
        groups, index, OffloadingConnectorStats(), OffloadLimits(workers, 10.0, held)
    )


def prompt(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(blocks)]


def store(
    plan: OffloadPlan, name: str, hashes: list[bytes], first_block: int = 1, fail: int = 0
) -> StoreBlocks | None:
    """Have a request's blocks stored, the last ``fail`` of them without success."""
    plan.add_request(name)
    rows = [hashes] * len(plan.groups)
    tables = [
        list(range(first_block + 100 * g, first_block + 100 * g + len(hashes)))
        for g in range(len(plan.groups))
    ]
    plan.plan_store(name, 4 * len(hashes), rows, tables)
    stores = plan.take(0.0).stores
    for job in stores:
        rows_of = [(p.group, b, s) for p in job.parts for b, s in zip(p[1], p[2], strict=True)]
        bad = [FailedBlock(*row, FailureCause.COPY) for row in rows_of[len(rows_of) - fail :]]
        plan.on_report(JobReport(job.job, tuple(bad)), 0.0)
    plan.check()
    return stores[0] if stores else None


def load(
    plan: OffloadPlan, name: str, hashes: list[bytes], total: int, sync: bool = False
) -> LoadBlocks:
    tables = [list(range(50, 50 + len(hashes))) for _ in plan.groups]
    plan.plan_load(name, LoadRequest(0, total, [hashes] * len(tables), tables, sync), 0.0)
    (job,) = plan.take(0.0).loads
    return job


def counted(plan: OffloadPlan, name: str) -> dict[str, int]:
    counters: dict[str, dict[str, int]] = plan.stats.data["counters"]
    return counters.get(name, {})


def test_what_one_request_computed_another_one_loads() -> None:
    plan, hashes = make_plan(), prompt("a", 3)
    plan.add_request("r1")
    assert plan.match("r1", [hashes], 0, 12) == 0
    assert not plan.due([("r1", 3)]) and plan.due([("r1", 4)])
    assert plan.plan_store("r1", 13, [hashes], [[1, 2, 3, 4]]) == [(0, 0), (0, 1), (0, 2)]
    assert not plan.due([("r1", 15)]) and plan.due([("r1", 16)])
    assert plan.busy
    (job,) = plan.take(0.0).stores
    assert list(job.parts[0].block_ids) == [1, 2, 3]
    assert plan.match("r1", [hashes], 0, 12) == 0  # nothing is there before the report
    plan.finish_request("r1", [hashes])
    settled = plan.on_report(JobReport(job.job), 1.0)
    assert settled is not None
    assert settled.released == (1, 2, 3)
    assert settled.stored == tuple((0, block_hash) for block_hash in hashes)
    assert not plan.busy

    plan.add_request("r2")
    assert plan.match("r2", [hashes], 0, 12) == 12
    assert plan.match("r2", [hashes], 4, 11) == 4
    wanted = LoadRequest(4, 12, [hashes], [[7, 8, 9]], False)
    plan.plan_load("r2", wanted, 2.0)
    work = plan.take(2.0)
    (back,) = work.loads
    assert (back.req_id, back.sync, work.stores) == ("r2", False, [])
    assert list(back.parts[0].block_ids) == [8, 9]
    assert list(back.parts[0].slots) == list(job.parts[0].slots)[1:]
    settled = plan.on_report(JobReport(back.job), 3.0)
    assert settled is not None and settled.job.cause is None
    assert plan.take(3.0).loads == []
    plan.check()


def test_nothing_is_stored_twice() -> None:
    plan, hashes = make_plan(), prompt("a", 2)
    for name in ("r1", "r2"):
        plan.add_request(name)
    assert len(plan.plan_store("r1", 8, [hashes], [[1, 2]])) == 2
    assert plan.plan_store("r2", 8, [hashes], [[3, 4]]) == []  # planned in the same step
    (job,) = plan.take(0.0).stores
    plan.add_request("r3")
    assert plan.plan_store("r3", 8, [hashes], [[5, 6]]) == []  # in flight
    plan.on_report(JobReport(job.job), 0.0)
    plan.add_request("r4")
    assert plan.plan_store("r4", 8, [hashes], [[7, 8]]) == []  # there
    assert plan.plan_store("r1", 8, [hashes], [[1, 2]]) == []
    assert plan.take(0.0).stores == []
    assert not plan.busy


def test_stores_of_one_step_are_one_job_with_a_part_per_group() -> None:
    plan = make_plan(slots=16, groups=HYBRID)
    plan.add_request("r1")
    plan.add_request("r2")
    a, b = prompt("a", 2), prompt("b", 1)
    plan.plan_store("r1", 8, [a, a], [[1, 2], [0, 3]])  # block 0 lies outside the window
    plan.plan_store("r2", 4, [b, b], [[4], [5]])
    (job,) = plan.take(0.0).stores
    assert [(p.group, list(p.block_ids)) for p in job.parts] == [(0, [1, 2, 4]), (1, [3, 5])]


def test_blocks_fill_chunk_by_chunk() -> None:
    plan, hashes = make_plan(), prompt("a", 4)
    plan.add_request("r1")
    table = [[1, 2, 3, 4]]
    assert plan.plan_store("r1", 6, [hashes], table) == [(0, 0)]
    assert not plan.due([("r1", 7)]) and plan.due([("r1", 8)])
    assert plan.plan_store("r1", 12, [hashes[:2]], table) == [(0, 1)]  # a hash is not known yet
    assert plan.due([("r1", 12)])
    assert plan.plan_store("r1", 16, [hashes], table) == [(0, 2), (0, 3)]


def test_only_so_many_blocks_are_held_by_stores_and_the_rest_comes_later() -> None:
    plan = make_plan(held=2)
    plan.add_request("r1")
    plan.add_request("r2")
    a, b = prompt("a", 2), prompt("b", 2)
    assert len(plan.plan_store("r1", 8, [a], [[1, 2]])) == 2
    assert plan.plan_store("r2", 8, [b], [[3, 4]]) == []
    (job,) = plan.take(0.0).stores
    assert plan.plan_store("r2", 8, [b], [[3, 4]]) == []
    assert plan.due([("r2", 8)])
    plan.on_report(JobReport(job.job), 0.0)
    assert len(plan.plan_store("r2", 8, [b], [[3, 4]])) == 2
    assert counted(plan, "skipped_store_blocks") == {}


def test_a_preempted_request_is_stored_from_its_new_blocks() -> None:
    plan, hashes = make_plan(slots=2), prompt("a", 3)
    plan.add_request("r1")
    plan.plan_store("r1", 8, [hashes], [[1, 2, 3]])
    (job,) = plan.take(0.0).stores
    bad = [FailedBlock(0, 2, job.parts[0].slots[1], FailureCause.DEADLINE)]
    plan.on_report(JobReport(job.job, tuple(bad)), 0.0)
    plan.add_request("r1")
    assert plan.due([("r1", 4)])
    assert plan.plan_store("r1", 8, [hashes], [[5, 6, 7]]) == [(0, 1)]
    (job,) = plan.take(0.0).stores
    assert list(job.parts[0].block_ids) == [6]


def test_what_fits_is_stored() -> None:
    plan = make_plan(slots=4)
    assert store(plan, "r1", prompt("a", 2)) is not None
    reading = load(plan, "r1", prompt("a", 2), 8)  # two of four slots cannot be evicted
    plan.add_request("r2")
    hashes = prompt("b", 3)
    assert plan.plan_store("r2", 12, [hashes], [[4, 5, 6]]) == [(0, 0), (0, 1)]
    assert counted(plan, "skipped_store_blocks") == {"no_space": 1}
    (job,) = plan.take(0.0).stores
    for answer in (JobReport(job.job), JobReport(reading.job)):
        plan.on_report(answer, 0.0)
    assert plan.match("r2", [hashes], 0, 12) == 8
    plan.check()


@pytest.mark.parametrize("chunk", [4, 12, 48])
def test_a_prompt_larger_than_the_tier_keeps_its_head(chunk: int) -> None:
    plan, hashes = make_plan(slots=5), prompt("a", 12)
    plan.add_request("r1")
    for computed in range(chunk, 49, chunk):
        plan.plan_store("r1", computed, [hashes], [list(range(1, 13))])
        for job in plan.take(0.0).stores:
            plan.on_report(JobReport(job.job), 0.0)
    assert plan.match("r1", [hashes], 0, 48) == 20
    assert plan.take_removed() == []


def test_a_prompt_with_its_head_in_the_tier_does_not_evict_it() -> None:
    plan, hashes = make_plan(slots=5), prompt("a", 12)
    store(plan, "r1", hashes[:4])
    store(plan, "r2", hashes, first_block=20)
    assert plan.match("r2", [hashes], 0, 48) == 20
    assert plan.take_removed() == []


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_block_evicted_while_its_request_is_stored_is_not_touched(policy: str) -> None:
    plan = make_plan(slots=3, policy=policy)
    old = prompt("a", 2)
    store(plan, "r1", old)
    store(plan, "r2", prompt("b", 1), first_block=10)
    longer = [*old, *prompt("c", 3)]  # found its head on the device, so that nobody used it here
    plan.add_request("r3")
    plan.plan_store("r3", 20, [longer], [[1, 2, 3, 4, 5]])
    plan.add_request("r4")
    plan.plan_store("r4", 12, [prompt("d", 3)], [[7, 8, 9]])  # while slots are being written
    plan.check()
    (job,) = plan.take(0.0).stores
    slots = list(job.parts[0].slots)
    assert len(slots) == len(set(slots))
    plan.on_report(JobReport(job.job), 0.0)
    plan.check()
    for block_hash in [*longer, *prompt("d", 3)]:
        slot = plan.index.slot_of(0, block_hash)
        assert slot is None or plan.index.hash_of(slot) == block_hash


def test_use_by_a_load_or_a_store_keeps_a_prompt() -> None:
    for use in ("load", "store"):
        plan = make_plan(slots=4)
        store(plan, "r1", prompt("a", 2))
        store(plan, "r2", prompt("b", 2), first_block=10)
        if use == "load":
            plan.on_report(JobReport(load(plan, "r1", prompt("a", 2), 8).job), 0.0)
        else:
            store(plan, "r3", prompt("a", 2), first_block=20)
        store(plan, "r4", prompt("c", 2), first_block=30)
        assert plan.take_removed() == [Block(0, b"b1"), Block(0, b"b0")]
        assert counted(plan, "evicted_blocks") == {"host": 2}
        assert plan.take_removed() == [] and counted(plan, "evicted_blocks") == {"host": 2}


@pytest.mark.parametrize("resets", [True, False])
def test_after_a_reset_a_request_whose_load_fails_stores_nothing(resets: bool) -> None:
    """What it computes again rests on blocks of the load that came before the reset. Control:
    without a reset, it is stored."""
    plan, hashes = make_plan(), prompt("a", 3)
    store(plan, "r1", hashes)
    plan.add_request("r2")
    assert plan.match("r2", [hashes], 0, 12) == 12
    job = load(plan, "r2", hashes, 12)
    if resets:
        plan.reset()
    else:
        plan.index.remove(plan.index.ready_slots(0, hashes))
    bad = FailedBlock(0, 52, job.parts[0].slots[2], FailureCause.COPY)
    plan.on_report(JobReport(job.job, (bad,)), 1.0)
    tables = [list(range(50, 53))]
    assert bool(plan.due([("r2", 12)])) is not resets
    assert bool(plan.plan_store("r2", 12, [hashes], tables)) is not resets
    plan.add_request("r2")  # it is admitted anew, and computed from its first token on
    assert bool(plan.plan_store("r2", 12, [hashes], tables)) is resets


@pytest.mark.parametrize("cause", list(FailureCause))
def test_a_request_whose_load_failed_gets_nothing_from_then_on(cause: FailureCause) -> None:
    plan, hashes = make_plan(), prompt("a", 3)
    store(plan, "r0", hashes)
    plan.add_request("r1")
    assert plan.match("r1", [hashes], 0, 12) == 12
    job = load(plan, "r1", hashes, 12)
    part = job.parts[0]
    bad = FailedBlock(0, part.block_ids[1], part.slots[1], cause)
    settled = plan.on_report(JobReport(job.job, (bad,)), 0.0)
    assert settled is not None and settled.job.cause is cause
    assert counted(plan, "failed_requests") == {cause.value: 1}
    assert counted(plan, "recomputed_tokens") == {"": 8}  # the first block of 4 tokens is good
    assert plan.match("r1", [hashes], 0, 12) == 0
    plan.add_request("r1")  # preempted and back
    assert plan.match("r1", [hashes], 0, 12) == 0
    plan.add_request("r2")
    quarantined = cause in (FailureCause.DIGEST, FailureCause.COPY)
    assert plan.match("r2", [hashes], 0, 12) == (4 if quarantined else 12)
    assert plan.take_removed() == ([Block(0, b"a1")] if quarantined else [])
    assert counted(plan, "evicted_blocks") == {}
    plan.finish_request("r1", [hashes])
    plan.add_request("r1")  # the name is used again, by another request
    assert plan.match("r1", [hashes], 0, 4) == 4
    plan.check()


def test_a_load_that_fails_after_its_request_left_fails_nobody() -> None:
    plan, hashes = make_plan(), prompt("a", 1)
    store(plan, "r1", hashes)
    job = load(plan, "r1", hashes, 4)
    plan.finish_request("r1", [hashes])
    bad = FailedBlock(0, 50, job.parts[0].slots[0], FailureCause.DEADLINE)
    assert plan.on_report(JobReport(job.job, (bad,)), 0.0) is not None
    assert plan.match("r1", [hashes], 0, 4) == 0  # not known any more
    assert not plan.busy
    plan.check()


def test_a_block_lost_between_promise_and_plan_is_marked() -> None:
    plan, hashes = make_plan(slots=2), prompt("a", 2)
    store(plan, "r1", hashes)
    plan.add_request("r2")
    assert plan.match("r2", [hashes], 0, 8) == 8
    store(plan, "r3", prompt("b", 1), first_block=10)  # evicts the tail
    job = load(plan, "r2", hashes, 8)
    assert list(job.parts[0].slots) == [plan.index.slot_of(0, b"a0"), -1]
    assert list(job.parts[0].block_ids) == [50, 51]
    bad = FailedBlock(0, 51, -1, FailureCause.MISSING)
    settled = plan.on_report(JobReport(job.job, (bad,)), 0.0)
    assert settled is not None and settled.job.cause is FailureCause.MISSING
    assert plan.match("r2", [hashes], 0, 8) == 0
    plan.check()


def test_a_windowed_group_loads_only_what_it_still_sees() -> None:
    plan, hashes = make_plan(slots=16, groups=HYBRID), prompt("a", 4)
    store(plan, "r1", hashes)
    plan.add_request("r2")
    assert plan.match("r2", [hashes, hashes], 0, 16) == 16
    tables = [[1, 2, 3, 4], [0, 0, 0, 8]]
    plan.plan_load("r2", LoadRequest(0, 16, [hashes, hashes], tables, False), 0.0)
    (job,) = plan.take(0.0).loads
    assert [list(part.block_ids) for part in job.parts] == [[1, 2, 3, 4], [8]]
    assert job.parts[1].slots[0] == plan.index.slot_of(1, b"a3")


def test_only_the_states_that_the_engine_names_are_stored() -> None:
    plan, hashes = make_plan(slots=16, groups=STATES), prompt("a", 4)
    plan.add_request("r1")
    rows, tables, kept = [hashes, hashes], [[1, 2, 3, 4], [0, 0, 0, 9]], [(1, 2, 7)]
    stored = plan.plan_store("r1", 16, rows, tables, kept)
    assert stored == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]
    (job,) = plan.take(0.0).stores
    assert [(p.group, list(p.block_ids)) for p in job.parts] == [(0, [1, 2, 3, 4]), (1, [7])]
    plan.on_report(JobReport(job.job), 0.0)
    plan.add_request("r2")
    assert plan.match("r2", rows, 0, 16) == 12  # up to the state, no further
    plan.plan_load("r2", LoadRequest(0, 12, rows, [[5, 6, 8], [0, 0, 9]], False), 0.0)
    (work,) = plan.take(0.0).loads
    assert [list(part.block_ids) for part in work.parts] == [[5, 6, 8], [9]]
    assert plan.plan_store("r1", 0, rows, tables, kept) == []  # it is there already
    assert plan.plan_store("gone", 0, rows, tables, [(1, 3, 9)]) == []


def test_a_state_for_which_copies_have_no_room_is_given_up() -> None:
    plan, hashes = make_plan(slots=16, groups=STATES, held=1), prompt("a", 2)
    plan.add_request("r1")
    both = [(1, 0, 7), (1, 1, 8)]
    assert plan.plan_store("r1", 0, [hashes, hashes], [[], []], both) == [(1, 0)]
    assert counted(plan, "skipped_store_blocks") == {"busy": 1}
    plan.reset()
    assert plan.plan_store("r1", 0, [hashes, hashes], [[], []], both) == []


def test_a_state_is_evicted_with_the_tokens_before_it() -> None:
    plan, hashes = make_plan(slots=6, groups=STATES), prompt("a", 4)
    plan.add_request("r1")
    rows, kept = [hashes, hashes], [(1, 1, 8), (1, 3, 9)]
    plan.plan_store("r1", 16, rows, [[1, 2, 3, 4], []], kept)
    for job in plan.take(0.0).stores:
        plan.on_report(JobReport(job.job), 0.0)
    plan.finish_request("r1", rows)
    plan.take_removed()
    store(plan, "r2", prompt("b", 4))
    gone = {(block.group, block.block_hash) for block in plan.take_removed()}
    assert gone == {(1, b"a3"), (0, b"a3"), (0, b"a2"), (1, b"a1")}


def test_device_blocks_under_a_load_are_never_stored() -> None:
    plan, hashes = make_plan(), prompt("a", 2)
    store(plan, "r1", hashes)
    plan.add_request("r2")
    job = load(plan, "r2", hashes, 8)
    plan.reset()  # so that the tier lacks them again
    assert plan.plan_store("r2", 8, [hashes], [[50, 51]]) == []
    assert plan.take(0.0).stores == []
    plan.on_report(JobReport(job.job), 0.0)
    plan.add_request("r2")
    assert len(plan.plan_store("r2", 8, [hashes], [[50, 51]])) == 2


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_reset_forgets_all_even_what_is_in_flight(policy: str) -> None:
    plan = make_plan(policy=policy)
    there, flying = prompt("a", 2), prompt("b", 2)
    store(plan, "r1", there)
    plan.add_request("r2")
    plan.plan_store("r2", 8, [flying], [[5, 6]])
    (job,) = plan.take(0.0).stores
    reading = load(plan, "r1", there, 8)
    assert plan.reset() == [5, 6]  # so that the engine's own reset does not fail for them
    plan.check()
    assert plan.match("r2", [there], 0, 8) == 0
    settled = plan.on_report(JobReport(job.job), 0.0)
    assert settled is not None and (settled.stored, settled.released) == ((), ())
    assert plan.match("r2", [flying], 0, 8) == 0
    assert plan.index.slots.used == 2  # under the load, which reads the right bytes
    settled = plan.on_report(JobReport(reading.job), 0.0)
    assert settled is not None and settled.job.cause is None
    assert plan.index.slots.used == 0
    store(plan, "r3", there, first_block=20)
    assert plan.match("r2", [there], 0, 8) == 8
    plan.check()


def test_a_store_nobody_answers_expires() -> None:
    plan, hashes = make_plan(workers=2), prompt("a", 2)
    plan.add_request("r1")
    plan.plan_store("r1", 8, [hashes], [[1, 2]])
    (job,) = plan.take(5.0).stores
    plan.on_report(JobReport(job.job), 6.0)
    assert plan.jobs.expire(24.9) == []
    assert plan.jobs.expire(25.0) == []
    assert plan.jobs.expire(25.1) == [1, 2]
    assert not plan.busy and plan.jobs.ledger.held_by(Owner.STORE) == 0
    settled = plan.on_report(JobReport(job.job), 26.0)
    assert settled is not None and (settled.released, settled.stored) == ((), ())
    assert plan.match("r1", [hashes], 0, 8) == 0
    assert not plan.busy
    plan.check()


def test_times_are_taken_by_kind_of_load() -> None:
    plan, hashes = make_plan(), prompt("a", 1)
    store(plan, "r1", hashes)
    plan.on_report(JobReport(load(plan, "r1", hashes, 4).job), 3.0)
    plan.on_report(JobReport(load(plan, "r1", hashes, 4, sync=True).job), 1.0)
    failed = load(plan, "r1", hashes, 4)
    bad = FailedBlock(0, 50, failed.parts[0].slots[0], FailureCause.MISSING)
    plan.on_report(JobReport(failed.job, (bad,)), 5.0)
    seconds = {name: cells["host"][0] for name, cells in plan.stats.data["histograms"].items()}
    # Exposed: what a parked request waited, also for nothing. Latency: loads that were of use.
    assert seconds == {"load_exposed_seconds": 3.0 + 5.0, "load_latency_seconds": 3.0 + 1.0}


def test_unknown_requests_are_no_error() -> None:
    plan = make_plan()
    plan.finish_request("never seen", [[]])
    assert plan.match("never seen", [prompt("a", 1)], 0, 4) == 0
    assert not plan.due([("never seen", 100)])
    assert plan.on_report(JobReport(load(plan, "gone", prompt("a", 1), 4).job), 0.0) is not None


def test_a_plan_without_slots_stores_nothing() -> None:
    plan = make_plan(slots=0)
    assert store(plan, "r1", prompt("a", 2)) is None
    assert plan.match("r1", [prompt("a", 2)], 0, 8) == 0
    assert not plan.due([("r1", 8)])


def test_gauges_count_blocks_and_bytes() -> None:
    plan = make_plan(slots=4)
    store(plan, "r1", prompt("a", 3))
    load(plan, "r1", prompt("a", 2), 8)
    found = {name: value for name, value, label in gauges(plan, 1.0, 100) if label is None}
    assert found == {
        "host_blocks_used": 3,
        "host_blocks_capacity": 4,
        "host_blocks_pinned": 2,
        "host_bytes_used": 300,
        "host_bytes_capacity": 400,
        "ledger_oldest_hold_seconds": 1.0,
    }


def test_a_lookup_is_counted_in_tokens() -> None:
    stats = OffloadingConnectorStats()
    count_lookup(stats, 100, hits_by_tier(64, {Tier.DISK: 16, Tier.REMOTE: 20}))
    count_lookup(stats, 10, hits_by_tier(0, {Tier.DISK: 16}))
    assert stats.data["counters"] == {
        "lookups": {"": 2},
        "query_tokens": {"": 110},
        "hit_tokens": {"disk": 16, "remote": 20, "host": 28},
        "miss_tokens": {"": 46},
    }


def test_a_request_that_found_no_room_does_not_store_its_tail() -> None:
    plan, hashes = make_plan(slots=2), prompt("a", 4)
    held = prompt("b", 2)
    plan.add_request("other")
    plan.plan_store("other", 8, [held], [[1, 2]])
    (first,) = plan.take(0.0).stores  # in flight: both slots are busy
    plan.add_request("r1")
    assert plan.plan_store("r1", 8, [hashes], [[3, 4, 5, 6]]) == []
    assert counted(plan, "skipped_store_blocks") == {"no_space": 2}
    plan.on_report(JobReport(first.job), 1.0)  # now there is room, but the head is missing
    assert not plan.due([("r1", 16)])
    plan.add_request("r1")  # preempted: everything is computed, and considered, again
    assert plan.plan_store("r1", 8, [hashes], [[3, 4, 5, 6]]) == [(0, 0), (0, 1)]


def test_blocks_that_the_copies_never_reached_are_counted() -> None:
    plan, hashes = make_plan(held=1), prompt("a", 3)
    plan.add_request("r1")
    assert plan.plan_store("r1", 4, [hashes], [[1, 2, 3]]) == [(0, 0)]
    assert plan.plan_store("r1", 12, [hashes], [[1, 2, 3]]) == []
    assert not counted(plan, "skipped_store_blocks")  # they may still be stored
    plan.finish_request("r1", [hashes])
    assert counted(plan, "skipped_store_blocks") == {"busy": 2}


def test_one_request_cannot_hold_more_blocks_than_all_stores_may() -> None:
    plan, hashes = make_plan(held=2), prompt("a", 5)
    plan.add_request("r1")
    assert plan.plan_store("r1", 20, [hashes], [[1, 2, 3, 4, 5]]) == [(0, 0), (0, 1)]
    assert plan.due([("r1", 20)])
    (job,) = plan.take(0.0).stores
    assert plan.plan_store("r1", 20, [hashes], [[1, 2, 3, 4, 5]]) == []
    plan.on_report(JobReport(job.job), 0.0)
    assert plan.plan_store("r1", 20, [hashes], [[1, 2, 3, 4, 5]]) == [(0, 2), (0, 3)]


def test_what_is_computed_again_after_a_failed_load_is_stored_again() -> None:
    plan, hashes = make_plan(), prompt("a", 2)
    store(plan, "r1", hashes)
    plan.add_request("r2")
    job = load(plan, "r2", hashes, 8, sync=True)
    assert plan.plan_store("r2", 8, [hashes], [[50, 51]]) == []  # the tier has both
    failed = FailedBlock(0, 50, job.parts[0].slots[0], FailureCause.DIGEST)
    plan.on_report(JobReport(job.job, (failed,)), 0.0)
    assert plan.due([("r2", 8)])
    assert plan.plan_store("r2", 8, [hashes], [[50, 51]]) == [(0, 0)]
