"""The table of aims and results in benchmarks/README.md, made from ``benchmarks/results``."""

from __future__ import annotations

from typing import NamedTuple

from scripts.headlines import NOT_YET, figures_of, name_of, oldest, result


class Aim(NamedTuple):
    """One line: figures of one result file that belong together.

    Attributes:
        aims: bounds as ``<= 1.5``, ``>= 2`` or ``0``; one for all figures, or one for each. Empty:
            none.
        unit: of the figures.
    """

    text: str
    file: str
    figures: tuple[str, ...]
    aims: tuple[str, ...] = ()
    unit: str = ""


AIMS = (
    Aim("full-hit lookup of 8,192 blocks among 1,007,616", "plan", ("lookup_8192_ms",),
        ("<= 1.5",), "ms"),
    Aim("the same, times faster than vLLM's CPU offload manager", "plan", ("lookup_vs_vllm",),
        (">= 3",)),
    Aim("memory of the index, bytes per block", "plan", ("bytes_per_block",), ("<= 250",)),
    Aim("planning a step of 256 requests", "plan", ("build_meta_256_us",), ("<= 200",), "us"),
    Aim("one statistics record", "plan", ("stats_record_us",), ("<= 2",), "us"),
    Aim("largest statistics payload of every metric that there is, bytes", "plan",
        ("stats_payload_bytes",), ("<= 4096",)),
    Aim("scattered 64 KiB pages over one large memcpy, store / load", "copy_cpu",
        ("ratio_64k_store", "ratio_64k_load"), (">= 0.8",)),
    Aim("the same, 1 MiB pages", "copy_cpu", ("ratio_1m_store", "ratio_1m_load"), (">= 0.8",)),
    Aim("TTFT of a 2k-token prompt: host hit over recompute", "offload_engine",
        ("ttft_hit_over_recompute",), ("<= 0.25",)),
    Aim("host hit over a hit of vLLM's `ExampleConnector`", "offload_engine",
        ("ttft_hit_over_example",), ("<= 0.9",)),
    Aim("host hit over device hit", "offload_engine", ("ttft_hit_over_device_hit",)),
    Aim("models like Qwen3-Next / Qwen3.5: TTFT of a 2k host hit over recompute", "hybrids",
        ("ttft_hit_over_recompute_qwen3_next", "ttft_hit_over_recompute_qwen3_5"), ("<= 0.25",)),
    Aim("bytes that they store over those of attention alone, a state every 288 / 576 / 1,152 / "
        "2,304 tokens", "hybrids",
        ("stored_over_attention_qwen3_next_every_288",
         "stored_over_attention_qwen3_next_every_576",
         "stored_over_attention_qwen3_next_every_1152",
         "stored_over_attention_qwen3_next_every_2304")),
    Aim("cost when nothing hits", "overhead", ("overhead_no_hit",), ("<= 1.01",)),
    Aim("TCP transport over raw sockets, 64 KiB / 256 KiB / 2 MiB pages", "transport",
        ("ratio_raw_64k", "ratio_raw_256k", "ratio_raw_2m"), (">= 0.9",)),
    Aim("the same over NIXL (UCX over TCP, tuned), 64 KiB pages", "transport",
        ("ratio_nixl_64k",), (">= 2",)),
    Aim("its CPU seconds per GB over NIXL's", "transport", ("cpu_per_gb_ratio_nixl",),
        ("<= 0.7",)),
    Aim("what a digest of every block costs", "transport", ("digest_cost",), ("<= 0.25",)),
    Aim("rate with a busy Python thread in each process, over idle", "transport",
        ("ratio_busy_gil",), (">= 0.85",)),
    Aim("on a link of 1 / 10 Gbit/s, over iperf3", "transport",
        ("ratio_iperf_1g", "ratio_iperf_10g"), (">= 0.99",)),
    Aim("NIXL transport over plain NIXL with the same pages, 16 / 64 / 256 KiB / 2 MiB",
        "transport", ("ratio_plain_nixl_16k", "ratio_plain_nixl_64k", "ratio_plain_nixl_256k",
                      "ratio_plain_nixl_2m"), (">= 0.95",)),
    Aim("to connect and agree, with both transports", "transport", ("handshake_ms",),
        ("<= 50",), "ms"),
    Aim("hand-off of 4k tokens by push: share of the wire time that shows", "handoff",
        ("exposed_over_wire_4k",), ("<= 0.1",)),
    Aim("its TTFT over vLLM's `NixlConnector`: push / pull", "handoff",
        ("ttft_push_over_nixl_4k", "ttft_pull_over_nixl_4k"), ("<= 0.8",)),
    Aim("the same with engines on cores of their own", "handoff",
        ("ttft_push_over_nixl_4k_apart", "ttft_pull_over_nixl_4k_apart"), ("<= 0.6", "<= 0.9")),
    Aim("at 256 tokens: push / pull / both on cores of their own", "handoff",
        ("ttft_push_over_nixl_256", "ttft_pull_over_nixl_256", "ttft_push_over_nixl_256_apart",
         "ttft_pull_over_nixl_256_apart"), ("<= 1.05",)),
    Aim("the same, eight prompts of 256 tokens at once", "handoff",
        ("ttft_push_over_nixl_256_c8", "ttft_pull_over_nixl_256_c8",
         "ttft_push_over_nixl_256_c8_apart", "ttft_pull_over_nixl_256_c8_apart"), ("<= 0.8",)),
    Aim("its TTFT over `NixlConnector` with KVConnect's NIXL transport, push", "handoff",
        ("ttft_push_over_nixl_connector_4k",), ("<= 0.8",)),
    Aim("push over pull with that transport", "handoff", ("ttft_push_over_pull_nixl_path_4k",),
        ("<= 1",)),
    Aim("SGLang, 4k tokens by layers on a link as slow as prefill: share of the wire time that "
        "shows; built-in `nixl`", "sglang_handoff",
        ("exposed_over_wire_4k", "exposed_over_wire_4k_nixl"), ("<= 0.15", "")),
    Aim("its TTFT over SGLang's built-in `nixl`", "sglang_handoff",
        ("ttft_layerwise_over_nixl_4k",), ("<= 0.85",)),
    Aim("the same at 256 tokens, the worst of all variants and links / of layers over TCP with a "
        "link", "sglang_handoff", ("ttft_256_over_nixl", "ttft_tcp_layerwise_over_nixl_256"),
        ("<= 1.05",)),
    Aim("4k tokens on a link that is not shaped, layers / chunks over TCP", "sglang_handoff",
        ("ttft_tcp_layerwise_over_nixl_4k_free", "ttft_tcp_over_nixl_4k_free"), ("<= 1.05",)),
    Aim("what the hooks add to a layer while pages leave", "sglang_handoff", ("hook_us",),
        ("<= 20",), "us"),
    Aim("TTFT of a 2k-token prompt over recompute: from disk / a Valkey server / host memory",
        "tiers", ("ttft_disk_over_recompute", "ttft_remote_over_recompute",
                  "ttft_host_over_recompute"), ("<= 0.25",)),
    Aim("the cost rule over computing everything, worst and best share of a prompt on disk; a "
        "second engine without a connector, worst", "tiers",
        ("cost_rule_worst", "cost_rule_at_100", "control_worst"), ("<= 1.01", "<= 1.01", "")),
    Aim("TTFT of a 2k-token prompt that another engine has: over recompute / over own host "
        "memory / the same over the network", "sharing",
        ("ttft_peer_over_recompute_2k", "ttft_peer_over_host_2k", "ttft_network_over_host_2k"),
        ("<= 0.35", "<= 1.5", "")),
    Aim("the same with engines on cores of their own", "sharing",
        ("ttft_peer_over_recompute_2k_apart", "ttft_peer_over_host_2k_apart",
         "ttft_network_over_host_2k_apart"), ("<= 0.35", "<= 1.5", "")),
    Aim("p99 between tokens of an engine that is read from, over the same beside another busy "
        "engine / over the network / both on cores of their own", "sharing",
        ("server_slowdown", "server_slowdown_network", "server_slowdown_apart",
         "server_slowdown_network_apart"), ("<= 1.03", "", "<= 1.03", "")),
    Aim("p99 of a hand-off while others read shared blocks of its worker: over the same reads from "
        "another process / over one alone", "handoff_beside",
        ("p99_beside_over_elsewhere", "p99_beside_over_alone"), ("<= 1.1",)),
    Aim("two engines, a trace at random, over one ideal cache of both sizes; without sharing",
        "sharing", ("trace_hit_over_shared_ideal", "trace_control"), (">= 0.9", "")),
    Aim("the cost rule over computing, worst and best share of a prompt in another engine; one "
        "engine over itself", "sharing",
        ("cost_rule_worst", "cost_rule_at_100", "control_worst"), ("<= 1.03", "<= 1.03", "")),
    Aim("the same with engines on cores of their own", "sharing",
        ("cost_rule_worst_apart", "cost_rule_at_100_apart", "control_worst_apart"),
        ("<= 1.03", "<= 1.03", "")),
    Aim("TTFT of a prompt that the hint `prefetch` has brought from another engine, over one in "
        "own host memory", "sharing", ("prefetch_ttft_over_host",), ("<= 1.1",)),
    Aim("a pinned prompt / one that is not, after more prompts than host memory holds", "sharing",
        ("pin_kept", "pin_control"), (">= 1", "0")),
    Aim("receipts that do not add up / wrong answers", "sharing",
        ("receipt_mismatch", "wrong_tokens"), ("0",)),
    Aim("raw direct I/O over the disk tier's way, write / read", "disk_paths",
        ("ratio_raw_write", "ratio_raw_read"), ("<= 1.176",)),
    Aim("NIXL's POSIX plugin (libaio) over the same, write / read", "disk_paths",
        ("ratio_nixl_aio_write", "ratio_nixl_aio_read")),
    Aim("a full disk tier, which evicts its oldest blocks, over raw direct I/O of as many threads, "
        "the worst of 32 KiB to 4 MiB, write / read", "store",
        ("disk_write_ratio", "disk_read_ratio"), (">= 0.85",)),
    Aim("start of a disk tier with a million blocks, with indexes", "store", ("start_1e6_s",),
        ("<= 1",), "s"),
    Aim("the same, blocks per second", "store", ("rebuild_blocks_per_s",), (">= 200000",)),
    Aim("Valkey tier over its client's own pipelines, put / get of 1 MiB", "store",
        ("valkey_put_ratio", "valkey_get_ratio"), (">= 0.9",)),
    Aim("router: whole answers per second of a core", "router", ("answers_per_core_second",),
        (">= 1500",)),
    Aim("what it adds to the first event at 200 streams a second, p50 / p99", "router",
        ("added_p50_ms", "added_p99_ms"), ("<= 1", "<= 5"), "ms"),
    Aim("the same over vllm-router (Rust), p50 / p99", "router",
        ("added_p50_over_vllm_router", "added_p99_over_vllm_router"), ("<= 1.5",)),
    Aim("streams per second of a core over vllm-router, near saturation / at 100 a second; whole "
        "answers", "router", ("streams_per_core_second_over_vllm_router",
                              "calm_streams_per_core_second_over_vllm_router",
                              "answers_per_core_second_over_vllm_router"),
        (">= 1.3", ">= 0.95", ">= 0.8")),
    Aim("choosing the engines of a request in a fleet of 2 / 16 / 64", "decisions",
        ("decision_us_2", "decision_us_16", "decision_us_64"), (), "us"),
    Aim("memory of a slow stream / peak with hostile engines and clients", "router",
        ("mib_per_slow_stream", "peak_mib_hostile"), ("<= 0.3", "<= 256"), "MiB"),
    Aim("streams whose engine was killed or drained: wrong / broken", "continue_streams",
        ("wrong_streams", "broken_streams"), ("0",)),
    Aim("what a client of such a stream waits longer, killed / drained, median",
        "continue_streams", ("extra_ms_p50", "drain_extra_ms_p50"), (), "ms"),
    Aim("tokens of prompts that are computed again, killed / drained", "continue_streams",
        ("computed_again", "drain_computed_again")),
    Aim("streams of 50 tokens per second of a core, with the journal over without",
        "continue_streams", ("journal_over_relay",), (">= 0.97",)),
    Aim("`--disaggregate auto`: TTFT over the better one of `always` and `never`, the worse "
        "workload", "disaggregate", ("ttft_auto_over_best_p50",), ("<= 1.1",)),
    Aim("its time between tokens over that of `always`, p99: trace / mixed", "disaggregate",
        ("itl_p99_auto_over_always_trace", "itl_p99_auto_over_always_mixed")),
    Aim("requests over 8 data-parallel ranks by fewest tokens: tokens of the busiest over the "
        "mean, simulated / real router", "balance", ("imbalance", "real_imbalance_minimum"),
        ("<= 1.15",)),
    Aim("their TTFT below that of round robin", "balance",
        ("ttft_gain", "real_ttft_gain_minimum")),
    Aim("metrics: share of a request's time, new prompts / prompts loaded from the host tier",
        "metrics", ("metrics_cost_new", "metrics_cost_hit"), ("<= 0.005",)),
    Aim("spans of a traced request, the thread that sends them included", "metrics",
        ("trace_cost",), ("<= 0.005",)),
    Aim("to count a hand-off's transfer / to keep its times for a span", "metrics",
        ("metrics_us_per_transfer", "trace_us_per_transfer"), ("<= 5",), "us"),
    Aim("spans of a request in the router, tracing on / off", "metrics",
        ("router_trace_us_per_request", "router_trace_off_us_per_request"), (), "us"),
    Aim("scrape of a router with 100 engines of 8 ranks / of an engine of 8 data-parallel ranks "
        "with 100 peers each", "metrics", ("scrape_ms_router", "scrape_ms_engine"), ("<= 50",),
        "ms"),
    Aim("series of these scrapes", "metrics", ("series_router", "series_engine")),
    Aim("chaos: share of requests that are served while the router lives", "chaos",
        ("served_share",), (">= 0.99",)),
    Aim("the same: wrong tokens / hangs / leaked blocks", "chaos",
        ("wrong_tokens", "hangs", "leaked_blocks"), ("0",)),
    Aim("hostile input: crashes / hangs / smuggled / wrong", "hostile",
        ("crashes", "hangs", "smuggled", "wrong"), ("0",)),
    Aim("the same: memory gained by ten bombs, MiB / longest silence of `/health`, ms", "hostile",
        ("bomb_mib", "bomb_health_gap_ms"), ("<= 128", "<= 100")),
    Aim("soak: entries of containers / files / threads that stay", "soak",
        ("container_growth", "fd_growth", "thread_growth"), ("0",)),
    Aim("the same: memory, MiB per hour", "soak", ("rss_growth_mib_per_hour",), ("<= 2",)),
    Aim("schedulers of the engines at random, hours / wrong", "fuzz", ("fuzz_hours", "fuzz_wrong"),
        ("", "0")),
)  # fmt: skip


def table() -> str:
    """Return the rows as a Markdown table; a figure that misses its aim is bold."""
    lines = ["| figure | aim | measured | commit |", "|---|---|---|---|"]
    for row in AIMS:
        names = ", ".join(f"`{name}`" for name in row.figures)
        aims = " / ".join(aim or "-" for aim in row.aims) or "-"
        record = result(row.file)
        commit = name_of(record) if record else ""
        lines.append(f"| {row.text} (`{row.file}`: {names}) | {aims} | {_cell(row)} | {commit} |")
    return "\n".join([*lines, "", oldest([result(row.file) for row in AIMS])])


def meets(value: float, aim: str) -> bool:
    """Return whether a figure is within a bound."""
    sign, _, bound = aim.rpartition(" ")
    if not bound:
        return True
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def _cell(row: Aim) -> str:
    found = figures_of(row.file)
    aims = row.aims * len(row.figures) if len(row.aims) < 2 else row.aims
    aims = aims or ("",) * len(row.figures)
    cells = [
        _shown(found[name], aim) if name in found else NOT_YET
        for name, aim in zip(row.figures, aims, strict=True)
    ]
    return " / ".join(cells) + (f" {row.unit}" if row.unit else "")


def _shown(value: float, aim: str) -> str:
    digits = 0 if value == int(value) or value >= 1000 else 1 if value >= 20 else 2
    text = f"{value:,.{3 if abs(value) < 0.1 and digits else digits}f}"
    return text if meets(value, aim) else f"**{text}**"
