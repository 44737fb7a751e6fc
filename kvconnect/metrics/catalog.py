"""Every metric, one row each. Prometheus families, ``docs/metrics.md`` and tests derive from it.

To add a metric, add a row here and record it through :mod:`kvconnect.stats` under the row's
name. Label values are closed sets, so that every series exists from the first scrape, as 0. Only
peers cannot be listed in advance: their label is bounded, and its series appear with them.

``python -m kvconnect.metrics.catalog > docs/metrics.md`` writes the documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum

from kvconnect.metrics.model import Alias, Family, Label, Metric, Part
from kvconnect.plan.jobs import QUARANTINED
from kvconnect.plan.ledger import Owner
from kvconnect.stats import (
    MOST_LABELS,
    OTHER,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
    TRANSFER_WIRE,
)
from kvconnect.types import FailureCause, Tier, TransferType


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


_TYPE = Label("transfer_type", _values(TransferType))
_JOBS = ("GPU_to_CPU", "CPU_to_GPU", "SEND", "RECV")  # the plan's; tiers below host have none
_JOB = Label("transfer_type", _JOBS)
_TIER = Label("tier", _values(Tier))
_CAUSE = Label("cause", _values(FailureCause))
_QUARANTINE = Label("cause", tuple(cause.value for cause in QUARANTINED))
_REASON = Label("reason", ("no_space", "busy"))
_OWNER = Label("owner", _values(Owner))
_STORE_OUTCOME = Label("outcome", ("corrupt", "size", "full", "limited", "failed", "unavailable"))
_SENT = Label("outcome", ("done", "expired", "aborted"))
_RECEIVED = Label("outcome", ("done", "failed", "aborted"))
_ROLE = Label("role", ("send", "recv"))
_AGREEMENT = ("protocol", "format", "groups", "block_size", "layers", "heads", "packing")
_ACCESS = ("auth", "tls", "address", "ticket", "params", "transport", "rate")
_FIELD = Label("field", (*_AGREEMENT, *_ACCESS, OTHER))
_STATE = Label("state", ("up", "connecting"))
_TRANSPORT = Label("transport", ("tcp", "nixl"))
_PEER = Label("peer", (OTHER,), limit=MOST_LABELS)
_LOAD = (TransferType.CPU_TO_GPU.value,)
_STORE = (TransferType.GPU_TO_CPU.value,)
_OFFLOAD = _STORE + _LOAD
_STEP = "an engine step ends"
_PEERS = "the first worker gains or loses a peer"

VLLM, SGLANG = "vllm:", "sglang:"
"""Prefixes of the engines' metric names."""

# A table is read by rows: laid out by hand, not one argument per line.
# fmt: off
CATALOG: tuple[Metric, ...] = (
    Metric("transfer_bytes", "counter", "bytes", "Bytes moved, all ranks together.",
           "an operation finishes, by its bytes",
           label=_TYPE, source=TRANSFER_SIZE, part=Part.SUM,
           aliases=(Alias("vllm:kv_offload_load_bytes", only=_LOAD),
                    Alias("vllm:kv_offload_store_bytes", only=_STORE),
                    Alias("vllm:kv_offload_total_bytes", only=_OFFLOAD))),
    Metric("transfer_seconds", "counter", "seconds",
           "Wire time of the operations whose bytes were counted, all ranks together.",
           "an operation finishes, by its wire time",
           label=_TYPE, source=TRANSFER_WIRE, part=Part.SUM,
           aliases=(Alias("vllm:kv_offload_load_time", only=_LOAD),
                    Alias("vllm:kv_offload_store_time", only=_STORE),
                    Alias("vllm:kv_offload_total_time", only=_OFFLOAD))),
    Metric("transfer_operations", "counter", "operations",
           "Operations finished, all ranks together.", "an operation finishes",
           label=_TYPE, source=TRANSFER_SIZE, part=Part.COUNT),
    Metric("transfer_size_bytes", "histogram", "bytes",
           "Bytes of one operation on one rank.", "an operation finishes",
           label=_TYPE, buckets=SIZE_BUCKETS, part=Part.BUCKETS,
           aliases=(Alias("vllm:kv_offload_load_size", only=_LOAD),
                    Alias("vllm:kv_offload_store_size", only=_STORE),
                    Alias("vllm:kv_offload_size", only=_OFFLOAD))),
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
           aliases=(Alias("vllm:kv_offload_allocation_failure", only=("no_space",)),)),
    Metric("failed_blocks", "counter", "blocks",
           "Blocks whose store or load failed: wrong digest, copy error, deadline, or gone.",
           "a job ends with failed blocks", label=_CAUSE),
    Metric("quarantined_blocks", "counter", "blocks",
           "Stored blocks never to be used again, because their bytes cannot be trusted.",
           "a copy is quarantined", label=_QUARANTINE),
    Metric("failed_requests", "counter", "requests",
           "Requests whose load failed: given back for recomputation, in SGLang aborted.",
           "a request's load fails", label=_CAUSE),
    Metric("recomputed_tokens", "counter", "tokens",
           "Tokens promised by a hit and computed after all, because their load failed.",
           "a request's load fails", absent=(SGLANG,)),
    Metric("expired_jobs", "counter", "jobs",
           "Jobs that were not done by their deadline.", "a job's deadline passes", label=_JOB),
    Metric("store_failed_blocks", "counter", "blocks",
           "Blocks that a tier below host memory did not take or give, and why.",
           "a call to the tier ends", label=_STORE_OUTCOME),
    Metric("store_evicted_blocks", "counter", "blocks",
           "Blocks dropped below host memory to make room or for their age.",
           "a tier below host memory drops blocks"),
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
           "Device blocks held by jobs and leases; not back at 0 on an idle engine means a leak.",
           _STEP,
           label=_OWNER),
    Metric("ledger_oldest_hold_seconds", "gauge", "seconds",
           "Age of the oldest hold; beyond the longest deadline means a leak.", _STEP),
    Metric("jobs_in_flight", "gauge", "jobs",
           "Jobs submitted and not yet reported done by every rank.", _STEP, label=_JOB),
    Metric("handoff_sent_requests", "counter", "requests",
           "Requests offered to decode engines, by how their lease ended.",
           "a lease ends", label=_SENT),
    Metric("handoff_received_requests", "counter", "requests",
           "Requests asked for at prefill engines, by how that ended.",
           "the last rank reports a hand-off", label=_RECEIVED),
    Metric("handoff_failures", "counter", "requests",
           "Received requests with outcome `failed`, by the first cause found.",
           "the last rank reports a failed hand-off", label=_CAUSE),
    Metric("handoff_expired_leases", "counter", "leases",
           "Leases that ran out before a decode engine had everything.",
           "a lease's deadline passes", absent=(SGLANG,)),
    Metric("handoff_refused", "counter", "refusals",
           "Peers, tickets and requests turned away, by what did not fit.",
           "this side turns one away", label=_FIELD),
    Metric("handoff_digest_failed_blocks", "counter", "blocks",
           "Received blocks whose bytes differ from those sent, all ranks together.",
           "a wrong digest is found"),
    Metric("handoff_early_wants", "counter", "asks",
           "Asked with a card, so possibly before the prefill engine knew of the request (push), "
           "on each rank.",
           "a decode worker asks"),
    Metric("handoff_late_wants", "counter", "asks",
           "Asked with a finished prefill's ticket (pull), on each rank.",
           "a decode worker asks"),
    Metric("handoff_wire_seconds", "histogram", "seconds",
           "Wire time of one request from one rank to another: sum over what was sent or received "
           "of it.",
           "a rank has sent or received a request", label=_ROLE,
           buckets=TIME_BUCKETS, part=Part.BUCKETS,
           aliases=(Alias("sglang:kvcache_transfer_latency"),)),
    Metric("handoff_latency_seconds", "histogram", "seconds",
           "Latency of one request's hand-off, from asked to usable; successful ones only.",
           "the last rank reports a hand-off done", buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("handoff_exposed_seconds", "histogram", "seconds",
           "Exposed time of one request on one rank: from its last page being computed (from "
           "asking, if that came later) until everything had arrived.",
           "a rank has received a request",
           buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("handoff_wait_seconds", "histogram", "seconds",
           "From asking until the first byte, on one rank.",
           "the first byte of a request arrives", buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("handoff_handshake_seconds", "histogram", "seconds",
           "From connecting to a peer until both sides have agreed.",
           "a handshake ends well", buckets=TIME_BUCKETS, part=Part.BUCKETS),
    Metric("handoff_peers", "gauge", "peers",
           "Workers of other engines that this engine's first worker talks to.", _PEERS,
           label=_STATE),
    Metric("handoff_leases", "gauge", "leases",
           "Live leases: requests whose blocks are kept for a decode engine.", _STEP,
           absent=(SGLANG,)),
    Metric("handoff_transport_peers", "gauge", "peers",
           "Prefill workers that this engine's first worker reads from, by the transport that "
           "was chosen.", _PEERS,
           label=_TRANSPORT),
    Metric("handoff_transport_bytes_per_second", "gauge", "bytes per second",
           "Speed measured with real bytes when the first worker connected to its last peer.",
           "the first worker connects to a peer", label=_TRANSPORT),
    Metric("handoff_peer_bytes", "counter", "bytes",
           "Bytes sent to and received from one engine, all ranks together.",
           "pages are sent or received", label=_PEER),
    Metric("handoff_peer_seconds", "counter", "seconds",
           "Wire time of the bytes in `handoff_peer_bytes`, all ranks together.",
           "pages are sent or received", label=_PEER),
    Metric("handoff_peer_failures", "counter", "failures",
           "Lost connections and failed hand-offs with one engine, on each rank.",
           "a connection or a hand-off fails", label=_PEER),
)
# fmt: on


def families(prefix: str) -> Iterator[Family]:
    """Yield the families of the engine whose metric names start with ``prefix``.

    Args:
        prefix: the engine's, with its colon: ``VLLM`` or ``SGLANG``.
    """
    rows = [metric for metric in CATALOG if prefix not in metric.absent]
    for metric in rows:
        yield Family(f"{prefix}kvconnect_{metric.name}", metric)
    for metric in rows:
        for alias in metric.aliases:
            if alias.name.startswith(prefix):
                yield Family(alias.name, metric, alias)


_INTRO = """\
# Metrics

Generated from `kvconnect/metrics/catalog.py`. Names are shown as a scrape of vLLM's `/metrics`
shows them; SGLang's start with `sglang:` instead of `vllm:` ([what differs](#sglang)). Every
series also has the engine's own labels (vLLM: `model_name`, `engine`), and exists, as 0, from the
first scrape on. Only those of a `peer` appear with it.

## Three times that are never mixed

- **Wire** time: from an operation's first byte to its last byte, on one rank. Bytes over wire
  time is the speed of the copy.
- **Latency**: from the moment a load was asked for to the moment its blocks are usable, queueing
  included.
- **Exposed** time: what the request really waited for. A load that is hidden behind other work
  has latency but no exposed time.

A hand-off has the same three, on the decode side:

- **Wire** time adds up what a request's pages took from one rank to another. Pages that leave
  while the prefill still computes have pauses between them, which do not count.
- **Latency** runs from asking the prefill engine to the last page being usable. Who asks early
  (push) also waits for the prefill; who asks late (pull) waits for the pages alone.
- **Exposed** time is what the hand-off adds to the prefill: from the last page being computed
  (for a pull: from asking) until everything has arrived. A perfect push has next to none.
- *Wait* is from asking until the first byte: queueing and, with push, the first layers' prefill.

`role` is the side of the wire: prefill engines `send`, decode engines `recv`.

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
# Which part of the wire time is not hidden behind prefill? (decode side)
  (increase(vllm:kvconnect_handoff_exposed_seconds_sum[5m])
    / increase(vllm:kvconnect_handoff_exposed_seconds_count[5m]))
/ ignoring (role)
  (increase(vllm:kvconnect_handoff_wire_seconds_sum{role="recv"}[5m])
    / increase(vllm:kvconnect_handoff_wire_seconds_count{role="recv"}[5m]))
# How fast is the wire to each engine?
increase(vllm:kvconnect_handoff_peer_bytes_total[5m])
  / increase(vllm:kvconnect_handoff_peer_seconds_total[5m])
# Which engines are trouble?
topk(3, rate(vllm:kvconnect_handoff_peer_failures_total[5m]) > 0)
# Why do hand-offs fail, as a share of all of them?
rate(vllm:kvconnect_handoff_failures_total[5m])
  / ignoring (cause) group_left
    sum without (outcome) (rate(vllm:kvconnect_handoff_received_requests_total[5m]))
```

Ranks add up: with tensor parallelism, bytes, seconds and operations are those of all ranks, so
bytes over seconds is the mean speed of one rank. An engine that does not step publishes nothing
new: its gauges keep the values of its last step. What workers know of their connections is shown
for the first of them.

`peer` is the `host:port` at which another engine's first worker listens. The first 32 that the
serving process sees have their own series until it ends; later ones are added up as `other`, so
that engines which come and go cannot fill the scrape.
"""

_SGLANG = """\
## SGLang

The same rows are on SGLang's own `/metrics` when it runs with `--enable-metrics`, under names that
start with `sglang:kvconnect_`. Their labels are those of SGLang's scheduler metrics: `model_name`,
`engine_type`, `tp_rank`, `pp_rank`, `moe_ep_rank`, with data parallelism `dp_rank`, and what
`--extra-metric-labels` adds. Two things differ:

- Every rank is a process that publishes its own numbers, so what the table says of all ranks
  together is a sum over `tp_rank` and `pp_rank`. As with SGLang's own metrics, of the ranks that
  share attention only the first publishes, unless `--enable-metrics-for-all-schedulers` is set.
- Not there, because SGLang has nothing like it: {absent}.

`sglang:kvcache_transfer_latency` is the wire time of one request in seconds: the active times of
all its chunks added up, observed once and on success only. It means the same for every transport,
and layer-wise sending does not make it longer. With different tensor parallelism on both sides,
one request is as many observations as ranks it goes to or comes from.

```promql
# Mean wire time of a request's KV cache, on the prefill side
increase(sglang:kvcache_transfer_latency_sum{{role="send"}}[5m])
  / increase(sglang:kvcache_transfer_latency_count{{role="send"}}[5m])
```
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
    lines = [_INTRO, "## Metrics", "", "| name | kind | labels | unit | meaning | moves when |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [_row(family) for family in families(VLLM) if family.alias is None]
    absent = ", ".join(f"`{row.name}`" for row in CATALOG if SGLANG in row.absent)
    lines += ["", _SGLANG.format(absent=absent), *_alias_table(SGLANG)]
    lines += ["", _ALIASES, *_alias_table(VLLM)]
    lines += ["", "## Buckets", "", "Upper bounds, inclusive; `+Inf` follows.", ""]
    lines += [f"- bytes: {_bounds(SIZE_BUCKETS)}", f"- seconds: {_bounds(TIME_BUCKETS)}"]
    return "\n".join(lines) + "\n"


def _row(family: Family) -> str:
    row = family.metric
    cells = (f"`{family.exposed}`", row.kind, _labels(family), row.unit, row.help, row.when)
    return f"| {' | '.join(cells)} |"


def _alias_table(prefix: str) -> list[str]:
    rows = [_alias_row(family) for family in families(prefix) if family.alias is not None]
    return ["| name | kind | labels | is |", "|---|---|---|---|", *rows]


def _alias_row(family: Family) -> str:
    alias = family.alias
    assert alias is not None
    fact = f"`{family.metric.name}`"
    if alias.only and family.metric.label:
        values = " or ".join(f"`{value}`" for value in alias.only)
        fact += f" with `{family.metric.label.name}` = {values}"
    if alias.per:
        fact += f" / `{alias.per}`"
    return f"| `{family.exposed}` | {family.metric.kind} | {_labels(family)} | {fact} |"


def _labels(family: Family) -> str:
    if family.label is None:
        return ""
    values = ", ".join(f"`{value}`" for value in family.values)
    seen = f"up to {family.limit} as seen, " if family.limit else ""
    return f"`{family.label}`: {seen}{values}"


def _bounds(buckets: tuple[float, ...]) -> str:
    return ", ".join(f"{bound:g}" for bound in buckets)


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
