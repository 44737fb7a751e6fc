"""Jobs of several workers: who waits, until when, and what an answer ends."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvconnect.errors import Misuse
from kvconnect.jobs import WorkerJob, WorkerJobs, first_cause
from kvconnect.types import FailureCause, JobId

DEADLINE_S = 10.0
LATE = 2 * DEADLINE_S


def test_the_last_worker_closes_a_job() -> None:
    jobs: WorkerJobs[str] = WorkerJobs(2, DEADLINE_S)
    job = jobs.open("work", 1.0)
    assert (job.work, job.opened, job.late_at, job.waiting) == ("work", 1.0, 1.0 + LATE, 2)
    assert jobs.find(job.number) is jobs[job.number] is job and job.number in jobs
    assert not jobs.answered(job) and len(jobs) == 1
    assert jobs.answered(job) and not len(jobs) and not jobs.awaited


def test_an_answer_to_no_open_job_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    jobs: WorkerJobs[str] = WorkerJobs(1, DEADLINE_S)
    assert jobs.find(JobId(7)) is None
    assert "job 7, which is not open" in caplog.text


def test_a_job_is_late_at_the_second_look_and_stays_open() -> None:
    jobs: WorkerJobs[str] = WorkerJobs(1, DEADLINE_S)
    job = jobs.open("work", 0.0)
    assert jobs.take_late(LATE - 0.1) == jobs.take_late(LATE) == []
    assert jobs.awaited
    assert jobs.take_late(LATE) == [job] and not jobs.awaited
    assert jobs.take_late(99.0) == [] and len(jobs) == 1
    assert jobs.answered(job)


def test_tables_that_share_numbers_have_no_job_of_one_number() -> None:
    numbers = count(1)
    one: WorkerJobs[str] = WorkerJobs(1, DEADLINE_S, numbers)
    other: WorkerJobs[str] = WorkerJobs(1, DEADLINE_S, numbers)
    found = [table.open("", 0.0).number for table in (one, other, one)]
    assert found == [1, 2, 3]


def test_a_closed_job_is_nobodys() -> None:
    jobs: WorkerJobs[str] = WorkerJobs(2, DEADLINE_S)
    job = jobs.open("work", 0.0)
    jobs.answered(job)
    jobs.close(job)
    assert jobs.find(job.number) is None and jobs.take_late(99.0) == []


@pytest.mark.parametrize(("waiting", "late_at"), [(0, 1.0), (3, 1.0), (1, float("inf")), (1, 0.0)])
def test_a_job_that_waits_for_nothing_is_found(waiting: int, late_at: float) -> None:
    jobs: WorkerJobs[str] = WorkerJobs(2, DEADLINE_S)
    job = jobs.open("work", 0.0)
    jobs.check()  # the control
    job.waiting, job.late_at = waiting, late_at
    with pytest.raises(Misuse, match=f"job {job.number} waits for"):
        jobs.check()


@pytest.mark.parametrize(
    ("causes", "first"),
    [
        ([], None),
        ([FailureCause.SKIPPED], FailureCause.SKIPPED),
        ([FailureCause.SKIPPED, FailureCause.COPY, FailureCause.DIGEST], FailureCause.COPY),
        ([FailureCause.DIGEST, FailureCause.SKIPPED], FailureCause.DIGEST),
    ],
)
def test_a_skipped_block_names_a_cause_only_where_no_other_does(
    causes: list[FailureCause], first: FailureCause | None
) -> None:
    assert first_cause(causes) is first


class Table(RuleBasedStateMachine):
    """Jobs that workers answer or do not, beside a model that has one entry per worker."""

    kind: Any = WorkerJobs

    @initialize(workers=st.integers(1, 3))
    def start(self, workers: int) -> None:
        self.jobs: WorkerJobs[int] = self.kind(workers, DEADLINE_S)
        self.workers, self.now, self.opened = workers, 0.0, 0
        self.owed: dict[int, set[int]] = {}  # work -> workers that have not answered
        self.since: dict[int, float] = {}
        self.looks: Counter[int] = Counter()  # past a job's time

    @rule()
    def open(self) -> None:
        self.opened += 1
        self.jobs.open(self.opened, self.now)
        self.owed[self.opened] = set(range(self.workers))
        self.since[self.opened] = self.now

    @rule(choice=st.randoms(use_true_random=False))
    def answer(self, choice: Any) -> None:
        if not self.owed:
            return
        job = choice.choice(list(self.jobs))
        owed = self.owed[job.work]
        owed.remove(min(owed))
        assert self.jobs.answered(job) == (not owed)
        if not owed:
            del self.owed[job.work]

    @rule(choice=st.randoms(use_true_random=False))
    def close(self, choice: Any) -> None:
        if self.owed:
            job: WorkerJob[int] = choice.choice(list(self.jobs))
            self.jobs.close(job)
            del self.owed[job.work]

    @rule(seconds=st.sampled_from([0.0, 1.0, DEADLINE_S, LATE]))
    def look(self, seconds: float) -> None:
        self.now += seconds
        past = [work for work in self.owed if self.now >= self.since[work] + LATE]
        self.looks.update(past)
        late = [job.work for job in self.jobs.take_late(self.now)]
        assert late == [work for work in past if self.looks[work] == 2]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "jobs"):
            self.jobs.check()
            assert {job.work: job.waiting for job in self.jobs} == {
                work: len(owed) for work, owed in self.owed.items()
            }
            assert self.jobs.awaited == any(self.looks[work] < 2 for work in self.owed)


class ForgetsWorkers(WorkerJobs[int]):
    """Ends a job at its first answer."""

    def answered(self, job: WorkerJob[int]) -> bool:
        job.waiting = 1
        return super().answered(job)


class LateAtOnce(WorkerJobs[int]):
    """Does not read the answers of a long step first."""

    def take_late(self, now: float) -> list[WorkerJob[int]]:
        for job in self:
            job.due = True
        return super().take_late(now)


def test_any_order_of_events() -> None:
    run_state_machine_as_test(Table, settings=settings(max_examples=100, stateful_step_count=30))


@pytest.mark.parametrize("broken", [ForgetsWorkers, LateAtOnce])
def test_a_broken_table_is_found(broken: type) -> None:
    machine = type(f"With{broken.__name__}", (Table,), {"kind": broken})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine, settings=settings(max_examples=100, stateful_step_count=30, print_blob=False)
        )
