"""KVConnect's statistics and metrics in vLLM's classes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvconnect.observability.metrics.prometheus import PromMetrics
from kvconnect.stats import OffloadingConnectorStats


class KVConnectStats(OffloadingConnectorStats, KVConnectorStats):
    """:class:`OffloadingConnectorStats` that vLLM can send between its processes."""


class KVConnectPromMetrics(KVConnectorPromMetrics):
    """Registers KVConnect's metrics with vLLM's classes and labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = PromMetrics(metric_types, labelnames, per_engine_labelvalues, aliases=False)
        # Aliases are metric names of vLLM's own connectors, which have precedence. Under
        # MultiConnector they may register after this, but before the event loop runs again.
        with contextlib.suppress(RuntimeError):  # without a loop, observe adds them
            asyncio.get_running_loop().call_soon(self._metrics.add_aliases)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one interval to the engine's series."""
        self._metrics.add_aliases()
        self._metrics.observe(transfer_stats_data, engine_idx)
