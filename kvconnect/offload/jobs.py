"""Open jobs and the ledger of the device blocks that they hold.

Jobs hold device blocks while a copy reads or writes them. The ledger proves at any time that a
held block has one owner, that every owner has a deadline, and that whatever was granted is
returned or still held.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvconnect.errors import Misuse
from kvconnect.offload.index import HostIndex
from kvconnect.offload.messages import FailedBlock, GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, JobId, TransferType


class Owner(str, Enum):
    """Kind of job that holds blocks. Values are metric labels."""

    STORE = "store"
    LOAD = "load"
    SEND = "send"
    RECV = "recv"


class Hold(NamedTuple):
    """Device blocks held by one job; ``since`` and ``deadline`` in seconds of one clock."""

    job: JobId
    owner: Owner
    blocks: tuple[int, ...]
    since: float
    deadline: float


class Ledger:
    """All held device blocks. Owned by the scheduler's thread; has no clock of its own."""

    def __init__(self) -> None:
        self.granted = 0
        self.returned = 0
        self._holds: dict[JobId, Hold] = {}
        self._owner_of: dict[int, JobId] = {}
        self._held_by = dict.fromkeys(Owner, 0)

    def __repr__(self) -> str:
        return f"<Ledger {len(self._owner_of)} blocks held by {len(self._holds)} jobs>"

    @property
    def held(self) -> int:
        """Device blocks held now."""
        return len(self._owner_of)

    def holds_block(self, block_id: int) -> bool:
        """Whether some job holds this device block."""
        return block_id in self._owner_of

    def grant(self, hold: Hold) -> None:
        """Add a hold.

        Raises:
            Misuse: the job already holds blocks, or one of the blocks has an owner.
        """
        if hold.job in self._holds:
            raise Misuse(f"job {hold.job} is granted blocks twice")
        for block in hold.blocks:
            if block in self._owner_of:
                owner = self._owner_of[block]
                raise Misuse(f"block {block} is held by job {owner}, not free for {hold.job}")
            self._owner_of[block] = hold.job
        self._holds[hold.job] = hold
        self._held_by[hold.owner] += len(hold.blocks)
        self.granted += len(hold.blocks)

    def settle(self, job: JobId) -> Hold | None:
        """Remove a job's hold and return it; None if it was settled before (expired)."""
        hold = self._holds.pop(job, None)
        if hold is not None:
            for block in hold.blocks:
                del self._owner_of[block]
            self._held_by[hold.owner] -= len(hold.blocks)
            self.returned += len(hold.blocks)
        return hold

    def expired(self, now: float) -> Sequence[Hold]:
        """Return holds whose deadline has passed, oldest first. They stay in the ledger."""
        return [hold for hold in self._holds.values() if hold.deadline <= now]

    def held_by(self, owner: Owner) -> int:
        """Device blocks held by jobs of one kind."""
        return self._held_by[owner]

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest hold was granted; 0 when nothing is held."""
        return max((now - hold.since for hold in self._holds.values()), default=0.0)

    def check(self) -> None:
        """Prove that holds, owners and counts agree.

        Raises:
            Misuse: an entry does not add up; the message names it.
        """
        owners = {block: hold.job for hold in self._holds.values() for block in hold.blocks}
        if owners != self._owner_of:
            raise Misuse("held blocks and owners do not match")
        if self.granted != self.returned + len(self._owner_of):
            raise Misuse(
                f"granted {self.granted} != returned {self.returned} + held {len(self._owner_of)}"
            )
        if sum(self._held_by.values()) != len(self._owner_of):
            raise Misuse(f"{len(self._owner_of)} blocks are held, by kind {self._held_by}")
        for hold in self._holds.values():
            if not hold.deadline > hold.since:
                raise Misuse(f"job {hold.job} has no deadline after {hold.since}")


# Jobs in flight: from instruction to the last worker's report, exactly once.
#
# Opening a job adds its device blocks to the ledger; the report of the last worker settles it:
# slots become readable or free, readers unpin, bad copies are quarantined, blocks are released.


logger = logging.getLogger(__name__)

NULL_BLOCK = 0  # the engine's placeholder for blocks outside a window; never copied
_TYPE = {Owner.STORE: TransferType.GPU_TO_CPU, Owner.LOAD: TransferType.CPU_TO_GPU}
# A worker counts from the arrival of the job and must be able to answer before the job expires.
_ANSWER_FACTOR = 2.0


class JobLimits(NamedTuple):
    """``workers`` must answer each job, which may take ``deadline_s`` seconds."""

    workers: int
    deadline_s: float


def first_cause(causes: Iterable[FailureCause]) -> FailureCause | None:
    """Return the first cause other than SKIPPED, which gives no reason; else SKIPPED; None for no
    causes."""
    return min(causes, key=lambda cause: cause is FailureCause.SKIPPED, default=None)


@dataclass
class CopyJob:
    """A store or load, until the last worker's report."""

    owner: Owner
    parts: tuple[GroupBlocks, ...]
    asked: float
    waiting: int  # workers that have not answered
    req_id: str = ""  # of a load, as are tokens and sync
    tokens: int = 0
    sync: bool = False
    seconds: float = 0.0  # that copies took, of the slowest worker so far
    failures: dict[tuple[int, int, int], FailedBlock] = field(default_factory=dict)
    overdue: bool = False  # was past its deadline at the last check
    void: bool = False  # a reset or expiry made the result useless: nothing waits for it

    @property
    def cause(self) -> FailureCause | None:
        """First cause that gives a reason; None if no block failed."""
        return first_cause(failure.cause for failure in self.failures.values())


class SettledJob(NamedTuple):
    """A finished job.

    ``released`` device blocks are no longer held by a store and go back to the engine's pool.
    ``stored`` and ``dropped`` name the (group, hash) of blocks that became readable, or did not.
    """

    job: CopyJob
    released: tuple[int, ...] = ()
    stored: tuple[tuple[int, bytes], ...] = ()
    dropped: tuple[tuple[int, bytes], ...] = ()


class JobTable:
    """Open jobs of one engine. Owned by the scheduler's thread."""

    def __init__(
        self, index: HostIndex, stats: OffloadingConnectorStats, limits: JobLimits
    ) -> None:
        self.ledger = Ledger()
        self._index = index
        self._stats = stats
        self._limits = limits
        self._jobs: dict[JobId, CopyJob] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return any(not job.void for job in self._jobs.values())

    def open_store(self, parts: tuple[GroupBlocks, ...], now: float) -> StoreBlocks:
        """Open a store of reserved slots; their device blocks are held from now on."""
        job = self._open(CopyJob(Owner.STORE, parts, now, self._limits.workers))
        return StoreBlocks(job, parts, self._limits.deadline_s)

    def open_load(
        self, req_id: str, parts: tuple[GroupBlocks, ...], tokens: int, *, sync: bool, now: float
    ) -> LoadBlocks:
        """Open a load; its slots are pinned, its device blocks held from now on."""
        for part in parts:
            slots = [slot for slot in part.slots if slot >= 0]
            self._index.pin(slots)
            self._index.policy.touch(slots)
        job = self._open(
            CopyJob(Owner.LOAD, parts, now, self._limits.workers, req_id, tokens, sync)
        )
        return LoadBlocks(job, req_id, parts, self._limits.deadline_s, sync)

    def cancel_load(self, number: JobId) -> None:
        """Close a load that no worker was told of."""
        self._unpin(self._jobs.pop(number))
        self.ledger.settle(number)

    def on_report(self, report: JobReport) -> SettledJob | None:
        """Take one worker's answer; return what changed once the last one has answered."""
        job = self._jobs.get(report.job)
        if job is None:
            logger.warning("a worker reported job %d, which is not open; ignored", report.job)
            return None
        for failure in report.failures:
            known = job.failures.get(failure[:3])
            if known is None or known.cause is FailureCause.SKIPPED:  # the others name a reason
                job.failures[failure[:3]] = failure
        job.seconds = max(job.seconds, report.seconds)
        job.waiting -= 1
        if job.waiting:
            return None
        del self._jobs[report.job]
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

        A store expires at the second check past its deadline, so that answers which arrived
        during a long step are read first. Its blocks never become readable; its slots stay
        reserved, since a worker may still write them. A load's blocks stay held: only its worker
        knows when the last write has ended, and the worker has a deadline of its own.
        """
        released: list[int] = []
        for hold in self.ledger.expired(now):
            job = self._jobs[hold.job]
            if job.owner is Owner.STORE and job.overdue:
                self._stats.count("expired_jobs", label=_TYPE[job.owner].value)
                released += self._void(hold.job, job)
            job.overdue = True
        return released

    def void_stores(self) -> list[int]:
        """Void the stores in flight, after a reset or when their blocks are suspect: their blocks
        never become readable. Return their source blocks, released."""
        stores = [(n, job) for n, job in self._jobs.items() if job.owner is Owner.STORE]
        return [block for number, job in stores for block in self._void(number, job)]

    def _void(self, number: JobId, job: CopyJob) -> tuple[int, ...]:
        job.void = True
        hold = self.ledger.settle(number)
        return () if hold is None else hold.blocks

    def gauges(self, now: float) -> Iterable[tuple[str, float, str | None]]:
        """Yield (name, value, label) of each gauge."""
        for owner in _TYPE:
            yield "ledger_held_blocks", self.ledger.held_by(owner), owner.value
            jobs = sum(job.owner is owner for job in self._jobs.values())
            yield "jobs_in_flight", jobs, _TYPE[owner].value
        yield "ledger_oldest_hold_seconds", self.ledger.oldest_age(now), None

    def _open(self, job: CopyJob) -> JobId:
        self._last += 1
        number = JobId(self._last)
        # A synchronous load ends before its step computes. Its blocks may have a new owner before
        # its report arrives, so they are not held.
        parts = () if job.sync else job.parts
        blocks = tuple(block for part in parts for block in part.block_ids)
        deadline = job.asked + self._limits.deadline_s * _ANSWER_FACTOR
        self.ledger.grant(Hold(number, job.owner, blocks, job.asked, deadline))
        self._jobs[number] = job
        return number

    def _end_store(self, job: CopyJob, released: tuple[int, ...]) -> SettledJob:
        failed = {failure.slot for failure in job.failures.values()}
        stored: list[tuple[int, bytes]] = []
        dropped: list[tuple[int, bytes]] = []
        for part in job.parts:
            good = [slot for slot in part.slots if not job.void and slot not in failed]
            dropped += self._index.abandon(set(part.slots).difference(good))
            self._index.commit(good)
            stored += [(part.group, self._index.hash_of(slot)) for slot in good]
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
