"""The plan of the tiers below host memory: what is looked up, brought up, and written down.

One object per engine, owned by the scheduler's thread; time is an argument, as in
:mod:`kvconnect.offload.planner`. A request whose prefix the host tier lacks is told to ask later
(:meth:`TierPlan.ask`): workers look its blocks up, and what is worth it comes into host slots,
from where it is loaded like any block of that tier. No request waits longer than ``wait_s``. What
the host tier has stored is written down behind it, by as much as may be under way at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup, leading_group
from kvconnect.offload.index import HostIndex
from kvconnect.offload.messages import (
    SECONDARY_TIERS,
    Instructions,
    LookupBlocks,
    PrefetchBlocks,
    TierAnswer,
    WriteBackBlocks,
)
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.lookup import (
    Absent,
    Answered,
    Answers,
    Block,
    Choose,
    Coming,
    LookupRequest,
    Question,
    missing,
    worth_fetching,
)
from kvconnect.tiers.writeback import WriteBacks
from kvconnect.types import FailureCause, Tier

_MOST_KEYS = 1 << 14  # of one lookup


class TierLimits(NamedTuple):
    """``workers`` must answer each job, which may take ``deadline_s`` seconds; a request waits at
    most ``wait_s``. ``slots`` of the host tier may be kept from eviction for spills, and as many
    for what requests wait for. ``reused``: write down only blocks that were loaded once."""

    workers: int
    deadline_s: float
    wait_s: float
    slots: int
    reused: bool


class Promoted(NamedTuple):
    """Blocks that were brought up for a request."""

    req_id: str
    blocks: Sequence[Block]


@dataclass(eq=False)
class _Waiting:
    """A request that asked, until it is over."""

    wanted: LookupRequest
    asked: float
    deadline: float
    decided: bool = False
    working: bool = False  # a job is about its blocks; else it waits for another request's
    pinned: list[int] = field(default_factory=list)  # slots it is about to read
    brought: dict[Tier, int] = field(default_factory=dict)  # tokens that came for it

    def pin(self, index: HostIndex, groups: Sequence[CacheGroup]) -> None:
        """Keep what the host tier has of the prefix until its load is planned."""
        self.unpin(index)
        rows = self.wanted.rows(groups)
        self.pinned = [slot for number, row in rows for slot in index.ready_slots(number, row)]
        index.pin(self.pinned)

    def unpin(self, index: HostIndex) -> None:
        index.unpin(self.pinned)
        self.pinned = []

    def note(self, blocks: Sequence[Block], found: bytes, groups: Sequence[CacheGroup]) -> None:
        """Remember where the tokens of the prefix came from: those of the leading group."""
        lead = leading_group(groups)
        for (group, _), number in zip(blocks, found, strict=True):
            tier = SECONDARY_TIERS[number]
            if tier is not None and group == lead:
                self.brought[tier] = self.brought.get(tier, 0) + groups[lead].block_tokens


class TierPlan:
    """Decides for one engine; see the module docstring. ``choose`` weighs a fetch against
    computing; ``fetched`` is told (tier, blocks, seconds) of each that brought something."""

    def __init__(
        self,
        index: HostIndex,
        groups: Sequence[CacheGroup],
        stats: OffloadingConnectorStats,
        limits: TierLimits,
        choose: Choose,
        fetched: Callable[[Tier, int, float], None],
    ) -> None:
        self._index = index
        self._groups = tuple(groups)
        self._stats = stats
        self._limits = limits
        self._choose = choose
        self._fetched = fetched
        self._waiting: dict[str, _Waiting] = {}
        self._coming = Coming()
        self._planned = Instructions()
        self._answers = Answers(limits.workers, limits.deadline_s)
        self._absent = Absent()
        self.spills = WriteBacks(index, limits.slots, limits.reused, stats)

    def __repr__(self) -> str:
        return f"<BelowPlan {len(self._waiting)} requests, {len(self._answers)} jobs>"

    @property
    def busy(self) -> bool:
        """Whether something is planned or an answer is awaited: the engine must step on."""
        return self._answers.busy or self.spills.ready

    def ask(self, req_id: str, wanted: LookupRequest, now: float) -> bool:
        """Whether the request should ask again later; False once the host tier has what it gets.

        To be asked at every step while a request waits. What was decided stays.
        """
        waiting = self._waiting.get(req_id)
        if waiting is None:
            waiting = _Waiting(wanted, now, now + self._limits.wait_s)
            self._waiting[req_id] = waiting
        since = now - self._limits.wait_s
        follows = self._coming.for_other(wanted.rows(self._groups), since)
        if not waiting.decided and not waiting.working and not follows:
            waiting.working = self._seek(req_id, wanted, now)
            waiting.decided = not waiting.working
        return not waiting.decided

    def planned(self, req_id: str) -> dict[Tier, int]:
        """The request was admitted, and its load pins what it reads. Return how many tokens came
        for it, by tier."""
        waiting = self._waiting.get(req_id)
        if waiting is None:
            return {}
        waiting.unpin(self._index)
        brought, waiting.brought = waiting.brought, {}
        return brought

    def forget(self, req_id: str) -> None:
        """The request is over."""
        waiting = self._waiting.pop(req_id, None)
        if waiting is not None:
            waiting.unpin(self._index)

    def take(self, work: Instructions, now: float) -> None:
        """Add what the workers have to do to a step's work."""
        for question in self._answers.expire(now):
            self._give_up(question)
        self._absent.expire(now)
        for waiting in self._waiting.values():
            if now >= waiting.deadline and (waiting.pinned or not waiting.decided):
                if not waiting.decided:
                    self._stats.count("tier_decisions", label="late")
                    waiting.decided = True
                waiting.unpin(self._index)
        for keys, slots in self.spills.take():
            self._stats.count("tier_written_blocks", len(keys))
            for key in keys:
                self._absent.drop(key)
            number = self._answers.open(Question(keys, slots), now)
            work.spills.append(WriteBackBlocks(number, keys, slots, self._limits.deadline_s))
        work.seeks, work.fetches = self._planned.seeks, self._planned.fetches
        self._planned = Instructions()

    def on_answer(self, answer: TierAnswer, now: float) -> Promoted | None:
        """Take one worker's answer; the last one of a job decides what comes next. Return what the
        host tier has now, after a fetch."""
        answered = self._answers.take(answer, now)
        if answered is None:
            return None
        if answered.question.req_id is None:
            self.spills.ended(answered.question.slots, answered.given_up)
        elif len(answered.question.slots):
            return self._end_fetch(answered.question.req_id, answered, now)
        else:
            self._end_seek(answered.question.req_id, answered, now)
        return None

    def reset(self) -> None:
        """Blocks have other names from now on: what was found is no more, and what is on its way
        is not used."""
        self.spills.clear()
        self._absent.clear()
        self._answers.void()
        for waiting in self._waiting.values():
            waiting.decided = True
            waiting.unpin(self._index)

    def gauges(self) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of what is going on."""
        waiting = sum(not waiting.decided for waiting in self._waiting.values())
        yield "tier_waiting_requests", waiting, None
        yield "tier_jobs_in_flight", len(self._answers), None

    def _give_up(self, question: Question) -> None:
        """A job takes too long: what it is about may be stored, fetched and written by others. Its
        slots are taken until it has ended."""
        if question.req_id is None:
            self.spills.given_up(question.slots)
        elif question.slots:
            self._index.abandon(question.slots, held=True)
            self._coming.drop(question.blocks)
            cause = FailureCause.DEADLINE.value
            self._stats.count("failed_blocks", len(question.slots), label=cause)

    def _seek(self, req_id: str, wanted: LookupRequest, now: float) -> bool:
        """Have blocks looked up; return False if nothing can be below."""
        lacking = missing(self._index, self._groups, wanted, self._absent)
        blocks = tuple(islice(lacking, _MOST_KEYS))
        if not blocks:
            return False
        keys = tuple(wanted.key(*block) for block in blocks)
        job = self._answers.open(Question(keys, array("q"), req_id, blocks), now)
        self._planned.seeks.append(LookupBlocks(job, keys))
        self._stats.count("tier_lookups")
        return True

    def _end_seek(self, req_id: str, answered: Answered, now: float) -> None:
        waiting = self._waiting.get(req_id)
        if answered.void:
            return
        for key, tier in zip(answered.question.keys, answered.found, strict=True):
            if not tier:
                self._absent.add(key, now)
        if waiting is None or waiting.decided:
            return
        pairs = zip(answered.question.blocks, answered.found, strict=True)
        there = {block: tier for block, tier in pairs if tier}
        blocks: list[Block] = []
        if there:
            args = (self._index, self._groups, waiting.wanted, there)
            blocks, seconds = worth_fetching(*args, self._choose)
            waiting.deadline = min(waiting.deadline, now + seconds)
        waiting.decided = not (blocks and self._fetch(req_id, waiting, blocks, now))

    def _fetch(self, req_id: str, waiting: _Waiting, blocks: Iterable[Block], now: float) -> bool:
        """Have blocks brought into slots; return False if there is no room."""
        waiting.pin(self._index, self._groups)  # before anything is evicted for it
        kept = sum(len(other.pinned) for other in self._waiting.values())
        room = self._limits.slots - self._answers.fetching - kept
        found: list[Block] = []
        slots: array[int] = array("q")
        for block in blocks:
            slot = self._index.reserve(*block) if len(found) < room else None
            if slot is None:
                break
            slots.append(slot)
            found.append(block)
        if not found:
            self._stats.count("tier_decisions", label="no_space")
            return False
        self._coming.add(found, now)
        keys = tuple(waiting.wanted.key(*block) for block in found)
        number = self._answers.open(Question(keys, slots, req_id, tuple(found)), now)
        self._planned.fetches.append(PrefetchBlocks(number, keys, slots, self._limits.deadline_s))
        return True

    def _end_fetch(self, req_id: str, answered: Answered, now: float) -> Promoted:
        _, slots, _, blocks = answered.question
        worthless = answered.void or answered.given_up
        found = bytes(len(blocks)) if worthless else answered.found
        good = [slot for slot, tier in zip(slots, found, strict=True) if tier]
        self._index.abandon([slot for slot, tier in zip(slots, found, strict=True) if not tier])
        self._index.commit(good)
        self.spills.brought(good)
        if not answered.given_up:  # else others may bring them by now
            self._coming.drop(blocks)
        tiers = [SECONDARY_TIERS[tier] for tier in found if tier]
        slowest = SECONDARY_TIERS[max(found)]
        if slowest is not None:
            self._fetched(slowest, len(good), answered.seconds)
        came = Promoted(req_id, [block for block, tier in zip(blocks, found, strict=True) if tier])
        waiting = self._waiting.get(req_id)
        if waiting is None or waiting.decided:
            return came
        waiting.decided = True
        for tier in (Tier.DISK, Tier.REMOTE):
            if tier in tiers:
                self._stats.observe("load_latency_seconds", answered.seconds, label=tier.value)
                waited = now - waiting.asked
                self._stats.observe("load_exposed_seconds", waited, label=tier.value)
        waiting.note(blocks, found, self._groups)
        waiting.pin(self._index, self._groups)
        return came
