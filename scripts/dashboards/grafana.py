"""Dashboards as JSON for Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import bargauge, stat, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus as prometheus_builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from scripts.dashboards import helps
from scripts.dashboards.panels import Board, Panel
from scripts.dashboards.promql import ENGINE, PREFIXES

Builder = Any  # the SDK has no base class that panels, or variables, share

_TAG = "kvconnect"
_HEIGHTS = {"number": 4, "bars": 9}  # others 8
_PROMETHEUS = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_ALL = dashboard.VariableOption(text="All", value="$__all", selected=True)
_HELPS = helps()


def to_json(board: Board) -> str:
    """Return a board as Grafana's JSON."""
    built = builders.Dashboard(board.title)
    built.uid(board.uid)
    built.description(board.about)
    built.tags([_TAG])
    built.time("now-1h", "now")
    built.refresh("30s")
    built.tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    built.link(_links_to_other_boards())
    for variable in _variables(board):
        built.with_variable(variable)
    for row in board.rows:
        built.with_row(builders.Row(row.title))
        for panel in row.panels:
            built.with_panel(_panel(panel))
    whole = built.build()
    for number, shown in enumerate(whole.panels or (), 1):
        shown.id_val = number
    return json.dumps(whole, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _links_to_other_boards() -> Builder:
    link = builders.DashboardLink("KVConnect")
    link.type(dashboard.DashboardLinkType.DASHBOARDS)
    link.tags([_TAG])
    link.keep_time(True)
    link.include_vars(True)
    return link


def _variables(board: Board) -> Iterator[Builder]:
    source = builders.DatasourceVariable("datasource")
    source.label("Data source")
    source.type("prometheus")
    yield source
    if not board.engines:
        of_router = "kvconnect_router_requests_total"
        yield _query("role", "Role (job)", f"label_values({of_router}, job)")
        here = f'{of_router}{{job=~"$role"}}'
        yield _query("instance", "Instance", f"label_values({here}, instance)")
        return
    engine = builders.CustomVariable("engine")
    engine.label("Engine")
    engine.values(", ".join(f"{name} : {value}" for name, value in PREFIXES.items()))
    engine.multi(True)
    engine.include_all(True)
    engine.current(_ALL)
    yield engine
    name = f'__name__=~"{ENGINE}kvconnect_lookups_total"'
    yield _query("model", "Model", f"label_values({{{name}}}, model_name)")
    name += ', model_name=~"$model"'
    yield _query("role", "Role (job)", f"label_values({{{name}}}, job)")
    name += ', job=~"$role"'
    yield _query("instance", "Instance", f"label_values({{{name}}}, instance)")


def _query(name: str, label: str, query: str) -> Builder:
    variable = builders.QueryVariable(name)
    variable.label(label)
    variable.datasource(_PROMETHEUS)
    variable.query(query)
    variable.definition(query)
    variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    variable.multi(True)
    variable.include_all(True)
    variable.all_value(".*")
    variable.current(_ALL)
    return variable


def _panel(panel: Panel) -> Builder:
    built = _shape(panel)
    built.title(panel.title)
    built.description(_description(panel))
    built.datasource(_PROMETHEUS)
    built.unit(panel.unit)
    built.span(panel.width)
    built.height(_HEIGHTS.get(panel.kind, 8))
    for number, query in enumerate(panel.queries):
        target = prometheus_builders.Dataquery()
        target.datasource(_PROMETHEUS)
        target.ref_id(chr(ord("A") + number))
        target.expr(query.expr)
        target.legend_format(query.legend or panel.title)
        if panel.kind in ("number", "bars"):
            target.instant()
        else:
            target.range()
        built.with_target(target)
    return built


def _shape(panel: Panel) -> Builder:
    last = common_builders.ReduceDataOptions()
    last.calcs(["lastNotNull"])
    if panel.kind == "number":
        number = stat.Panel()
        number.reduce_options(last)
        return number
    if panel.kind == "bars":
        bars = bargauge.Panel()
        bars.reduce_options(last)
        bars.orientation(common.VizOrientation.HORIZONTAL)
        bars.display_mode(common.BarGaugeDisplayMode.BASIC)
        bars.min(0)
        return bars
    lines = timeseries.Panel()
    lines.min(0)
    lines.show_points(common.VisibilityMode.NEVER)
    legend = common_builders.VizLegendOptions()
    legend.show_legend(True)
    legend.display_mode(common.LegendDisplayMode.LIST)
    legend.placement(common.LegendPlacement.BOTTOM)
    lines.legend(legend)
    tooltip = common_builders.VizTooltipOptions()
    tooltip.mode(common.TooltipDisplayMode.MULTI)
    lines.tooltip(tooltip)
    if panel.kind == "areas":
        stacking = common_builders.StackingConfig()
        stacking.mode(common.StackingMode.NORMAL)
        lines.stacking(stacking)
        lines.fill_opacity(25)
    return lines


def _description(panel: Panel) -> str:
    """Return a panel's description: ``about``, then the help texts of its metrics."""
    words = re.findall(r"kvconnect_\w+", " ".join(query.expr for query in panel.queries))
    stems = [word if word in _HELPS else re.sub(r"_[a-z]+$", "", word) for word in words]
    meanings = [f"`{stem}`: {_HELPS[stem]}" for stem in dict.fromkeys(stems)]
    return "\n\n".join(filter(None, (panel.about, *meanings)))
