"""The metric catalogue of engines: one row per metric.

Prometheus families, ``docs/metrics.md`` and tests are derived from it. To add a metric, add a row
and record it through :mod:`kvconnect.stats` under the row's name. Label values are closed sets, so
every series exists from the first scrape, as 0. Only the label ``peer`` is open: it is bounded, and
a peer's series appears when the peer is first seen.

``python -m scripts.dashboards.document > docs/metrics.md`` writes the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from kvconnect.observability.metrics.model import Alias, EntryPart, Family, Label, Metric
from kvconnect.offload.hints.outcomes import CACHE_HINT_OUTCOMES
from kvconnect.offload.hints.plan import KEPT
from kvconnect.offload.index import QUARANTINED
from kvconnect.offload.ledger import Owner
from kvconnect.protocol.cache_hints import CacheHint, IgnoredHint
from kvconnect.protocol.hello import REFUSAL_FIELDS
from kvconnect.stats import (
    MOST_LABELS,
    OTHER,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
    TRANSFER_WIRE,
)
from kvconnect.threads import ThreadKind
from kvconnect.tiers.cost_model import LoadReason
from kvconnect.types import FailureCause, PromptSource, Tier, TransferType


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


_TYPE = Label("transfer_type", _values(TransferType))
_JOBS = ("GPU_to_CPU", "CPU_to_GPU", "SEND", "RECV")  # secondary tiers have counters of their own
_JOB = Label("transfer_type", _JOBS)
_TIER = Label("tier", _values(Tier))
_HOST = Label("tier", (Tier.HOST.value,))
_LOWER = (Tier.DISK.value, Tier.PEER.value, Tier.REMOTE.value)
_SECONDARY = Label("tier", _LOWER)
_SOURCE = Label("source", _values(PromptSource))
_DECISION = Label("reason", (*_values(LoadReason), "hinted", "late", "no_space"))
_HANDOFF_CAUSE = Label("cause", _values(FailureCause))
_CAUSE = Label("cause", tuple(c for c in _values(FailureCause) if c != FailureCause.PROMPT.value))
_QUARANTINE = Label("cause", tuple(cause.value for cause in QUARANTINED))
_REASON = Label("reason", ("no_space", "busy"))
_HINT = Label("hint", _values(CacheHint))
_KEPT_BY = Label("hint", tuple(hint.value for hint in KEPT))
_IGNORED_HINT = Label("reason", _values(IgnoredHint))
_HINT_OUTCOME = Label("outcome", CACHE_HINT_OUTCOMES)
_OWNER = Label("owner", _values(Owner))
_STORE_OUTCOME = Label(
    "outcome", ("corrupt", "size", "full", "limited", "failed", "late", "unavailable")
)
_SENT = Label("outcome", ("done", "expired", "aborted"))
_RECEIVED = Label("outcome", ("done", "failed", "aborted"))
_ROLE = Label("role", ("send", "recv"))
_FIELD = Label("field", (*sorted(REFUSAL_FIELDS - {OTHER}), OTHER))
_STATE = Label("state", ("up", "connecting"))
_TRANSPORT = Label("transport", ("tcp", "nixl"))
_THREAD = Label("thread", _values(ThreadKind))
_PEER = Label("peer", (OTHER,), limit=MOST_LABELS)
_LOAD = (TransferType.CPU_TO_GPU.value,)
_STORE = (TransferType.GPU_TO_CPU.value,)
_OFFLOAD = _STORE + _LOAD
_RECV = (TransferType.RECV.value,)
_UP = tuple(f"{tier.name}_to_CPU" for tier in (Tier.DISK, Tier.PEER, Tier.REMOTE))
_DOWN = (TransferType.CPU_TO_DISK.value, TransferType.CPU_TO_REMOTE.value)
_STEP = "an engine step ends"
_PEERS = "the first worker gains or loses a peer"

VLLM, SGLANG = "vllm:", "sglang:"
"""Prefixes of the engines' metric names."""

# Laid out by hand, because a table is read by rows.
# fmt: off
CATALOG: tuple[Metric, ...] = (
    Metric("transfer_bytes", "counter", "bytes", "Bytes moved, all ranks together.",
           "an operation finishes, by its bytes",
           label=_TYPE, source=TRANSFER_SIZE, part=EntryPart.SUM,
           aliases=(Alias("vllm:kv_offload_load_bytes", only=_LOAD),
                    Alias("vllm:kv_offload_store_bytes", only=_STORE),
                    Alias("vllm:kv_offload_total_bytes", only=_OFFLOAD),
                    Alias("vllm:kv_offload_tiering_read_bytes", only=_UP),
                    Alias("vllm:kv_offload_tiering_write_bytes", only=_DOWN))),
    Metric("transfer_seconds", "counter", "seconds",
           "Wire time of the operations whose bytes were counted, all ranks together.",
           "an operation finishes, by its wire time",
           label=_TYPE, source=TRANSFER_WIRE, part=EntryPart.SUM,
           aliases=(Alias("vllm:kv_offload_load_time", only=_LOAD),
                    Alias("vllm:kv_offload_store_time", only=_STORE),
                    Alias("vllm:kv_offload_total_time", only=_OFFLOAD),
                    Alias("vllm:kv_offload_tiering_read_time", only=_UP),
                    Alias("vllm:kv_offload_tiering_write_time", only=_DOWN))),
    Metric("transfer_operations", "counter", "operations",
           "Operations finished, all ranks together.", "an operation finishes",
           label=_TYPE, source=TRANSFER_SIZE, part=EntryPart.COUNT),
    Metric("transfer_size_bytes", "histogram", "bytes",
           "Bytes of one operation on one rank.", "an operation finishes",
           label=_TYPE, buckets=SIZE_BUCKETS, part=EntryPart.BUCKETS,
           aliases=(Alias("vllm:kv_offload_load_size", only=_LOAD),
                    Alias("vllm:kv_offload_store_size", only=_STORE),
                    Alias("vllm:kv_offload_size", only=_OFFLOAD),
                    Alias("vllm:nixl_bytes_transferred", only=_RECV))),
    Metric("transfer_wire_seconds", "histogram", "seconds",
           "Wire time of one operation on one rank.", "an operation finishes",
           label=_TYPE, buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("load_latency_seconds", "histogram", "seconds",
           "Latency of one request's load.", "the last rank reports a load done",
           label=_TIER, buckets=TIME_BUCKETS, part=EntryPart.BUCKETS, alike=True),
    Metric("load_exposed_seconds", "histogram", "seconds",
           "Exposed time of one request's load, or of all loads that ran inside one step. "
           "Waits inside the GPU's own queue are not counted.",
           "a request that waited for a load can run",
           label=_TIER, buckets=TIME_BUCKETS, part=EntryPart.BUCKETS,
           aliases=(Alias("vllm:kv_offload_lookup_async_delay_seconds", only=_LOWER),), alike=True),
    Metric("lookups", "counter", "requests",
           "Requests looked up at admission; a preempted one is admitted, and looked up, again.",
           "a request's lookup is decided", alike=True),
    Metric("query_tokens", "counter", "tokens",
           "Prompt tokens beyond the device's own prefix hit.",
           "a request's lookup is decided", alike=True),
    Metric("hit_tokens", "counter", "tokens",
           "Tokens of `query_tokens` found, by tier. A load that fails later does not lower it.",
           "a request's lookup is decided", label=_TIER, alike=True),
    Metric("miss_tokens", "counter", "tokens",
           "Tokens of `query_tokens` found in no tier. Hits of all tiers and misses add up to it.",
           "a request's lookup is decided", alike=True),
    Metric("evicted_blocks", "counter", "blocks",
           "Blocks dropped to make room.", "a tier evicts a block", label=_HOST),
    Metric("skipped_store_blocks", "counter", "blocks",
           "Blocks not stored: no room even after eviction, or too many stores in flight.",
           "a store of a block is given up before it starts", label=_REASON,
           aliases=(Alias("vllm:kv_offload_allocation_failure", only=("no_space",)),)),
    Metric("cache_hints", "counter", "hints",
           "Hints of requests on their cached blocks, of those that were understood.",
           "a request arrives", label=_HINT, absent=(SGLANG,)),
    Metric("ignored_cache_hints", "counter", "hints",
           "Hints that were ignored: `unknown` name, `invalid` value or ticket of a `source`, or "
           "in `conflict` with another hint of the request.",
           "a request arrives", label=_IGNORED_HINT, absent=(SGLANG,)),
    Metric("cache_hint_blocks", "counter", "blocks",
           "Blocks of prompts with hints, by outcome. `refused_share` and `refused_tenant` exceed "
           "`pin_share`, of all requests or of one `cache_salt`; `expired` are kept no longer; "
           "`missing` are not in host memory, nor in a tier from which they are dropped; `stayed`: "
           "a tier could not drop them.",
           "a request with hints ends, its blocks are stored and removed, or their time is over",
           label=_HINT_OUTCOME, absent=(SGLANG,)),
    Metric("failed_blocks", "counter", "blocks",
           "Blocks whose store or load failed: wrong digest, copy error, deadline, or evicted.",
           "a job ends with failed blocks", label=_CAUSE),
    Metric("quarantined_blocks", "counter", "blocks",
           "Stored blocks that are never used again, because their bytes are not trusted.",
           "a copy is quarantined", label=_QUARANTINE),
    Metric("failed_requests", "counter", "requests",
           "Requests whose load failed. vLLM recomputes them; SGLang aborts them.",
           "a request's load fails", label=_CAUSE, alike=True),
    Metric("prompt_tokens", "counter", "tokens",
           "Prompt tokens of finished requests by where their KV came from. Sources add up to the "
           "prompts.",
           "a request ends", label=_SOURCE, absent=(SGLANG,)),
    Metric("recomputed_tokens", "counter", "tokens",
           "Tokens of a hit that were recomputed because their load failed.",
           "a request's load fails", absent=(SGLANG,)),
    Metric("expired_jobs", "counter", "jobs",
           "Jobs that missed their deadline.", "a job's deadline passes", label=_JOB),
    Metric("store_failed_blocks", "counter", "blocks",
           "Blocks that a secondary tier failed to store, return or remove, by reason.",
           "a call to the tier ends", label=_STORE_OUTCOME),
    Metric("store_evicted_blocks", "counter", "blocks",
           "Blocks that a disk or remote tier evicted, for room or for age.",
           "a disk or remote tier evicts blocks"),
    Metric("tier_lookups", "counter", "requests",
           "Requests looked up in the secondary tiers.",
           "a request's first lookup starts", alike=True),
    Metric("tier_decisions", "counter", "requests",
           "Lookups that hit a secondary tier, by decision: `load` prefetches; `probe` and "
           "`unknown` prefetch a few blocks to measure the tier; `recompute` is faster than the "
           "tier; `hinted`: a request's hint asked for the prefetch; `no_space` found host memory "
           "full; `late` exceeded `wait_s`.",
           "a lookup is decided", label=_DECISION, absent=(SGLANG,),
           aliases=(Alias("vllm:kv_offload_tiering_promotion_allocation_failures",
                          only=("no_space",)),)),
    Metric("tier_written_blocks", "counter", "blocks",
           "Blocks of the host tier handed to write-back.",
           "a write-back job is handed to the workers"),
    Metric("tier_skipped_blocks", "counter", "blocks",
           "Blocks not written back, because write-back is behind.",
           "a block is stored in the host tier",
           aliases=(Alias("vllm:kv_offload_tiering_backpressure_blocks_dropped"),)),
    Metric("tier_waiting_requests", "gauge", "requests",
           "Requests that wait for a secondary tier.", _STEP, absent=(SGLANG,)),
    Metric("tier_jobs_in_flight", "gauge", "jobs",
           "Lookups, prefetches, write-backs and removals not yet answered by every rank.", _STEP),
    Metric("peer_refused_blocks", "counter", "blocks",
           "Blocks that another engine asked for and that were not sent, because as much is being "
           "sent as may be.",
           "a peer asks for blocks"),
    Metric("tier_available", "gauge", "tiers",
           "1 while the first rank uses a tier, 0 while its circuit breaker is open, or while no "
           "peer can be asked.",
           "a tier is used", label=_SECONDARY),
    Metric("tier_bytes_used", "gauge", "bytes",
           "Bytes that a tier of the first rank holds; 0 if only a server knows.",
           "a tier is used", label=_SECONDARY),
    Metric("tier_bytes_capacity", "gauge", "bytes",
           "Bytes that a tier of the first rank may hold; 0 if only a server knows.",
           "a tier is used", label=_SECONDARY),
    Metric("host_blocks_used", "gauge", "blocks",
           "Host slots that hold a block.", _STEP),
    Metric("host_blocks_capacity", "gauge", "blocks", "Host slots in total.", _STEP),
    Metric("host_blocks_pinned", "gauge", "blocks",
           "Host slots that a store or load in flight protects from eviction.", _STEP,
           aliases=(Alias("vllm:kv_offload_cpu_cache_usage_perc", per="host_blocks_capacity"),)),
    Metric("host_blocks_kept", "gauge", "blocks",
           "Host slots that requests have pinned or retained.", _STEP, label=_KEPT_BY,
           absent=(SGLANG,)),
    Metric("host_bytes_used", "gauge", "bytes",
           "Host memory in slots that hold a block, all ranks together.", _STEP),
    Metric("host_bytes_capacity", "gauge", "bytes",
           "Host memory set aside for blocks, all ranks together.", _STEP),
    Metric("ledger_held_blocks", "gauge", "blocks",
           "Device blocks held by jobs and leases. Above 0 on an idle engine means a leak.",
           _STEP,
           label=_OWNER),
    Metric("ledger_oldest_hold_seconds", "gauge", "seconds",
           "Age of the oldest hold. More than the longest deadline means a leak.", _STEP),
    Metric("jobs_in_flight", "gauge", "jobs",
           "Jobs submitted that not every rank has reported done.", _STEP, label=_JOB),
    Metric("handoff_sent_requests", "counter", "requests",
           "Requests offered to decode engines, by how the lease ended.",
           "a lease ends", label=_SENT, alike=True),
    Metric("handoff_received_requests", "counter", "requests",
           "Requests read from prefill engines, by outcome.",
           "the last rank reports a hand-off", label=_RECEIVED,
           aliases=(Alias("vllm:nixl_num_failed_transfers", only=("failed",)),), alike=True),
    Metric("handoff_failures", "counter", "requests",
           "Received requests with outcome `failed`, by the first cause found.",
           "the last rank reports a failed hand-off", label=_HANDOFF_CAUSE, alike=True),
    Metric("handoff_expired_leases", "counter", "leases",
           "Leases that expired before a decode engine had every page.",
           "a lease's deadline passes", absent=(SGLANG,),
           aliases=(Alias("vllm:nixl_num_kv_expired_reqs"),)),
    Metric("handoff_refused", "counter", "refusals",
           "Peers, tickets and requests rejected, by the field that did not match.",
           "this side rejects one", label=_FIELD),
    Metric("handoff_digest_failed_blocks", "counter", "blocks",
           "Received blocks with a wrong digest, all ranks together.",
           "a wrong digest is found"),
    Metric("handoff_early_reads", "counter", "reads",
           "Read requests with a standing ticket, on each rank; possibly before the prefill "
           "engine knew of the request (push).",
           "a decode worker sends a read request"),
    Metric("handoff_late_reads", "counter", "reads",
           "Read requests with a finished prefill's ticket (pull), on each rank.",
           "a decode worker sends a read request"),
    Metric("handoff_wire_seconds", "histogram", "seconds",
           "Wire time of one request from one rank to another, all its transfers added up.",
           "a rank has sent or received a request", label=_ROLE,
           buckets=TIME_BUCKETS, part=EntryPart.BUCKETS,
           aliases=(Alias("sglang:kvcache_transfer_latency"),
                    Alias("vllm:nixl_xfer_time_seconds", only=("recv",)))),
    Metric("handoff_latency_seconds", "histogram", "seconds",
           "Latency of one request's hand-off, from read request to usable; successful ones only.",
           "the last rank reports a hand-off done", buckets=TIME_BUCKETS, part=EntryPart.BUCKETS,
           alike=True),
    Metric("handoff_exposed_seconds", "histogram", "seconds",
           "Exposed time of one request on one rank: from its last computed page, or its read "
           "request if that came later, until the last page arrived.",
           "a rank has received a request",
           buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("handoff_wait_seconds", "histogram", "seconds",
           "From read request until the first byte, on one rank.",
           "the first byte of a request arrives", buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("handoff_handshake_seconds", "histogram", "seconds",
           "From connecting to a peer until the handshake succeeded.",
           "a handshake succeeds", buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("handoff_peers", "gauge", "peers",
           "Workers of other engines that the first worker is connected to.", _PEERS,
           label=_STATE),
    Metric("handoff_mixed_weights_peers", "gauge", "peers",
           "Workers of other engines that the first worker is connected to although their weights "
           "are others, since both sides set `mix_weights`.", _PEERS),
    Metric("handoff_leases", "gauge", "leases",
           "Active leases: requests whose blocks are kept for a decode engine.", _STEP,
           absent=(SGLANG,)),
    Metric("handoff_transport_peers", "gauge", "peers",
           "Prefill workers that the first worker reads from, by chosen transport.", _PEERS,
           label=_TRANSPORT),
    Metric("handoff_transport_bytes_per_second", "gauge", "bytes per second",
           "Speed that the first worker measured when it connected to its last peer.",
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
    Metric("thread_failures", "counter", "errors",
           "Unexpected errors of threads, each with a traceback in the log. The thread was "
           "restarted, or the jobs that depended on it failed.",
           "an engine step ends after a thread's error", label=_THREAD),
    Metric("handoff_peer_errors", "counter", "errors",
           "Connections closed because a peer's message raised an unexpected error: a bug, with "
           "a traceback in the log.",
           "a peer's message raises an unexpected error"),
)
# fmt: on

RANK_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of SGLang that tell ranks of one engine apart."""

ALIKE = frozenset(
    f"{row.name}_{part}"
    for row in CATALOG
    if row.alike
    for part in (("bucket", "sum", "count") if row.kind == "histogram" else ("total",))
)
"""Series, without the engine in front, that every rank of an engine counts alike. Their largest is
the engine's; their sum over ranks is not."""


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
