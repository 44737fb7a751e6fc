"""KVConnect's statistics and metrics in the shapes vLLM expects."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvconnect.metrics.prometheus import PromMetrics
from kvconnect.stats import OffloadingConnectorStats


class KVConnectStats(OffloadingConnectorStats, KVConnectorStats):
    """:class:`OffloadingConnectorStats` that vLLM can carry; used by both halves."""


class KVConnectPromMetrics(KVConnectorPromMetrics):
    """Registers the catalogue with the classes and labels vLLM hands in."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = labelnames, per_engine_labelvalues
        self._metrics = PromMetrics(metric_types, *labels, aliases=False)
        # vLLM's own names are for other connectors first, and under MultiConnector these may
        # register theirs next. A server does all of that before its event loop turns again.
        with contextlib.suppress(RuntimeError):  # no loop: with the first payload
            asyncio.get_running_loop().call_soon(self._metrics.add_aliases)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's deltas to the engine's series."""
        self._metrics.add_aliases()
        self._metrics.observe(transfer_stats_data, engine_idx)
