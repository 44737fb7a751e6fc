"""Host tier of one device pool: pages by hash, stored whole and loaded stage by stage.

Slot ``n`` of the index stands for one host slot per stage of the pool, ``n * stages`` and
following. So each stage is loaded like any block and has its own digest.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from kvconnect.config import Config
from kvconnect.copy import make_copier
from kvconnect.engines.sglang.pools import PoolMap
from kvconnect.errors import ConfigError, TransferFailed
from kvconnect.offload.copy_executor import FinishedCopy
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.host_tier import HostTier
from kvconnect.offload.index import HostIndex
from kvconnect.offload.jobs import QUARANTINED, Hold, Ledger, Owner
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks
from kvconnect.offload.streams import Fence
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, JobId, Tier, TransferType

_GROUP = 0  # the only one: each pool has its own index
_STUCK_S = 120.0  # longer than any deadline: the copy thread or the device is dead
_STORE_SHARE = 0.25  # of the device's pages that stores may hold; the engine needs the rest


class Space(NamedTuple):
    """Device pages about to be stored, and the slots of the index reserved for them."""

    pages: array[int]
    slots: array[int]


@dataclass(eq=False)
class PoolLoad:
    """Load of one request's pages of this pool. Its slots are pinned from when it is queued until
    it ends; slot -1: not stored."""

    job: JobId
    pages: array[int]
    slots: array[int]
    cause: FailureCause | None = None  # of a failure, once it has ended


@dataclass(eq=False)
class _PoolJob:
    """Executor jobs that end together: one store, or the stages of a batch of loads."""

    waiting: int  # executor jobs that have not ended
    space: Space | None = None  # of a store
    ended: Callable[[FailureCause | None], None] | None = None  # of a store
    wants: Sequence[PoolLoad] = ()  # of a load
    failures: dict[int, FailureCause] = field(default_factory=dict)  # by page


class PoolTier:
    """Stores and loads one pool's pages. For the scheduler's thread; copies run on another thread.

    ``share_bytes``: the pool's part of this worker's host memory.

    Raises:
        ConfigError: the part is less than one page, or more than is free.
    """

    make_copier = staticmethod(make_copier)

    def __init__(
        self, pool: PoolMap, share_bytes: int, config: Config, stats: OffloadingConnectorStats
    ) -> None:
        num_pages = share_bytes // pool.page_bytes
        if num_pages < 1:
            has = f"pool {pool.name} gets {share_bytes} bytes of it"
            fix = f"{has}, and a page takes {pool.page_bytes}; use more"
            raise ConfigError("host_bytes", config.offload.host_bytes or "auto", fix)
        self.pool = pool
        self.index = HostIndex(num_pages, 1, make_policy(config.offload.policy, num_pages))
        self.ledger = Ledger()
        self.tier = HostTier(
            num_pages * pool.page_bytes,
            config.digest,
            pool.geometry,
            pool.area,
            self.make_copier,
            config.offload.store_rate,
        )
        self._stats = stats
        self._moved = threading.Event()
        self._deadline_s = config.deadline_s
        self._jobs: dict[JobId, _PoolJob] = {}
        self._last = 0
        self._evictions_counted = 0

    def reserve(self, keys: Sequence[bytes], pages: Sequence[int]) -> Space | None:
        """Reserve slots for those pages that are neither stored nor being stored. If there are too
        few slots or too many stores run, return None and count the pages as skipped."""
        index, held = self.index, self.ledger.held_by(Owner.STORE)
        index.policy.touch(index.ready_slots(_GROUP, keys))
        missing = {
            key: page
            for key, page in zip(keys, pages, strict=True)
            if not index.has(_GROUP, key) and not self.ledger.holds_block(page)
        }
        if held and held + len(missing) > self.pool.num_pages * _STORE_SHARE:
            self._stats.count("skipped_store_blocks", len(missing), label="busy")
            return None
        space = Space(array("q"), array("q"))
        fits = len(keys) <= len(index.slots)  # else it would evict its own head for its tail
        for key, page in missing.items():
            slot = index.reserve(_GROUP, key) if fits else None
            if slot is None:
                self._stats.count("skipped_store_blocks", len(missing), label="no_space")
                self.give_back(space)
                return None
            space.pages.append(page)
            space.slots.append(slot)
        return space

    def give_back(self, space: Space) -> None:
        """Free reserved slots in which nothing will be stored."""
        self.index.abandon(space.slots)

    def store(
        self, space: Space, fence: Fence, ended: Callable[[FailureCause | None], None]
    ) -> None:
        """Store pages after ``fence``. At the end, :meth:`poll` calls ``ended`` with the cause of a
        failure, or None."""
        job = self._open(Owner.STORE, space.pages)
        self._jobs[job] = _PoolJob(waiting=1, space=space, ended=ended)
        parts = tuple(
            GroupBlocks(stage, space.pages, self.pool.stage_slots(space.slots, stage))
            for stage in range(len(self.pool.stages))
        )
        store = StoreBlocks(job, parts, self._deadline_s)
        self.tier.executor.submit(store, fence, lambda _: self._moved.set())

    def want(self, keys: Sequence[bytes], pages: Sequence[int]) -> PoolLoad:
        """Pin the host copies of ``keys``, which are to be loaded into the device's ``pages``."""
        slots = array("q", self.index.ready_slots(_GROUP, keys))
        self.index.pin(slots)
        self.index.policy.touch(slots)
        slots.extend([-1] * (len(keys) - len(slots)))
        where = array("q", pages)
        return PoolLoad(self._open(Owner.LOAD, where), where, slots)

    def release(self, want: PoolLoad) -> None:
        """Unpin a load's host copies and release its device pages. No copy may use them now."""
        self.index.unpin(slot for slot in want.slots if slot >= 0)
        self.ledger.settle(want.job)

    def load(
        self, wants: Sequence[PoolLoad], fence: Fence, landed: Callable[[int, bool], None]
    ) -> None:
        """Load pages after ``fence``, stage by stage. The copy thread calls ``landed`` with each
        stage and whether it was loaded whole. After the last stage, :meth:`poll` ends ``wants``."""
        stages = range(len(self.pool.stages))
        job = _PoolJob(waiting=len(stages), wants=wants)
        for stage in stages:
            parts = tuple(
                GroupBlocks(stage, want.pages, self.pool.stage_slots(want.slots, stage))
                for want in wants
            )
            number = self._next()
            self._jobs[number] = job

            def report(done: FinishedCopy, stage: int = stage) -> None:
                landed(stage, not done.report.failures)
                self._moved.set()

            load = LoadBlocks(number, "", parts, self._deadline_s, sync=False)
            self.tier.executor.submit(load, fence, report)

    def poll(self) -> None:
        """Process the copies that have ended."""
        for done in self.tier.poll():
            self._stats.record_transfer(done.kind.value, done.nbytes, done.seconds)
            job = self._jobs.pop(done.job.job)
            if any(failure.cause is FailureCause.DEADLINE for failure in done.report.failures):
                self._stats.count("expired_jobs", label=done.kind.value)
            for failure in done.report.failures:
                known = job.failures.get(failure.block_id)
                if known in (None, FailureCause.SKIPPED):  # SKIPPED says no reason
                    job.failures[failure.block_id] = failure.cause
            job.waiting -= 1
            if not job.waiting:
                self._end(done.job.job, job)
        fresh = self.index.evictions - self._evictions_counted
        self._evictions_counted = self.index.evictions
        self._stats.count("evicted_blocks", fresh, label=Tier.HOST.value)
        self.index.removed.clear()  # nobody reads them

    def gauges(self) -> Iterator[tuple[str, float, str | None]]:
        """Yield (name, value, label) of each gauge; values of several pools add up."""
        slots, page_bytes = self.index.slots, self.pool.page_bytes
        yield "host_blocks_used", slots.used, None
        yield "host_blocks_capacity", len(slots), None
        yield "host_blocks_pinned", slots.busy, None
        yield "host_bytes_used", slots.used * page_bytes, None
        yield "host_bytes_capacity", len(slots) * page_bytes, None
        stores = sum(job.space is not None for job in self._jobs.values())
        for owner, kind, jobs in (
            (Owner.STORE, TransferType.GPU_TO_CPU, stores),
            (Owner.LOAD, TransferType.CPU_TO_GPU, len(self._jobs) - stores),
        ):
            yield "ledger_held_blocks", self.ledger.held_by(owner), owner.value
            yield "jobs_in_flight", jobs, kind.value

    def drain(self) -> None:
        """Block until no copy runs.

        Raises:
            TransferFailed: a copy does not end.
        """
        while True:
            self._moved.clear()
            self.poll()
            if not self._jobs:
                return
            if not self._moved.wait(_STUCK_S):
                raise TransferFailed(f"{len(self._jobs)} copies of pool {self.pool.name} are stuck")

    def close(self) -> None:
        """Stop copying and free the memory. Idempotent."""
        self.tier.close()

    def _end(self, number: JobId, job: _PoolJob) -> None:
        for cause in job.failures.values():
            self._stats.count("failed_blocks", label=cause.value)
        if job.space is not None:
            self.ledger.settle(number)
            bad = {slot for page, slot in zip(*job.space, strict=True) if page in job.failures}
            self.index.abandon(bad)
            self.index.commit([slot for slot in job.space.slots if slot not in bad])
        for want in job.wants:
            self._end_want(want, job.failures)
        if job.ended is not None:
            job.ended(worst(job.failures.values()))

    def _end_want(self, want: PoolLoad, failures: dict[int, FailureCause]) -> None:
        self.release(want)
        for page, slot in zip(want.pages, want.slots, strict=True):
            cause = failures.get(page)
            if cause in QUARANTINED and slot >= 0 and self.index.discard(slot):
                self._stats.count("quarantined_blocks", label=cause.value)
        want.cause = worst(failures[page] for page in want.pages if page in failures)

    def _open(self, owner: Owner, pages: array[int]) -> JobId:
        number, now = self._next(), time.monotonic()
        self.ledger.grant(Hold(number, owner, tuple(pages), now, now + self._deadline_s))
        return number

    def _next(self) -> JobId:
        self._last += 1
        return JobId(self._last)


def worst(causes: Iterable[FailureCause]) -> FailureCause | None:
    """Return the first cause other than SKIPPED, else SKIPPED; None for no causes."""
    found = None
    for cause in causes:
        if found in (None, FailureCause.SKIPPED):
            found = cause
    return found


# Layer-wise loads: which layers of a forward have their pages.


class LayerCounter(LayerWiseLoadCounter):
    """SGLang's counter of loaded layers, with a time limit and a measure of a forward's waits.

    For the engine's thread; copy threads report to :class:`LoadBatch`.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._waited: dict[int, float] = {}
        self._passed: dict[int, int] = {}  # by batch: layers that were waited for

    def wait_until(self, threshold: int) -> None:
        """Block until each layer up to ``threshold`` of the forward's batch is loaded or failed.

        SGLang calls this at each layer or, with a graph of the whole prefill, only for the last
        one. Pools load side by side, so a later layer may be ready before an earlier one.
        """
        index = self.consumer_index
        if index not in self.futures:
            return
        for layer in range(self._passed.get(index, 0), threshold + 1):
            self._wait(index, layer)
        self._passed[index] = max(self._passed.get(index, 0), threshold + 1)

    def finish(self, index: int) -> bool:
        """Block until each layer of batch ``index`` is loaded or failed; return whether all loaded.

        Raises:
            TransferFailed: the copy thread is stuck.
        """
        for layer in range(self.num_layers if index in self.futures else 0):
            self._wait(index, layer)
        self._passed.pop(index, None)
        return bool(super().finish(index))

    def take_waited(self, index: int) -> float:
        """Return the seconds that the engine's thread waited for a batch, and forget them."""
        return self._waited.pop(index, 0.0)

    def reset(self) -> None:
        super().reset()
        self._waited.clear()
        self._passed.clear()

    def _wait(self, index: int, layer: int) -> None:
        """Wait for one layer. Raises :class:`TransferFailed` if the copy thread is stuck: it may
        still write the pages, so the step cannot go on."""
        future = self.futures[index][layer]
        if future.done():
            return
        started = time.perf_counter()
        try:
            future.exception(_STUCK_S)
        except FutureTimeout:
            what = f"layer {layer} of a load did not land within {_STUCK_S:.0f} s"
            raise TransferFailed(what) from None
        waited = time.perf_counter() - started
        self._waited[index] = self._waited.get(index, 0.0) + waited


class LoadBatch:
    """One batch of loads. A layer is ready when each pool that loads a part of it has reported, or
    at once if there is none. ``stages``: for each pool that loads, the layers of each stage."""

    def __init__(
        self, counter: LayerCounter, stages: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        self.index: int = counter.update_producer()
        self._futures = counter.futures[self.index]  # the counter may drop them before us
        self._stages = stages
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        self._waiting = [0] * counter.num_layers
        for layer in _flat(stages.values()):
            self._waiting[layer] += 1
        for pools, future in zip(self._waiting, self._futures, strict=True):
            if not pools:
                future.set_result(None)

    def landed(self, pool: str, stage: int, good: bool) -> None:
        """Report that a stage of a pool was loaded, or failed. Thread-safe."""
        with self._lock:
            for layer in self._stages[pool][stage]:
                self._waiting[layer] -= 1
                if not good:
                    self._failed.add(layer)
                if self._waiting[layer]:
                    continue
                if layer in self._failed:
                    error = TransferFailed(f"layer {layer} could not be loaded")
                    self._futures[layer].set_exception(error)
                else:
                    self._futures[layer].set_result(None)


def _flat(stages: Iterable[Sequence[Sequence[int]]]) -> Iterable[int]:
    return (layer for pool in stages for stage in pool for layer in stage)
