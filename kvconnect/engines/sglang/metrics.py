"""KVConnect's metrics on SGLang's own ``/metrics``.

SGLang's scrape adds up what its processes write into ``PROMETHEUS_MULTIPROC_DIR``, so a family
that a scheduler process registers is in it, with nothing passed through SGLang's own collectors.
``prometheus_client`` decides at its first import where values go, and SGLang's first process sets
the directory late: so nothing here imports it before a :class:`Publisher` is made.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

from kvconnect.errors import KVConnectError
from kvconnect.metrics.catalog import SGLANG

if TYPE_CHECKING:
    from kvconnect.metrics.prometheus import PromMetrics
    from kvconnect.stats import OffloadingConnectorStats

logger = logging.getLogger(__name__)

_making = threading.Lock()


def publisher() -> Publisher:
    """Return this process's publisher, which all parts share: families register only once.

    Call it in a scheduler process, when SGLang has published its configuration.
    """
    with _making:
        return _the_publisher()


@functools.cache
def _the_publisher() -> Publisher:
    return Publisher()


class Publisher:
    """Adds what was measured in this process to its series.

    Any thread may call :meth:`publish`. Nothing is raised: an engine runs as well without metrics,
    so an error ends them with one log line. On a rank that publishes nothing, and without
    ``--enable-metrics``, nothing is registered and ``prometheus_client`` is not imported.
    """

    def __init__(self) -> None:
        """Register every family, so that it reads 0 before its first event."""
        self._lock = threading.Lock()
        self._metrics: PromMetrics | None = None
        try:
            labels = scheduler_labels()
            if labels is not None:
                self._metrics = _register(labels)
        # What SGLang says of itself has moved, a name is taken, or its directory is gone.
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, OSError) as error:
            logger.warning("there will be no metrics of KVConnect: %s", error)

    def publish(self, interval: OffloadingConnectorStats | None) -> None:
        """Add one interval, which :meth:`OffloadingConnectorStats.take` has returned: of any part
        of this process, in any order. It stays unchanged; ``None`` is an idle one."""
        if interval is None:
            return
        with self._lock:
            if self._metrics is None:
                return
            try:
                self._metrics.observe(interval.data)
            except (KVConnectError, ValueError, OSError) as error:
                self._metrics = None
                logger.warning("metrics of KVConnect end here: %s", error)


def scheduler_labels() -> dict[str, object] | None:
    """Return the labels that SGLang's metrics of this scheduler process have, ``None`` if it is
    not to publish any. Written against SGLang 0.5.23, ``SchedulerMetricsCollector.init_new``.

    Raises:
        ImportError, AttributeError, ValueError: SGLang keeps or publishes its settings otherwise.
    """
    from sglang.srt import runtime_context as context

    shown, ranks = context.get_observability(), context.get_parallel()
    first = ranks.attn_tp_rank == 0 and ranks.attn_cp_rank == 0
    if not (shown.enable_metrics and (first or shown.enable_metrics_for_all_schedulers)):
        return None
    labels = {
        "model_name": context.get_serving().served_model_name,
        "engine_type": _engine_type(context.get_disagg()),
        "tp_rank": ranks.tp_rank,
        "pp_rank": ranks.pp_rank,
        "moe_ep_rank": ranks.moe_ep_rank,
    }
    if ranks.dp_rank is not None:
        labels["dp_rank"] = ranks.dp_rank
    return labels | (shown.extra_metric_labels or {})


def _engine_type(disagg: Any) -> str:
    """Return SGLang's word for what the engine does; one series lasts through changes of role."""
    if disagg.enable_pd_role_switch:
        return "dynamic"
    mode: str = disagg.disaggregation_mode
    return "unified" if mode == "null" else mode


def _register(labels: dict[str, object]) -> PromMetrics:
    from kvconnect.metrics.prometheus import PLAIN, PromMetrics

    return PromMetrics(PLAIN, list(labels), {0: list(labels.values())}, SGLANG)
