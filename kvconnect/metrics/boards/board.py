"""What a dashboard is, in few words: rows of panels, each of which shows queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "areas", "number", "bars"]
"""``lines`` over time, ``areas`` on top of one another, one ``number`` or ``bars`` for the whole
time range."""


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and what its series are called: ``{{label}}`` stands for a value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. ``unit`` is Grafana's word for it; ``width`` is of 24; ``about`` says how to read
    it, before the meaning of its metrics, which comes from the catalogue."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    width: int = 8
    about: str = ""


@dataclass(frozen=True)
class Row:
    """A heading and the panels under it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard; ``uid`` is its file name and its address in Grafana. ``engines``: whether it
    is about engines, and so has variables for which of them."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    engines: bool = True
