"""The board of host memory and the tiers below it."""

from __future__ import annotations

from kvconnect.observability.metrics.boards.grafana import Board, Panel, PanelRow, Query
from kvconnect.observability.metrics.boards.promql import most, now, quantile, rate, series, share

_TYPES = 'transfer_type!~"SEND|RECV"'
_AVAILABLE = series("below_available")

_LOOKUPS = PanelRow(
    "Lookups",
    (
        Panel(
            "Tokens asked for, by where they were",
            "short",
            (
                Query(rate(series("hit_tokens"), "tier"), "{{tier}}"),
                Query(rate(series("miss_tokens")), "nowhere"),
            ),
            kind="areas",
            about="Per second.",
        ),
        Panel(
            "Requests looked up",
            "reqps",
            (
                Query(rate(series("lookups")), "all"),
                Query(rate(series("below_lookups")), "below host memory"),
            ),
        ),
        Panel(
            "What became of hits below host memory",
            "reqps",
            (Query(rate(series("below_decisions"), "reason"), "{{reason}}"),),
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
            "What a request waits for its load",
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
            "Requests and jobs that wait for tiers below",
            "short",
            (
                Query(now(series("below_waiting_requests")), "requests"),
                Query(now(series("below_jobs_in_flight")), "jobs"),
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
                Query(now(series("host_blocks_capacity")), "room"),
            ),
        ),
        Panel(
            "Memory in use",
            "bytes",
            (
                Query(now(series("host_bytes_used"), "instance"), "{{instance}}"),
                Query(now(series("host_bytes_capacity"), "instance"), "room, {{instance}}"),
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
    ),
)

_BELOW = PanelRow(
    "Disk and remote",
    (
        Panel(
            "Bytes in use",
            "bytes",
            (
                Query(now(series("below_bytes_used"), "instance, tier"), "{{tier}}, {{instance}}"),
                Query(
                    now(series("below_bytes_capacity"), "instance, tier") + " > 0",
                    "room, {{tier}}, {{instance}}",
                ),
            ),
        ),
        Panel(
            "Tiers in use",
            "short",
            (
                Query(
                    f"min by (instance, tier) ({_AVAILABLE}) and "
                    f"max by (instance, tier) (max_over_time({_AVAILABLE}[$__range])) > 0",
                    "{{tier}}, {{instance}}",
                ),
            ),
            about="Tiers that were in use within the time range; 0: left alone for failures.",
        ),
        Panel(
            "Written down, brought up",
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
            "Blocks for the tiers below",
            "short",
            (
                Query(rate(series("below_spilled_blocks")), "given"),
                Query(rate(series("below_skipped_blocks")), "not given: behind"),
                Query(rate(series("store_evicted_blocks")), "dropped by the tier"),
            ),
            about="Per second.",
        ),
        Panel(
            "Blocks a tier did not take or give",
            "short",
            (Query(rate(series("store_failed_blocks"), "outcome"), "{{outcome}}"),),
            about="Per second.",
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
            "Computed after all",
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
    "Host memory, disk and remote stores: what is found there, how full they are, how fast.",
    (_LOOKUPS, _HOST, _BELOW, _COPIES, _FAILURES),
)
