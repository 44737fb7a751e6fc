"""Which dropped blocks the secondary tiers are to remove, and when."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvconnect.jobs import WorkerJobs
from kvconnect.offload.hints.outcomes import RELEASED, STAYED, HintOutcomes
from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.tiers.messages import NOT_REMOVED, REMOVED, RemovalAnswer, RemoveBlocks
from kvconnect.tiers.writeback import WriteBacks

_JOB_BLOCKS = 4096
_MOST_QUEUED = 1 << 16


class DroppedBlock(NamedTuple):
    """A block to remove. ``absent``: its outcome if no secondary tier has it; None if the outcome
    is counted elsewhere."""

    key: bytes
    absent: str | None


@dataclass(eq=False)
class _RemovalWork:
    """The job that the workers have. ``found``: their answers so far, by block."""

    blocks: list[DroppedBlock]
    found: bytes


class Removals:
    """A queue of blocks to remove, one job at a time. A block that is being written back waits for
    that job, or it would come back. Owned by the scheduler's thread; time is an argument.

    ``workers`` must answer each job; each worker has ``deadline_s`` seconds for it.
    """

    def __init__(
        self,
        write_backs: WriteBacks,
        outcomes: HintOutcomes,
        workers: int,
        deadline_s: float,
    ) -> None:
        self._write_backs = write_backs
        self._outcomes = outcomes
        self._queue: deque[DroppedBlock] = deque()
        self._held: list[DroppedBlock] = []  # being written back
        self._held_at = 0  # write-backs that had ended then
        self._open: WorkerJobs[_RemovalWork] = WorkerJobs(workers, deadline_s)

    @property
    def jobs(self) -> int:
        """Jobs that the workers have."""
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether a job can be planned or is unanswered: the engine must keep stepping."""
        return bool(len(self._open) or self._queue or self._released())

    def add(self, blocks: Iterable[DroppedBlock]) -> None:
        """Queue blocks. Those that the queue has no room for stay where they are, and are counted
        as not removed."""
        blocks = list(blocks)
        room = _MOST_QUEUED - len(self._queue) - len(self._held)
        self._queue.extend(blocks[:room])
        self._count(blocks[room:], bytes([NOT_REMOVED]) * len(blocks[room:]))

    def take(self, now: float) -> list[RemoveBlocks]:
        """Return the job to start now, if any."""
        for job in self._open.take_late(now):
            self._open.close(job)
            self._count(job.work.blocks, bytes([NOT_REMOVED]) * len(job.work.blocks))
        if len(self._open):
            return []
        if self._released():
            self._queue.extend(self._held)
            self._held.clear()
        self._held_at = self._write_backs.ended_jobs
        blocks: list[DroppedBlock] = []
        while self._queue and len(blocks) < _JOB_BLOCKS:
            block = self._queue.popleft()
            (self._held if block.key in self._write_backs.running else blocks).append(block)
        if not blocks:
            return []
        job = self._open.open(_RemovalWork(blocks, bytes(len(blocks))), now)
        keys = tuple(block.key for block in blocks)
        return [RemoveBlocks(job.number, keys, self._open.deadline_s)]

    def on_answer(self, answer: RemovalAnswer) -> None:
        """Take one worker's answer; ignored if it comes after the job has timed out."""
        job = self._open.find(answer.job)
        if job is None or len(answer.found) != len(job.work.blocks):
            return
        job.work.found = bytes(map(max, job.work.found, answer.found))
        if self._open.answered(job):
            self._count(job.work.blocks, job.work.found)

    def _released(self) -> bool:
        """Whether a write-back has ended that a block may have waited for."""
        return bool(self._held) and self._held_at != self._write_backs.ended_jobs

    def _count(self, blocks: list[DroppedBlock], found: bytes) -> None:
        outcomes = {NOT_REMOVED: STAYED, REMOVED: RELEASED[CacheHint.DROP]}
        pairs = zip(blocks, found, strict=True)
        self._outcomes.count(
            Counter(outcomes.get(answer, block.absent) for block, answer in pairs if block.absent)
        )
