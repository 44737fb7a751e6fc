"""Plots of a report: SVG texts by matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from kvconnect.observability.report.runs import Points
from kvconnect.terminal import plain

COLORS = ("#4269d0", "#ff8c1a")
"""Colors of the first and the second run."""

_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable
    "svg.hashsalt": "kvconnect",  # the same run gives the same page
    "text.parse_math": False,  # names are not formulas
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_WIDTH, _ROW, _MARGIN = 9.0, 0.24, 0.8  # inches
_LONGEST_NAME = 60


def bars(title: str, rows: Mapping[str, Sequence[float | None]], names: Sequence[str]) -> str:
    """Return a group of horizontal bars per row as SVG, one bar per run.

    Args:
        rows: name of a figure -> its value in each run, None for no bar.
        names: of the runs.
    """
    figure = Figure(figsize=(_WIDTH, _MARGIN + _ROW * len(rows) * len(names)))
    with matplotlib.rc_context(_SETTINGS):
        axes = figure.add_subplot()
        thick = 0.8 / len(names)
        for run, name in enumerate(names):
            places = [row + (run - (len(names) - 1) / 2) * thick for row in range(len(rows))]
            values = [found[run] or 0.0 for found in rows.values()]
            drawn = axes.barh(places, values, thick, color=COLORS[run], label=name)
            texts = ["" if found[run] is None else f"{found[run]:.3g}" for found in rows.values()]
            axes.bar_label(drawn, texts, padding=3, fontsize=8)
        axes.set_yticks(range(len(rows)), [_shortened(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.12)
        if len(names) > 1:
            axes.legend(loc="best", frameon=False, fontsize=8)
        return _svg(figure, axes, title)


def lines(title: str, runs: Sequence[Points]) -> str:
    """Return a series over time as SVG, a line per run. ``title`` ends in a comma and the unit."""
    figure = Figure(figsize=(_WIDTH / 2, 2.2))
    with matplotlib.rc_context(_SETTINGS):
        axes = figure.add_subplot()
        for points, color in zip(runs, COLORS, strict=False):
            times, values = [at for at, _ in points], [value for _, value in points]
            alone = "o" if len(points) == 1 else ""
            axes.plot(times, values, color=color, linewidth=1.4, marker=alone)
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0)
        if axes.get_ylim()[1] >= 1000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        return _svg(figure, axes, title)


def _svg(figure: Figure, axes: Axes, title: str) -> str:
    axes.set_title(_shortened(title), loc="left", fontsize=10, fontweight="bold")
    figure.set_layout_engine("constrained")
    text = io.StringIO()
    with warnings.catch_warnings():
        # The browser may have glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]  # without the XML prologue


def _shortened(text: str) -> str:
    name = plain(text)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
