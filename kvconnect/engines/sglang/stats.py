"""Statistics of an SGLang process, under the same names as those of vLLM."""

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
    from kvconnect.engines.sglang.pool_tier import PoolTier
    from kvconnect.observability.metrics.prometheus import PromMetrics

_PUBLISH_S = 1.0
_KNOWN_REQUESTS = 4096  # waiting requests are looked up at every step, and counted once


class LinkerStats:
    """Counts of the linker, for the scheduler's thread. The pool tiers add copies to ``stats``."""

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
        """A request was looked up: pages that the device lacks, and how many of them are here."""
        if rid in self._known:
            return
        self._known[rid] = None
        if len(self._known) > _KNOWN_REQUESTS:
            del self._known[next(iter(self._known))]
        hits = {Tier.HOST: found * self._page_tokens}
        count_lookup(self.stats, asked * self._page_tokens, hits)

    def loaded(self, seconds: float) -> None:
        """A request's load is there, so long after it was asked for."""
        self.stats.observe("load_latency_seconds", seconds, label=Tier.HOST.value)

    def waited(self, seconds: float) -> None:
        """A forward with loads waited so long for its layers, over all of them."""
        self.stats.observe("load_exposed_seconds", seconds, label=Tier.HOST.value)

    def load_failed(self, cause: FailureCause) -> None:
        """A request is aborted because its load failed."""
        self.stats.count("failed_requests", label=cause.value)

    def take(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call, with the gauges if one moved."""
        now = time.monotonic()
        found: dict[tuple[str, str | None], float] = {
            ("ledger_oldest_hold_seconds", None): max(
                tier.ledger.oldest_age(now) for tier in self._tiers
            )
        }
        for tier in self._tiers:
            for name, value, label in tier.gauges():
                found[name, label] = found.get((name, label), 0) + value
        if found != self._gauges:
            self._gauges = found
            for (name, label), value in found.items():
                self.stats.gauge(name, value, label)
        return self.stats.take()

    def publish(self) -> None:
        """Show it on SGLang's ``/metrics``, about once a second however often this is called."""
        now = time.monotonic()
        if now - self._published >= _PUBLISH_S:
            self._published = now
            publisher().publish(self.take())


# KVConnect's metrics on SGLang's own ``/metrics``.
#
# SGLang's scrape adds up what its processes write into ``PROMETHEUS_MULTIPROC_DIR``, so a family
# that a scheduler process registers is in it, with nothing passed through SGLang's own collectors.
# ``prometheus_client`` decides at its first import where values go, and SGLang's first process sets
# the directory late: so nothing here imports it before a :class:`Publisher` is made.


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
    from kvconnect.observability.metrics.prometheus import PLAIN, PromMetrics

    return PromMetrics(PLAIN, list(labels), {0: list(labels.values())}, SGLANG)


# Hands what the parts of a scheduler process have measured to its metrics, once per second.


_INTERVAL_S = 1.0


def publish_regularly(take: Callable[[], OffloadingConnectorStats | None]) -> threading.Event:
    """Publish what ``take`` returns, from a thread of its own, until the returned event is set.

    An idle scheduler calls nobody, so what was measured last would never be seen without one.
    ``take`` must be thread-safe. Call it where SGLang has published its configuration.
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
    """Return what threads of this process died of since the last call."""
    stats = OffloadingConnectorStats()
    for thread, number in threads.take_failures().items():
        stats.count("thread_failures", number, label=thread)
    return stats
