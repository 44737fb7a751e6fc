"""Copy jobs in flight: from instruction to the last worker's report, exactly once.

Opening a job adds its device blocks to the ledger; the report of the last worker settles it:
slots become readable or free, readers unpin, bad copies are quarantined, blocks are released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.jobs import WorkerJob, WorkerJobs, first_cause
from kvconnect.offload.index import HostIndex
from kvconnect.offload.ledger import Hold, Ledger, Owner
from kvconnect.offload.messages import FailedBlock, GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Block, FailureCause, JobId, TransferType

_TYPE = {Owner.STORE: TransferType.GPU_TO_CPU, Owner.LOAD: TransferType.CPU_TO_GPU}


@dataclass
class CopyJob:
    """A store or load, until the last worker's report."""

    owner: Owner
    parts: tuple[GroupBlocks, ...]
    asked: float
    req_id: str = ""  # of a load, as are tokens and sync
    tokens: int = 0
    sync: bool = False
    seconds: float = 0.0  # that copies took, of the slowest worker so far
    failures: dict[tuple[int, int, int], FailedBlock] = field(default_factory=dict)
    void: bool = False  # a reset or expiry made the result useless: nothing waits for it

    @property
    def cause(self) -> FailureCause | None:
        """First cause that gives a reason; None if no block failed."""
        return first_cause(failure.cause for failure in self.failures.values())


class SettledJob(NamedTuple):
    """A finished job.

    ``released`` device blocks are no longer held by a store and go back to the engine's pool.
    ``stored`` and ``dropped`` are the blocks that became readable, or did not.
    """

    job: CopyJob
    released: tuple[int, ...] = ()
    stored: tuple[Block, ...] = ()
    dropped: tuple[Block, ...] = ()


class CopyJobs:
    """Open copy jobs of one engine. Owned by the scheduler's thread."""

    def __init__(
        self,
        index: HostIndex,
        stats: OffloadingConnectorStats,
        workers: int,
        deadline_s: float,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """See :class:`~kvconnect.jobs.WorkerJobs` for the last three."""
        self.ledger = Ledger()
        self._index = index
        self._stats = stats
        self._jobs: WorkerJobs[CopyJob] = WorkerJobs(workers, deadline_s, numbers)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return any(not job.work.void for job in self._jobs)

    def open_store(self, parts: tuple[GroupBlocks, ...], now: float) -> StoreBlocks:
        """Open a store of reserved slots; their device blocks are held from now on."""
        number = self._open(CopyJob(Owner.STORE, parts, now))
        return StoreBlocks(number, parts, self._jobs.deadline_s)

    def open_load(
        self, req_id: str, parts: tuple[GroupBlocks, ...], tokens: int, *, sync: bool, now: float
    ) -> LoadBlocks:
        """Open a load; its slots are pinned, its device blocks held from now on."""
        for part in parts:
            slots = [slot for slot in part.slots if slot >= 0]
            self._index.pin(slots)
            self._index.policy.touch(slots)
        number = self._open(CopyJob(Owner.LOAD, parts, now, req_id, tokens, sync))
        return LoadBlocks(number, req_id, parts, self._jobs.deadline_s, sync)

    def cancel_load(self, number: JobId) -> None:
        """Close a load that no worker was told of."""
        job = self._jobs[number]
        self._jobs.close(job)
        self._unpin(job.work)
        self.ledger.settle(number)

    def on_report(self, report: JobReport) -> SettledJob | None:
        """Take one worker's answer; return what changed once the last one has answered."""
        found = self._jobs.find(report.job)
        if found is None:
            return None
        job = found.work
        for failure in report.failures:
            known = job.failures.get(failure[:3])
            if known is None or known.cause is FailureCause.SKIPPED:  # the others name a reason
                job.failures[failure[:3]] = failure
        job.seconds = max(job.seconds, report.seconds)
        if not self._jobs.answered(found):
            return None
        for failure in job.failures.values():
            self._stats.count("failed_blocks", label=failure.cause.value)
        if any(failure.cause is FailureCause.DEADLINE for failure in job.failures.values()):
            self._stats.count("expired_jobs", label=_TYPE[job.owner].value)
        hold = self.ledger.settle(report.job)
        if job.owner is Owner.STORE:
            return self._end_store(job, () if hold is None else hold.blocks)
        return self._end_load(job)

    def expire(self, now: float) -> list[int]:
        """Expire stores that workers did not answer in time; return their source blocks, released.

        The blocks of such a store never become readable; its slots stay reserved, since a worker
        may still write them. A load's blocks stay held: only its worker knows when the last write
        has ended, and the worker has a deadline of its own.
        """
        released: list[int] = []
        for job in self._jobs.take_late(now):
            if job.work.owner is Owner.STORE and not job.work.void:
                self._stats.count("expired_jobs", label=_TYPE[job.work.owner].value)
                released += self._void(job)
        return released

    def void_stores(self) -> list[int]:
        """Void the stores in flight, after a reset or when their blocks are suspect: their blocks
        never become readable. Return their source blocks, released."""
        stores = (job for job in self._jobs if job.work.owner is Owner.STORE)
        return [block for job in stores for block in self._void(job)]

    def check(self) -> None:
        """Check the ledger and the open jobs.

        Raises:
            Misuse: something does not add up.
        """
        self.ledger.check()
        self._jobs.check()

    def _void(self, job: WorkerJob[CopyJob]) -> tuple[int, ...]:
        job.work.void = True
        hold = self.ledger.settle(job.number)
        return () if hold is None else hold.blocks

    def gauges(self, now: float) -> Iterable[tuple[str, float, str | None]]:
        """Yield (name, value, label) of each gauge."""
        for owner in _TYPE:
            yield "ledger_held_blocks", self.ledger.held_by(owner), owner.value
            jobs = sum(job.work.owner is owner for job in self._jobs)
            yield "jobs_in_flight", jobs, _TYPE[owner].value
        yield "ledger_oldest_hold_seconds", self.ledger.oldest_age(now), None

    def _open(self, job: CopyJob) -> JobId:
        opened = self._jobs.open(job, job.asked)
        # A synchronous load ends before its step computes. Its blocks may have a new owner before
        # its report arrives, so they are not held.
        parts = () if job.sync else job.parts
        blocks = tuple(block for part in parts for block in part.block_ids)
        self.ledger.grant(Hold(opened.number, job.owner, blocks, job.asked, opened.late_at))
        return opened.number

    def _end_store(self, job: CopyJob, released: tuple[int, ...]) -> SettledJob:
        failed = {failure.slot for failure in job.failures.values()}
        stored: list[Block] = []
        dropped: list[Block] = []
        for part in job.parts:
            good = [slot for slot in part.slots if not job.void and slot not in failed]
            dropped += self._index.abandon(set(part.slots).difference(good))
            self._index.commit(good)
            stored += [Block(part.group, self._index.hash_of(slot)) for slot in good]
        return SettledJob(job, released, tuple(stored), tuple(dropped))

    def _end_load(self, job: CopyJob) -> SettledJob:
        self._unpin(job)
        for failure in job.failures.values():
            self._index.quarantine(failure.slot, failure.cause, self._stats)
        # A step that reads its loads went on without the blocks, and its stores may hold the
        # result.
        released = tuple(self.void_stores()) if job.sync and job.failures else ()
        return SettledJob(job, released)

    def _unpin(self, job: CopyJob) -> None:
        for part in job.parts:
            self._index.unpin(slot for slot in part.slots if slot >= 0)
