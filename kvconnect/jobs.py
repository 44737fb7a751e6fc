"""Jobs that every worker of an engine has to answer: the one place that counts answers and time.

What a worker may still read or write stays in use until the last answer, however late. So a job
that is late is told to its owner, and stays open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from kvconnect.errors import Misuse
from kvconnect.types import FailureCause, JobId

logger = logging.getLogger(__name__)

# A worker counts a job's time from its arrival, and must be able to answer before the job is late.
_ANSWER_FACTOR = 2.0

Work = TypeVar("Work")


@dataclass(eq=False)
class WorkerJob(Generic[Work]):
    """A job that some worker has not answered.

    Attributes:
        work: what the owner knows of it.
        opened: seconds of the owner's clock.
        late_at: when all workers should have answered.
        waiting: workers that have not answered.
        due: its time was over at the last look.
        late: its time was over at two looks.
    """

    number: JobId
    work: Work
    opened: float
    late_at: float
    waiting: int
    due: bool = False
    late: bool = False


def first_cause(causes: Iterable[FailureCause]) -> FailureCause | None:
    """Return the first cause other than SKIPPED, which gives no reason; else SKIPPED; None for no
    causes."""
    return min(causes, key=lambda cause: cause is FailureCause.SKIPPED, default=None)


class WorkerJobs(Generic[Work]):
    """Open jobs of one kind. Owned by the scheduler's thread; time is an argument.

    Args:
        workers: that must answer each job.
        deadline_s: seconds that a worker has for a job.
        numbers: of the jobs; tables whose answers come together share them.
    """

    def __init__(
        self, workers: int, deadline_s: float, numbers: Iterator[int] | None = None
    ) -> None:
        self.workers = workers
        self.deadline_s = deadline_s
        self._numbers = count(1) if numbers is None else numbers
        self._open: dict[JobId, WorkerJob[Work]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[WorkerJob[Work]]:
        """Return the open jobs, the oldest first."""
        return iter(list(self._open.values()))

    def __contains__(self, number: JobId) -> bool:
        return number in self._open

    def __getitem__(self, number: JobId) -> WorkerJob[Work]:
        return self._open[number]

    @property
    def awaited(self) -> bool:
        """Whether a job is open that is not late."""
        return any(not job.late for job in self._open.values())

    def open(self, work: Work, now: float) -> WorkerJob[Work]:
        """Add a job, and return it."""
        number = JobId(next(self._numbers))
        late_at = now + _ANSWER_FACTOR * self.deadline_s
        self._open[number] = job = WorkerJob(number, work, now, late_at, self.workers)
        return job

    def find(self, number: JobId) -> WorkerJob[Work] | None:
        """Return the open job that a worker answers; None, and a warning, if there is none."""
        job = self._open.get(number)
        if job is None:
            logger.warning("a worker answered job %d, which is not open; ignored", number)
        return job

    def answered(self, job: WorkerJob[Work]) -> bool:
        """Take one worker's answer; return whether it was the last, which closes the job."""
        job.waiting -= 1
        if not job.waiting:
            del self._open[job.number]
        return not job.waiting

    def close(self, job: WorkerJob[Work]) -> None:
        """Close a job that no worker uses anything of; answers that still come are ignored."""
        del self._open[job.number]

    def take_late(self, now: float) -> list[WorkerJob[Work]]:
        """Return the jobs that have become late since the last call, the oldest first.

        Call this in each step, after the workers' answers: a job is late at the second look past
        its time, so that answers which arrived during a long step are read first.
        """
        late = []
        for job in self._open.values():
            if now < job.late_at or job.late:
                continue
            job.late, job.due = job.due, True
            if job.late:
                late.append(job)
        return late

    def check(self) -> None:
        """Prove that each open job waits for a worker, and for a time.

        Raises:
            Misuse: one does not; the message names it.
        """
        for job in self._open.values():
            if not 0 < job.waiting <= self.workers or not job.opened < job.late_at < float("inf"):
                raise Misuse(f"job {job.number} waits for {job.waiting} workers to {job.late_at}")
