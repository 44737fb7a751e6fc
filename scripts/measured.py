"""The tables of docs/benchmarks.md, made from ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.headlines import NOT_YET, figures_of, name_of, result

_NOTHING = "no connector"
_ROUTER = "vllm-router, `NixlConnector`"


class Row(NamedTuple):
    """One line: figures that belong together, what they are compared with, and what is aimed at."""

    text: str
    figures: tuple[str, ...]
    peer: str = _NOTHING
    aim: str = "-"


SERVING = (
    Row("TTFT of questions about long documents, gain", ("doc_qa_ttft_gain",), aim=">= 0.75"),
    Row("time for all questions, gain", ("doc_qa_round_gain",), aim=">= 0.35"),
    Row("the same two, over theirs", ("doc_qa_ttft_over_lmcache", "doc_qa_round_over_lmcache"),
        "LMCache's server", "<= 1"),
    Row("failed requests, also with 100 documents", ("doc_failures",), "none", "0"),
    Row("prompts without reuse, time for all", ("overhead_random",), aim="<= 1.02"),
    Row("two engines without a connector, the same", ("overhead_control",), "each other"),
    Row("TTFT of the trace, mean, gain", ("trace_ttft_gain",), aim=">= 0.2"),
    Row("the same, 99th percentile", ("trace_p99_ratio",), aim="<= 0.8"),
    Row("the same, time between tokens", ("trace_itl_ratio",), aim="<= 1.02"),
    Row("prompt tokens from a cache", ("trace_hit_over_ideal",),
        "an ideal cache as big as the host tier", ">= 0.95"),
    Row("the same without KVConnect", ("trace_plain_hit_over_ideal",), "the same"),
    Row("TTFT of questions after one of 12 prefixes", ("prefix_repetition_ttft_ratio",)),
    Row("TTFT of questions after one of 12 system prompts", ("shared_prefix_ttft_ratio",)),
    Row("the same, prompts of guidellm", ("guidellm_ttft_ratio",)),
    Row("TTFT of five documents in other orders", ("permutator_ttft_ratio",)),
    Row("TTFT of a question to one of 10 chats", ("multi_round_ttft_ratio",)),
    Row("TTFT of prompts without reuse, all at once", ("random_prefill_ttft_ratio",)),
    Row("failed requests of these workloads, of either", ("workload_failures",), "none", "0"),
    Row("SGLang: TTFT of questions after one of 12 system prompts",
        ("sglang_shared_prefix_ttft_ratio",), "no cache in host memory"),
    Row("the same", ("sglang_hicache_ttft_ratio",), "HiCache, `file` backend"),
    Row("failed requests of SGLang's servers, of any", ("sglang_failures",), "none", "0"),
    Row("P/D: TTFT p50 / p99", ("pd_ttft_p50_ratio", "pd_ttft_p99_ratio"), _ROUTER, "<= 1"),
    Row("P/D: time between tokens, p99", ("pd_itl_p99_ratio",), _ROUTER, "<= 1"),
    Row("P/D: tokens per second", ("pd_throughput_ratio",), _ROUTER, ">= 1"),
    Row("P/D, engines on cores of their own: TTFT p50 / p99",
        ("pd_ttft_p50_ratio_apart", "pd_ttft_p99_ratio_apart"), _ROUTER, "<= 1"),
    Row("the same: time between tokens, p99", ("pd_itl_p99_ratio_apart",), _ROUTER, "<= 1"),
    Row("the same: tokens per second", ("pd_throughput_ratio_apart",), _ROUTER, ">= 1"),
    Row("answers that differ", ("wrong_answers",), aim="0"),
)  # fmt: skip
CHOICES = {
    "plain": "vLLM, no connector; vllm-router",
    "lmcache": "vLLM, LMCache's server; vllm-router",
    "kvconnect": "**vLLM, KVConnect; its router**",
    "nixl": "vLLM P/D, `NixlConnector`; vllm-router",
    "kvconnect_pd": "**vLLM P/D, KVConnect; its router**",
    "hicache": "SGLang, HiCache; smg",
    "sglang_kvconnect": "**SGLang, KVConnect; its router**",
    "sglang_nixl": "SGLang P/D, `nixl`; smg",
    "sglang_kvconnect_pd": "**SGLang P/D, KVConnect; its router**",
}
"""Fleets of ``benchmarks.choosing``."""
ROUTING = (
    Row("added to the first event at 200 streams a second, p50 / p99", ("added_p50", "added_p99")),
    Row("added to the last event, p50 / p99", ("added_end_p50", "added_end_p99")),
    Row("whole answers per second of a core", ("answers_per_core_second",)),
    Row("streams of 50 tokens per second of a core", ("streams_per_core_second",)),
)
JUDGED = (
    Row("time of a read / a write over their file", ("read_over_file", "write_over_file")),
    Row("the same, their file synchronised after each write",
        ("read_over_file_synced", "write_over_file_synced")),
    Row("requests per second over their file / synchronised",
        ("requests_over_file", "requests_over_file_synced")),
)  # fmt: skip
HANDED_OFF = {
    "4k tokens, link as slow as prefill": "4k_balanced",
    "4k tokens, 1 Gbit/s": "4k_1g",
    "4k tokens, link not shaped": "4k_free",
    "1k tokens, link as slow as prefill": "1k_balanced",
    "256 tokens, 1 Gbit/s": "256_1g",
    "256 tokens, loopback": "256_loopback",
    "eight times 256 tokens at once, 1 Gbit/s": "256_1g_c8",
}
"""Lines of SGLang's hand-off: what is asked, and how the figures' names end."""
PUSHED = {
    "wire time that shows in the time to first token, 4k tokens, a link as slow as prefill":
        "exposed_{}_over_wire_4k_balanced",
    "time to first token over NixlConnector's, 256 tokens": "ttft_{}_over_nixl_256",
    "the same, 4k tokens": "ttft_{}_over_nixl_4k",
    "the same, eight prompts of 256 tokens at once": "ttft_{}_over_nixl_256_c8",
}  # fmt: skip
"""Lines of vLLM's hand-off by push and pull."""
HAND_OFFS = {
    "TCP, by layers": "tcp_layerwise",
    "TCP, by chunks": "tcp",
    "NIXL, by layers": "nixl_path_layerwise",
    "NIXL, by chunks": "nixl_path",
    "built-in `mooncake_tcp`": "mooncake",
}


def choosing() -> str:
    """Return the table of ``benchmarks.choosing``."""
    found = figures_of("choosing")
    if not found:
        return "Not run yet: `benchmarks/choosing.py` makes this table."
    head = ("TTFT mean, ms", "99th percentile", "between tokens, ms", "tokens per second")
    lines = ["| two engines | " + " | ".join(head) + " | KVConnect's TTFT over it |"]
    lines.append("|---" * (len(head) + 2) + "|")
    for name, text in CHOICES.items():
        cells = [
            _spread(found, f"{key}_{name}")
            for key in ("ttft_ms", "ttft_p99_ms", "itl_ms", "tokens_per_s")
        ]
        over = f"ttft_over_{name}"
        cells.append(_cell(found, [over]) if over in found else "")
        lines.append("| " + " | ".join((text, *cells)) + " |")
    return _dated(lines, "choosing")


def _spread(found: Mapping[str, float], name: str) -> str:
    """Return a median with the least and the most of all rounds."""
    if name not in found:
        return NOT_YET
    return f"{found[name]:.0f} ({found[f'{name}_low']:.0f} to {found[f'{name}_high']:.0f})"


def serving() -> str:
    """Return the table of ``benchmarks.serve``."""
    found = figures_of("serve")
    lines = ["| figure | compared with | aim | measured |", "|---|---|---|---|"]
    for row in SERVING:
        names = ", ".join(f"`{name}`" for name in row.figures)
        cells = (f"{row.text} ({names})", row.peer, row.aim, _cell(found, row.figures))
        lines.append("| " + " | ".join(cells) + " |")
    return _dated(lines, "serve")


def routing() -> str:
    """Return the table of ``benchmarks.router``."""
    found = figures_of("router")
    lines = ["| figure | vllm-router 0.1.17 | smg 1.13 |", "|---|---|---|"]
    for row in ROUTING:
        names = ", ".join(f"`{name}_over_*`" for name in row.figures)
        cells = [f"{row.text} ({names})"]
        for peer in ("vllm_router", "smg"):
            cells.append(_cell(found, [f"{name}_over_{peer}" for name in row.figures]))
        lines.append("| " + " | ".join(cells) + " |")
    return _dated(lines, "router")


def judged() -> str:
    """Return the table of ``benchmarks.mooncake_storage``."""
    found = figures_of("mooncake_storage")
    lines = ["| figure | disk | Valkey | Mooncake |", "|---|---|---|---|"]
    for row in JUDGED:
        names = ", ".join(f"`*_{name}`" for name in row.figures)
        cells = [f"{row.text} ({names})"]
        for tier in ("disk", "valkey", "mooncake"):
            cells.append(_cell(found, [f"{tier}_{name}" for name in row.figures]))
        lines.append("| " + " | ".join(cells) + " |")
    return _dated(lines, "mooncake_storage")


def handed_off() -> str:
    """Return the table of ``benchmarks.sglang_handoff``."""
    found = figures_of("sglang_handoff")
    lines = ["| TTFT over built-in `nixl` | " + " | ".join(HAND_OFFS) + " |"]
    lines.append("|---" * (1 + len(HAND_OFFS)) + "|")
    for text, end in HANDED_OFF.items():
        cells = [_cell(found, [f"ttft_{kind}_over_nixl_{end}"]) for kind in HAND_OFFS.values()]
        lines.append("| " + " | ".join((text, *cells)) + " |")
    shares = [_cell(found, [f"exposed_over_wire_4k_{kind}"]) for kind in HAND_OFFS.values()]
    own = _cell(found, ["exposed_over_wire_4k_nixl"])
    text = f"share of the wire time that shows, 4k tokens (`nixl`: {own})"
    lines.append("| " + " | ".join((text, *shares)) + " |")
    return _dated(lines, "sglang_handoff")


def push_pays() -> str:
    """Return the table of ``benchmarks.handoff``."""
    found = figures_of("handoff")
    lines = ["| | push | pull |", "|---|---|---|"]
    for end, apart in (("", ""), ("_apart", ", apart")):
        for text, figure in PUSHED.items():
            cells = [_cell(found, [figure.format(way) + end]) for way in ("push", "pull")]
            lines.append("| " + " | ".join((text + apart, *cells)) + " |")
    return _dated(lines, "handoff")


def _dated(lines: Sequence[str], name: str) -> str:
    """Return a table with the commit that its benchmark measured."""
    return "\n".join([*lines, "", f"Commit: {name_of(result(name))}."])


def _cell(found: Mapping[str, float], names: Sequence[str]) -> str:
    if not found.keys() & {*names}:
        return NOT_YET
    return " / ".join(_number(found[name]) if name in found else NOT_YET for name in names)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) != 1 else f"{value:.2f}"
