"""The connector's half in a vLLM worker: owns the host tier's bytes and moves them."""

from __future__ import annotations

import logging

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect import memory
from kvconnect.config import OffloadConfig, check_fits, share_of_host_bytes
from kvconnect.copy import make_copier
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.messages import StepInstructions, StepReports, WorkerHello
from kvconnect.engines.vllm.stats import KVConnectStats
from kvconnect.errors import ConfigError, Misuse
from kvconnect.plan.groups import keeps_prefix
from kvconnect.plan.instructions import Load, Report, Store
from kvconnect.store.host import HostStore
from kvconnect.types import Tier
from kvconnect.worker.executor import CopyExecutor, Done
from kvconnect.worker.streams import make_streams

logger = logging.getLogger(__name__)


class WorkerHalf:
    """Owned by the worker's main thread; copies run on the executor's own thread.

    The copier can be exchanged before :meth:`register` (``make_copier``), which is how fault
    injection gets in.
    """

    make_copier = staticmethod(make_copier)

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OffloadConfig
    ) -> None:
        parallel = vllm_config.parallel_config
        self._share = _worker_share(vllm_config, config)
        self._kv_cache_config = kv_cache_config
        self._digest = config.digest
        self._keeps_prefix = keeps_prefix(translate.cache_groups(kv_cache_config))
        self._is_first = parallel.rank == 0
        self._stats = KVConnectStats()
        self._pending_stores: list[Store] = []
        self._reports: list[Report] = []
        self._errors: set[int] = set()
        self._executor: CopyExecutor | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocate the host tier and get ready to copy.

        Raises:
            ConfigError: ``host_bytes`` is too small for one block or more than is free.
        """
        geometry = translate.cache_geometry(self._kv_cache_config, kv_caches)
        area = translate.backing_area(kv_caches)
        num_slots = self._share // geometry.slot_bytes
        if num_slots < 1:
            raise ConfigError(
                "host_bytes",
                self._share,
                f"this worker's share is less than one block of {geometry.slot_bytes} bytes",
            )
        check_fits(
            num_slots * geometry.slot_bytes,
            memory_bytes=memory.available_bytes(),
            what="available now for this worker's share",
        )
        self.store = HostStore(num_slots, geometry.slot_bytes, self._digest)
        if area.device.type == "cuda":
            self.store.pin()
        copier = self.make_copier(area, self.store.tensor(), geometry)
        self._executor = CopyExecutor(copier, self.store, geometry, make_streams(area.device))

    @property
    def executor(self) -> CopyExecutor:
        """The copy thread; there once the KV caches are registered."""
        if self._executor is None:
            raise Misuse("the KV caches are not registered yet")
        return self._executor

    def hello(self) -> WorkerHello:
        """Return what the scheduler's half must know."""
        return WorkerHello(self.store.num_slots, self.store.slot_bytes)

    def begin_step(self, step: StepInstructions) -> None:
        """Start the step's loads, ahead of the forward; note its stores for after it."""
        self.submit_stores()  # a pipeline stage may end a step without asking for that
        self._pending_stores = list(step.work.stores)
        if step.work.loads:
            fence = self.executor.fence()  # after any zeroing of the blocks to be loaded
            for load in step.work.loads:
                self.executor.submit(load, fence)

    def wait_sync_loads(self) -> None:
        """Block until the loads this step's forward reads are there."""
        waited = self.executor.wait_sync_loads()
        if waited and self._is_first:
            self._stats.observe("load_exposed_seconds", waited, label=Tier.HOST.value)

    def submit_stores(self) -> None:
        """Queue the step's stores behind the forward that has been launched."""
        if self._pending_stores:
            fence = self.executor.fence()
            for store in self._pending_stores:
                self.executor.submit(store, fence)
            self._pending_stores = []

    def collect(self) -> tuple[set[str], set[str]]:
        """Return requests whose load ended, and those of them that must start over.

        With one full-attention group, blocks that failed are named instead
        (:meth:`take_errors`), so that the engine keeps the valid prefix.
        """
        finished: set[str] = set()
        failed: set[str] = set()
        for done in self.executor.poll():
            self._note(done)
            if not isinstance(done.job, Load):
                continue
            if not done.job.sync:
                finished.add(done.job.req_id)
            if done.report.failures and self._keeps_prefix:
                self._errors.update(failure.block_id for failure in done.report.failures)
            elif done.report.failures:
                failed.add(done.job.req_id)
        return finished, failed

    def take_errors(self) -> set[int]:
        """Return the device blocks of this step's failed loads."""
        errors, self._errors = self._errors, set()
        return errors

    def take_reports(self) -> StepReports | None:
        """Return the answers to jobs that ended."""
        if not self._reports:
            return None
        reports, self._reports = self._reports, []
        return StepReports(reports)

    def take_stats(self) -> KVConnectStats | None:
        """Return what was moved since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """Stop copying and give the host tier back. Idempotent."""
        if self._executor is not None:
            self._executor.close()
            self.store.close()

    def _note(self, done: Done) -> None:
        self._reports.append(done.report)
        if done.nbytes:
            self._stats.record_transfer(done.kind.value, done.nbytes, done.seconds)


def _worker_share(vllm_config: VllmConfig, config: OffloadConfig) -> int:
    """Return this worker's part of the host tier in bytes.

    Raises:
        ConfigError: the engines of this machine together ask for more memory than it has.
    """
    parallel = vllm_config.parallel_config
    engines: int = max(parallel.data_parallel_size_local, 1)
    workers: int = parallel.world_size
    there = memory.total_bytes()
    total = share_of_host_bytes(config, memory_bytes=there, engines=engines)
    check_fits(total * engines, memory_bytes=there, what=f"in this machine for {engines} engines")
    return total // workers
