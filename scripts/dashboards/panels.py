"""Dashboards as rows of panels with queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "areas", "number", "bars"]
"""``lines`` or stacked ``areas`` over time, or one ``number`` or ``bars`` for the whole range."""


@dataclass(frozen=True)
class Query:
    """A PromQL expression and its legend, in which ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. ``unit`` is Grafana's name; ``width`` is of 24 columns. Its description is
    ``about``, then the catalogue's help texts of its metrics."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    width: int = 8
    about: str = ""


@dataclass(frozen=True)
class PanelRow:
    """A heading and the panels under it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard. ``uid`` is its file name and its address in Grafana. ``engines``: whether it
    has variables that select engines."""

    uid: str
    title: str
    about: str
    rows: tuple[PanelRow, ...]
    engines: bool = True
