"""Questions to the workers' lower tiers, from instruction to the last worker's answer."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.offload.messages import TierAnswer
from kvconnect.types import JobId

logger = logging.getLogger(__name__)

# A worker counts from the moment a job arrives and must be able to answer before we give up.
_ANSWER_FACTOR = 2.0

Block = tuple[int, bytes]
"""(group, hash)"""


class Question(NamedTuple):
    """What was asked: about which blocks, into or out of which slots (none: a lookup), and for
    which request (none: a spill)."""

    keys: tuple[bytes, ...]
    slots: array[int]
    req_id: str | None = None
    blocks: tuple[Block, ...] = ()  # that the keys stand for; of a spill nobody asks


@dataclass(eq=False)
class _Open:
    question: Question
    asked: float
    waiting: int  # workers that have not answered
    found: bytes | None = None  # what all workers that answered have
    void: bool = False  # the result is worthless
    given_up: bool = False  # nobody waits for it any more


class Answered(NamedTuple):
    """A question that all workers have answered. ``found`` as in :class:`TierAnswer`, where a block
    counts as there if all workers have it, in a tier as slow as the slowest. ``void``: what was
    found is worthless, since blocks have other names now. ``given_up``: it came too late, see
    :meth:`Answers.expire`. ``seconds`` between question and last answer."""

    question: Question
    found: bytes
    void: bool
    given_up: bool
    seconds: float


@dataclass(eq=False)
class Answers:
    """Open questions of one engine, to ``workers`` that answer each, within ``deadline_s``.

    Owned by the scheduler's thread.
    """

    workers: int
    deadline_s: float
    _open: dict[JobId, _Open] = field(default_factory=dict)
    _last: int = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return any(not job.given_up for job in self._open.values())

    @property
    def fetching(self) -> int:
        """Slots that are being read into by what is waited for."""
        jobs = (job for job in self._open.values() if not job.given_up and job.question.req_id)
        return sum(len(job.question.slots) for job in jobs)

    def open(self, question: Question, now: float) -> JobId:
        """Number a question."""
        self._last += 1
        number = JobId(self._last)
        self._open[number] = _Open(question, now, self.workers)
        return number

    def take(self, answer: TierAnswer, now: float) -> Answered | None:
        """Take one worker's answer; return what all say once the last one has answered."""
        job = self._open.get(answer.job)
        if job is None or len(answer.found) != len(job.question.keys):
            logger.warning("a worker answered job %d, which is not open; ignored", answer.job)
            return None
        if job.found is None:
            job.found = answer.found
        else:
            pairs = zip(job.found, answer.found, strict=True)
            job.found = bytes(max(mine, other) if mine and other else 0 for mine, other in pairs)
        job.waiting -= 1
        if job.waiting:
            return None
        del self._open[answer.job]
        return Answered(job.question, job.found, job.void, job.given_up, now - job.asked)

    def expire(self, now: float) -> list[Question]:
        """Wait no longer for what has not been answered in time, and return it. Slots stay taken:
        only the worker can say that it does not read or write them any more. Lookups have none,
        so they are over."""
        late = [
            (number, job)
            for number, job in self._open.items()
            if not job.given_up and now >= job.asked + self.deadline_s * _ANSWER_FACTOR
        ]
        for number, job in late:
            job.given_up = True
            if not job.question.slots:
                del self._open[number]
        return [job.question for _, job in late]

    def void(self) -> None:
        """Blocks have other names from now on."""
        for job in self._open.values():
            job.void = True
