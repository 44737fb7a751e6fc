"""Every metric, one row each. Prometheus families, ``docs/metrics.md`` and tests derive from it.

To add a metric, add a row here and record it through :mod:`kvconnect.stats` under the row's
name. Label values are closed sets: every series exists from the first scrape, as 0.

``python -m kvconnect.metrics.catalog > docs/metrics.md`` writes the documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kvconnect.plan.jobs import QUARANTINED
from kvconnect.plan.ledger import Owner
from kvconnect.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
    TRANSFER_WIRE,
)
from kvconnect.types import FailureCause, Tier, TransferType

Kind = Literal["counter", "gauge", "histogram"]


class Part(Enum):
    """Which part of a recorded entry a row shows."""

    VALUE = "value"  # the number of a counter or gauge
    SUM = "sum"  # a histogram's sum
    COUNT = "count"  # a histogram's number of samples
    BUCKETS = "buckets"  # a histogram as such


@dataclass(frozen=True)
class Label:
    """A label name with all its values."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Alias:
    """Another full name, an engine's own, under which a row's fact is also published.

    ``only`` selects one label value, and the alias has no label; otherwise it has the row's.
    ``per`` names a gauge, recorded in the same payloads, by which the value is divided.
    """

    name: str
    only: str | None = None
    per: str | None = None


@dataclass(frozen=True)
class Metric:
    """One metric. ``name`` lacks the ``<engine>:kvconnect_`` in front.

    ``source`` is the name it is recorded under, the row's own unless the row shows a part of a
    histogram that is recorded once for several rows.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    when: str
    label: Label | None = None
    buckets: tuple[float, ...] = ()
    source: str = ""
    part: Part = Part.VALUE
    aliases: tuple[Alias, ...] = ()

    @property
    def recorded_as(self) -> str:
        """Name in the stats payload."""
        return self.source or self.name

    @property
    def section(self) -> str:
        """Section of the stats payload that holds it."""
        if self.part is not Part.VALUE:
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
        if self.metric.label is None or (self.alias and self.alias.only):
            return None
        return self.metric.label.name

    @property
    def values(self) -> tuple[str, ...]:
        """Label values in the payload that this family shows; ``""`` for an unlabelled row."""
        if self.alias and self.alias.only:
            return (self.alias.only,)
        return self.metric.label.values if self.metric.label else ("",)

    @property
    def exposed(self) -> str:
        """Name in a scrape: the Prometheus client appends ``_total`` to counters."""
        return f"{self.name}_total" if self.metric.kind == "counter" else self.name


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


_TYPE = Label("transfer_type", _values(TransferType))
_TIER = Label("tier", _values(Tier))
_CAUSE = Label("cause", _values(FailureCause))
_QUARANTINE = Label("cause", tuple(cause.value for cause in QUARANTINED))
_REASON = Label("reason", ("no_space", "busy"))
_OWNER = Label("owner", _values(Owner))
_LOAD = TransferType.CPU_TO_GPU.value
_STORE = TransferType.GPU_TO_CPU.value
_STEP = "an engine step ends"

# A table is read by rows: laid out by hand, not one argument per line.
# fmt: off
CATALOG: tuple[Metric, ...] = (
    Metric("transfer_bytes", "counter", "bytes", "Bytes moved, all ranks together.",
           "an operation finishes, by its bytes",
           label=_TYPE, source=TRANSFER_SIZE, part=Part.SUM,
           aliases=(Alias("vllm:kv_offload_load_bytes", only=_LOAD),
                    Alias("vllm:kv_offload_store_bytes", only=_STORE),
                    Alias("vllm:kv_offload_total_bytes"))),
    Metric("transfer_seconds", "counter", "seconds",
           "Wire time of the operations whose bytes were counted, all ranks together.",
           "an operation finishes, by its wire time",
           label=_TYPE, source=TRANSFER_WIRE, part=Part.SUM,
           aliases=(Alias("vllm:kv_offload_load_time", only=_LOAD),
                    Alias("vllm:kv_offload_store_time", only=_STORE),
                    Alias("vllm:kv_offload_total_time"))),
    Metric("transfer_operations", "counter", "operations",
           "Operations finished, all ranks together.", "an operation finishes",
           label=_TYPE, source=TRANSFER_SIZE, part=Part.COUNT),
    Metric("transfer_size_bytes", "histogram", "bytes",
           "Bytes of one operation on one rank.", "an operation finishes",
           label=_TYPE, buckets=SIZE_BUCKETS, part=Part.BUCKETS,
           aliases=(Alias("vllm:kv_offload_load_size", only=_LOAD),
                    Alias("vllm:kv_offload_store_size", only=_STORE),
                    Alias("vllm:kv_offload_size"))),
    Metric("transfer_wire_seconds", "histogram", "seconds",
           "Wire time of one operation on one rank.", "an operation finishes",
           label=_TYPE, buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("load_latency_seconds", "histogram", "seconds",
           "Latency of one request's load.", "the last rank reports a load done",
           label=_TIER, buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("load_exposed_seconds", "histogram", "seconds",
           "Exposed time of one request's load; of all loads of a step, if they ran inside it.",
           "a request that waited for a load can run",
           label=_TIER, buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("lookups", "counter", "requests",
           "Requests looked up at admission; a preempted one is admitted, and looked up, again.",
           "a request's lookup is decided"),
    Metric("query_tokens", "counter", "tokens",
           "Tokens asked for: those of the prompt beyond the device's own prefix hit.",
           "a request's lookup is decided"),
    Metric("hit_tokens", "counter", "tokens",
           "Tokens of `query_tokens` found, by where. A load that fails later does not undo it.",
           "a request's lookup is decided", label=_TIER),
    Metric("miss_tokens", "counter", "tokens",
           "Tokens of `query_tokens` found nowhere; hits of all tiers and misses add up to it.",
           "a request's lookup is decided"),
    Metric("evicted_blocks", "counter", "blocks",
           "Blocks dropped to make room.", "a tier evicts a block", label=_TIER),
    Metric("skipped_store_blocks", "counter", "blocks",
           "Blocks not stored: no room even after eviction, or too many stores under way.",
           "a store of a block is given up before it starts", label=_REASON,
           aliases=(Alias("vllm:kv_offload_allocation_failure", only="no_space"),)),
    Metric("failed_blocks", "counter", "blocks",
           "Blocks whose store or load failed: wrong digest, copy error, deadline, or gone.",
           "a job ends with failed blocks", label=_CAUSE),
    Metric("quarantined_blocks", "counter", "blocks",
           "Stored blocks never to be used again, because their bytes cannot be trusted.",
           "a copy is quarantined", label=_QUARANTINE),
    Metric("failed_requests", "counter", "requests",
           "Requests whose load failed and that were given back for recomputation.",
           "a request's load fails", label=_CAUSE),
    Metric("recomputed_tokens", "counter", "tokens",
           "Tokens promised by a hit and computed after all, because their load failed.",
           "a request's load fails"),
    Metric("expired_jobs", "counter", "jobs",
           "Jobs that were not done by their deadline.", "a job's deadline passes", label=_TYPE),
    Metric("host_blocks_used", "gauge", "blocks",
           "Host slots that hold a block.", _STEP),
    Metric("host_blocks_capacity", "gauge", "blocks", "Host slots there are.", _STEP),
    Metric("host_blocks_pinned", "gauge", "blocks",
           "Host slots that a store or load under way keeps from being evicted.", _STEP,
           aliases=(Alias("vllm:kv_offload_cpu_cache_usage_perc", per="host_blocks_capacity"),)),
    Metric("host_bytes_used", "gauge", "bytes",
           "Host memory in slots that hold a block, all ranks together.", _STEP),
    Metric("host_bytes_capacity", "gauge", "bytes",
           "Host memory set aside for blocks, all ranks together.", _STEP),
    Metric("ledger_held_blocks", "gauge", "blocks",
           "Device blocks held by jobs; not back at 0 on an idle engine means a leak.", _STEP,
           label=_OWNER),
    Metric("ledger_oldest_hold_seconds", "gauge", "seconds",
           "Age of the oldest hold; beyond the longest deadline means a leak.", _STEP),
    Metric("jobs_in_flight", "gauge", "jobs",
           "Jobs submitted and not yet reported done by every rank.", _STEP, label=_TYPE),
)
# fmt: on


def families(prefix: str) -> Iterator[Family]:
    """Yield the families of the engine whose metric names start with ``prefix``.

    Args:
        prefix: the engine's, with its colon: ``"vllm:"``.
    """
    for metric in CATALOG:
        yield Family(f"{prefix}kvconnect_{metric.name}", metric)
    for metric in CATALOG:
        for alias in metric.aliases:
            if alias.name.startswith(prefix):
                yield Family(alias.name, metric, alias)


_INTRO = """\
# Metrics

Generated from `kvconnect/metrics/catalog.py`. Names are shown as a scrape of vLLM's `/metrics`
shows them. Every series also has the engine's own labels (`model_name`, `engine`), and exists,
as 0, from the first scrape on.

## Three times that are never mixed

- **Wire** time: from an operation's first byte to its last byte, on one rank. Bytes over wire
  time is the speed of the copy.
- **Latency**: from the moment a load was asked for to the moment its blocks are usable, queueing
  included.
- **Exposed** time: what the request really waited for. A load that is hidden behind other work
  has latency but no exposed time.

Bytes and wire time of a transfer type are always those of the same operations. Rates and means
are for the query to compute:

```promql
# How fast is one copy?
increase(vllm:kvconnect_transfer_bytes_total[5m])
  / increase(vllm:kvconnect_transfer_seconds_total[5m])
# How much is moved per second?
rate(vllm:kvconnect_transfer_bytes_total[5m])
# What share of what was asked for is found?
sum without (tier) (rate(vllm:kvconnect_hit_tokens_total[5m]))
  / rate(vllm:kvconnect_query_tokens_total[5m])
# How long do the slowest 1 % of the requests wait for their load?
histogram_quantile(0.99, rate(vllm:kvconnect_load_exposed_seconds_bucket[5m]))
```

Ranks add up: with tensor parallelism, bytes, seconds and operations are those of all ranks, so
bytes over seconds is the mean speed of one rank. An engine that does not step publishes nothing
new: its gauges keep the values of its last step.
"""

_ALIASES = """\
## vLLM's names for the same facts

Boards made for vLLM's own offloading keep working. A name that another connector in the same
process has already registered is left to that connector, and a log line says so.

`vllm:kv_offload_cpu_cache_usage_perc` means what it means in vLLM: the share, 0 to 1, of host
slots that transfers under way pin, not the share that is filled.
`vllm:kv_offload_allocation_failure_total` counts attempts; KVConnect tries block by block, so an
attempt is a block.
"""


def markdown_table() -> str:
    """Return the text of ``docs/metrics.md``."""
    own = [family for family in families("vllm:") if family.alias is None]
    aliases = [family for family in families("vllm:") if family.alias is not None]
    lines = [_INTRO, "## Metrics", "", "| name | kind | labels | unit | meaning | moves when |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [_row(family) for family in own]
    lines += ["", _ALIASES, "| name | kind | labels | is |", "|---|---|---|---|"]
    lines += [_alias_row(family) for family in aliases]
    lines += ["", "## Buckets", "", "Upper bounds, inclusive; `+Inf` follows.", ""]
    lines += [f"- bytes: {_bounds(SIZE_BUCKETS)}", f"- seconds: {_bounds(TIME_BUCKETS)}"]
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    row = family.metric
    cells = (f"`{family.exposed}`", row.kind, _labels(family), row.unit, row.help, row.when)
    return f"| {' | '.join(cells)} |"


def _alias_row(family: Family) -> str:
    alias = family.alias
    assert alias is not None
    fact = f"`{family.metric.name}`"
    if alias.only and family.metric.label:
        fact += f" with `{family.metric.label.name}` = `{alias.only}`"
    if alias.per:
        fact += f" / `{alias.per}`"
    return f"| `{family.exposed}` | {family.metric.kind} | {_labels(family)} | {fact} |"


def _labels(family: Family) -> str:
    if family.label is None:
        return ""
    return f"`{family.label}`: " + ", ".join(f"`{value}`" for value in family.values)


def _bounds(buckets: tuple[float, ...]) -> str:
    return ", ".join(f"{bound:g}" for bound in buckets)


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
