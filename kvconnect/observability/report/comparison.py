"""Runs of a report, compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvconnect.observability.report.runs import Points, RecordedRun, Section

UNITS = {
    **dict.fromkeys(("over", "ratio", "vs", "share", "cost"), "ratios"),
    **{"gain": "gains", "ms": "ms", "us": "us", "s": "s", "gbps": "GB/s", "bytes": "bytes"},
}
"""Word in a figure's name -> unit. Figures of one unit share a plot."""
_MOST_BARS = 24
_MOST_CHANGES = 12


@dataclass(frozen=True)
class ComparisonRow:
    """One figure; ``values`` has one per run, None where a run lacks it."""

    name: str
    values: tuple[float | str | None, ...]

    @property
    def ratio(self) -> float | None:
        """Second run over first; None unless both are numbers and the first is not 0."""
        if len(self.values) < 2:
            return None
        first, second = self.values[:2]
        if not isinstance(first, float) or not isinstance(second, float) or not first:
            return None
        return second / first


@dataclass(frozen=True)
class Compared:
    """One section of all runs."""

    name: str
    about: tuple[ComparisonRow, ...]
    rows: tuple[ComparisonRow, ...]
    bars: Mapping[str, tuple[ComparisonRow, ...]]
    lines: Mapping[str, tuple[Points, ...]]


def compare(runs: Sequence[RecordedRun]) -> list[Compared]:
    """Return the sections of all runs, in the order of the first run."""
    names = dict.fromkeys(name for run in runs for name in run.sections)
    return [_compared(name, [run.sections.get(name) for run in runs]) for name in names]


def largest_changes(sections: Sequence[Compared]) -> list[tuple[str, ComparisonRow]]:
    """Return (section, figure) of the largest changes, as a factor in either direction."""
    found = [
        (max(ratio, 1 / ratio), section.name, row)
        for section in sections
        for row in section.rows
        if (ratio := row.ratio) is not None and ratio > 0 and ratio != 1
    ]
    found.sort(key=lambda each: -each[0])
    return [(name, row) for _, name, row in found[:_MOST_CHANGES]]


def _compared(name: str, sections: Sequence[Section | None]) -> Compared:
    present = [section for section in sections if section]
    rows = _rows([section.figures if section else {} for section in sections])
    series = dict.fromkeys(title for section in present for title in section.series)
    return Compared(
        name,
        _rows([section.about if section else {} for section in sections]),
        rows,
        {} if series else _bars(rows),
        {
            title: tuple(section.series.get(title, []) if section else [] for section in sections)
            for title in series
        },
    )


def _rows(columns: Sequence[Mapping[str, float | str]]) -> tuple[ComparisonRow, ...]:
    names = dict.fromkeys(name for column in columns for name in column)
    return tuple(
        ComparisonRow(name, tuple(column.get(name) for column in columns)) for name in names
    )


def _bars(rows: Sequence[ComparisonRow]) -> dict[str, tuple[ComparisonRow, ...]]:
    groups: dict[str, list[ComparisonRow]] = defaultdict(list)
    for row in rows:
        unit = unit_of(row.name)
        if unit and any(isinstance(value, float) for value in row.values):
            groups[unit].append(row)
    return {
        unit if len(group) <= _MOST_BARS else f"{unit} ({start // _MOST_BARS + 1})": tuple(
            group[start : start + _MOST_BARS]
        )
        for unit, group in groups.items()
        for start in range(0, len(group), _MOST_BARS)
    }


def unit_of(name: str) -> str:
    """Return a figure's unit, "" if its name has none."""
    words = name.split("_")
    return next((unit for word, unit in UNITS.items() if word in words), "")
