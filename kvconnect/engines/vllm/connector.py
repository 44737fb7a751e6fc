"""The class that vLLM loads. It forwards each call to the scheduler or worker of this process.

vLLM makes one object per role: SCHEDULER in the engine core, WORKER in each worker process. It also
calls the class methods in the API server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvconnect.engines.vllm import sleep, translate, weights
from kvconnect.engines.vllm.checks import checked_settings, why_idle
from kvconnect.engines.vllm.device_blocks import DeviceBlocks
from kvconnect.engines.vllm.idle import IdleScheduler, IdleWorker
from kvconnect.engines.vllm.messages import StepInstructions, StepReports, WorkerHello
from kvconnect.engines.vllm.scheduler import ConnectorScheduler
from kvconnect.engines.vllm.stats import KVConnectPromMetrics, KVConnectStats
from kvconnect.engines.vllm.worker import ConnectorWorker
from kvconnect.errors import Misuse, refusing
from kvconnect.settings import KVLayout, find_settings
from kvconnect.settings.summary import start_line
from kvconnect.types import Tier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_SOURCES = {
    Tier.HOST: CacheHitSource.HOST,
    Tier.DISK: CacheHitSource.DISK,
    Tier.PEER: CacheHitSource.P2P,
    Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,  # vLLM's word for a remote store
}
_LAYOUTS: dict[KVLayout, str | None] = {
    "engine": None,
    "blocks_first": "BLHNC",  # vLLM's letters: block, layer, head, token, content
}


class KVConnect(KVConnectorBase_V1, SupportsHMA):
    """vLLM KV connector. It keeps KV blocks in host memory and secondary tiers, and hands them from
    prefill to decode engines.

    The methods stand in this order: what vLLM asks the class, what it calls on a worker, what it
    calls on the scheduler, what it calls on both.
    """

    _cache_hit_source = CacheHitSource.P2P  # tokens from no tier come from another engine
    # A preempted request loses nothing that it needs: a dropped store is only a later miss, and
    # blocks of a hand-off are held separately.
    requires_kv_delivery = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = checked_settings(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            logger.info("%s", start_line(self._settings, f"vLLM {vllm.__version__}"))
        self._tier_tokens: Mapping[Tier, int] = {}  # of the last admitted request
        with refusing(f"model {vllm_config.model_config.model}"):
            _ = self.scheduler if role is KVConnectorRole.SCHEDULER else self.worker

    @cached_property
    def scheduler(self) -> ConnectorScheduler:
        """The connector's part in the engine core."""
        self._expect(KVConnectorRole.SCHEDULER)
        cache = translate.scheduled_cache(self._vllm_config, self._kv_cache_config)
        idle = why_idle(self._vllm_config, self._kv_cache_config)
        if idle:
            logger.warning("KVConnect stores and loads nothing: %s", idle)
            return IdleScheduler(self._vllm_config, cache, self._settings)
        scheduler = ConnectorScheduler(self._vllm_config, cache, self._settings)
        weights.follow_core(scheduler)
        if translate.is_traced(self._vllm_config):
            from kvconnect.engines.vllm.tracing import RequestTracing

            workers = self._vllm_config.parallel_config.world_size
            scheduler.observer = RequestTracing(workers, scheduler.receipts.sources)
        return scheduler

    @cached_property
    def worker(self) -> ConnectorWorker:
        """The connector's part in a worker process."""
        self._expect(KVConnectorRole.WORKER)
        idle = why_idle(self._vllm_config, self._kv_cache_config)
        kind = IdleWorker if idle else ConnectorWorker
        return kind(self._vllm_config, self._kv_cache_config, self._settings)

    def _expect(self, role: KVConnectorRole) -> None:
        if self.role is not role:
            raise Misuse(f"a {self.role.name} connector has no {role.name} part")

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True: all blocks are forgotten before the engine sleeps."""
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, after checking the settings: with CUDA graphs, vLLM calls this before it
        loads anything, so a bad setting ends the start early."""
        find_settings(extra_config, os.environ)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout to ask for, after checking all settings. vLLM calls this outside of its
        workers and before it measures memory, so a refused start ends early with a single
        traceback."""
        return _LAYOUTS[checked_settings(vllm_config).kv_layout]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return statistics from the data that another process sent."""
        return KVConnectStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Register KVConnect's metrics."""
        return KVConnectPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See :meth:`ConnectorWorker.register`."""
        with refusing(f"model {self._vllm_config.model_config.model}"):
            self.worker.register(kv_caches)
        sleep.tell(self)
        weights.follow_worker(self.worker)

    def unregister_kv_caches(self) -> None:
        """See :meth:`ConnectorWorker.release_caches`."""
        self.worker.release_caches()

    def restore_kv_caches(self) -> None:
        """See :meth:`ConnectorWorker.restore_caches`."""
        self.worker.restore_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """See :meth:`ConnectorWorker.hello`. None under MultiConnector: it passes one
        child's metadata to all children, and a sibling may have no other way to send its own."""
        return self.worker.hello() if get_kv_transfer_group() is self else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the loads, since vLLM usually calls ``start_load_kv`` after the forward."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepInstructions)
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See :meth:`ConnectorWorker.start_forward`. It waits for synchronous loads only."""
        self.worker.start_forward(translate.calls_layer_hooks(self._vllm_config, forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See :meth:`ConnectorWorker.start_layer`."""
        self.worker.start_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """See :meth:`ConnectorWorker.layer_written`. Whole blocks are stored after the step."""
        self.worker.layer_written(layer_name)

    def wait_for_save(self) -> None:
        """See :meth:`ConnectorWorker.end_step`; does not wait."""
        self.worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See :meth:`ConnectorWorker.collect`."""
        finished, failed = self.worker.collect()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See :meth:`ConnectorWorker.take_errors`."""
        return self.worker.take_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See :meth:`ConnectorWorker.take_reports`."""
        return self.worker.take_reports()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool through which KVConnect holds device blocks."""
        self.scheduler.device = DeviceBlocks(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """See :meth:`ConnectorScheduler.greet`. Metadata of other connectors is ignored."""
        hellos = {k: v for k, v in metadata.items() if isinstance(v, WorkerHello)}
        if hellos:
            with refusing(f"model {self._vllm_config.model_config.model}"):
                self.scheduler.greet(hellos)

    def on_new_request(self, request: Request) -> None:
        """See :meth:`ConnectorScheduler.add_request`."""
        self.scheduler.add_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`ConnectorScheduler.match`."""
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See :meth:`ConnectorScheduler.after_alloc`."""
        self._tier_tokens = self.scheduler.after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return where the tokens of the last admitted request come from."""
        found = {_SOURCES[tier]: tokens for tier, tokens in self._tier_tokens.items() if tokens}
        return found or super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See :meth:`ConnectorScheduler.build_step`."""
        return self.scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See :meth:`ConnectorScheduler.on_reports`."""
        reports = connector_output.kv_connector_worker_meta
        assert reports is None or isinstance(reports, StepReports)
        self.scheduler.on_reports(reports, connector_output.invalid_block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`ConnectorScheduler.finish_request`. False: vLLM may free the blocks at once,
        since stores and hand-offs hold theirs separately."""
        return False, self.scheduler.finish_request(request)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`request_finished_all_groups`. MultiConnector calls this method if a sibling
        supports one cache group only."""
        return self.request_finished_all_groups(request, (block_ids,))

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See :meth:`EventLog.take` and :meth:`Receipts.take_events`."""
        scheduler = self.scheduler
        return [*scheduler.events.take(), *scheduler.receipts.take_events(scheduler.tiers)]

    def has_pending_push_work(self) -> bool:
        """Return whether jobs are open; if so, the engine keeps stepping."""
        self.scheduler.handoff.stands = True  # vLLM asks only if it can schedule no request
        return self.scheduler.busy

    def reset_cache(self) -> bool:
        """See :meth:`ConnectorScheduler.reset`."""
        self.scheduler.reset()
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts of this process's part since the last call."""
        part = self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker
        return part.take_stats()

    def shutdown(self) -> None:
        """See :meth:`ConnectorWorker.close`."""
        if self.role is KVConnectorRole.WORKER:
            self.worker.close()
