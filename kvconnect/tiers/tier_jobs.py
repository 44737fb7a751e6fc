"""Jobs of the secondary tiers in flight: lookups, prefetches and write-backs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from kvconnect.jobs import WorkerJobs
from kvconnect.tiers.messages import TierAnswer
from kvconnect.types import Block, JobId


class TierJob(NamedTuple):
    """A lookup (without ``slots``), a prefetch, or a write-back (without ``req_id``)."""

    keys: tuple[bytes, ...]
    slots: array[int]
    req_id: str | None = None
    blocks: tuple[Block, ...] = ()  # of the keys, in their order; () for a write-back


@dataclass(eq=False)
class _TierWork:
    job: TierJob
    found: bytes | None = None  # combined answers so far
    stale: bool = False


class FinishedJob(NamedTuple):
    """A job that all workers have answered.

    ``found`` is as in :class:`TierAnswer`: a block counts as found if all workers have it, with the
    slowest of their tiers. ``stale``: keys have changed since, so ``found`` must not be used.
    ``timed_out``: the answer came too late, see :meth:`TierJobs.expire`. ``seconds`` from the start
    to the last answer.
    """

    job: TierJob
    found: bytes
    stale: bool
    timed_out: bool
    seconds: float


class TierJobs:
    """Open jobs of one engine. Owned by the scheduler's thread. ``workers`` and ``deadline_s``: see
    :class:`~kvconnect.jobs.WorkerJobs`."""

    def __init__(self, workers: int, deadline_s: float) -> None:
        self._open: WorkerJobs[_TierWork] = WorkerJobs(workers, deadline_s)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return self._open.awaited

    @property
    def prefetch_slots(self) -> int:
        """Slots of the prefetches that have not timed out."""
        jobs = (job.work.job for job in self._open if not job.late)
        return sum(len(job.slots) for job in jobs if job.req_id)

    def add(self, job: TierJob, now: float) -> JobId:
        """Add a job and return its number."""
        return self._open.open(_TierWork(job), now).number

    def on_answer(self, answer: TierAnswer, now: float) -> FinishedJob | None:
        """Take one worker's answer. Return the job once the last worker has answered."""
        job = self._open.find(answer.job)
        if job is None or len(answer.found) != len(job.work.job.keys):
            return None
        work = job.work
        if work.found is None:
            work.found = answer.found
        else:
            pairs = zip(work.found, answer.found, strict=True)
            work.found = bytes(max(mine, other) if mine and other else 0 for mine, other in pairs)
        if not self._open.answered(job):
            return None
        return FinishedJob(work.job, work.found, work.stale, job.late, now - job.opened)

    def expire(self, now: float) -> list[TierJob]:
        """Return the jobs that time out now. Their slots stay in use, since workers may still read
        or write them, until all workers have answered. A lookup has no slots, so it ends."""
        late = self._open.take_late(now)
        for job in late:
            if not job.work.job.slots:
                self._open.close(job)
        return [job.work.job for job in late]

    def mark_stale(self) -> None:
        """Note that keys have changed: what open jobs find must not be used."""
        for job in self._open:
            job.work.stale = True
