"""Decides for the secondary tiers what to look up, to prefetch and to write back.

One object per engine, owned by the scheduler's thread. Time is an argument, as in
:mod:`kvconnect.offload.planner`. If the host tier lacks a part of a request's prefix, the request
waits (:meth:`TierPlan.lookup`): workers look its blocks up, and the blocks worth loading are
prefetched into host slots, from which they are loaded like any other block of the host tier. No
request waits longer than ``wait_s``, or ``deadline_s`` if it asks for a prefetch. Blocks stored in
the host tier are written back in the background, a bounded number at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup, leading_group
from kvconnect.offload.index import HostIndex
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.lookup import (
    Choose,
    LookupRequest,
    PendingPrefetches,
    PinnedSlots,
    RecentMisses,
    blocks_to_prefetch,
)
from kvconnect.tiers.messages import (
    SECONDARY_TIERS,
    LookupBlocks,
    PrefetchBlocks,
    TierAnswer,
    TierInstructions,
    WriteBackBlocks,
)
from kvconnect.tiers.search import MAX_KEYS, TierSearch
from kvconnect.tiers.tier_jobs import FinishedJob, TierJob, TierJobs
from kvconnect.tiers.writeback import WriteBacks
from kvconnect.types import Block, FailureCause, Tier


class TierLimits(NamedTuple):
    """Limits of a :class:`TierPlan`.

    ``workers`` workers must answer each job, which may take ``deadline_s`` seconds. A request waits
    at most ``wait_s`` seconds, ``deadline_s`` if it asks for a prefetch. ``slots`` of the host tier
    may be pinned by write-backs, and as many by prefetches. ``reused``: write back only blocks that
    were loaded once. ``searches``: blocks are looked up also for requests that name no source.
    ``first_keys``: of a lookup's first round, see :class:`TierSearch`.
    """

    workers: int
    deadline_s: float
    wait_s: float
    slots: int
    reused: bool
    searches: bool = True
    first_keys: int = MAX_KEYS


class Promoted(NamedTuple):
    """Blocks that were prefetched into the host tier for a request, and their (key, slot); blocks
    that were not found."""

    req_id: str
    blocks: Sequence[Block]
    places: Sequence[tuple[bytes, int]]
    lost: Sequence[Block] = ()


@dataclass(eq=False)
class _Waiting:
    """A request that was looked up, until it ends."""

    request: LookupRequest
    search: TierSearch
    asked: float
    deadline: float
    decided: bool = False
    working: bool = False  # it has a job; otherwise it may wait for another request's prefetch
    awaited: Block | None = None  # a block of that prefetch
    pinned: list[int] = field(default_factory=list)  # slots that it is about to load
    promoted: dict[Tier, int] = field(default_factory=dict)  # tokens prefetched for it
    not_loaded: str | None = None  # why not all that the tiers have is prefetched for it

    def count(self, blocks: Sequence[Block], found: bytes, groups: Sequence[CacheGroup]) -> None:
        """Count promoted tokens by tier, those of the leading group."""
        lead = leading_group(groups)
        for (group, _), number in zip(blocks, found, strict=True):
            tier = SECONDARY_TIERS[number]
            if tier is not None and group == lead:
                self.promoted[tier] = self.promoted.get(tier, 0) + groups[lead].block_tokens


class TierPlan:
    """Decides for one engine; see the module docstring.

    ``choose`` weighs a prefetch against computing. ``on_prefetched`` is given (tier, blocks,
    seconds) of each prefetch that found a block.
    """

    def __init__(
        self,
        index: HostIndex,
        groups: Sequence[CacheGroup],
        stats: OffloadingConnectorStats,
        limits: TierLimits,
        choose: Choose,
        on_prefetched: Callable[[Tier, int, float], None],
    ) -> None:
        self._index = index
        self._groups = tuple(groups)
        self._stats = stats
        self._limits = limits
        self._choose = choose
        self._on_prefetched = on_prefetched
        self._waiting: dict[str, _Waiting] = {}
        self._prefetching = PendingPrefetches()
        self._planned = TierInstructions()
        self._jobs = TierJobs(limits.workers, limits.deadline_s)
        self._misses = RecentMisses()
        self._pinned = PinnedSlots(index)
        self.write_backs = WriteBacks(index, limits.slots, limits.reused, stats)
        self._ended_slots: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether work is planned or an answer is awaited: the engine must keep stepping."""
        return self._jobs.busy or self.write_backs.ready

    def lookup(self, req_id: str, request: LookupRequest, now: float) -> bool:
        """Return True while the request must wait, False once the host tier has what it will get.

        Call this at every step while the request waits. A decision is not changed afterwards.
        """
        waiting = self._waiting.get(req_id)
        if waiting is None:
            limits = self._limits
            wait_s = limits.deadline_s if request.prefetch_tokens else limits.wait_s
            search = TierSearch(self._index, self._groups, request, self._misses, limits.first_keys)
            waiting = _Waiting(request, search, now, now + wait_s)
            self._waiting[req_id] = waiting
        if not waiting.decided and not waiting.working and not self._follows(waiting, now):
            searches = self._limits.searches or bool(request.source)
            waiting.working = searches and self._look_up(req_id, waiting, now)
            waiting.decided = not waiting.working
            if waiting.working:
                self._stats.count("tier_lookups")
        return not waiting.decided

    def on_load_planned(self, req_id: str) -> dict[Tier, int]:
        """Unpin the slots of a request, whose load pins them now. Return how many tokens were
        promoted for it, by tier."""
        waiting = self._waiting.get(req_id)
        if waiting is None:
            return {}
        self._unpin(waiting)
        promoted, waiting.promoted = waiting.promoted, {}
        return promoted

    def not_loaded(self, req_id: str) -> str | None:
        """Return why not all that the tiers had was prefetched for a request: a decision as in
        ``tier_decisions``; None if all was."""
        waiting = self._waiting.get(req_id)
        return None if waiting is None else waiting.not_loaded

    def forget(self, req_id: str) -> str | None:
        """End a request; return :meth:`not_loaded`."""
        waiting = self._waiting.pop(req_id, None)
        if waiting is None:
            return None
        self._unpin(waiting)
        return waiting.not_loaded

    def take(self, now: float) -> TierInstructions:
        """Return this step's instructions for the workers."""
        work, self._planned = self._planned, TierInstructions()
        for job in self._jobs.expire(now):
            self._time_out(job)
        self._misses.expire(now)
        for waiting in self._waiting.values():
            if now >= waiting.deadline and (waiting.pinned or not waiting.decided):
                if not waiting.decided:
                    self._stats.count("tier_decisions", label="late")
                    waiting.decided, waiting.not_loaded = True, "late"
                self._unpin(waiting)
        for keys, slots in self.write_backs.take_jobs():
            self._stats.count("tier_written_blocks", len(keys))
            for key in keys:
                self._misses.discard(key)
            number = self._jobs.add(TierJob(keys, slots), now)
            write_back = WriteBackBlocks(number, keys, slots, self._limits.deadline_s)
            work.write_backs.append(write_back)
        return work

    def on_answer(self, answer: TierAnswer, now: float) -> Promoted | None:
        """Take one worker's answer. The last one of a job decides what comes next. Return the
        blocks that a prefetch has brought to the host tier."""
        finished = self._jobs.on_answer(answer, now)
        if finished is None:
            return None
        job = finished.job
        if job.req_id is None:
            pairs = zip(job.slots, finished.found, strict=True)
            failed = [slot for slot, tier in pairs if not tier and not finished.stale]
            self.write_backs.ended(job.slots, finished.timed_out, failed)
            self._ended_slots.extend(job.slots)
        elif len(job.slots):
            return self._end_prefetch(job.req_id, finished, now)
        else:
            self._end_lookup(job.req_id, finished, now)
        return None

    def take_ended(self) -> list[int]:
        """Return the slots of the write-backs that have ended since the last call."""
        ended, self._ended_slots = self._ended_slots, []
        return ended

    def reset(self) -> None:
        """Note that blocks have other keys from now on: results so far and those of open jobs are
        not used."""
        self.write_backs.clear()
        self._misses.clear()
        self._jobs.mark_stale()
        for waiting in self._waiting.values():
            waiting.decided = True
            self._unpin(waiting)

    def gauges(self, removals: int = 0) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of the gauges. ``removals``: jobs that are not the plan's."""
        waiting = sum(not waiting.decided for waiting in self._waiting.values())
        yield "tier_waiting_requests", waiting, None
        yield "tier_jobs_in_flight", len(self._jobs) + removals, None

    def _time_out(self, job: TierJob) -> None:
        """Let others store, prefetch and write back the blocks of a job that takes too long. Its
        slots stay in use until it ends."""
        if job.req_id is None:
            self.write_backs.timed_out(job.slots)
        elif job.slots:
            self._index.abandon(job.slots, held=True)
            self._prefetching.discard(job.blocks)
            cause = FailureCause.DEADLINE.value
            self._stats.count("failed_blocks", len(job.slots), label=cause)

    def _pin(self, waiting: _Waiting) -> None:
        """Pin the part of a request's prefix in the host tier until its load is planned."""
        self._unpin(waiting)
        rows = waiting.request.rows(self._groups)
        waiting.pinned = [
            slot for group, row in rows for slot in self._index.ready_slots(group, row)
        ]
        self._pinned.pin(waiting.pinned)

    def _unpin(self, waiting: _Waiting) -> None:
        self._pinned.unpin(waiting.pinned)
        waiting.pinned = []

    def _follows(self, waiting: _Waiting, now: float) -> bool:
        """Return whether another request's prefetch, which has not run for too long, brings a block
        of this one. Looks at one block only while it does."""
        start = now - self._limits.wait_s
        if waiting.awaited is None or self._prefetching.since(waiting.awaited) <= start:
            rows = waiting.request.rows(self._groups)
            waiting.awaited = self._prefetching.first_since(rows, start)
        return waiting.awaited is not None

    def _look_up(self, req_id: str, waiting: _Waiting, now: float) -> bool:
        """Plan the next round of a lookup. Return False if no secondary tier can have a block of
        use that is not found yet."""
        blocks, request = waiting.search.next_round(), waiting.request
        if not blocks:
            return False
        keys = tuple(request.key(block.group, block.block_hash) for block in blocks)
        self._planned.pages.update(request.page_keys(blocks))
        number = self._jobs.add(TierJob(keys, array("q"), req_id, blocks), now)
        self._planned.lookups.append(LookupBlocks(number, keys, request.source))
        return True

    def _end_lookup(self, req_id: str, finished: FinishedJob, now: float) -> None:
        waiting = self._waiting.get(req_id)
        if finished.stale:
            return
        for key, tier in zip(finished.job.keys, finished.found, strict=True):
            if not tier:
                self._misses.add(key, now)
        if waiting is None or waiting.decided:
            return
        waiting.search.take(finished.job.blocks, finished.found)
        if self._look_up(req_id, waiting, now):
            return
        found = waiting.search.found
        blocks: list[Block] = []
        if found:
            chosen = blocks_to_prefetch(
                self._index, self._groups, waiting.request, found, self._choose
            )
            blocks = chosen.blocks
            if chosen.hinted:
                self._stats.count("tier_decisions", label="hinted")
            waiting.not_loaded = "recompute" if chosen.more_found else None
            waiting.deadline = min(waiting.deadline, now + chosen.give_up_s)
        if not blocks and self._follows(waiting, now):
            waiting.working = False  # a prefetch that was planned meanwhile brings its blocks
            return
        waiting.decided = not (blocks and self._prefetch(req_id, waiting, blocks, now))

    def _prefetch(
        self, req_id: str, waiting: _Waiting, blocks: Iterable[Block], now: float
    ) -> bool:
        """Plan a prefetch of the blocks that get slots. Return False if none gets one."""
        self._pin(waiting)  # before slots are evicted for it
        room = self._limits.slots - self._jobs.prefetch_slots - len(self._pinned)
        placed: list[Block] = []
        slots: array[int] = array("q")
        for block in blocks:
            slot = (
                self._index.reserve(block.group, block.block_hash) if len(placed) < room else None
            )
            if slot is None:
                waiting.not_loaded = "no_space"
                break
            slots.append(slot)
            placed.append(block)
        if not placed:
            self._stats.count("tier_decisions", label="no_space")
            return False
        self._prefetching.add(placed, now)
        keys = tuple(waiting.request.key(block.group, block.block_hash) for block in placed)
        self._planned.pages.update(waiting.request.page_keys(placed))
        number = self._jobs.add(TierJob(keys, slots, req_id, tuple(placed)), now)
        prefetch = PrefetchBlocks(number, keys, slots, self._limits.deadline_s)
        self._planned.prefetches.append(prefetch)
        return True

    def _end_prefetch(self, req_id: str, finished: FinishedJob, now: float) -> Promoted:
        keys, slots, _, blocks = finished.job
        unusable = finished.stale or finished.timed_out
        found = bytes(len(blocks)) if unusable else finished.found
        good = [slot for slot, tier in zip(slots, found, strict=True) if tier]
        self._index.abandon([slot for slot, tier in zip(slots, found, strict=True) if not tier])
        self._index.commit(good)
        self.write_backs.promoted(good)
        if not finished.timed_out:  # otherwise another request may be prefetching them now
            self._prefetching.discard(blocks)
        tiers = [SECONDARY_TIERS[tier] for tier in found if tier]
        slowest = SECONDARY_TIERS[max(found)]
        if slowest is not None:
            self._on_prefetched(slowest, len(good), finished.seconds)
        promoted = [block for block, tier in zip(blocks, found, strict=True) if tier]
        waiting = self._waiting.get(req_id)
        if waiting is not None and not waiting.decided:
            waiting.decided = True
            for tier in filter(None, SECONDARY_TIERS):
                if tier in tiers:
                    self._stats.observe("load_latency_seconds", finished.seconds, label=tier.value)
                    waited = now - waiting.asked
                    self._stats.observe("load_exposed_seconds", waited, label=tier.value)
            waiting.count(blocks, found, self._groups)
            self._pin(waiting)
        pairs = zip(keys, slots, strict=True)
        places = [place for place, tier in zip(pairs, found, strict=True) if tier]
        lost = [block for block, tier in zip(blocks, found, strict=True) if not tier]
        return Promoted(req_id, promoted, places, lost)
