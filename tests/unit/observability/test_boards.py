"""Dashboards: what is committed is what is generated, valid, and about metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

import pydantic
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvconnect import cli
from kvconnect.observability.metrics.catalog import SGLANG, VLLM, families
from kvconnect.router.metrics import RouterMetrics
from scripts.dashboards import promql
from scripts.dashboards.__main__ import BOARDS
from scripts.dashboards.grafana import to_json
from tests.boards import (
    FOLDER,
    Shown,
    boards,
    engines,
    filled,
    names,
    of_alerts,
    of_panels,
    selectors,
)

PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}

OF_ONE_ENGINE = {
    ("KVConnectTierDown", "vllm:kvconnect_lookups_total"),
    ("KVConnectTierDown", "vllm:kvconnect_transfer_operations_total"),
}
"""Series of an alert's exceptions for one engine: only vLLM's tiers are unknown at its start."""

plugins.register_default_plugins()


# Committed, generated, valid ----------------------------------------------------------------------


def test_what_is_committed_is_what_is_generated() -> None:
    made = {board.uid: to_json(board) for board in BOARDS}
    committed = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    assert committed == made, "python -m scripts.dashboards"


def wrong(board: dict[str, Any]) -> list[str]:
    """What Grafana's types do not have: fields, and values of other types."""
    read = Dashboard.from_json(board)
    if json.loads(json.dumps(read, cls=JSONEncoder)) != board:
        return ["a field that is unknown, or left out"]
    return list(mistyped(read))


def mistyped(value: Any) -> Iterable[str]:
    if isinstance(value, list):
        for item in value:
            yield from mistyped(item)
    elif type(value).__module__.startswith("grafana_foundation_sdk"):
        config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        for name, hint in get_type_hints(type(value)).items():
            item = getattr(value, name)
            try:
                pydantic.TypeAdapter(hint, config=config).validate_python(item)
            except pydantic.ValidationError as error:
                yield f"{type(value).__name__}.{name}: {error}"
            yield from mistyped(item)


@pytest.mark.parametrize("name", sorted(boards()))
def test_boards_are_of_the_types_that_grafana_publishes(name: str) -> None:
    assert wrong(boards()[name]) == []


@pytest.mark.parametrize("change", [{"titel": "x"}, {"refresh": 30}, {"tags": "kvconnect"}])
def test_control_a_wrong_field_is_seen(change: dict[str, Any]) -> None:
    assert wrong({**boards()["kvconnect-router"], **change})


def test_panels_lie_on_the_grid_and_not_on_one_another() -> None:
    for name, board in boards().items():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert max(x for x, _ in cells) < 24, (name, panel["title"])
            assert not cells & taken, (name, panel["title"])
            taken |= cells
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)


def test_the_engines_are_read_as_they_are_meant() -> None:
    assert engines() == promql.PREFIXES


def test_legends_name_what_tells_series_apart() -> None:
    for one in of_panels():
        told = set(re.findall(r"{{(\w+)}}", one.legend))
        apart = {
            label.strip()
            for labels in re.findall(r"\bby \(([^)]*)\)", one.expr)
            for label in labels.split(",")
        }
        assert told == apart - {"le"}, one


# Metrics that exist -------------------------------------------------------------------------------


def catalogue() -> dict[str, set[str]]:
    """Every metric of engines and router -> its series' names in a scrape."""
    found = {
        family.name: {f"{family.name}{part}" for part in PARTS[family.metric.kind]}
        for prefix in (VLLM, SGLANG)
        for family in families(prefix)
        if family.alias is None  # an alias is for boards that others have made
    }
    for metric in RouterMetrics().registry.collect():
        found[metric.name] = {f"{metric.name}{part}" for part in PARTS[metric.type]}
    return found


def matched(expr: str, known: set[str]) -> list[set[str]]:
    """Of every selector in an expression, the names that are known and that it matches."""
    return [
        {name for name in known if all(re.fullmatch(p, name) for p in names(selector))}
        for selector in selectors(filled(expr))
        if "kvconnect_" in selector  # what engines publish themselves, a live scrape proves
    ]


def unknown(shown: Iterable[Shown]) -> set[tuple[str, str]]:
    """Where something is selected that KVConnect does not publish."""
    known = set().union(*catalogue().values())
    return {(one.board, one.title) for one in shown if not all(matched(one.expr, known))}


def unused(shown: Iterable[Shown]) -> set[str]:
    """Metrics, without the engine in front, that are not selected."""
    known = set().union(*catalogue().values())
    used = {name for one in shown for some in matched(one.expr, known) for name in some}
    return {name.rpartition(":")[2] for name, series in catalogue().items() if not series & used}


def test_every_metric_is_shown_and_what_is_shown_exists() -> None:
    everything = [*of_panels(), *of_alerts()]
    assert all(selectors(filled(one.expr)) for one in everything)
    assert unknown(everything) == set()
    assert unused(everything) == set()


def test_every_alert_is_for_both_engines() -> None:
    """In either way in which SGLang's names are stored."""
    known = set().union(*catalogue().values())
    known |= {name.replace("sglang:", "sglang_") for name in known}
    alone = set()
    for one in of_alerts():
        for some in matched(one.expr, known):
            prefixes = {name.partition("kvconnect_")[0] for name in some}
            if prefixes not in ({"vllm:", "sglang:", "sglang_"}, {""}):
                alone.add((one.title, *some))
    assert alone == OF_ONE_ENGINE


def test_control_an_unknown_and_an_unused_metric_are_seen() -> None:
    panels = of_panels()
    for bad in ('{__name__=~"(${engine:pipe})kvconnect_lookup_total"}', "kvconnect_router_quue{}"):
        assert unknown([Shown("b", "t", f"sum(rate({bad}[5m]))")]) == {("b", "t")}
    without = [one for one in panels if "kvconnect_host_blocks_pinned" not in one.expr]
    assert unused([*without, *of_alerts()]) == {"kvconnect_host_blocks_pinned"}
    without = [one for one in panels if "kvconnect_router_picks" not in one.expr]
    assert unused([*without, *of_alerts()]) == {"kvconnect_router_picks"}


@pytest.mark.parametrize("name", ["lookup", "load_exposed_seconds", "lookups_total", "x_sum"])
def test_a_board_cannot_be_made_with_an_unknown_metric(name: str) -> None:
    with pytest.raises(AssertionError, match="catalogue"):
        promql.series(name)
    with pytest.raises(AssertionError, match="catalogue"):
        promql.router(name)


def test_what_ranks_count_alike_is_not_added_up() -> None:
    of_one = "sum by (tier) (max without (tp_rank, pp_rank, moe_ep_rank) (rate("
    assert promql.rate(promql.series("hit_tokens"), "tier").startswith(of_one)
    assert "max" not in promql.rate(promql.series("transfer_bytes"))  # each rank moves its own


# The command --------------------------------------------------------------------------------------


def test_dashboards_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert cli.main(["dashboards", "export", str(folder)]) == 0
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(written) == {"alerts.yaml", *(f"{name}.json" for name in boards())}
    assert all(written[name] == (FOLDER / name).read_bytes() for name in written)
    assert capsys.readouterr().out.splitlines() == [str(folder / name) for name in sorted(written)]


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["dashboards", "export", str(tmp_path / "file" / "x")]) == 1
    assert re.fullmatch(r"kvconnect dashboards: .*file.*\n", capsys.readouterr().err)
