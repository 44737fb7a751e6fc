"""KVConnect's statistics and metrics in the shapes vLLM expects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvconnect.observability.metrics.prometheus import PromMetrics
from kvconnect.stats import OffloadingConnectorStats


class KVConnectStats(OffloadingConnectorStats, KVConnectorStats):
    """:class:`OffloadingConnectorStats` that vLLM can carry, of the scheduler and of a worker."""


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


# Which gauges the scheduler publishes, and when.


_LOOK_S = 0.1  # between two looks at the gauges while the engine works


class Gauges:
    """The gauges that were published last, and whether they may have moved since.

    Reading them takes a tenth of a millisecond: too much for every step, and nobody looks that
    often. But what an engine comes to rest with stays on display.
    """

    def __init__(self) -> None:
        self.moved = True
        self._values: dict[tuple[str, str | None], float] = {}
        self._looked = 0.0  # when

    def due(self, now: float, at_rest: bool) -> bool:
        """Whether to look at them again. The oldest hold's age moves by itself."""
        return now - self._looked >= (_LOOK_S if self.moved else 1.0) or (self.moved and at_rest)

    def publish(
        self,
        read: Iterable[tuple[str, float, str | None]],
        stats: OffloadingConnectorStats,
        now: float,
    ) -> None:
        """Set all gauges in ``stats`` if one has moved: some series are quotients of two."""
        self.moved, self._looked = False, now
        found: dict[tuple[str, str | None], float] = {}
        for name, value, label in read:
            # Only the age has several sources; in whole seconds, it seldom moves.
            found[name, label] = max(int(value), found.get((name, label), 0))
        if found == self._values:
            return
        self._values = found
        for (name, label), value in found.items():
            stats.gauge(name, value, label)
