"""Every metric, one row each. Prometheus families, ``docs/metrics.md`` and tests derive from it.

To add a metric, add a row here and record it through :mod:`kvconnect.stats` under the row's
name. Label values are closed sets, so that every series exists from the first scrape, as 0. Only
peers cannot be listed in advance: their label is bounded, and its series appear with them.

``python -m kvconnect.observability.metrics.document > docs/metrics.md`` writes the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from kvconnect.observability.metrics.model import Alias, EntryPart, Family, Label, Metric
from kvconnect.offload.jobs import QUARANTINED, Owner
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
from kvconnect.types import FailureCause, Tier, TransferType


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


_TYPE = Label("transfer_type", _values(TransferType))
_JOBS = ("GPU_to_CPU", "CPU_to_GPU", "SEND", "RECV")  # the plan's; tiers below host have none
_JOB = Label("transfer_type", _JOBS)
_TIER = Label("tier", _values(Tier))
_HOST = Label("tier", (Tier.HOST.value,))
_LOWER = (Tier.DISK.value, Tier.REMOTE.value)
_BELOW = Label("tier", _LOWER)
_DECISION = Label("reason", (*_values(LoadReason), "late", "no_space"))
_CAUSE = Label("cause", _values(FailureCause))
_QUARANTINE = Label("cause", tuple(cause.value for cause in QUARANTINED))
_REASON = Label("reason", ("no_space", "busy"))
_OWNER = Label("owner", _values(Owner))
_STORE_OUTCOME = Label(
    "outcome", ("corrupt", "size", "full", "limited", "failed", "late", "unavailable")
)
_SENT = Label("outcome", ("done", "expired", "aborted"))
_RECEIVED = Label("outcome", ("done", "failed", "aborted"))
_ROLE = Label("role", ("send", "recv"))
_AGREEMENT = ("protocol", "format", "groups", "block_size", "layers", "heads", "packing")
_ACCESS = ("auth", "tls", "address", "ticket", "params", "transport", "rate")
_FIELD = Label("field", (*_AGREEMENT, *_ACCESS, OTHER))
_STATE = Label("state", ("up", "connecting"))
_TRANSPORT = Label("transport", ("tcp", "nixl"))
_THREAD = Label("thread", _values(ThreadKind))
_PEER = Label("peer", (OTHER,), limit=MOST_LABELS)
_LOAD = (TransferType.CPU_TO_GPU.value,)
_STORE = (TransferType.GPU_TO_CPU.value,)
_OFFLOAD = _STORE + _LOAD
_RECV = (TransferType.RECV.value,)
_UP = (TransferType.DISK_TO_CPU.value, TransferType.REMOTE_TO_CPU.value)
_DOWN = (TransferType.CPU_TO_DISK.value, TransferType.CPU_TO_REMOTE.value)
_STEP = "an engine step ends"
_PEERS = "the first worker gains or loses a peer"

VLLM, SGLANG = "vllm:", "sglang:"
"""Prefixes of the engines' metric names."""

# A table is read by rows: laid out by hand, not one argument per line.
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
           label=_TIER, buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("load_exposed_seconds", "histogram", "seconds",
           "Exposed time of one request's load; of all loads of a step, if they ran inside it "
           "(what a GPU waits for by itself is not counted).",
           "a request that waited for a load can run",
           label=_TIER, buckets=TIME_BUCKETS, part=EntryPart.BUCKETS,
           aliases=(Alias("vllm:kv_offload_lookup_async_delay_seconds", only=_LOWER),)),
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
           "Blocks dropped to make room.", "a tier evicts a block", label=_HOST),
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
    Metric("below_lookups", "counter", "requests",
           "Requests whose blocks were looked for in the tiers below host memory.",
           "a request is first asked about"),
    Metric("below_decisions", "counter", "requests",
           "What became of lookups that found something, and why: brought up (`load`, or a few "
           "blocks to learn what a tier does, `probe` and `unknown`), or computed because that is "
           "faster (`recompute`), or host memory was busy (`no_space`) or the wait too long "
           "(`late`).",
           "a lookup is decided", label=_DECISION, absent=(SGLANG,),
           aliases=(Alias("vllm:kv_offload_tiering_promotion_allocation_failures",
                          only=("no_space",)),)),
    Metric("below_spilled_blocks", "counter", "blocks",
           "Blocks of the host tier given to the tiers below it.",
           "a job is handed to the workers"),
    Metric("below_skipped_blocks", "counter", "blocks",
           "Blocks not given to the tiers below, because these are behind.",
           "a block is stored in the host tier",
           aliases=(Alias("vllm:kv_offload_tiering_backpressure_blocks_dropped"),)),
    Metric("below_waiting_requests", "gauge", "requests",
           "Requests that wait for tiers below host memory.", _STEP, absent=(SGLANG,)),
    Metric("below_jobs_in_flight", "gauge", "jobs",
           "Lookups, fetches and spills not yet answered by every rank.", _STEP),
    Metric("below_available", "gauge", "tiers",
           "1 while a tier is used, 0 while it is left alone for its failures; of the first rank.",
           "a tier was used", label=_BELOW),
    Metric("below_bytes_used", "gauge", "bytes",
           "Bytes that a tier of the first rank takes; 0 where a server knows.",
           "a tier was used", label=_BELOW),
    Metric("below_bytes_capacity", "gauge", "bytes",
           "Bytes that a tier of the first rank may take; 0 where a server knows.",
           "a tier was used", label=_BELOW),
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
           "the last rank reports a hand-off", label=_RECEIVED,
           aliases=(Alias("vllm:nixl_num_failed_transfers", only=("failed",)),)),
    Metric("handoff_failures", "counter", "requests",
           "Received requests with outcome `failed`, by the first cause found.",
           "the last rank reports a failed hand-off", label=_CAUSE),
    Metric("handoff_expired_leases", "counter", "leases",
           "Leases that ran out before a decode engine had everything.",
           "a lease's deadline passes", absent=(SGLANG,),
           aliases=(Alias("vllm:nixl_num_kv_expired_reqs"),)),
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
           buckets=TIME_BUCKETS, part=EntryPart.BUCKETS,
           aliases=(Alias("sglang:kvcache_transfer_latency"),
                    Alias("vllm:nixl_xfer_time_seconds", only=("recv",)))),
    Metric("handoff_latency_seconds", "histogram", "seconds",
           "Latency of one request's hand-off, from asked to usable; successful ones only.",
           "the last rank reports a hand-off done", buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("handoff_exposed_seconds", "histogram", "seconds",
           "Exposed time of one request on one rank: from its last page being computed (from "
           "asking, if that came later) until everything had arrived.",
           "a rank has received a request",
           buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("handoff_wait_seconds", "histogram", "seconds",
           "From asking until the first byte, on one rank.",
           "the first byte of a request arrives", buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
    Metric("handoff_handshake_seconds", "histogram", "seconds",
           "From connecting to a peer until both sides have agreed.",
           "a handshake ends well", buckets=TIME_BUCKETS, part=EntryPart.BUCKETS),
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
    Metric("thread_failures", "counter", "errors",
           "Errors that ended the work of a thread, and are in the log; it was begun again, or "
           "what depended on it has failed.",
           "an engine step ends after a thread's error", label=_THREAD),
    Metric("handoff_peer_errors", "counter", "errors",
           "Connections that were ended because what the other side said raised an error that "
           "nobody foresaw: a bug, with its traceback in the log.",
           "a peer finds a bug"),
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
