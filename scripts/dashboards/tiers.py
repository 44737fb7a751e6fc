"""The dashboard of host memory, disk and remote tiers."""

from __future__ import annotations

from scripts.dashboards.panels import Board, Panel, PanelRow, Query
from scripts.dashboards.promql import most, now, quantile, rate, series, share

_TYPES = 'transfer_type!~"SEND|RECV"'
_AVAILABLE = series("tier_available")

_LOOKUPS = PanelRow(
    "Lookups",
    (
        Panel(
            "Prompt tokens looked up, by tier",
            "short",
            (
                Query(rate(series("hit_tokens"), "tier"), "{{tier}}"),
                Query(rate(series("miss_tokens")), "miss"),
            ),
            kind="areas",
            about="Per second.",
        ),
        Panel(
            "Prompt tokens of finished requests, by source (vLLM)",
            "short",
            (Query(rate(series("prompt_tokens"), "source"), "{{source}}"),),
            kind="areas",
            about="Per second. The sources add up to the prompts.",
        ),
        Panel(
            "Requests looked up",
            "reqps",
            (
                Query(rate(series("lookups")), "all"),
                Query(rate(series("tier_lookups")), "disk and remote"),
            ),
        ),
        Panel(
            "Decisions on disk and remote hits",
            "reqps",
            (Query(rate(series("tier_decisions"), "reason"), "{{reason}}"),),
            kind="areas",
        ),
        Panel(
            "Latency of a load",
            "s",
            tuple(
                Query(
                    quantile(q, series("load_latency_seconds_bucket"), "tier"),
                    f"p{q * 100:.0f} {{{{tier}}}}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "Exposed time of a load",
            "s",
            tuple(
                Query(
                    quantile(q, series("load_exposed_seconds_bucket"), "tier"),
                    f"p{q * 100:.0f} {{{{tier}}}}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "Requests and jobs that wait for disk or remote",
            "short",
            (
                Query(now(series("tier_waiting_requests")), "requests"),
                Query(now(series("tier_jobs_in_flight")), "jobs"),
            ),
        ),
    ),
)

_HOST = PanelRow(
    "Host memory",
    (
        Panel(
            "Blocks",
            "short",
            (
                Query(now(series("host_blocks_used")), "used"),
                Query(now(series("host_blocks_pinned")), "pinned"),
                Query(now(series("host_blocks_capacity")), "capacity"),
            ),
        ),
        Panel(
            "Memory in use",
            "bytes",
            (
                Query(now(series("host_bytes_used"), "instance"), "{{instance}}"),
                Query(now(series("host_bytes_capacity"), "instance"), "capacity, {{instance}}"),
            ),
        ),
        Panel(
            "Evicted, and not stored",
            "short",
            (
                Query(rate(series("evicted_blocks")), "evicted"),
                Query(rate(series("skipped_store_blocks"), "reason"), "not stored: {{reason}}"),
            ),
            about="Blocks per second.",
        ),
        Panel(
            "Kept by hints (vLLM)",
            "short",
            (Query(now(series("host_blocks_kept"), "hint"), "{{hint}}"),),
            about="Blocks that requests have pinned or retained.",
        ),
        Panel(
            "Blocks of prompts with hints, by outcome (vLLM)",
            "short",
            (Query(rate(series("cache_hint_blocks"), "outcome"), "{{outcome}}"),),
            about="Blocks per second.",
        ),
        Panel(
            "Hints of requests (vLLM)",
            "short",
            (
                Query(rate(series("cache_hints"), "hint"), "{{hint}}"),
                Query(rate(series("ignored_cache_hints"), "reason"), "ignored: {{reason}}"),
            ),
            about="Hints per second.",
        ),
    ),
)

_SECONDARY = PanelRow(
    "Disk and remote",
    (
        Panel(
            "Bytes in use",
            "bytes",
            (
                Query(now(series("tier_bytes_used"), "instance, tier"), "{{tier}}, {{instance}}"),
                Query(
                    now(series("tier_bytes_capacity"), "instance, tier") + " > 0",
                    "capacity, {{tier}}, {{instance}}",
                ),
            ),
        ),
        Panel(
            "Available tiers",
            "short",
            (
                Query(
                    f"min by (instance, tier) ({_AVAILABLE}) and "
                    f"max by (instance, tier) (max_over_time({_AVAILABLE}[$__range])) > 0",
                    "{{tier}}, {{instance}}",
                ),
            ),
            about="Tiers used within the time range; 0: circuit breaker open.",
        ),
        Panel(
            "Write-back and prefetch",
            "Bps",
            (
                Query(
                    rate(
                        series("transfer_bytes", 'transfer_type=~".*(DISK|REMOTE).*"'),
                        "transfer_type",
                    ),
                    "{{transfer_type}}",
                ),
            ),
            kind="areas",
        ),
        Panel(
            "Blocks written back",
            "short",
            (
                Query(rate(series("tier_written_blocks")), "written"),
                Query(rate(series("tier_skipped_blocks")), "skipped: behind"),
                Query(rate(series("store_evicted_blocks")), "evicted by the tier"),
            ),
            about="Per second.",
        ),
        Panel(
            "Blocks a tier failed to store or return",
            "short",
            (Query(rate(series("store_failed_blocks"), "outcome"), "{{outcome}}"),),
            about="Per second.",
        ),
        Panel(
            "Blocks not sent to other engines",
            "short",
            (Query(rate(series("peer_refused_blocks")), "refused"),),
            about="Per second: as much was being sent as may be.",
        ),
    ),
)

_COPIES = PanelRow(
    "Copies",
    (
        Panel(
            "Speed of one copy",
            "Bps",
            (
                Query(
                    share(
                        rate(series("transfer_bytes", _TYPES), "transfer_type"),
                        rate(series("transfer_seconds", _TYPES), "transfer_type"),
                    ),
                    "{{transfer_type}}",
                ),
            ),
        ),
        Panel(
            "Wire time of one operation, p99",
            "s",
            (
                Query(
                    quantile(0.99, series("transfer_wire_seconds_bucket", _TYPES), "transfer_type"),
                    "{{transfer_type}}",
                ),
            ),
        ),
        Panel(
            "Bytes of one operation, median",
            "bytes",
            (
                Query(
                    quantile(0.5, series("transfer_size_bytes_bucket", _TYPES), "transfer_type"),
                    "{{transfer_type}}",
                ),
            ),
        ),
    ),
)

_FAILURES = PanelRow(
    "Failures",
    (
        Panel(
            "Blocks that failed, by cause",
            "short",
            (Query(rate(series("failed_blocks"), "cause"), "{{cause}}"),),
            about="Per second.",
        ),
        Panel(
            "Blocks in quarantine, by cause",
            "short",
            (Query(rate(series("quarantined_blocks"), "cause"), "{{cause}}"),),
            about="Per second.",
        ),
        Panel(
            "Recomputed after a failed load",
            "short",
            (
                Query(rate(series("recomputed_tokens")), "tokens"),
                Query(rate(series("failed_requests"), "cause"), "requests: {{cause}}"),
            ),
            about="Per second.",
        ),
        Panel(
            "Oldest hold of a device block",
            "s",
            (Query(most(series("ledger_oldest_hold_seconds"), "instance"), "{{instance}}"),),
        ),
    ),
)

BOARD = Board(
    "kvconnect-tiers",
    "KVConnect: offload and tiers",
    "Host memory, disk and remote stores: hits, use, speed and failures.",
    (_LOOKUPS, _HOST, _SECONDARY, _COPIES, _FAILURES),
)
