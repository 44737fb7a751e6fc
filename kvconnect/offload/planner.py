"""Decides for the host tier which blocks to store and load, and what a worker's report changes.

One object per engine, owned by the scheduler's thread. Time is an argument (``now``, seconds of
one monotonic clock). Blocks are promised in :meth:`OffloadPlan.match`, loads planned when the
engine has allocated device blocks, stores as blocks fill; :meth:`OffloadPlan.take` hands out the
step's instructions and :meth:`OffloadPlan.on_report` takes the answers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup, keeps_prefix, longest_prefix
from kvconnect.offload.copy_jobs import CopyJob, CopyJobs, SettledJob
from kvconnect.offload.hints.plan import HintPlan
from kvconnect.offload.index import HostIndex
from kvconnect.offload.ledger import Owner
from kvconnect.offload.load_mode import LoadMode
from kvconnect.offload.messages import GroupBlocks, JobReport, LoadBlocks, OffloadInstructions
from kvconnect.offload.shared_loads import SharedLoads
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import NULL_BLOCK, Block, Tier

Hashes = Sequence[Sequence[bytes]]
"""Per group, the chained hash of each full block whose tokens are known."""

BlockTable = Sequence[Sequence[int]]
"""Per group, the device block ids of a request, in prefix order."""

KeptStates = Sequence[tuple[int, int, int]]
"""(group, block number, device block) of states that the engine keeps."""

_NEVER = sys.maxsize


class OffloadLimits(NamedTuple):
    """Limits of a plan.

    ``workers`` must answer each job; a job may take ``deadline_s`` seconds; stores may hold
    ``held_blocks`` device blocks at once, since more would starve the engine. ``finds_loaded``:
    requests find on the device what another one has loaded.
    """

    workers: int
    deadline_s: float
    held_blocks: int
    finds_loaded: bool = False


class LoadRequest(NamedTuple):
    """A promised prefix, now that device blocks exist: tokens [local, total) are loaded."""

    local_tokens: int
    total_tokens: int
    hashes: Hashes
    block_ids: BlockTable
    sync: bool


@dataclass
class _PlannedRequest:
    """State of a live request."""

    next_block: list[int]  # per group: the first block not yet considered for storing
    due_tokens: int = 0  # computed tokens at which the next block is full
    stops: bool = False  # it stores nothing more
    covered: int = 0  # slots that hold, or were given to, blocks of this request
    deferred: int = 0  # full blocks not considered yet because the copies lag behind
    load_failed: bool = False

    def set_due(self, groups: Sequence[CacheGroup]) -> None:
        """Set ``due_tokens`` from the blocks that were considered."""
        ends = [
            (done + 1) * group.block_tokens
            for done, group in zip(self.next_block, groups, strict=True)
            if group.states != "some"
        ]
        self.due_tokens = _NEVER if self.stops else min(ends, default=_NEVER)


class OffloadPlan:
    """Decides for one engine; see the module docstring. ``numbers``: as in ``WorkerJobs``."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        index: HostIndex,
        stats: OffloadingConnectorStats,
        limits: OffloadLimits,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.index = index
        self.stats = stats
        self.jobs = CopyJobs(index, stats, limits.workers, limits.deadline_s, numbers)
        self.hints = HintPlan(index, self.groups, stats)
        self.load_mode = LoadMode()
        self.shared_loads = SharedLoads(self.groups, limits.deadline_s)
        self._finds_loaded = limits.finds_loaded
        self._held_limit = limits.held_blocks
        self._requests: dict[str, _PlannedRequest] = {}
        self._loads: list[LoadBlocks] = []
        self._store_parts: dict[int, GroupBlocks] = {}  # this step's stores, by group
        self._planned = 0  # blocks in them

    def __repr__(self) -> str:
        return f"<OffloadPlan {self.index.slots!r} {self.jobs.ledger!r} {len(self.jobs)} jobs>"

    @property
    def busy(self) -> bool:
        """Whether a job is planned or unanswered, so that the engine must keep stepping."""
        return bool(self._store_parts or self._loads) or self.jobs.busy

    def add_request(self, req_id: str) -> None:
        """Start to remember a request; again when its blocks are computed anew."""
        known = self._requests.get(req_id)
        request = self._requests[req_id] = _PlannedRequest(
            next_block=[0] * len(self.groups),
            stops=not len(self.index.slots),  # there may be no host tier
            load_failed=known is not None and known.load_failed,
        )
        request.set_due(self.groups)

    def _start_over(self, req_id: str) -> None:
        """A request's load failed: what it computes again is stored again, unless a reset has made
        the KV before it stale."""
        stops = self._requests[req_id].stops
        self._requests[req_id].load_failed = True
        self.add_request(req_id)
        self._requests[req_id].stops = stops
        self._requests[req_id].set_due(self.groups)

    def finish_request(self, req_id: str, hashes: Hashes) -> None:
        """The request is over. Its jobs, if any, end on their own."""
        self.shared_loads.finish(req_id)
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        self.stats.count("skipped_store_blocks", request.deferred, label="busy")
        rows = [row[:done] for row, done in zip(hashes, request.next_block, strict=True)]
        self.index.policy.settle(self.index.in_prefix_order(self.groups, rows))

    def match(self, req_id: str, hashes: Hashes, local_tokens: int, max_tokens: int) -> int:
        """Return how many tokens beyond ``local_tokens`` the tier can restore; changes nothing.

        A request whose load failed once gets 0: it is recomputed, not tried again.
        """
        request = self._requests.get(req_id)
        if request is None or request.load_failed:
            return 0
        total = longest_prefix(self.index, self.groups, hashes, local_tokens, max_tokens)
        return total - local_tokens

    def awaits_load(
        self, req_id: str, hashes: Hashes, local_tokens: int, num_tokens: int, now: float
    ) -> bool:
        """See :meth:`SharedLoads.awaits`. A request whose load failed waits for none."""
        request = self._requests.get(req_id)
        if request is None or request.load_failed:
            return False
        return self.shared_loads.awaits(req_id, hashes, local_tokens, num_tokens, now)

    def plan_load(self, req_id: str, wanted: LoadRequest, now: float) -> None:
        """Plan the load of a promised prefix into the device blocks the engine allocated."""
        parts = tuple(
            _load_part(self.index, number, group, wanted)
            for number, group in enumerate(self.groups)
        )
        tokens = wanted.total_tokens - wanted.local_tokens
        self._loads.append(self.jobs.open_load(req_id, parts, tokens, sync=wanted.sync, now=now))
        if self._finds_loaded and tokens and not wanted.sync:
            self.shared_loads.began(req_id, wanted.hashes, wanted.local_tokens, wanted.total_tokens)

    def due(self, computed: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return those (request, computed tokens) for which :meth:`plan_store` would look at a
        new block; asked every step for every running request."""
        known = self._requests.get
        return [
            (req_id, tokens)
            for req_id, tokens in computed
            if (request := known(req_id)) is not None and tokens >= request.due_tokens
        ]

    def plan_store(
        self,
        req_id: str,
        computed_tokens: int,
        hashes: Hashes,
        block_ids: BlockTable,
        kept: KeptStates = (),
    ) -> list[tuple[int, int]]:
        """Plan to store the request's newly full blocks, and states, that the tier lacks.

        Args:
            computed_tokens: tokens whose KV is on the device after this step.
            kept: states that this step writes, of groups whose states the engine names.

        Returns:
            (group, block number) of each block that was given a slot.
        """
        request = self._requests.get(req_id)
        if request is None or request.stops:
            return []
        room = self._held_limit - self.jobs.ledger.held_by(Owner.STORE) - self._planned
        new: list[tuple[int, int]] = []
        request.deferred = 0
        for number, group in enumerate(self.groups):
            if group.states == "some":
                continue
            row, table = hashes[number], block_ids[number]
            end = min(computed_tokens // group.block_tokens, len(row))
            blocks = range(request.next_block[number], end)
            done, stop = self._reserve(request, number, blocks, row, table, room - len(new))
            new.extend((number, block) for block in done)
            request.next_block[number] = stop
            request.deferred += max(0, end - stop)
        for number, block, block_id in kept:
            place, at = range(block, block + 1), {block: block_id}
            done, stop = self._reserve(request, number, place, hashes[number], at, room - len(new))
            new.extend((number, block) for block in done)
            request.next_block[number] = max(request.next_block[number], block + 1)
            # The engine keeps a state on the device for a few steps only, so it cannot wait.
            self.stats.count("skipped_store_blocks", block + 1 - stop, label="busy")
        request.set_due(self.groups)
        self._planned += len(new)
        return new

    def take(self, now: float) -> OffloadInstructions:
        """Hand out what was planned since the last call; all stores of a step are one job."""
        self.hints.expire(now)
        instructions = OffloadInstructions(loads=self._loads)
        if self._store_parts:
            parts = tuple(self._store_parts.values())
            instructions.stores.append(self.jobs.open_store(parts, now))
        self._loads, self._store_parts, self._planned = [], {}, 0
        return instructions

    def on_report(self, report: JobReport, now: float) -> SettledJob | None:
        """Take one worker's answer; return what changed once the last one has answered. What it
        says of stored blocks goes to :attr:`hints` next."""
        settled = self.jobs.on_report(report)
        if settled is None or settled.job.owner is not Owner.LOAD:
            return settled
        job = settled.job
        self.shared_loads.ended(job.req_id, failed=job.cause is not None)
        _count_load(self.stats, job, now, keeps_prefix(self.groups))
        if job.cause is None:
            self.load_mode.loaded(sum(len(part.slots) for part in job.parts), job.seconds)
        elif job.req_id in self._requests:
            self._start_over(job.req_id)
        return settled

    def reset(self) -> list[int]:
        """Forget every stored block, also those whose store is still in flight; return the
        device blocks that those stores held, released.

        Live requests store nothing more until they are admitted anew: what they compute builds
        on KV that the reset may have made stale.
        """
        self.index.clear()
        self.hints.reset()
        self.shared_loads.clear()
        for request in self._requests.values():
            request.stops = True
            request.set_due(self.groups)
        return self.jobs.void_stores()

    def take_removed(self) -> list[Block]:
        """Return the blocks that left the tier since the last call, and count the evicted."""
        return self.index.take_removed(self.stats)

    def check(self) -> None:
        """Prove that blocks and slots add up.

        Raises:
            Misuse: naming what does not.
        """
        self.index.check()
        self.jobs.check()

    def _reserve(
        self,
        request: _PlannedRequest,
        number: int,
        blocks: range,
        hashes: Sequence[bytes],
        block_ids: Sequence[int] | Mapping[int, int],
        room: int,
    ) -> tuple[list[int], int]:
        """Give slots to at most ``room`` blocks that need one; return those blocks, and the first
        block that was not considered because the copies lag behind."""
        index, holds = self.index, self.jobs.ledger.holds_block
        part = self._store_parts.get(number) or GroupBlocks(number, array("q"), array("q"))
        # Before any eviction: a slot that lost its block must not be touched any more.
        ready = index.ready_slots(number, hashes[blocks.start : blocks.stop])
        index.policy.touch(ready)
        request.covered += len(ready)
        new: list[int] = []
        stop = max(blocks.start, blocks.stop)
        for block in blocks[len(ready) :]:
            block_hash, block_id = hashes[block], block_ids[block]
            if index.has(number, block_hash) or block_id == NULL_BLOCK or holds(block_id):
                continue
            if len(new) >= room:
                stop = block
                break
            # A prompt larger than the tier must not evict its own head to store its tail.
            fits = request.covered < len(index.slots)
            slot = index.reserve(number, block_hash) if fits else None
            if slot is None:
                self.stats.count("skipped_store_blocks", blocks.stop - block, label="no_space")
                request.stops = True  # later blocks are of no use without this one
                break
            request.covered += 1
            part.block_ids.append(block_id)
            part.slots.append(slot)
            new.append(block)
        if new:
            self._store_parts[number] = part
        return new, stop


def gauges(
    plan: OffloadPlan, now: float, slot_bytes: int
) -> Iterator[tuple[str, float, str | None]]:
    """Yield (name, value, label) of each gauge; ``slot_bytes`` over all workers."""
    yield from plan.index.slots.gauges(slot_bytes)
    yield from plan.jobs.gauges(now)
    plan.hints.expire(now)
    yield from plan.hints.gauges()


def hits_by_tier(hit_tokens: int, promoted: Mapping[Tier, int]) -> dict[Tier, int]:
    """Return the hit tokens of an admitted request by tier.

    ``promoted``: tokens that this request brought into host memory, by their former tier.
    """
    hits, host = {}, hit_tokens
    for tier, tokens in promoted.items():
        hits[tier] = min(tokens, host)  # it may have been evicted since
        host -= hits[tier]
    return {**hits, Tier.HOST: host}


def count_lookup(
    stats: OffloadingConnectorStats, asked_tokens: int, hits: Mapping[Tier, int]
) -> None:
    """Count one admitted request: tokens the device lacked, and where those hit came from."""
    stats.count("lookups")
    stats.count("query_tokens", asked_tokens)
    for tier, tokens in hits.items():
        stats.count("hit_tokens", tokens, label=tier.value)
    stats.count("miss_tokens", asked_tokens - sum(hits.values()))


def _load_part(
    index: HostIndex, number: int, group: CacheGroup, wanted: LoadRequest
) -> GroupBlocks:
    """Return the blocks of one group that tokens [local, total) need, with their slots."""
    first = max(group.first_block(wanted.total_tokens), wanted.local_tokens // group.block_tokens)
    end = wanted.total_tokens // group.block_tokens
    slots = array("q", index.ready_slots(number, wanted.hashes[number][first:end]))
    slots.extend([-1] * (end - first - len(slots)))
    return GroupBlocks(number, array("q", wanted.block_ids[number][first:end]), slots)


def _count_load(
    stats: OffloadingConnectorStats, job: CopyJob, now: float, keeps_prefix: bool
) -> None:
    """Record how long a load took, or that its request failed and what must be recomputed."""
    latency = now - job.asked
    if not job.sync:  # a parked request waits for the whole load; workers measure the others
        stats.observe("load_exposed_seconds", latency, label=Tier.HOST.value)
    if job.cause is None:
        stats.observe("load_latency_seconds", latency, label=Tier.HOST.value)
        return
    stats.count("failed_requests", label=job.cause.value)
    stats.count("recomputed_tokens", lost_tokens(job, keeps_prefix))


def lost_tokens(job: CopyJob, keeps_prefix: bool) -> int:
    """Return how many tokens of a load are computed instead. ``keeps_prefix``: the engine keeps the
    blocks before the first bad one."""
    if job.cause is None:
        return 0
    if not keeps_prefix:
        return job.tokens
    blocks = job.parts[0].block_ids
    good = min(blocks.index(failure.block_id) for failure in job.failures.values())
    return job.tokens - job.tokens // len(blocks) * good
