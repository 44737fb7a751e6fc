"""Publishes stats payloads as Prometheus metrics.

The engine chooses the metric classes: those of ``prometheus_client``, or wrappers with the same
interface (Ray's). A payload holds deltas; the series are cumulative.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from kvconnect.errors import Misuse
from kvconnect.observability.metrics.catalog import families
from kvconnect.observability.metrics.model import EntryPart, Family
from kvconnect.stats import GAUGES, OTHER, OffloadingConnectorStats

logger = logging.getLogger(__name__)

_CLASSES: dict[str, type[Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

PLAIN: Mapping[type[Any], Any] = {cls: cls for cls in _CLASSES.values()}
"""``metric_types`` of an engine without wrappers: series are those of the default registry."""


class PromMetrics:
    """All families of the catalogue, for the engines of one process.

    Not thread-safe: one thread calls :meth:`observe`. Scrapes may run concurrently.
    """

    def __init__(
        self,
        metric_types: Mapping[type[Any], Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        prefix: str = "vllm:",
        *,
        aliases: bool = True,
    ) -> None:
        """Register every family and create every series with the value 0.

        Args:
            metric_types: maps ``prometheus_client``'s ``Counter``, ``Gauge`` and ``Histogram``
                to the classes to build with.
            labelnames: the engine's own labels, which come first.
            per_engine_labelvalues: their values for each engine index.
            prefix: of every metric name; with its colon.
            aliases: whether to register the engine's own names now, or later in
                :meth:`add_aliases`, after other connectors.

        Raises:
            ValueError: one of KVConnect's own names is registered already. An alias that is
                taken is left to its owner, with one log line.
        """
        self._engines = frozenset(per_engine_labelvalues)
        # By recorded name, because a payload has few names of the catalogue.
        self._feeds: dict[tuple[str, str], list[_Feed]] = {}
        self._metric_types, self._labelnames = metric_types, labelnames
        self._labelvalues, self._seen = per_engine_labelvalues, _OpenLabels()
        self._aliases: list[Family] = []
        for family in families(prefix):
            if family.alias is None:
                self._add(family)
            else:
                self._aliases.append(family)
        if aliases:
            self.add_aliases()
        # Names and labels that were not, or need not be, logged as unknown.
        self._known = {
            (family.metric.section, family.metric.recorded_as, value)
            for family in families(prefix)
            for value in family.values
        }

    def add_aliases(self) -> None:
        """Register aliases that were deferred. Idempotent."""
        while self._aliases:
            self._add(self._aliases.pop(0))

    def _add(self, family: Family) -> None:
        built = _register(family, self._metric_types, self._labelnames)
        if built is not None:
            feed = _Feed(family, built, self._labelvalues, self._seen)
            row = family.metric
            self._feeds.setdefault((row.section, row.recorded_as), []).append(feed)

    def observe(self, data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add one payload, ``OffloadingConnectorStats.data``, to engine ``engine_idx``'s series.

        ``data`` stays unchanged. Names that this version does not know, which a newer worker
        may send, are ignored.

        Raises:
            Misuse: the payload is malformed or the engine unknown; nothing was added.
        """
        if engine_idx not in self._engines:
            raise Misuse(f"no metrics for engine {engine_idx}, only for {sorted(self._engines)}")
        payload = OffloadingConnectorStats(data).data
        self._log_unknown(payload)
        for section, names in payload.items():
            for name in names:
                for feed in self._feeds.get((section, name), ()):
                    feed.observe(payload, engine_idx)

    def _log_unknown(self, payload: dict[str, Any]) -> None:
        sent = {
            (section, name, label)
            for section, names in payload.items()
            for name, values in names.items()
            for label in values
            if (section, name, OTHER) not in self._known
        }
        unknown = sent - self._known
        if unknown:
            logger.debug("metrics unknown to this version are ignored: %s", sorted(unknown))
            self._known |= unknown


class _OpenLabels:
    """Values of open labels that have series of their own, by label and engine.

    All families share it: a peer has its own series in all of them or in none, so that queries
    over two families cover the same peers.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str | None, int], set[str]] = {}

    def shown(self, family: Family, engine_idx: int, value: str) -> str | None:
        """Return the label value that ``value`` is published under; None if it is ignored."""
        if value in family.values:
            return value
        if OTHER not in family.values:
            return None
        seen = self._values.setdefault((family.label, engine_idx), set())
        if len(seen) < family.limit:
            seen.add(value)
        return value if value in seen else OTHER


class _Feed:
    """A registered family and its series, by engine index and label value."""

    def __init__(
        self,
        family: Family,
        built: Any,
        per_engine_labelvalues: Mapping[int, list[object]],
        seen: _OpenLabels,
    ) -> None:
        self.family = family
        self._built = built
        self._engine_values = per_engine_labelvalues
        self._seen = seen
        self._children: dict[tuple[int, str], Any] = {}
        for engine_idx in per_engine_labelvalues:
            for value in family.values:
                child = self._child(engine_idx, value)
                if family.metric.kind == "gauge":
                    # In multiprocess mode a gauge that was never set is absent from the scrape.
                    child.set(0)

    def observe(self, payload: dict[str, Any], engine_idx: int) -> None:
        row = self.family.metric
        for label, value in payload[row.section][row.recorded_as].items():
            shown = self._seen.shown(self.family, engine_idx, label)
            if shown is not None:
                self._add(self._child(engine_idx, shown), value, payload)

    def _child(self, engine_idx: int, value: str) -> Any:
        key = engine_idx, value
        if key not in self._children:
            own = [value] if self.family.label else []
            # All labels in one call: a wrapper's labels() works once only.
            self._children[key] = self._built.labels(*self._engine_values[engine_idx], *own)
        return self._children[key]

    def _add(self, child: Any, value: Any, payload: dict[str, Any]) -> None:
        row, alias = self.family.metric, self.family.alias
        if alias is None or alias.per is None:
            _ADD[row.kind, row.part](child, value, row.buckets)
            return
        whole = payload[GAUGES].get(alias.per, {}).get("", 0)
        if whole:  # an arena without a single slot has no share in use
            child.set(value / whole)


def _register(
    family: Family, metric_types: Mapping[type[Any], Any], labelnames: list[str]
) -> Any | None:
    row = family.metric
    arguments: dict[str, Any] = {
        "name": family.name,
        "documentation": row.help,
        "labelnames": [*labelnames, family.label] if family.label else labelnames,
    }
    if row.kind == "gauge":
        # With several API servers each engine's payloads reach one of them at a time: the
        # newest value is the true one, their sum is not.
        arguments["multiprocess_mode"] = "mostrecent"
    elif row.kind == "histogram":
        arguments["buckets"] = list(row.buckets)
    try:
        return metric_types[_CLASSES[row.kind]](**arguments)
    except ValueError as error:
        if family.alias is None:
            raise
        logger.info("%s belongs to another connector and is left to it: %s", family.name, error)
        return None


def _add(child: Any, value: float, _buckets: tuple[float, ...]) -> None:
    child.inc(value)


def _add_sum(child: Any, cells: list[float], _buckets: tuple[float, ...]) -> None:
    child.inc(cells[0])


def _add_count(child: Any, cells: list[float], _buckets: tuple[float, ...]) -> None:
    child.inc(sum(cells[1:]))


def _set(child: Any, value: float, _buckets: tuple[float, ...]) -> None:
    child.set(value)


def _add_buckets(child: Any, cells: list[float], buckets: tuple[float, ...]) -> None:
    """Add counts per bucket to a histogram series.

    ``observe()`` takes samples, and samples would make payloads as long as an interval has
    operations. So the counters inside ``prometheus_client``'s histogram are raised directly,
    exactly as its ``observe()`` does, in memory as well as in multiprocess mode. A wrapper has
    no such counters: it gets one representative sample per count, so that its buckets are
    exact and its sum is approximate (exact when all samples fell into one bucket; the counters
    beside it are exact always).
    """
    total, *counts = cells
    inner = getattr(child, "_buckets", None)
    if inner is not None:
        child._sum.inc(total)
        for bucket, n in zip(inner, counts, strict=True):
            if n:
                bucket.inc(n)
        return
    alone = sum(n > 0 for n in counts) == 1
    edges = (0.0, *buckets, 2 * buckets[-1])
    for i, n in enumerate(counts):
        middle = (edges[i] + edges[i + 1]) / 2
        for _ in range(int(n)):
            child.observe(min(total / n, edges[i + 1]) if alone else middle)


_ADD: dict[tuple[str, EntryPart], Callable[[Any, Any, tuple[float, ...]], None]] = {
    ("counter", EntryPart.VALUE): _add,
    ("counter", EntryPart.SUM): _add_sum,
    ("counter", EntryPart.COUNT): _add_count,
    ("gauge", EntryPart.VALUE): _set,
    ("histogram", EntryPart.BUCKETS): _add_buckets,
}
