"""The board of ``kvconnect router``."""

from __future__ import annotations

from scripts.dashboards.panels import Board, Panel, PanelRow, Query
from scripts.dashboards.promql import (
    during,
    most,
    now,
    quantile,
    rate,
    router,
    share,
)

_REQUESTS = PanelRow(
    "Requests",
    (
        Panel(
            "Served",
            "percentunit",
            (
                Query(
                    share(
                        during(router("requests_total", 'outcome=~"ok|continued"')),
                        during(router("requests_total")),
                    )
                ),
            ),
            kind="number",
            width=6,
        ),
        Panel(
            "Requests", "short", (Query(during(router("requests_total"))),), kind="number", width=6
        ),
        Panel("Waiting for their turn", "short", (Query(now(router("queue"))),), "number", 6),
        Panel("Engines up", "short", (Query(now(router("upstream_up"))),), "number", 6),
        Panel(
            "Requests by outcome",
            "reqps",
            (Query(rate(router("requests_total"), "outcome"), "{{outcome}}"),),
            kind="areas",
        ),
        Panel(
            "Mode, and reason",
            "reqps",
            (Query(rate(router("requests_total"), "mode, reason"), "{{mode}}: {{reason}}"),),
            kind="areas",
        ),
        Panel(
            "Time to first byte",
            "s",
            tuple(
                Query(
                    quantile(q, router("ttft_seconds_bucket"), "mode"),
                    f"p{q * 100:.0f} {{{{mode}}}}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "What the router adds",
            "s",
            tuple(
                Query(
                    quantile(q, router("added_latency_seconds_bucket"), "mode"),
                    f"p{q * 100:.0f} {{{{mode}}}}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "Second attempts by cause",
            "reqps",
            (Query(rate(router("retries_total"), "role, cause"), "{{role}}: {{cause}}"),),
        ),
        Panel(
            "Requests that went to no further engine",
            "reqps",
            (Query(rate(router("withheld_retries_total"), "reason"), "{{reason}}"),),
            about="deadly: two engines crashed during one request, which is refused for a while.",
        ),
        Panel(
            "Streams whose decode engine was lost",
            "reqps",
            (Query(rate(router("lost_streams_total"), "result"), "{{result}}"),),
            about="continued: another engine went on. Else why none did; see --continue.",
        ),
        Panel(
            "Streams whose decode engine was drained",
            "reqps",
            (Query(rate(router("drained_streams_total"), "result"), "{{result}}"),),
            about="handed_off: from there to another engine. computed: by another engine, again. "
            "stayed: it could not leave.",
        ),
        Panel(
            "Connections of clients that were refused",
            "reqps",
            (Query(rate(router("refused_connections_total"), "reason"), "{{reason}}"),),
            about="address: one has too many. files: all together have. memory: too much waits.",
        ),
        Panel(
            "Streams that native code gave back",
            "reqps",
            (Query(rate(router("relay_returns_total"), "reason"), "{{reason}}"),),
            about="bytes: a last chunk or a part of one, as each stream has. full: slow clients.",
        ),
        Panel(
            "Fields of requests that were dropped",
            "reqps",
            (Query(rate(router("dropped_fields_total"), "field"), "{{field}}"),),
        ),
        Panel(
            "Requests to engines, by outcome",
            "reqps",
            (
                Query(
                    rate(router("upstream_requests_total"), "role, outcome"),
                    "{{role}}: {{outcome}}",
                ),
            ),
        ),
    ),
)

_CHOICES = PanelRow(
    "Choices and balance",
    (
        Panel(
            "Why an engine was picked",
            "reqps",
            (Query(rate(router("picks_total"), "role, why"), "{{role}}: {{why}}"),),
            width=6,
        ),
        Panel(
            "Prompts handed off, and left to decode, by reason",
            "reqps",
            (
                Query(
                    rate(router("handoff_decisions_total"), "decision, reason"),
                    "{{decision}}: {{reason}}",
                ),
            ),
            about="sooner: by expected times to the first token. no_data: not measured yet.",
            width=6,
        ),
        Panel(
            "Imbalance",
            "short",
            (Query(most(router("imbalance"), "role"), "{{role}}"),),
            about="1: every rank has as many tokens as the others.",
            width=6,
        ),
        Panel(
            "Prompt tokens expected and found in caches",
            "short",
            (Query(rate(router("hit_tokens_total"), "which"), "{{which}}"),),
            about="Per second. Far apart: the router's picture of the caches is wrong.",
            width=6,
        ),
        Panel(
            "Tokens of each rank",
            "short",
            (
                Query(
                    now(router("tokens_in_flight"), "role, upstream, rank"),
                    "{{role}} {{upstream}} {{rank}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Tokens of others on each rank",
            "short",
            (
                Query(
                    most(router("foreign_tokens"), "role, upstream, rank") + " >= 0",
                    "{{role}} {{upstream}} {{rank}}",
                ),
            ),
            width=12,
        ),
    ),
)

_MEMBERS = PanelRow(
    "Engines",
    (
        Panel(
            "Up",
            "short",
            (Query(f"min by (role, upstream) ({router('upstream_up')})", "{{role}} {{upstream}}"),),
        ),
        Panel(
            "Open requests",
            "short",
            (Query(now(router("in_flight"), "role, upstream"), "{{role}} {{upstream}}"),),
        ),
        Panel(
            "Probes of hand-offs",
            "ops",
            (Query(rate(router("probes_total"), "outcome"), "{{outcome}}"),),
            about="Other than ok: an engine that is up hands no KV over, and gets no requests.",
        ),
        Panel(
            "KV event messages",
            "ops",
            (Query(rate(router("kv_events_total"), "role, outcome"), "{{role}}: {{outcome}}"),),
        ),
        Panel(
            "Receipts of streams",
            "ops",
            (Query(rate(router("stream_receipts_total"), "outcome"), "{{outcome}}"),),
            about="Missing: an engine did not publish it in time, or publishes none.",
        ),
        Panel(
            "Load reports requested",
            "ops",
            (Query(rate(router("load_reports_total"), "role, outcome"), "{{role}}: {{outcome}}"),),
        ),
        Panel(
            "Unusable answers",
            "ops",
            (Query(rate(router("refused_answers_total"), "what"), "{{what}}"),),
            about="Of engines and of sources of engines; the log says whose.",
        ),
        Panel(
            "Errors of background tasks",
            "ops",
            (Query(rate(router("task_failures_total"), "task"), "{{task}}"),),
            about="Each is a bug, and in the log; the task begins again.",
        ),
        Panel(
            "Standing tickets requested",
            "ops",
            (
                Query(
                    rate(router("standing_ticket_fetches_total"), "upstream, outcome"),
                    "{{upstream}}: {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Engines that were to change their role",
            "ops",
            (Query(rate(router("role_changes_total"), "role, outcome"), "{{role}}: {{outcome}}"),),
            about="As --auto-roles has it. Refused: not drained in time, or the probe failed.",
        ),
    ),
)

BOARD = Board(
    "kvconnect-router",
    "KVConnect: router",
    "What clients get, which engines are picked and why, and which engines there are.",
    (_REQUESTS, _CHOICES, _MEMBERS),
    engines=False,
)
