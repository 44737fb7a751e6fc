"""The dashboard of hand-offs from prefill to decode engines: ``kvconnect-handoff.json``."""

from __future__ import annotations

from scripts.dashboards.panels import Board, Panel, PanelRow, Query
from scripts.dashboards.promql import (
    during,
    most,
    now,
    own,
    quantile,
    rate,
    series,
    share,
)

_WIRE_TYPES = 'transfer_type=~"SEND|RECV"'

# In the order of a request's life.
_PHASES = (
    ("handshake", "handoff_handshake_seconds", ()),
    ("wait for the first byte", "handoff_wait_seconds", ()),
    ("wire, sending", "handoff_wire_seconds", ('role="send"',)),
    ("wire, receiving", "handoff_wire_seconds", ('role="recv"',)),
    ("exposed", "handoff_exposed_seconds", ()),
    ("read request to usable", "handoff_latency_seconds", ()),
)
_QUEUES = ("vllm:request_queue_time_seconds{}", "sglang:queue_time_seconds{}")


def _queue(part: str) -> str:
    return own(*(name.format(part) for name in _QUEUES))


def _mean(name: str, *more: str) -> str:
    parts = (series(f"{name}_{part}", *more) for part in ("sum", "count"))
    return share(*(during(part, "job") for part in parts))


_TIME = PanelRow(
    "Where the time goes",
    (
        Panel(
            "Mean time of each phase",
            "s",
            (
                Query(
                    share(during(_queue("_sum"), "job"), during(_queue("_count"), "job")),
                    "queue of the engine, {{job}}",
                ),
                *(
                    Query(_mean(name, *more), f"{text}, {{{{job}}}}")
                    for text, name, more in _PHASES
                ),
            ),
            kind="bars",
            about="Of one request, in order. Phases overlap: with push, pages move while prefill "
            "computes. `exposed` is the time that the hand-off adds.",
        ),
        Panel(
            "Slowest 1 % of each phase",
            "s",
            (
                Query(quantile(0.99, _queue("_bucket"), "job"), "queue of the engine, {{job}}"),
                *(
                    Query(quantile(0.99, series(f"{name}_bucket", *more)), text)
                    for text, name, more in _PHASES
                ),
            ),
        ),
        Panel(
            "Share of the wire time that is hidden",
            "percentunit",
            (
                Query(
                    "1 - "
                    + share(
                        rate(series("handoff_exposed_seconds_sum")),
                        rate(series("handoff_wire_seconds_sum", 'role="recv"')),
                    ),
                    "hidden",
                ),
            ),
            about="1: all pages arrive while prefill still computes. Below 0: exposed time exceeds "
            "wire time.",
        ),
    ),
)

_SPEED = PanelRow(
    "Speed",
    (
        Panel(
            "Speed against the link",
            "Bps",
            (
                Query(
                    share(
                        rate(series("transfer_bytes", _WIRE_TYPES), "transfer_type, job"),
                        rate(series("transfer_seconds", _WIRE_TYPES), "transfer_type, job"),
                    ),
                    "{{transfer_type}}, {{job}}",
                ),
                Query(
                    most(series("handoff_transport_bytes_per_second"), "transport") + " > 0",
                    "link, {{transport}}",
                ),
            ),
            about="Speed while pages move, and speed measured when the peers connected.",
        ),
        Panel(
            "Bytes per second with each peer",
            "Bps",
            (
                Query(
                    rate(series("handoff_peer_bytes"), "instance, peer"), "{{instance}}, {{peer}}"
                ),
            ),
        ),
        Panel(
            "Speed with each peer",
            "Bps",
            (
                Query(
                    share(
                        rate(series("handoff_peer_bytes"), "instance, peer"),
                        rate(series("handoff_peer_seconds"), "instance, peer"),
                    ),
                    "{{instance}}, {{peer}}",
                ),
            ),
        ),
        Panel(
            "Wire time of one operation, p99",
            "s",
            (
                Query(
                    quantile(
                        0.99, series("transfer_wire_seconds_bucket", _WIRE_TYPES), "transfer_type"
                    ),
                    "{{transfer_type}}",
                ),
            ),
        ),
        Panel(
            "Bytes of one operation, median",
            "bytes",
            (
                Query(
                    quantile(
                        0.5, series("transfer_size_bytes_bucket", _WIRE_TYPES), "transfer_type"
                    ),
                    "{{transfer_type}}",
                ),
            ),
        ),
        Panel(
            "Read requests, early (push) and late (pull)",
            "reqps",
            (
                Query(rate(series("handoff_early_reads")), "early"),
                Query(rate(series("handoff_late_reads")), "late"),
            ),
        ),
    ),
)

_ENDS = PanelRow(
    "Outcomes",
    (
        Panel(
            "Requests sent",
            "reqps",
            (Query(rate(series("handoff_sent_requests"), "outcome"), "{{outcome}}"),),
            kind="areas",
            width=6,
        ),
        Panel(
            "Requests received",
            "reqps",
            (Query(rate(series("handoff_received_requests"), "outcome"), "{{outcome}}"),),
            kind="areas",
            width=6,
        ),
        Panel(
            "Failed hand-offs by cause",
            "reqps",
            (Query(rate(series("handoff_failures"), "cause"), "{{cause}}"),),
            width=6,
        ),
        Panel(
            "Rejected, by field",
            "ops",
            (Query(rate(series("handoff_refused"), "field") + " > 0", "{{field}}"),),
            width=6,
        ),
        Panel(
            "Failures with each peer",
            "ops",
            (
                Query(
                    rate(series("handoff_peer_failures"), "instance, peer"),
                    "{{instance}}, {{peer}}",
                ),
                Query(rate(series("handoff_peer_errors"), "instance"), "{{instance}}, bugs"),
            ),
        ),
        Panel(
            "Blocks with a wrong digest",
            "short",
            (Query(rate(series("handoff_digest_failed_blocks"), "instance"), "{{instance}}"),),
        ),
        Panel(
            "Failures that SGLang counts",
            "reqps",
            (
                Query(rate(own("sglang:num_transfer_failed_reqs_total")), "transfer"),
                Query(rate(own("sglang:num_bootstrap_failed_reqs_total")), "bootstrap"),
            ),
        ),
    ),
)

_HELD = PanelRow(
    "Held resources",
    (
        Panel(
            "Leases",
            "short",
            (
                Query(now(series("handoff_leases"), "instance"), "{{instance}}"),
                Query(
                    rate(series("handoff_expired_leases"), "instance"),
                    "expired per second, {{instance}}",
                ),
            ),
        ),
        Panel(
            "Oldest hold of a device block",
            "s",
            (Query(most(series("ledger_oldest_hold_seconds"), "instance"), "{{instance}}"),),
        ),
        Panel(
            "Jobs in flight",
            "short",
            (Query(now(series("jobs_in_flight"), "transfer_type"), "{{transfer_type}}"),),
        ),
        Panel(
            "Peers",
            "short",
            (
                Query(now(series("handoff_peers"), "instance, state"), "{{state}}, {{instance}}"),
                Query(
                    now(series("handoff_transport_peers"), "transport"),
                    "read from over {{transport}}",
                ),
                Query(
                    now(series("handoff_mixed_weights_peers"), "instance"),
                    "with other weights, {{instance}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Requests that wait for KV",
            "short",
            (
                Query(
                    now(
                        own(
                            "vllm:num_requests_kv_fetch_by_stage",
                            "sglang:num_decode_transfer_queue_reqs",
                        ),
                        "job, stage",
                    ),
                    "{{job}} {{stage}}",
                ),
            ),
            width=12,
        ),
    ),
)

BOARD = Board(
    "kvconnect-handoff",
    "KVConnect: hand-off",
    "From prefill to decode engines: time by phase, speed, outcomes and held resources.",
    (_TIME, _SPEED, _ENDS, _HELD),
)
