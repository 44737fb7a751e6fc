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
from dataclasses import dataclass, field, replace
from functools import partial

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from kvconnect.copy import make_copier
from kvconnect.engines.sglang.device_pools import PoolMap
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
from kvconnect.offload.streams import Fence, Streams
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, JobId

_GROUP = 0  # the only one: each pool has its own index
_STUCK_S = 120.0  # longer than any deadline: the copy thread or the device is dead
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
            if not self._moved.wait(_STUCK_S):
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


# Layer-wise loads: which layers of a forward have their pages.


class LayerCounter(LayerWiseLoadCounter):
    """SGLang's counter of loaded layers, whose waits are the device's where it has streams.

    For the engine's thread; copy threads report to :class:`LoadBatch`.
    """

    def __init__(self, num_layers: int, streams: Streams) -> None:
        super().__init__(num_layers)
        self.batches: dict[int, LoadBatch] = {}
        self._streams = streams
        self._waited: dict[int, float] = {}
        # By batch and stream: layers that the stream waits for. Models may use several streams.
        self._passed: dict[int, dict[int, int]] = {}

    def wait_until(self, threshold: int) -> None:
        """Make later work of the current stream wait for each layer up to ``threshold`` of the
        forward's batch. Blocks until their copies are launched, or have failed.

        SGLang calls this at each layer or, with a graph of the whole prefill, only for the last
        one. Pools load side by side, so a later layer may be ready before an earlier one.
        """
        batch = self.batches.get(self.consumer_index)
        if batch is None:
            return
        started, stream = time.perf_counter(), self._streams.current()
        passed = self._passed.setdefault(batch.index, {})
        for layer in range(passed.get(stream, 0), threshold + 1):
            for fence in batch.fences(layer):
                self._streams.follow(fence)
            passed[stream] = layer + 1
        self._add_wait(batch.index, started)

    def finish(self, index: int) -> bool:
        """Block until each layer of batch ``index`` is loaded or failed; return whether all loaded.

        Raises:
            TransferFailed: the copy thread is stuck: it may still write the pages.
        """
        started = time.perf_counter()
        for layer, future in enumerate(self.futures.get(index, ())):
            try:
                future.exception(_STUCK_S)
            except FutureTimeout:
                raise _stuck(layer) from None
        self._add_wait(index, started)
        self._passed.pop(index, None)
        self.batches.pop(index, None)
        return bool(super().finish(index))

    def take_waited(self, index: int) -> float:
        """Return the seconds that the engine's thread waited for a batch, and forget them."""
        return self._waited.pop(index, 0.0)

    def reset(self) -> None:
        super().reset()
        self.batches.clear()
        self._waited.clear()
        self._passed.clear()

    def _add_wait(self, index: int, started: float) -> None:
        waited = time.perf_counter() - started
        self._waited[index] = self._waited.get(index, 0.0) + waited


class LoadBatch:
    """One batch of loads. A layer is ready when each pool that loads a part of it has reported, or
    at once if there is none. ``stages``: for each pool that loads, the layers of each stage.

    Thread-safe.
    """

    def __init__(
        self, counter: LayerCounter, stages: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        self.index: int = counter.update_producer()
        counter.batches[self.index] = self
        self._futures = counter.futures[self.index]  # the counter may drop them before us
        self._stages = stages
        self._changed = threading.Condition()
        self._failed: set[int] = set()
        self._waiting = [0] * counter.num_layers
        for layer in _flat(stages.values()):
            self._waiting[layer] += 1
        self._not_launched = list(self._waiting)
        self._launched: set[tuple[str, int]] = set()  # pools and stages
        self._fences: list[list[Fence]] = [[] for _ in self._waiting]
        for pools, future in zip(self._waiting, self._futures, strict=True):
            if not pools:
                future.set_result(None)

    def fences(self, layer: int) -> Sequence[Fence]:
        """Return the fences behind a layer's copies; none on a device without streams, after their
        end. Blocks until they are launched.

        Raises:
            TransferFailed: the copy thread is stuck.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._not_launched[layer], _STUCK_S):
                raise _stuck(layer)
            return self._fences[layer]

    def launched(self, pool: str, stage: int, fence: Fence) -> None:
        """Report that all copies of a stage are launched, with a fence behind them."""
        if fence is None:
            return  # no streams: what counts is the end
        with self._changed:
            for layer in self._stages[pool][stage]:
                self._fences[layer].append(fence)
            self._mark_launched(pool, stage)

    def landed(self, pool: str, stage: int, good: bool) -> None:
        """Report that a stage of a pool was loaded, or failed."""
        with self._changed:
            self._mark_launched(pool, stage)
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

    def _mark_launched(self, pool: str, stage: int) -> None:
        if (pool, stage) not in self._launched:
            self._launched.add((pool, stage))
            for layer in self._stages[pool][stage]:
                self._not_launched[layer] -= 1
            self._changed.notify_all()


def _stuck(layer: int) -> TransferFailed:
    return TransferFailed(f"layer {layer} of a load did not land within {_STUCK_S:.0f} s")


def _flat(stages: Iterable[Sequence[Sequence[int]]]) -> Iterable[int]:
    return (layer for pool in stages for stage in pool for layer in stage)
