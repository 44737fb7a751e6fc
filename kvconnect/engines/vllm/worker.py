"""The connector in a vLLM worker: its share of the host tier, and its hand-offs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvconnect import memory, threads
from kvconnect.cache.groups import keeps_prefix
from kvconnect.cache.layout import Geometry
from kvconnect.copy import make_copier
from kvconnect.disaggregation.agent import HandoffAgent
from kvconnect.engines.vllm import translate
from kvconnect.engines.vllm.disaggregation_worker import FormerAgent, make_handoffs
from kvconnect.engines.vllm.kv_replicas import kv_replicas, share_memory
from kvconnect.engines.vllm.messages import (
    LookedAtWeights,
    StepInstructions,
    StepReports,
    WorkerHello,
)
from kvconnect.engines.vllm.received_blocks import ReceivedBlocks
from kvconnect.engines.vllm.states import keeps_none
from kvconnect.engines.vllm.stats import KVConnectStats
from kvconnect.engines.vllm.tier_stores import make_lower_tiers
from kvconnect.engines.vllm.weights import WorkerWeights
from kvconnect.errors import Misuse
from kvconnect.offload.host_arena import arena_bytes
from kvconnect.offload.host_tier import HostTier
from kvconnect.offload.messages import JobReport, LoadBlocks
from kvconnect.offload.numa import device_node
from kvconnect.offload.shared_memory import SharedMemory
from kvconnect.protocol.identity import Identity
from kvconnect.settings import Settings
from kvconnect.settings.host_memory import check_fits, share_of_host_bytes
from kvconnect.tiers.worker import TierWorker
from kvconnect.transport.tcp.shared_port import SharedPort
from kvconnect.types import Tier

logger = logging.getLogger(__name__)

_IDLE_S = 0.003  # for which a step that computes nothing waits for news; a new request waits too


def _may_wait(parallel: ParallelConfig) -> bool:
    """Return whether a step that computes nothing may wait for news. Beside others that compute, it
    may not: pipelines fill up with such steps, and ranks of data parallelism step together."""
    stages, ranks = parallel.pipeline_parallel_size, parallel.data_parallel_size
    return bool(stages == 1 and ranks == 1)


class ConnectorWorker:
    """Owned by the worker's main thread; copies and transfers run on threads of their own.

    Tests replace ``make_copier`` and ``share_memory`` before :meth:`register`.
    """

    make_copier = staticmethod(make_copier)
    share_memory = staticmethod(share_memory)

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        _worker_share(vllm_config, settings)  # raises before the model is loaded
        self._stats = KVConnectStats()
        self._reports = StepReports()
        self._step = StepInstructions()  # the last one
        self._errors: set[int] = set()
        self._idle_s = _IDLE_S if _may_wait(vllm_config.parallel_config) else 0.0
        self._news = threading.Event()  # the agent's or the secondary tiers' thread has something
        self._port = SharedPort()
        self._tier: HostTier | None = None
        self._tiers: TierWorker | None = None
        self._agent: HandoffAgent | None = None
        self._make_agent: Callable[..., HandoffAgent | None] = lambda **_: None
        self._listens_at: tuple[str, int] | None = None  # as the scheduler was told
        self._weights: WorkerWeights | None = None
        self._looked = 0  # number of the last order to look at the weights

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocate the host tier and the secondary tiers for these caches. Caches that were
        registered before are not used any more, and what was stored of them is lost.

        Raises:
            ConfigError: a setting does not fit this machine.
            Incompatible: the layout of the KV cache is not supported.
        """
        self.close()
        self._agent = self._tiers = self._tier = None
        self._received = ReceivedBlocks(self._kv_cache_config, kv_caches)
        share = _worker_share(self._vllm_config, self._settings)
        if share and keeps_none(self._kv_cache_config):
            logger.warning("prefix caching is off, so vLLM keeps no states: nothing is offloaded")
            share = 0
        if share:
            area = translate.backing_area(kv_caches)
            geometry = translate.cache_geometry(self._kv_cache_config, kv_caches)
            self._tier = HostTier(
                share,
                self._settings.digest,
                geometry,
                area,
                self.make_copier,
                self._settings.store_rate,
                self._shared_memory(share, geometry, area.device),
            )
            places = translate.cache_layers(self._kv_cache_config, kv_caches, geometry)
            self._tier.executor.sync.layers = places
            if self._tier.stores:  # for the others too
                self._tiers = make_lower_tiers(
                    self._vllm_config,
                    self._kv_cache_config,
                    self._settings,
                    kv_caches,
                    (self._tier.store, geometry),
                    self._port,
                )
            if self._tiers is not None:
                self._tiers.news = self._news
        mixes = self._settings.mix_weights
        self._weights = self._weights or WorkerWeights(self._vllm_config, mixes=mixes)
        self._make_agent = partial(
            make_handoffs,
            self._vllm_config,
            self._kv_cache_config,
            self._settings,
            kv_caches,
            self._port,
        )

    @property
    def tier(self) -> HostTier:
        """The host tier. Raises :class:`Misuse` before :meth:`register`, or if it is off."""
        if self._tier is None:
            raise Misuse("there is no host tier (yet)")
        return self._tier

    def hello(self) -> WorkerHello:
        """Start to listen, and return this worker's hello.

        Not done in :meth:`register`: vLLM captures CUDA graphs after it, and a peer that measures
        its bandwidth makes this worker use the device, which would break a capture.
        """
        if self._weights is not None:
            self._weights.start()
        if self._tiers is not None:
            self._tiers.set_identity(self._identity)
        self._start_agent()
        agent, tier = self._agent, self._tier
        return WorkerHello(
            num_slots=tier.store.num_slots if tier else 0,
            slot_bytes=tier.store.slot_bytes if tier else 0,
            stores=tier is None or tier.stores,
            address=agent.address if agent else None,
            receives=agent is not None,
            serves=self._tiers.address if self._tiers else None,
            identity=self._identity,
        )

    def release_caches(self) -> None:
        """Stop to use the KV cache: vLLM frees its memory. Waits for copies; ends the hand-offs.
        Idempotent."""
        if self._agent is not None:
            former = FormerAgent(self._listens_at, self._step.epoch)
            self._make_agent = partial(self._make_agent, former=former)
            self._agent.close()
            self._agent = None
        if self._tier is not None:
            self._tier.executor.pause()

    def restore_caches(self) -> None:
        """Use the KV cache again, whose memory is back; listen where it did before, if nobody else
        does by now. Idempotent."""
        if self._tier is not None:
            self._tier.executor.resume()
        self._start_agent()

    @property
    def _identity(self) -> Identity:
        return self._weights.identity if self._weights is not None else Identity()

    def weights_updating(self, *, draft: bool) -> None:
        """See :class:`HoldsWeights`. Until the update has ended, no peer's weights are the same."""
        if self._weights is not None:
            self._weights.updating(draft=draft)
            self._show_weights()

    def weights_updated(self, *, draft: bool, from_files: bool) -> None:
        """See :class:`HoldsWeights`."""
        if self._weights is not None:
            self._weights.updated(draft=draft, from_files=from_files)
            self._show_weights()

    def weights_awake(self) -> None:
        """See :class:`HoldsWeights`."""
        if self._weights is not None:
            self._weights.look()
            self._show_weights()

    def _show_weights(self) -> None:
        """Tell peers and the scheduler which weights this worker has."""
        place = translate.place(self._vllm_config.parallel_config)
        mixed = self._weights is not None and self._weights.mixed
        self._reports.identities[place] = LookedAtWeights(self._looked, self._identity, mixed)
        if self._agent is not None:
            self._agent.set_identity(self._identity)
        if self._tiers is not None:
            self._tiers.set_identity(self._identity)

    def begin_step(self, step: StepInstructions) -> None:
        """Start the step's loads and receives before the forward; keep its stores for later."""
        if step.weights is not None and self._weights is not None:
            self._looked = step.weights.number
            self._weights.look(step.weights.version, reset=step.weights.reset)
            self._show_weights()
        if step.computes and self._weights is not None:
            self._weights.computed = True
        if step.greet:
            place = translate.place(self._vllm_config.parallel_config)
            self._reports.hellos[place] = self.hello()
        if self._tiers is not None:
            parts = chain.from_iterable(store.parts for store in step.offload.stores)
            self._tiers.serve(step.tiers, chain.from_iterable(part.slots for part in parts))
            work = step.tiers
            self._tiers.submit((*work.lookups, *work.prefetches, *work.write_backs, *work.removals))
        if self._tier is not None:
            self._tier.begin(step.offload.loads, step.offload.stores)
        if self._agent is not None:
            self._received.zero(step.disaggregation.receives)
            self._agent.begin_step(step.disaggregation, step.epoch)
        self._step = step

    def layer_written(self, layer_name: str) -> None:
        """A layer's attention has been launched: hand off its KV. With micro-batches, each layer is
        called twice, so :meth:`end_step` hands everything off."""
        agent = self._agent
        if agent is None or not agent.offering:
            return
        if not self._vllm_config.parallel_config.use_ubatching:
            agent.layer_written(layer_name)

    def start_forward(self, hooks: bool) -> None:
        """Make the forward wait for the synchronous loads. With ``hooks``, layers that have a hook
        wait for their own part only, in :meth:`start_layer`."""
        if self._tier is not None:
            self._tier.executor.sync.before_forward(hooks)

    def start_layer(self, layer_name: str) -> None:
        """Make the layer that is launched next wait for its loads."""
        if self._tier is not None:
            self._tier.executor.sync.before_layer(layer_name)

    def end_step(self) -> None:
        """Start stores and hand-offs that wait for the launched forward."""
        if self._agent is not None:
            self._agent.end_step()
        if self._tier is not None:
            self._tier.submit_stores()

    def collect(self) -> tuple[set[str], set[str]]:
        """Return (requests whose load ended, requests that must start over).

        With one full-attention group, no request starts over: :meth:`take_errors` names the failed
        blocks instead, so that the engine keeps the valid prefix.
        """
        finished: set[str] = set()
        failed: set[str] = set()
        self._reports.timed = self._step.timed
        cache = self._kv_cache_config
        waited = self._tier.executor.sync.finish() if self._tier else 0.0
        if waited and self._vllm_config.parallel_config.rank == 0:
            self._stats.observe("load_exposed_seconds", waited, label=Tier.HOST.value)
        for done in self._tier.poll() if self._tier else ():
            self._reports.reports.append(done.report)
            if done.nbytes:
                self._stats.record_transfer(done.kind.value, done.nbytes, done.seconds)
            if isinstance(done.job, LoadBlocks):
                _add_failures(cache, done.job.req_id, done.report, self._errors, failed)
                if not done.job.sync:
                    finished.add(done.job.req_id)
        # Tiers have news for ranks that store only; the step lasts until these have answered.
        awaits = self._step.handoffs or self._tier is None or self._tier.stores
        if self._step.idle and self._idle_s and awaits:
            self._news.wait(self._idle_s)
        self._news.clear()
        if self._agent is not None:  # its poll clears the news, so that of the tiers comes after it
            arrived, notices = self._agent.poll(ends_step=True)
            self._reports.notices += notices
            for report, job in arrived:
                self._reports.arrivals.append(report)
                _add_failures(cache, job.req_id, report, self._errors, failed)
                finished.add(job.req_id)
        if self._tiers is not None:
            self._reports.answers += self._tiers.poll()
        return finished, failed

    def take_errors(self) -> set[int]:
        """Return the device blocks of this step's failed loads."""
        errors, self._errors = self._errors, set()
        return errors

    def take_reports(self) -> StepReports | None:
        """Return the reports since the last call; None if there are none."""
        taken = self._reports
        if taken.is_empty():
            return None
        self._reports = StepReports()
        return taken

    def take_stats(self) -> KVConnectStats | None:
        """Return the counts since the last call."""
        for part in (self._agent, self._tiers):
            theirs = part.take_stats() if part else None
            if theirs is not None:
                self._stats.aggregate(theirs)
        for thread, number in threads.take_failures().items():
            self._stats.count("thread_failures", number, label=thread)
        return self._stats.take()

    def close(self) -> None:
        """Stop copies and transfers, and free the host tier. Idempotent."""
        if self._agent is not None:
            self._agent.close()
        if self._tiers is not None:  # it uses the tier's memory
            self._tiers.close()
        if self._tier is not None:
            self._tier.close()

    def _shared_memory(
        self, share: int, geometry: Geometry, device: torch.device
    ) -> SharedMemory | None:
        """Return memory for the host tier of this worker and those with the same KV, if any."""
        replicas = kv_replicas(self._vllm_config, self._kv_cache_config)
        if replicas == 1:
            return None
        slot_bytes, node = geometry.slot_bytes, device_node(device)

        def sizes(workers: int) -> tuple[int, int]:
            slots = share * workers // slot_bytes
            return arena_bytes(slots, slot_bytes) if slots else 0, slots * slot_bytes

        return self.share_memory(replicas, sizes, -1 if node is None else node)

    def _start_agent(self) -> None:
        self._agent = self._agent or self._make_agent(identity=self._identity)
        if self._agent is not None:
            self._agent.news = self._news
            self._listens_at = self._agent.address or self._listens_at


def _add_failures(
    cache: KVCacheConfig, req_id: str, report: JobReport, errors: set[int], failed: set[str]
) -> None:
    """Note the device blocks that could not be loaded, or that their request must start over."""
    if not report.failures:
        return
    if keeps_prefix(translate.cache_groups(cache)):
        errors.update(failure.block_id for failure in report.failures)
    else:
        failed.add(req_id)


def _worker_share(vllm_config: VllmConfig, settings: Settings) -> int:
    """Return this worker's share of the host tier in bytes.

    Raises:
        ConfigError: the engines of this machine together need more memory than it has.
    """
    parallel = vllm_config.parallel_config
    engines = translate.engines_here(parallel)
    workers: int = parallel.local_world_size  # of this engine on this machine
    there = memory.total_bytes()
    total = share_of_host_bytes(settings, memory_bytes=there, engines=engines)
    check_fits(total * engines, memory_bytes=there, what=f"in this machine for {engines} engines")
    return total // workers
