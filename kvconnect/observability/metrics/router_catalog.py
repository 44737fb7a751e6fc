"""The metric catalogue of ``kvconnect router``: one row per metric."""

from __future__ import annotations

from kvconnect.observability.metrics.model import RouterMetric

_LATENCY = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_TTFT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ENGINE = ("role", "upstream")

# fmt: off
ROUTER_CATALOG: tuple[RouterMetric, ...] = (
    RouterMetric("requests", "counter", "Client requests.", ("mode", "reason", "outcome")),
    RouterMetric("upstream_requests", "counter", "Requests to engines.", (*_ENGINE, "outcome")),
    RouterMetric("picks", "counter", "Engines picked for a request, by reason.", ("role", "why")),
    RouterMetric("handoff_decisions", "counter",
        "Prompts that were handed off, or left to the decode engine, by reason.",
        ("decision", "reason")),
    RouterMetric("role_changes", "counter",
        "Engines that were to change to a role because its prompts waited.", ("role", "outcome")),
    RouterMetric("retries", "counter", "Attempts after a failed one.", ("role", "cause")),
    RouterMetric("withheld_retries", "counter",
        "Requests that went to no further engine after one was lost.", ("reason",)),
    RouterMetric("lost_streams", "counter",
        "Streams whose decode engine was lost, by what became of them.", ("result",)),
    RouterMetric("drained_streams", "counter",
        "Streams whose decode engine was drained, by where they went on.", ("result",)),
    RouterMetric("refused_connections", "counter",
        "Clients' connections over a limit.", ("reason",)),
    RouterMetric("relay_returns", "counter",
        "Streams that native code gave back to Python.", ("reason",)),
    RouterMetric("dropped_fields", "counter",
        "Fields of clients' requests that were not sent on.", ("field",)),
    RouterMetric("probes", "counter", "Probes that moved KV between two engines.", ("outcome",)),
    RouterMetric("hit_tokens", "counter",
        "Prompt tokens expected and found in prefill engines' caches, "
        "of requests whose answer reports them.", ("which",)),
    RouterMetric("kv_events", "counter", "KV event messages.", (*_ENGINE, "outcome")),
    RouterMetric("stream_receipts", "counter",
        "Streams whose receipt was asked for among the engine's KV events.",
        ("upstream", "outcome")),
    RouterMetric("standing_ticket_fetches", "counter", "Standing tickets requested.",
        ("upstream", "outcome")),
    RouterMetric("load_reports", "counter", "Load reports requested.", (*_ENGINE, "outcome")),
    RouterMetric("refused_answers", "counter",
        "Answers of engines, and entries of sources of engines, "
        "that could not be used.", ("what",)),
    RouterMetric("task_failures", "counter", "Errors of background tasks.", ("task",)),
    RouterMetric("queue", "gauge", "Requests that wait for their turn."),
    RouterMetric("in_flight", "gauge", "Open requests to engines.", _ENGINE),
    RouterMetric("upstream_up", "gauge", "1 while an engine answers.", _ENGINE),
    RouterMetric("tokens_in_flight", "gauge",
        "Prompt tokens of open requests; a cached one counts an eighth.", (*_ENGINE, "rank")),
    RouterMetric("foreign_tokens", "gauge", "Tokens that are not the router's own, -1: unknown.",
        (*_ENGINE, "rank")),
    RouterMetric("imbalance", "gauge", "Tokens of the busiest rank over their mean; 1 while idle.",
        ("role",)),
    RouterMetric("added_latency_seconds", "histogram",
        "Time that the router itself added: until both requests to engines were written, "
        "without the wait for prefill in pull mode.",
        ("mode",), _LATENCY),
    RouterMetric("ttft_seconds", "histogram",
        "Request to first byte of a streamed answer.", ("mode",), _TTFT),
)
# fmt: on
"""Every metric of ``kvconnect router``; ``router/metrics.py`` records them."""
