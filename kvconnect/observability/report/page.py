"""The report as one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvconnect.observability.report.comparison import Compared, compare, largest_changes
from kvconnect.observability.report.plots import COLORS, bars, lines
from kvconnect.observability.report.runs import RecordedRun


def html(runs: Sequence[RecordedRun]) -> str:
    """Return the page about one run, or two compared."""
    names = _names([run.path for run in runs])
    sections = compare(runs)
    # Names come from untrusted files: everything but the plots is escaped.
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["figure"] = figure
    template = environment.from_string(files(__package__).joinpath("page.html").read_text())
    return template.render(
        names=names,
        colors=COLORS,
        changes=largest_changes(sections),
        sections=[_section(section, names) for section in sections],
    )


def _section(section: Compared, names: Sequence[str]) -> dict[str, Any]:
    drawn = [
        bars(title, {row.name: [_number(v) for v in row.values] for row in rows}, names)
        for title, rows in section.bars.items()
    ]
    drawn += [lines(title, points) for title, points in section.lines.items()]
    return {
        "name": section.name,
        "about": section.about,
        "rows": section.rows,
        "is_history": bool(section.lines),
        "plots": [Markup(plot) for plot in drawn],  # matplotlib escapes its texts
    }


def figure(value: float | str | None) -> str:
    """Return a value as a table shows it."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 or value.is_integer() else f"{value:.4g}"
    return "" if value is None else value


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, float) else None


def _names(paths: Sequence[str]) -> list[str]:
    """Return names of runs: file names without suffix, or paths if these are equal."""
    short = [Path(path).stem for path in paths]
    return short if len(set(short)) == len(short) else [Path(path).as_posix() for path in paths]
