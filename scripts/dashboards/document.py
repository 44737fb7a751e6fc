"""The documentation of the metrics, from the catalogue.

``python -m scripts.dashboards.document > docs/metrics.md`` writes it.
"""

from __future__ import annotations

import sys

from kvconnect.observability.metrics.catalog import CATALOG, SGLANG, VLLM, families
from kvconnect.observability.metrics.model import Family
from kvconnect.stats import SIZE_BUCKETS, TIME_BUCKETS

_INTRO = """\
# Metrics

Generated from `kvconnect/observability/metrics/catalog.py`.

- Names are those in a scrape of vLLM's `/metrics`. SGLang's begin with `sglang:` instead of
  `vllm:`; [SGLang](#sglang) says what else differs.
- Each series also has the engine's own labels (vLLM: `model_name`, `engine`).
- Each series exists from the first scrape on, with the value 0. Series of a `peer` begin with the
  first event of that peer.

## Three times

- **Wire** time: from an operation's first byte to its last byte, on one rank. Bytes divided by
  wire time is the speed of the copy.
- **Latency**: from the moment a load is requested until its blocks can be used, queueing
  included.
- **Exposed** time: how long the request waited. A load that runs beside other work has latency
  but no exposed time.

A hand-off has the same three times, measured on the decode side:

- **Wire** time is the time in which a request's pages moved from one rank to another. With push,
  pages are sent while prefill computes; the pauses between them are not counted.
- **Latency** is from the read request until the last page can be used. With push, it contains the
  prefill; with pull, it does not.
- **Exposed** time is what the hand-off adds to prefill: from the last computed page (with pull:
  from the read request) until the last page has arrived. With push, it is near 0 if the link is
  fast enough.
- **Wait** is from the read request until the first byte: queueing and, with push, the prefill of
  the first layers.

The label `role` names the side: prefill engines `send`, decode engines `recv`.

Bytes and wire time of a transfer type are those of the same operations, so a query can divide one
by the other:

```promql
# How fast is one copy?
increase(vllm:kvconnect_transfer_bytes_total[5m])
  / increase(vllm:kvconnect_transfer_seconds_total[5m])
# How much is moved per second?
rate(vllm:kvconnect_transfer_bytes_total[5m])
# What share of the requested tokens is found?
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
# Which three engines fail most often?
topk(3, rate(vllm:kvconnect_handoff_peer_failures_total[5m]) > 0)
# Why do hand-offs fail, as a share of all of them?
rate(vllm:kvconnect_handoff_failures_total[5m])
  / ignoring (cause) group_left
    sum without (outcome) (rate(vllm:kvconnect_handoff_received_requests_total[5m]))
```

- **vLLM's own counter.** `vllm:prompt_tokens_cached_by_source_total` counts the same tokens as
  `hit_tokens_total`, without those of preempted requests. Its label `source` is `host`, `disk`,
  `external_unspecified` (remote stores) or `p2p` (hand-offs).
- **Ranks.** With tensor parallelism, bytes, seconds and operations of all ranks are added up. So
  bytes divided by seconds is the mean speed of one rank. Metrics of connections are those of the
  first worker.
- **Idle engines.** An engine that runs no steps publishes nothing new: its gauges keep the values
  of its last step.
- **Peers.** `peer` is another engine's host and the beginning of its id, as in
  `10.1.2.3/7565b9d2`. It is `host:port` if a connection ends before the peer has sent its id. The
  first 32 peers have series of their own until the process ends; later ones are added up as
  `other`, so that the number of series is limited.
"""

_SGLANG = """\
## SGLang

With `--enable-metrics`, SGLang's own `/metrics` has the same metrics, under names that begin with
`sglang:kvconnect_`. Their labels are those of SGLang's scheduler metrics: `model_name`,
`engine_type`, `tp_rank`, `pp_rank`, `moe_ep_rank`, with data parallelism `dp_rank`, and those of
`--extra-metric-labels`. Three things differ:

- Each rank is a process that publishes its own numbers. Where the table says *all ranks
  together*, sum over `tp_rank` and `pp_rank`. Of requests and tokens, all ranks count the same:
  take the largest, with `max without (tp_rank, pp_rank, moe_ep_rank)`. As with SGLang's own
  metrics, of the ranks that share attention only the first publishes, unless
  `--enable-metrics-for-all-schedulers` is set.
- These are missing, because SGLang has no such event: {absent}.
- Prometheus may store `sglang:` as `sglang_`
  ([why](https://github.com/prometheus/client_python/issues/1177)).

`sglang:kvcache_transfer_latency` is the wire time of one request in seconds: the sum over its
chunks, observed once, on success only. It means the same for every transport and for layer-wise
sending. With different tensor parallelism on both sides, a rank observes a request once for each
rank that it sends to or receives from.

```promql
# Mean wire time of a request's KV cache, on the prefill side
increase(sglang:kvcache_transfer_latency_sum{{role="send"}}[5m])
  / increase(sglang:kvcache_transfer_latency_count{{role="send"}}[5m])
```
"""

_ALIASES = """\
## vLLM's names for the same facts

Dashboards that were made for vLLM's own offloading, its tiers and its NIXL connector keep
working. If another connector in the same process has registered a name, KVConnect leaves the name
to that connector and says so in the log.

- `vllm:kv_offload_cpu_cache_usage_perc` means what it means in vLLM: the share, 0 to 1, of host
  slots that transfers pin, not the share that is filled.
- `vllm:kv_offload_allocation_failure_total` counts attempts. KVConnect allocates block by block,
  so an attempt is a block.
- `vllm:kv_offload_tiering_*` have the label `transfer_type` where vLLM's have `tier`.
- One observation of `vllm:nixl_xfer_time_seconds` is one request on one decode rank, and one of
  `vllm:nixl_bytes_transferred` is one operation, as with vLLM's NIXL connector.

These names are missing, because KVConnect has no such event: `vllm:nixl_post_time_seconds`,
`vllm:nixl_num_descriptors`, `vllm:nixl_num_failed_notifications`,
`vllm:nixl_num_notifications_after_expiry`, `vllm:kv_offload_lookup_sync_delay_seconds` (no lookup
waits for a tier), and those of vLLM's tiers that count chunks and jobs.
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
