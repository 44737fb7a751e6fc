"""The overview dashboard: savings, transfers, failures and engine load."""

from __future__ import annotations

from scripts.dashboards.panels import Board, Panel, PanelRow, Query
from scripts.dashboards.promql import (
    during,
    now,
    own,
    quantile,
    rate,
    series,
    share,
)

_HIT_TOKENS = during(series("hit_tokens"))
_RECOMPUTED = during(series("recomputed_tokens"))  # SGLang has none
_PREFILL_SECONDS = own(
    "vllm:request_prefill_time_seconds_sum",
    "sglang:per_stage_req_latency_seconds_sum",
    more=('stage=~"|prefill_forward"',),
)
_PREFILL_TOKENS = own(
    "vllm:request_prefill_kv_computed_tokens_sum", "sglang:uncached_prompt_tokens_histogram_sum"
)
_DEVICE_HITS = own(
    "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total", more=('cache_source=~"|device"',)
)
_QUERIED = own("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")


def _ttft_saved() -> str:
    """Prefill seconds of the hit tokens, less the exposed seconds of their loads, per lookup."""
    token = f"{during(_PREFILL_SECONDS)} / {during(_PREFILL_TOKENS)}"
    waited = during(series("load_exposed_seconds_sum"))
    return f"({_HIT_TOKENS} * {token} - {waited}) / {during(series('lookups'))}"


_HELPING = PanelRow(
    "Is it helping?",
    (
        Panel(
            "Prompt tokens saved",
            "short",
            (Query(f"{_HIT_TOKENS} - ({_RECOMPUTED} or vector(0))"),),
            kind="number",
            width=5,
        ),
        Panel(
            "Share of tokens found",
            "percentunit",
            (Query(share(_HIT_TOKENS, during(series("query_tokens")))),),
            kind="number",
            width=5,
        ),
        Panel(
            "TTFT saved per request",
            "s",
            (Query(_ttft_saved()),),
            kind="number",
            width=5,
            about="An estimate: prefill time of the hit tokens at the mean prefill speed, less the "
            "exposed time of loads. Below 0, loads cost more than they save.",
        ),
        Panel(
            "Bytes moved", "bytes", (Query(during(series("transfer_bytes"))),), "number", width=5
        ),
        Panel(
            "Failed requests",
            "short",
            (Query(f"{during(series('failed_requests'))} + {during(series('handoff_failures'))}"),),
            kind="number",
            width=4,
        ),
        Panel(
            "Hit rate by tier",
            "percentunit",
            (
                Query(
                    share(
                        rate(series("hit_tokens"), "tier"), rate(series("query_tokens")), by="tier"
                    ),
                    "{{tier}}",
                ),
                Query(share(rate(_DEVICE_HITS), rate(_QUERIED)), "device, of all prompt tokens"),
            ),
            about="Tiers: share of the tokens that missed the device's prefix cache.",
        ),
        Panel(
            "Time to first token",
            "s",
            tuple(
                Query(
                    quantile(
                        q,
                        own(
                            "vllm:time_to_first_token_seconds_bucket",
                            "sglang:time_to_first_token_seconds_bucket",
                        ),
                        "job",
                    ),
                    f"p{q * 100:.0f} {{{{job}}}}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "Exposed time of loads and hand-offs, p99",
            "s",
            (
                Query(
                    quantile(0.99, series("load_exposed_seconds_bucket"), "tier"), "load, {{tier}}"
                ),
                Query(quantile(0.99, series("handoff_exposed_seconds_bucket")), "hand-off"),
            ),
        ),
    ),
)

_MOVED = PanelRow(
    "Transfers",
    (
        Panel(
            "Bytes per second",
            "Bps",
            (Query(rate(series("transfer_bytes"), "transfer_type"), "{{transfer_type}}"),),
            kind="areas",
        ),
        Panel(
            "Speed of one copy",
            "Bps",
            (
                Query(
                    share(
                        rate(series("transfer_bytes"), "transfer_type"),
                        rate(series("transfer_seconds"), "transfer_type"),
                    ),
                    "{{transfer_type}}",
                ),
            ),
            about="Bytes over the wire time of the same operations, on one rank.",
        ),
        Panel(
            "Operations per second",
            "ops",
            (Query(rate(series("transfer_operations"), "transfer_type"), "{{transfer_type}}"),),
        ),
    ),
)

_WRONG = PanelRow(
    "Failures",
    (
        Panel(
            "Failures by cause",
            "reqps",
            (
                Query(rate(series("failed_requests"), "cause"), "load: {{cause}}"),
                Query(rate(series("handoff_failures"), "cause"), "hand-off: {{cause}}"),
            ),
            about="vLLM recomputes a failed load. For a failed hand-off, `kv_load_failure_policy` "
            "chooses between an error and recomputation.",
        ),
        Panel(
            "Jobs over their deadline",
            "ops",
            (Query(rate(series("expired_jobs"), "transfer_type"), "{{transfer_type}}"),),
        ),
        Panel(
            "Errors of threads",
            "ops",
            (Query(rate(series("thread_failures"), "thread"), "{{thread}}"),),
            about="Each is a bug or a hardware fault, with a traceback in the log.",
        ),
        Panel(
            "Device blocks held",
            "short",
            (Query(now(series("ledger_held_blocks"), "owner"), "{{owner}}"),),
            kind="areas",
        ),
    ),
)

_ENGINES = PanelRow(
    "Engines",
    (
        Panel(
            "Requests running",
            "short",
            (
                Query(
                    now(own("vllm:num_requests_running", "sglang:num_running_reqs"), "instance"),
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Requests waiting",
            "short",
            (
                Query(
                    now(own("vllm:num_requests_waiting", "sglang:num_queue_reqs"), "instance"),
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Device KV cache in use",
            "percentunit",
            (
                Query(
                    f"max by (instance) ({own('vllm:kv_cache_usage_perc', 'sglang:token_usage')})",
                    "{{instance}}",
                ),
            ),
        ),
    ),
)

BOARD = Board(
    "kvconnect-overview",
    "KVConnect: overview",
    "Savings, transfers, failures and the engines' load.",
    (_HELPING, _MOVED, _WRONG, _ENGINES),
)
