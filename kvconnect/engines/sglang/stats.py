"""Statistics of an SGLang process, under the same names as vLLM's."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvconnect import threads
from kvconnect.errors import KVConnectError
from kvconnect.observability.metrics.catalog import SGLANG
from kvconnect.offload.planner import count_lookup
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause, Tier

if TYPE_CHECKING:
    from kvconnect.engines.sglang.linker_host_tier import PoolTier
    from kvconnect.observability.metrics.prometheus import PromMetrics

_PUBLISH_S = 1.0
_KNOWN_REQUESTS = 4096  # limit: SGLang looks up waiting requests at every step; each counts once


class LinkerStats:
    """The linker's statistics. For the scheduler's thread. Pool tiers add theirs to ``stats``."""

    def __init__(
        self, stats: OffloadingConnectorStats, tiers: Sequence[PoolTier], page_tokens: int
    ) -> None:
        self.stats = stats
        self._tiers = tiers
        self._page_tokens = page_tokens
        self._known: dict[str, None] = {}  # requests that were counted, oldest first
        self._gauges: dict[tuple[str, str | None], float] = {}
        self._published = time.monotonic()

    def looked_up(self, rid: str, asked: int, found: int) -> None:
        """Count a request's lookup: pages that the device lacks, and how many of them are found."""
        if rid in self._known:
            return
        self._known[rid] = None
        if len(self._known) > _KNOWN_REQUESTS:
            del self._known[next(iter(self._known))]
        hits = {Tier.HOST: found * self._page_tokens}
        count_lookup(self.stats, asked * self._page_tokens, hits)

    def loaded(self, seconds: float) -> None:
        """Record that a request's pages were loaded, ``seconds`` after the load was queued."""
        self.stats.observe("load_latency_seconds", seconds, label=Tier.HOST.value)

    def waited(self, seconds: float) -> None:
        """Record how long a forward waited for the loads of all its layers."""
        self.stats.observe("load_exposed_seconds", seconds, label=Tier.HOST.value)

    def load_failed(self, cause: FailureCause) -> None:
        """Count a request that is aborted because its load failed."""
        self.stats.count("failed_requests", label=cause.value)

    def take(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call, and all gauges if one changed."""
        now = time.monotonic()
        found: dict[tuple[str, str | None], float] = {}
        for tier in self._tiers:
            for name, value, label in tier.gauges(now):
                known = found.get((name, label), 0)
                oldest = name == "ledger_oldest_hold_seconds"
                found[name, label] = max(known, value) if oldest else known + value
        if found != self._gauges:
            self._gauges = found
            for (name, label), value in found.items():
                self.stats.gauge(name, value, label)
        return self.stats.take()

    def publish(self) -> None:
        """Publish to SGLang's ``/metrics``, at most about once a second."""
        now = time.monotonic()
        if now - self._published >= _PUBLISH_S:
            self._published = now
            publisher().publish(self.take())


# KVConnect's metrics on SGLang's own ``/metrics``.
#
# SGLang's scrape adds up what its processes write into ``PROMETHEUS_MULTIPROC_DIR``. So it contains
# a metric family that a scheduler process registers, without SGLang's own collectors.
# ``prometheus_client`` decides at its first import where values go, and SGLang's first process sets
# the directory late. So nothing here imports it before a :class:`Publisher` is made.


logger = logging.getLogger(__name__)

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


# A thread that publishes statistics once per second.


_INTERVAL_S = 1.0


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
