"""The documentation of the metrics, from the catalogue.

``python -m kvconnect.observability.metrics.document > docs/metrics.md`` writes it.
"""

from __future__ import annotations

import sys

from kvconnect.observability.metrics.catalog import CATALOG, SGLANG, VLLM, families
from kvconnect.observability.metrics.model import Family
from kvconnect.stats import SIZE_BUCKETS, TIME_BUCKETS

_INTRO = """\
# Metrics

Generated from `kvconnect/observability/metrics/catalog.py`. Names are shown as a scrape of
vLLM's `/metrics` shows them; SGLang's start with `sglang:` instead of `vllm:`
([what differs](#sglang)). Every series also has the engine's own labels (vLLM: `model_name`,
`engine`), and exists, as 0, from the first scrape on. Only those of a `peer` appear with it.

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

vLLM's own `vllm:prompt_tokens_cached_by_source_total` says the same as `hit_tokens_total`, for
requests that were not preempted: `source` is `host`, `disk` or, for `remote`,
`external_unspecified`; tokens of hand-offs are `p2p`.

Ranks add up: with tensor parallelism, bytes, seconds and operations are those of all ranks, so
bytes over seconds is the mean speed of one rank. An engine that does not step publishes nothing
new: its gauges keep the values of its last step. What workers know of their connections is shown
for the first of them.

`peer` is another engine's host and the beginning of its id, as in `10.1.2.3/7565b9d2`; `host:port`
if a connection ends before it has said its id. The first 32 that the serving process sees have
their own series until it ends; later ones are added up as `other`, so that engines which come and
go cannot fill the scrape.
"""

_SGLANG = """\
## SGLang

The same rows are on SGLang's own `/metrics` when it runs with `--enable-metrics`, under names that
start with `sglang:kvconnect_`. Their labels are those of SGLang's scheduler metrics: `model_name`,
`engine_type`, `tp_rank`, `pp_rank`, `moe_ep_rank`, with data parallelism `dp_rank`, and what
`--extra-metric-labels` adds. Three things differ:

- Every rank is a process that publishes its own numbers, so what the table says of all ranks
  together is a sum over `tp_rank` and `pp_rank`. As with SGLang's own metrics, of the ranks that
  share attention only the first publishes, unless `--enable-metrics-for-all-schedulers` is set.
- Not there, because SGLang has nothing like it: {absent}.
- Prometheus may store `sglang:` as `sglang_`, as it and SGLang's client library agree
  ([why](https://github.com/prometheus/client_python/issues/1177)).

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

Boards made for vLLM's own offloading, its tiers and NIXL's connector keep working. A name that
another connector in the same process has registered is left to that connector, and a log line says
so.

`vllm:kv_offload_cpu_cache_usage_perc` means what it means in vLLM: the share, 0 to 1, of host
slots that transfers under way pin, not the share that is filled.
`vllm:kv_offload_allocation_failure_total` counts attempts; KVConnect tries block by block, so an
attempt is a block. `vllm:kv_offload_tiering_*` have the label `transfer_type` where vLLM's have
`tier`. `vllm:nixl_xfer_time_seconds` and `vllm:nixl_bytes_transferred` are of one request (of one
operation) on one decode rank, as NIXL's.

Not there, because nothing here is the same fact: `vllm:nixl_post_time_seconds`,
`vllm:nixl_num_descriptors`, `vllm:nixl_num_failed_notifications`,
`vllm:nixl_num_notifications_after_expiry`; `vllm:kv_offload_lookup_sync_delay_seconds` (no lookup
waits for a tier); and of the tiers, what they count by chunk and by job.
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
