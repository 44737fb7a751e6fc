"""Host tier of one device pool: pages by hash, stored whole and loaded stage by stage.

Slot ``n`` of the index stands for one host slot per stage of the pool, ``n * stages`` and
following. So each stage is loaded like any block and has its own digest.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvconnect.copy import make_copier
from kvconnect.engines.sglang.device_pools import PoolMap
from kvconnect.engines.sglang.layerwise_loads import STUCK_S, LoadBatch
from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.offload.copy_executor import FinishedCopy
from kvconnect.offload.copy_jobs import CopyJobs
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.host_tier import HostTier
from kvconnect.offload.index import HostIndex
from kvconnect.offload.ledger import Owner
from kvconnect.offload.messages import (
    FailedBlock,
    GroupBlocks,
    JobReport,
    LoadBlocks,
    StoreBlocks,
)
from kvconnect.offload.streams import Fence
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, JobId

_GROUP = 0  # the only one: each pool has its own index
_STORE_SHARE = 0.25  # of the device's pages that stores may hold; the engine needs the rest


@dataclass(eq=False)
class PoolLoad:
    """Load of one request's pages of this pool. Slot -1: not stored."""

    job: LoadBlocks
    cause: FailureCause | None = None  # of a failure, once it has ended

    def ended(self, cause: FailureCause | None) -> None:
        self.cause = cause


@dataclass(eq=False)
class _PoolCopy:
    """Jobs that end together, each with the callback for its end: a store, or a batch of loads."""

    jobs: Sequence[tuple[StoreBlocks | LoadBlocks, Callable[[FailureCause | None], None]]]
    waiting: int = 0  # jobs of the executor that have not ended
    failures: list[FailedBlock] = field(default_factory=list)


class PoolTier:
    """Stores and loads one pool's pages. For the scheduler's thread; copies run on another thread.

    ``share_bytes``: the pool's part of this worker's host memory.

    Raises:
        ConfigError: the part is less than one page, or more than is free.
    """

    make_copier = staticmethod(make_copier)

    def __init__(
        self, pool: PoolMap, share_bytes: int, settings: Settings, stats: OffloadingConnectorStats
    ) -> None:
        num_pages = share_bytes // pool.page_bytes
        if num_pages < 1:
            has = f"pool {pool.name} gets {share_bytes} bytes of it"
            fix = f"{has}, and a page takes {pool.page_bytes}; use more"
            raise ConfigError("host_bytes", settings.host_bytes, fix)
        self.pool = pool
        self.index = HostIndex(num_pages, 1, make_policy(settings.policy, num_pages))
        self.jobs = CopyJobs(self.index, stats, 1, settings.deadline_s)
        self.tier = HostTier(
            num_pages * pool.page_bytes,
            settings.digest,
            pool.geometry,
            pool.area,
            self.make_copier,
            settings.store_rate,
        )
        self._stats = stats
        self._moved = threading.Event()
        self._copies: dict[JobId, _PoolCopy] = {}  # by the number of its first job

    def reserve(self, keys: Sequence[bytes], pages: Sequence[int]) -> GroupBlocks | None:
        """Reserve slots for those pages that are neither stored nor being stored. If there are too
        few slots or too many stores run, return None and count the pages as skipped."""
        index, ledger = self.index, self.jobs.ledger
        index.policy.touch(index.ready_slots(_GROUP, keys))
        missing = {
            key: page
            for key, page in zip(keys, pages, strict=True)
            if not index.has(_GROUP, key) and not ledger.holds_block(page)
        }
        held = ledger.held_by(Owner.STORE)
        if held and held + len(missing) > self.pool.num_pages * _STORE_SHARE:
            self._stats.count("skipped_store_blocks", len(missing), label="busy")
            return None
        blocks = GroupBlocks(_GROUP, array("q"), array("q"))
        fits = len(keys) <= len(index.slots)  # else it would evict its own head for its tail
        for key, page in missing.items():
            slot = index.reserve(_GROUP, key) if fits else None
            if slot is None:
                self._stats.count("skipped_store_blocks", len(missing), label="no_space")
                self.give_back(blocks)
                return None
            blocks.block_ids.append(page)
            blocks.slots.append(slot)
        return blocks

    def give_back(self, blocks: GroupBlocks) -> None:
        """Free reserved slots in which nothing will be stored."""
        self.index.abandon(blocks.slots)

    def store(
        self, blocks: GroupBlocks, fence: Fence, ended: Callable[[FailureCause | None], None]
    ) -> None:
        """Store pages after ``fence``. At the end, :meth:`poll` calls ``ended`` with the cause of a
        failure, or None."""
        job = self.jobs.open_store((blocks,), time.monotonic())
        copy = _PoolCopy([(job, ended)])
        self._submit(copy, range(len(self.pool.stages)), fence, lambda _: None)

    def queue_load(self, keys: Sequence[bytes], pages: Sequence[int]) -> PoolLoad:
        """Pin the host copies of ``keys``, which are to be loaded into the device's ``pages``."""
        slots = array("q", self.index.ready_slots(_GROUP, keys))
        slots.extend([-1] * (len(keys) - len(slots)))
        part = GroupBlocks(_GROUP, array("q", pages), slots)
        now = time.monotonic()
        return PoolLoad(self.jobs.open_load("", (part,), 0, sync=False, now=now))

    def cancel(self, load: PoolLoad) -> None:
        """End a load that was not started."""
        self.jobs.cancel_load(load.job.job)

    def load(self, loads: Sequence[PoolLoad], fence: Fence, batch: LoadBatch) -> None:
        """Load pages after ``fence``, stage by stage. The copy thread reports each stage to
        ``batch``. After the last stage, :meth:`poll` ends ``loads``."""
        copy = _PoolCopy([(load.job, load.ended) for load in loads])
        for stage in range(len(self.pool.stages)):
            landed = partial(batch.landed, self.pool.name, stage)
            launched = partial(batch.launched, self.pool.name, stage)
            self._submit(copy, [stage], fence, landed, launched)

    def poll(self) -> None:
        """Process the copies that have ended."""
        for done in self.tier.poll():
            self._stats.record_transfer(done.kind.value, done.nbytes, done.seconds)
            copy, stages = self._copies[done.job.job], len(self.pool.stages)
            for _, page, slot, cause in done.report.failures:
                copy.failures.append(FailedBlock(_GROUP, page, slot // stages, cause))
            copy.waiting -= 1
            if not copy.waiting:
                del self._copies[done.job.job]
                self._end(copy)
        self.index.take_removed(self._stats)  # nobody needs the list

    def gauges(self, now: float) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of each gauge."""
        yield from self.index.slots.gauges(self.pool.page_bytes)
        yield from self.jobs.gauges(now)

    def drain(self) -> None:
        """Block until no copy runs.

        Raises:
            TransferFailed: a copy does not end.
        """
        while True:
            self._moved.clear()
            self.poll()
            if not self._copies:
                return
            if not self._moved.wait(STUCK_S):
                raise TransferFailed(
                    f"{len(self._copies)} copies of pool {self.pool.name} are stuck"
                )

    def close(self) -> None:
        """Stop copying and free the memory. Idempotent."""
        self.tier.close()

    def _submit(
        self,
        copy: _PoolCopy,
        stages: Iterable[int],
        fence: Fence,
        landed: Callable[[bool], None],
        launched: Callable[[Fence], None] | None = None,
    ) -> None:
        """Start one job of the executor, for these stages of all pages."""
        first, _ = copy.jobs[0]
        parts = tuple(
            GroupBlocks(stage, part.block_ids, self.pool.stage_slots(part.slots, stage))
            for stage in stages
            for job, _ in copy.jobs
            for part in job.parts
        )

        def report(done: FinishedCopy) -> None:
            landed(not done.report.failures)
            self._moved.set()

        copy.waiting += 1
        self._copies[first.job] = copy
        self.tier.executor.submit(replace(first, parts=parts), fence, report, launched)

    def _end(self, copy: _PoolCopy) -> None:
        for job, ended in copy.jobs:
            pages = set(job.parts[0].block_ids)
            failures = tuple(failure for failure in copy.failures if failure.block_id in pages)
            settled = self.jobs.on_report(JobReport(job.job, failures))
            ended(settled.job.cause if settled else None)
