"""Jobs in flight: settled by the last report, once; what failed is neither kept nor published."""

from __future__ import annotations

from array import array

import pytest

from kvconnect.offload.copy_jobs import CopyJobs
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.ledger import Owner
from kvconnect.offload.messages import FailedBlock, GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, JobId

HASHES = [b"h0", b"h1", b"h2", b"h3"]
COPY, DIGEST = FailureCause.COPY, FailureCause.DIGEST
MISSING, SKIPPED = FailureCause.MISSING, FailureCause.SKIPPED
DEADLINE_S = 10.0


class Desk:
    """A job book with four slots, and jobs that need one line."""

    def __init__(self, workers: int = 1) -> None:
        self.index = HostIndex(4, 1, make_policy("lru", 4))
        self.stats = OffloadingConnectorStats()
        self.book = CopyJobs(self.index, self.stats, workers, DEADLINE_S)

    def store(self, count: int = 2, now: float = 0.0) -> StoreBlocks:
        """Open a store of the first blocks: device block 10 + n to the slot of HASHES[n]."""
        part = GroupBlocks(0, array("q"), array("q"))
        for number in range(count):
            slot = self.index.reserve(0, HASHES[number])
            assert slot is not None
            part.block_ids.append(10 + number)
            part.slots.append(slot)
        return self.book.open_store((part,), now)

    def stored(self, count: int = 2) -> list[int]:
        """Store blocks and return their slots."""
        self.book.on_report(JobReport(self.store(count).job))
        slots = [self.index.slot_of(0, block_hash) for block_hash in HASHES[:count]]
        return [slot for slot in slots if slot is not None]

    def load(
        self, slots: list[int], first: int = 20, sync: bool = False, now: float = 0.0
    ) -> LoadBlocks:
        blocks = array("q", range(first, first + len(slots)))
        parts = (GroupBlocks(0, blocks, array("q", slots)),)
        return self.book.open_load("req", parts, 8 * len(slots), sync=sync, now=now)

    def counted(self, name: str) -> dict[str, int]:
        counters: dict[str, dict[str, int]] = self.stats.data["counters"]
        return counters.get(name, {})

    def check(self) -> None:
        self.index.check()
        self.book.ledger.check()


def failures(
    job: StoreBlocks | LoadBlocks, *causes: FailureCause | None
) -> tuple[FailedBlock, ...]:
    """Name a cause, or None, per block of a job's only part."""
    part = job.parts[0]
    rows = zip(part.block_ids, part.slots, causes, strict=True)
    return tuple(FailedBlock(0, block, slot, cause) for block, slot, cause in rows if cause)


def test_a_store_publishes_and_releases_when_reported() -> None:
    desk = Desk()
    store = desk.store()
    assert (len(desk.book), desk.book.ledger.held, desk.book.busy) == (1, 2, True)
    assert desk.index.ready_slots(0, HASHES[:2]) == []
    settled = desk.book.on_report(JobReport(store.job))
    assert settled is not None and settled.job.owner is Owner.STORE
    assert settled.released == (10, 11)
    assert settled.stored == ((0, b"h0"), (0, b"h1"))
    assert desk.index.ready_slots(0, HASHES[:2]) == list(store.parts[0].slots)
    assert (len(desk.book), desk.book.ledger.held, desk.book.busy) == (0, 0, False)
    desk.check()


def test_a_failed_block_is_not_published_but_the_others_are() -> None:
    desk = Desk()
    store = desk.store(3)
    settled = desk.book.on_report(JobReport(store.job, failures(store, None, COPY, None)))
    assert settled is not None
    assert settled.stored == ((0, b"h0"), (0, b"h2"))
    assert settled.released == (10, 11, 12)
    assert not desk.index.has(0, b"h1") and desk.index.slots.used == 2
    assert desk.counted("failed_blocks") == {"copy": 1}
    desk.check()


def test_the_last_worker_settles_and_failures_are_merged() -> None:
    desk = Desk(workers=3)
    store = desk.store(3)
    assert desk.book.on_report(JobReport(store.job, failures(store, COPY, None, None))) is None
    assert desk.book.on_report(JobReport(store.job)) is None
    assert desk.book.ledger.held == 3
    last = JobReport(store.job, failures(store, COPY, None, SKIPPED))
    settled = desk.book.on_report(last)
    assert settled is not None and settled.stored == ((0, b"h1"),)
    assert desk.counted("failed_blocks") == {"copy": 1, "skipped": 1}  # blocks, not answers
    desk.check()


def test_a_report_of_no_open_job_is_ignored() -> None:
    desk = Desk()
    store = desk.store()
    report = JobReport(store.job, failures(store, COPY, SKIPPED))
    assert desk.book.on_report(JobReport(JobId(99))) is None
    assert desk.book.on_report(report) is not None
    before = desk.stats.data["counters"]["failed_blocks"].copy()
    assert desk.book.on_report(report) is None
    assert desk.counted("failed_blocks") == before
    assert desk.book.ledger.returned == 2
    desk.check()


def test_a_load_pins_its_slots_until_reported() -> None:
    desk = Desk()
    slots = desk.stored(4)
    load = desk.load(slots)
    assert desk.index.slots.busy == 4 and desk.index.reserve(0, b"new") is None
    settled = desk.book.on_report(JobReport(load.job))
    assert settled is not None
    # The blocks of a load are the request's: nothing goes back to the pool.
    assert (settled.job.owner, settled.released) == (Owner.LOAD, ())
    assert (settled.stored, settled.job.cause) == ((), None)
    assert desk.index.slots.busy == 0 and desk.index.reserve(0, b"new") is not None
    desk.check()


@pytest.mark.parametrize("cause", list(FailureCause))
def test_only_what_cannot_be_trusted_is_quarantined(cause: FailureCause) -> None:
    desk = Desk()
    slots = desk.stored(2)
    load = desk.load(slots)
    settled = desk.book.on_report(JobReport(load.job, failures(load, None, cause)))
    assert settled is not None
    assert (settled.job.req_id, settled.job.cause) == ("req", cause)
    quarantined = cause in (DIGEST, COPY)
    assert desk.index.has(0, b"h0")
    assert desk.index.has(0, b"h1") is not quarantined
    assert desk.counted("quarantined_blocks") == ({cause.value: 1} if quarantined else {})
    desk.check()


def test_a_missing_slot_is_neither_pinned_nor_quarantined() -> None:
    desk = Desk()
    desk.stored(4)  # the last slot holds a block: index -1 must not reach it
    load = desk.load([0, -1])
    assert desk.index.slots.busy == 1
    report = JobReport(load.job, failures(load, COPY, COPY))  # a copy that broke off names all
    settled = desk.book.on_report(report)
    assert settled is not None and settled.job.cause is COPY
    assert desk.counted("quarantined_blocks") == {"copy": 1}
    assert desk.index.slots.used == 3
    desk.check()


def test_a_block_under_another_reader_is_quarantined_once() -> None:
    desk = Desk()
    slots = desk.stored(1)
    first, second = desk.load(slots), desk.load(slots, first=30)
    desk.book.on_report(JobReport(first.job, failures(first, DIGEST)))
    assert not desk.index.has(0, b"h0") and desk.index.slots.used == 1
    desk.check()
    desk.book.on_report(JobReport(second.job, failures(second, DIGEST)))
    assert desk.index.slots.used == 0
    assert desk.counted("quarantined_blocks") == {"digest": 1}
    desk.check()


def test_an_expired_store_gives_its_blocks_back_once_and_is_not_published() -> None:
    desk = Desk()
    store = desk.store()
    assert desk.book.expire(DEADLINE_S) == []  # a worker may still answer
    assert desk.book.expire(2 * DEADLINE_S) == []  # its answer may have come during a long step
    assert desk.book.busy
    assert desk.book.expire(2 * DEADLINE_S) == [10, 11]
    assert desk.book.expire(2 * DEADLINE_S) == []
    assert not desk.book.busy  # nobody steps on and on for a worker that is gone
    assert desk.counted("expired_jobs") == {"GPU_to_CPU": 1}
    assert desk.index.slots.busy == 2  # the late copy may still write there
    desk.check()
    settled = desk.book.on_report(JobReport(store.job))
    assert settled is not None and (settled.released, settled.stored) == ((), ())
    assert desk.index.slots.used == 0 and desk.book.ledger.returned == 2
    desk.check()


def test_a_load_never_expires_here() -> None:
    desk = Desk()
    load = desk.load(desk.stored(2))
    assert desk.book.expire(1000.0) == desk.book.expire(1000.0) == []
    assert desk.book.ledger.held == 2 and desk.index.slots.busy == 2
    settled = desk.book.on_report(JobReport(load.job))
    assert settled is not None and desk.book.ledger.held == 0


def test_voided_stores_are_not_published() -> None:
    desk = Desk()
    store = desk.store()
    assert desk.book.busy
    assert desk.book.void_stores() == [10, 11]
    assert not desk.book.busy  # should its worker be gone, nobody steps on and on for it
    assert desk.book.void_stores() == []
    settled = desk.book.on_report(JobReport(store.job))
    assert settled is not None and (settled.released, settled.stored) == ((), ())
    assert desk.index.slots.used == 0
    desk.check()


@pytest.mark.parametrize(("sync", "stored"), [(True, ()), (False, ((0, b"h1"),))])
def test_what_a_step_computed_on_a_failed_load_is_not_published(
    sync: bool, stored: tuple[tuple[int, bytes], ...]
) -> None:
    desk = Desk()
    load = desk.load(desk.stored(1), sync=sync)
    slot = desk.index.reserve(0, b"h1")
    assert slot is not None
    store = desk.book.open_store((GroupBlocks(0, array("q", [30]), array("q", [slot])),), 0.0)
    failed = desk.book.on_report(JobReport(load.job, failures(load, DIGEST)))
    settled = desk.book.on_report(JobReport(store.job))
    assert failed is not None and settled is not None
    # Nothing computes on the blocks of an asynchronous load before it has ended.
    assert settled.stored == stored
    assert (*failed.released, *settled.released) == (30,)
    desk.check()


def test_blocks_of_a_synchronous_load_can_have_a_new_owner_before_its_report() -> None:
    desk = Desk()
    slots = desk.stored(1)
    first = desk.load(slots, sync=True)
    second = desk.load(slots)  # the first request was aborted, and its block given away
    assert desk.book.ledger.held == 1
    for load in (first, second):
        assert desk.book.on_report(JobReport(load.job)) is not None
    assert desk.book.ledger.held == 0
    desk.check()


def test_a_cancelled_load_leaves_no_trace() -> None:
    desk = Desk()
    slots = desk.stored(2)
    load = desk.load([*slots, -1])
    other = desk.load(slots, first=30)
    desk.book.cancel_load(load.job)
    assert (len(desk.book), desk.book.ledger.held) == (1, 2)
    assert desk.index.slots.busy == 2  # under the other load
    desk.check()
    assert desk.book.on_report(JobReport(load.job)) is None
    assert desk.book.on_report(JobReport(other.job)) is not None
    assert (len(desk.book), desk.book.ledger.held, desk.index.slots.busy) == (0, 0, 0)
    desk.check()


def test_gauges_tell_what_is_open() -> None:
    desk = Desk()
    slots = desk.stored(1)
    desk.load(slots, now=3.0)
    desk.book.open_store((GroupBlocks(0, array("q", [30, 31]), array("q", [])),), 5.0)
    found = {(name, label): value for name, value, label in desk.book.gauges(8.0)}
    assert found == {
        ("ledger_held_blocks", "store"): 2,
        ("ledger_held_blocks", "load"): 1,
        ("jobs_in_flight", "GPU_to_CPU"): 1,
        ("jobs_in_flight", "CPU_to_GPU"): 1,
        ("ledger_oldest_hold_seconds", None): 5.0,
    }


def test_blocks_that_were_not_stored_are_named() -> None:
    desk = Desk()
    job = desk.store(2)
    settled = desk.book.on_report(JobReport(job.job, failures(job, None, COPY)))
    assert settled is not None
    assert (settled.stored, settled.dropped) == (((0, HASHES[0]),), ((0, HASHES[1]),))
    assert desk.index.has(0, HASHES[0]) and not desk.index.has(0, HASHES[1])


@pytest.mark.parametrize("cause", [FailureCause.DEADLINE, FailureCause.COPY])
def test_a_job_past_its_deadline_is_counted_as_expired(cause: FailureCause) -> None:
    desk = Desk()
    load = desk.load(desk.stored(1))
    desk.book.on_report(JobReport(load.job, failures(load, cause)))
    expired = desk.stats.data["counters"].get("expired_jobs", {})
    assert expired == ({"CPU_to_GPU": 1} if cause is FailureCause.DEADLINE else {})
