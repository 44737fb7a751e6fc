"""The columns of the metric catalogue, and the Prometheus family of a row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from kvconnect.stats import COUNTERS, GAUGES, HISTOGRAMS

Kind = Literal["counter", "gauge", "histogram"]


class EntryPart(Enum):
    """The part of a recorded entry that a row publishes."""

    VALUE = "value"  # a counter's or gauge's number
    SUM = "sum"  # a histogram's sum
    COUNT = "count"  # a histogram's number of samples
    BUCKETS = "buckets"  # the whole histogram


@dataclass(frozen=True)
class Label:
    """A label name with all its values.

    A label with the value ``OTHER`` is open: the first ``limit`` unlisted values get series of
    their own, and the rest are added up as ``OTHER``.
    """

    name: str
    values: tuple[str, ...]
    limit: int = 0


@dataclass(frozen=True)
class Alias:
    """An engine's own name under which a row is also published.

    ``only`` selects label values; an alias of a single one has no label, any other has the
    row's. ``per`` names a gauge, recorded in the same payloads, by which the value is divided.
    """

    name: str
    only: tuple[str, ...] = ()
    per: str | None = None


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` lacks the ``<engine>:kvconnect_`` in front.

    ``source`` is the recorded name: the row's own, unless several rows publish parts of one
    recorded histogram. ``absent`` has the prefixes of engines that cannot record it. ``alike``:
    every rank of an engine counts the same requests or tokens, so one of them has the whole.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    when: str
    label: Label | None = None
    buckets: tuple[float, ...] = ()
    source: str = ""
    part: EntryPart = EntryPart.VALUE
    aliases: tuple[Alias, ...] = ()
    absent: tuple[str, ...] = ()
    alike: bool = False

    @property
    def recorded_as(self) -> str:
        """Name in the stats payload."""
        return self.source or self.name

    @property
    def section(self) -> str:
        """Section of the stats payload that holds it."""
        if self.part is not EntryPart.VALUE:
            return HISTOGRAMS
        return COUNTERS if self.kind == "counter" else GAUGES


@dataclass(frozen=True)
class Family:
    """One Prometheus family: a row under its own name or under one of its aliases."""

    name: str
    metric: Metric
    alias: Alias | None = None

    @property
    def label(self) -> str | None:
        """Name of the label, beside the engine's own labels."""
        if self.metric.label is None or (self.alias and len(self.alias.only) == 1):
            return None
        return self.metric.label.name

    @property
    def limit(self) -> int:
        """Limit of series for label values not in ``values``."""
        return self.metric.label.limit if self.metric.label else 0

    @property
    def values(self) -> tuple[str, ...]:
        """Label values in the payload that this family shows; ``""`` for an unlabelled row."""
        if self.alias and self.alias.only:
            return self.alias.only
        return self.metric.label.values if self.metric.label else ("",)

    @property
    def exposed(self) -> str:
        """Name in a scrape. The Prometheus client appends ``_total`` to counters."""
        return f"{self.name}_total" if self.metric.kind == "counter" else self.name


class RouterMetric(NamedTuple):
    """One metric of the router: its name after ``kvconnect_router_``, its kind, help, label names
    and, of a histogram, buckets."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
