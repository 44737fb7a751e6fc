"""Which blocks to look for below the host tier, and which of those found to bring up."""

from __future__ import annotations

import logging
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup, leading_group, longest_prefix
from kvconnect.cache.keys import PREFIX_BYTES, block_key
from kvconnect.offload.index import HostIndex
from kvconnect.offload.messages import SECONDARY_TIERS, TierAnswer
from kvconnect.types import JobId, Tier

SHARED = bytes(PREFIX_BYTES)
"""Tenant and scope of a request that has neither."""

_ABSENT_S = 5.0  # another engine may write meanwhile what a shared tier lacks
_MOST_ABSENT = 1 << 16


class LookupResult(NamedTuple):
    """What could be brought up for a request: where each block after the first ``context`` tokens
    is, as far as a prefix goes. ``tokens`` must be computed if nothing is."""

    context: int
    tokens: int
    block_tokens: int
    tiers: Sequence[Tier]


class PrefetchDecision(NamedTuple):
    """How many of the blocks to bring up, and after how many seconds to compute after all."""

    blocks: int
    give_up_s: float = math.inf


Choose = Callable[[LookupResult], PrefetchDecision]


class LookupRequest(NamedTuple):
    """What a request could use: tokens [local, most). ``prefix``: its tenant and scope. ``names``:
    what blocks are called below the host tier, by hash, where that is something else."""

    hashes: Sequence[Sequence[bytes]]
    local_tokens: int
    most_tokens: int
    prefix: bytes = SHARED
    names: Mapping[bytes, bytes] = MappingProxyType({})

    def key(self, group: int, block_hash: bytes) -> bytes:
        """Return what a block is called below the host tier."""
        return block_key(self.prefix, group, self.names.get(block_hash, block_hash))

    def rows(self, groups: Sequence[CacheGroup]) -> Iterator[tuple[int, Sequence[bytes]]]:
        """Yield each group's number and the hashes of its blocks that could be used."""
        for number, group in enumerate(groups):
            start = self.local_tokens // group.block_tokens
            yield number, self.hashes[number][start : self.most_tokens // group.block_tokens]


class Absent:
    """Keys that were looked up and not found, for a while. Bounded."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._until

    def add(self, key: bytes, now: float) -> None:
        self._until[key] = now + _ABSENT_S
        self._until.move_to_end(key)
        if len(self._until) > _MOST_ABSENT:
            self._until.popitem(last=False)

    def drop(self, key: bytes) -> None:
        """It is there now."""
        self._until.pop(key, None)

    def expire(self, now: float) -> None:
        """Forget what was found absent too long ago; the oldest come first."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def clear(self) -> None:
        self._until.clear()


class Coming:
    """Blocks that fetches bring, and when they were asked for."""

    def __init__(self) -> None:
        self._asked: dict[Block, float] = {}

    def add(self, blocks: Iterable[Block], now: float) -> None:
        self._asked.update(dict.fromkeys(blocks, now))

    def drop(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._asked.pop(block, None)

    def for_other(self, rows: Iterable[tuple[int, Sequence[bytes]]], since: float) -> bool:
        """Whether any of these blocks was asked for after ``since``: longer nobody waits."""
        asked = self._asked
        if not asked:
            return False
        return any(asked.get((group, it), since) > since for group, row in rows for it in row)


class _View:
    """The host tier and what was found below it, as :func:`longest_prefix` reads an index."""

    def __init__(self, index: HostIndex, found: Mapping[Block, int]) -> None:
        self._index = index
        self._found = found

    def slot_of(self, group: int, block_hash: bytes) -> int | None:
        slot = self._index.slot_of(group, block_hash)
        return self._found.get((group, block_hash)) if slot is None else slot

    def ready_slots(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        slots = []
        for block_hash in hashes:
            slot = self.slot_of(group, block_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots


def missing(
    index: HostIndex, groups: Sequence[CacheGroup], wanted: LookupRequest, absent: Absent
) -> Iterator[Block]:
    """Yield the blocks that the host tier lacks, of a full group up to one that is nowhere."""
    for number, row in wanted.rows(groups):
        for block_hash in row:
            if index.has(number, block_hash):
                continue
            if wanted.key(number, block_hash) not in absent:
                yield number, block_hash
            elif groups[number].is_full:
                break


def worth_fetching(
    index: HostIndex,
    groups: Sequence[CacheGroup],
    wanted: LookupRequest,
    there: Mapping[Block, int],
    choose: Choose,
) -> tuple[list[Block], float]:
    """Return which of the blocks found below to bring up, in prefix order within each group, and
    how many seconds that is worth waiting for.

    ``there``: what was found, by its place in :data:`SECONDARY_TIERS`. What is weighed are the
    blocks of the leading group, if it is one with full attention; the others' blocks follow from
    its prefix. Where all groups have windows, it is all or nothing.
    """
    view, number = _View(index, there), leading_group(groups)
    lead, row, local = groups[number], wanted.hashes[number], wanted.local_tokens
    total = longest_prefix(view, groups, wanted.hashes, local, wanted.most_tokens)
    start, end = local // lead.block_tokens, total // lead.block_tokens
    if not lead.is_full:
        start = max(start, lead.first_block(total))
    start += len(index.ready_slots(number, row[start:end]))
    tiers: list[Tier] = []
    for block_hash in row[start:end]:
        found = SECONDARY_TIERS[there.get((number, block_hash), 0)]
        if found or tiers:  # what host memory has between them costs nothing more
            tiers.append(found or tiers[-1])
    if not tiers:
        return [], 0.0
    context = start * lead.block_tokens
    worth = choose(LookupResult(context, wanted.most_tokens - context, lead.block_tokens, tiers))
    if worth.blocks < len(tiers):
        if not lead.is_full:
            return [], 0.0
        most = context + worth.blocks * lead.block_tokens
        total = longest_prefix(view, groups, wanted.hashes, local, most)
    found_blocks = [
        (group_number, block_hash)
        for group_number, group in enumerate(groups)
        for block_hash in wanted.hashes[group_number][
            max(group.first_block(total), local // group.block_tokens) : total // group.block_tokens
        ]
        if (group_number, block_hash) in there and not index.has(group_number, block_hash)
    ]
    return found_blocks, worth.give_up_s


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
