"""KVConnect's statistics and metrics in vLLM's classes."""

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


# Gauges of the scheduler.


_LOOK_S = 0.1  # between two reads of the gauges while the engine works


class Gauges:
    """The last published gauges, and whether they may have changed since (``moved``).

    Reading all gauges takes a tenth of a millisecond, too long for every step. When the engine
    comes to rest, they are read once more, since their last values stay visible.
    """

    def __init__(self) -> None:
        self.moved = True
        self._values: dict[tuple[str, str | None], float] = {}
        self._looked = 0.0  # when the gauges were last read

    def due(self, now: float, at_rest: bool) -> bool:
        """Return whether to read the gauges: at least every second, since ages change always."""
        return now - self._looked >= (_LOOK_S if self.moved else 1.0) or (self.moved and at_rest)

    def publish(
        self,
        read: Iterable[tuple[str, float, str | None]],
        stats: OffloadingConnectorStats,
        now: float,
    ) -> None:
        """Set all gauges in ``stats`` if one has changed: some series are quotients of two."""
        self.moved, self._looked = False, now
        found: dict[tuple[str, str | None], float] = {}
        for name, value, label in read:
            # Only the age has several sources. Rounded to seconds, it changes seldom.
            found[name, label] = max(int(value), found.get((name, label), 0))
        if found == self._values:
            return
        self._values = found
        for (name, label), value in found.items():
            stats.gauge(name, value, label)
