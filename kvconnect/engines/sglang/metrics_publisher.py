"""KVConnect's metrics on SGLang's own ``/metrics``.

SGLang's scrape adds up what its processes write into ``PROMETHEUS_MULTIPROC_DIR``. So it contains
a metric family that a scheduler process registers, without SGLang's own collectors.
``prometheus_client`` decides at its first import where values go, and SGLang's first process sets
the directory late. So nothing here imports it before a :class:`Publisher` is made.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvconnect import threads
from kvconnect.errors import KVConnectError
from kvconnect.observability.metrics.catalog import SGLANG
from kvconnect.stats import OffloadingConnectorStats

if TYPE_CHECKING:
    from kvconnect.observability.metrics.prometheus import PromMetrics

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0  # between two times that a process publishes
_making = threading.Lock()


def publisher() -> Publisher:
    """Return this process's only publisher: metric families can be registered only once.

    Call it in a scheduler process, after SGLang has published its configuration.
    """
    with _making:
        return _the_publisher()


@functools.cache
def _the_publisher() -> Publisher:
    return Publisher()


class Publisher:
    """Adds this process's statistics to its metrics. Thread-safe.

    Nothing is raised: an engine runs as well without metrics, so an error ends them with one log
    line. On a rank that publishes nothing, and without ``--enable-metrics``, nothing is registered
    and ``prometheus_client`` is not imported.
    """

    def __init__(self) -> None:
        """Register every family, so that it reads 0 before its first event."""
        self._lock = threading.Lock()
        self._metrics: PromMetrics | None = None
        try:
            labels = scheduler_labels()
            if labels is not None:
                self._metrics = _register(labels)
        # SGLang's configuration has moved, a metric's name is taken, or the directory is gone.
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, OSError) as error:
            logger.warning("there will be no metrics of KVConnect: %s", error)

    def publish(self, interval: OffloadingConnectorStats | None) -> None:
        """Add one interval from :meth:`OffloadingConnectorStats.take`, of any part of this process
        and in any order. It is not changed; ``None`` is an idle one."""
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
    """Return the labels of SGLang's own metrics of this scheduler process; None if it publishes
    none. Written against SGLang 0.5.23, ``SchedulerMetricsCollector.init_new``.

    Raises:
        ImportError, AttributeError, ValueError: this SGLang keeps its settings elsewhere.
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
    """Return SGLang's name of the engine's role; "dynamic" lasts through changes of role."""
    if disagg.enable_pd_role_switch:
        return "dynamic"
    mode: str = disagg.disaggregation_mode
    return "unified" if mode == "null" else mode


def _register(labels: dict[str, object]) -> PromMetrics:
    from kvconnect.observability.metrics.prometheus import PLAIN, PromMetrics

    return PromMetrics(PLAIN, list(labels), {0: list(labels.values())}, SGLANG)


def publish_regularly(take: Callable[[], OffloadingConnectorStats | None]) -> threading.Event:
    """Publish what ``take`` returns, on a new thread, until the returned event is set.

    An idle scheduler calls nothing, so without the thread the last values would never be seen.
    ``take`` must be thread-safe. Call this after SGLang has published its configuration.
    """
    stop = threading.Event()
    ours = publisher()

    def publish() -> None:
        ours.publish(take())
        ours.publish(_failures())

    def loop() -> None:
        while not stop.wait(_INTERVAL_S):
            publish()
        publish()

    kind = threads.ThreadKind.METRICS
    threads.make(kind, "kvconnect-metrics", loop, again=True, stopped=stop.is_set).start()
    return stop


def _failures() -> OffloadingConnectorStats:
    """Return the failures of this process's threads since the last call."""
    stats = OffloadingConnectorStats()
    for thread, number in threads.take_failures().items():
        stats.count("thread_failures", number, label=thread)
    return stats
