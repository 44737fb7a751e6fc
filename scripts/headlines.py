"""The README's table of measured ratios, and the plot of the same rows.

Both are made from ``benchmarks/results``; ``python -m scripts.reference`` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_YET = "not run yet"
PLOT = ROOT / "docs" / "drawings" / "headlines.svg"


class Headline(NamedTuple):
    """One ratio.

    Attributes:
        text: what is compared.
        peer: what it is divided by.
        file: name of the result file, without ``.json``.
        figure: name of the figure in it.
        limit: worst value that meets the aim; None where there is no aim.
        higher: whether a larger ratio is better.
    """

    text: str
    peer: str
    file: str
    figure: str
    limit: float | None
    higher: bool = False


HEADLINES = (
    Headline("TTFT of a 2k-token prompt in host memory", "computing it",
             "offload_engine", "ttft_hit_over_recompute", 0.25),
    Headline("TTFT of a 2k-token prompt in host memory", "vLLM's `ExampleConnector`",
             "offload_engine", "ttft_hit_over_example", 0.9),
    Headline("TTFT of a 2k-token prompt on disk", "computing it",
             "tiers", "ttft_disk_over_recompute", 0.25),
    Headline("Time of a prompt that finds nothing", "the engine without a connector",
             "overhead", "overhead_no_hit", 1.01),
    Headline("P/D: TTFT of a 4k prompt, push, engines on cores of their own",
             "vLLM's `NixlConnector`", "handoff", "ttft_push_over_nixl_4k_apart", 0.6),
    Headline("P/D: the same, engines that share all cores", "vLLM's `NixlConnector`",
             "handoff", "ttft_push_over_nixl_4k", 0.8),
    Headline("SGLang P/D: TTFT of a 4k prompt, by layers", "SGLang's `nixl` backend",
             "sglang_handoff", "ttft_layerwise_over_nixl_4k", 0.85),
    Headline("Rate over TCP, 64 KiB pages", "NIXL (UCX over TCP)",
             "transport", "ratio_nixl_64k", 2.0, higher=True),
    Headline("Rate of writes to Valkey, 1 MiB blocks", "the Valkey client alone",
             "store", "valkey_put_ratio", 0.9, higher=True),
    Headline("Router: answers per second of a CPU core", "`vllm-router` (Rust)",
             "router", "answers_per_core_second_over_vllm_router", None, higher=True),
)  # fmt: skip
"""At most ten; where a benchmark has several conditions, the figure is its worst."""


def measured(row: Headline) -> float | None:
    """Return the ratio of the last committed run; None if it has none."""
    return figures_of(row.file).get(row.figure)


def meets(row: Headline, value: float) -> bool:
    """Return whether a ratio, rounded as it is shown, is within the limit."""
    if row.limit is None:
        return True
    shown = float(_number(value))
    return shown >= row.limit if row.higher else shown <= row.limit


def table() -> str:
    """Return the rows as a Markdown table; a ratio that misses its limit is bold."""
    lines = ["| what | divided by | limit | measured | commit |", "|---|---|---|---|---|"]
    for row in HEADLINES:
        value = measured(row)
        text = NOT_YET if value is None else _number(value)
        if value is not None and not meets(row, value):
            text = f"**{text}**"
        sign = "&ge;" if row.higher else "&le;"
        limit = f"{sign} {row.limit:g}" if row.limit is not None else "none"
        commit = name_of(result(row.file)) if value is not None else ""
        lines.append(f"| {row.text} | {row.peer} | {limit} | {text} | {commit} |")
    found = [result(row.file) for row in HEADLINES if measured(row) is not None]
    return "\n".join([*lines, "", oldest(found)])


def result(file: str) -> Mapping[str, Any]:
    """Return the record of the last committed run; empty if there was none."""
    path = RESULTS / f"{file}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def figures_of(file: str) -> Mapping[str, float]:
    """Return the figures of the last committed run; empty if there was none."""
    figures: dict[str, float] = result(file).get("figures", {})
    return figures


def name_of(record: Mapping[str, Any]) -> str:
    """Return the commit that a run measured, as the tables show it."""
    return f"`{record['commit']}`" if record.get("commit") else "unknown"


def oldest(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence that names the oldest commit of some results."""
    if not all(record.get("commit") for record in records):
        return "Oldest commit: unknown, some of these results do not name one."
    first = min(records, key=lambda record: record.get("committed", 0))
    return f"Oldest commit: {name_of(first)}."


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


# The plot ---------------------------------------------------------------------------------------

_WIDTH, _LEFT, _ROW, _TOP, _BAR = 520, 24, 46, 66, 14
_LEAST, _MOST = 0.25, 128.0
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_MET, _MISSED, _NO_LIMIT = "#2c7d57", "#d96d00", "#7a8296"


def plot() -> str:
    """Return the rows as an SVG: bars from 1, to the right where KVConnect is better."""
    drawn = [(row, value) for row in HEADLINES if (value := measured(row)) is not None]
    bottom = _TOP + _ROW * len(drawn)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 34}" '
        f'width="{_WIDTH}" height="{bottom + 34}" role="img" '
        'aria-label="Measured: times better than the peer" font-family="system-ui, sans-serif" '
        'font-size="13" fill="#1b1e26">',
        f'<rect width="{_WIDTH}" height="{bottom + 34}" rx="8" fill="#ffffff"/>',
        _text(_LEFT, 24, "Times better than the peer", 'font-size="15" font-weight="700"'),
        *_legend(),
    ]
    for tick in _TICKS:
        color = "#1b1e26" if tick == 1 else "#dde1ea"
        parts.append(f'<path d="M{_x(tick)} {_TOP - 6}V{bottom}" stroke="{color}"/>')
        parts.append(_text(_x(tick), bottom + 18, f"{tick:g}", 'text-anchor="middle"'))
    for index, (row, value) in enumerate(drawn):
        parts += _bar(row, value, _TOP + _ROW * index)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts = []
    for x, color, text in (
        (_LEFT, _MET, "meets its limit"),
        (_LEFT + 132, _MISSED, "misses it"),
        (_LEFT + 226, _NO_LIMIT, "has no limit"),
    ):
        parts.append(f'<rect x="{x}" y="37" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 15, 46, text))
    x = _LEFT + 338
    parts.append(f'<path d="M{x} 34V50" stroke="#1b1e26" stroke-width="3"/>')
    parts.append(_text(x + 9, 46, "limit"))
    return parts


def _bar(row: Headline, value: float, top: float) -> list[str]:
    better = value if row.higher else 1 / value
    color = _NO_LIMIT if row.limit is None else _MET if meets(row, value) else _MISSED
    start, end = sorted((_x(1), _x(better)))
    y, behind = top + 20, end
    parts = [
        _halo(_LEFT, top + 14, f"{row.text} / {row.peer.replace('`', '')}"),
        f'<rect x="{start}" y="{y}" width="{max(end - start, 1):.1f}" height="{_BAR}" '
        f'fill="{color}"/>',
    ]
    if row.limit is not None:
        at = _x(row.limit if row.higher else 1 / row.limit)
        behind = max(end, at)
        parts.append(f'<path d="M{at} {y - 2}v{_BAR + 4}" stroke="#1b1e26" stroke-width="3"/>')
    parts.append(_halo(behind + 8, y + 12, f"{better:.1f}" if better >= 10 else f"{better:.2f}"))
    return parts


def _x(value: float) -> float:
    share = math.log(value / _LEAST) / math.log(_MOST / _LEAST)
    return round(_LEFT + share * (_WIDTH - 2 * _LEFT), 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{text.replace("&", "&amp;")}</text>'


def _halo(x: float, y: float, text: str) -> str:
    """A text with a white edge, to be read where it crosses a line."""
    return _text(x, y, text, 'stroke="#fff" stroke-width="4" paint-order="stroke"')
