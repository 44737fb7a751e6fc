"""Reads dashboards and alerts, and evaluates them in a real Prometheus, for both engines."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from kvconnect.observability.metrics import dashboards
from tests.engines.server import Process

FOLDER = Path(dashboards.__file__).parent
ALERTS = FOLDER / "alerts.yaml"
SCRAPE_S = 1
PATIENCE_S = 60.0


class Shown(NamedTuple):
    """One expression of a panel or an alert. ``legend`` names its series."""

    board: str
    title: str
    expr: str
    legend: str = ""


def boards() -> dict[str, dict[str, Any]]:
    """Return the JSON of every board, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def engines() -> dict[str, str]:
    """Return the choices of the variable ``engine``, as Grafana reads them."""
    variables = boards()["kvconnect-overview"]["templating"]["list"]
    (query,) = (variable["query"] for variable in variables if variable["name"] == "engine")
    return dict(option.strip().split(" : ") for option in query.split(","))


ALL = {
    "${engine:pipe}": "|".join(engines().values()),
    "$__rate_interval": "1m",
    "$__range": "30m",
    "$model": ".*",
    "$role": ".*",
    "$instance": ".*",
}
"""Grafana's values of the variables when all are selected, for half an hour."""


def of_board(name: str, board: dict[str, Any]) -> list[Shown]:
    """Return the expressions of a board's panels."""
    return [
        Shown(name, panel["title"], target["expr"], target["legendFormat"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def of_panels() -> list[Shown]:
    return [shown for name, board in boards().items() for shown in of_board(name, board)]


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_alerts() -> list[Shown]:
    return [Shown("alerts", rule["alert"], rule["expr"]) for rule in rules()]


def filled(text: str, values: Mapping[str, str] = ALL) -> str:
    """Put values in for the variables."""
    for variable, value in values.items():
        text = text.replace(variable, value)
    assert "$" not in text, f"a variable is left in {text}"
    return text


def selectors(expr: str) -> list[str]:
    """Return the selectors of series in an expression whose variables are filled in."""
    return re.findall(r"[a-zA-Z_:]*\{[^}]*\}|kvconnect_\w+(?!\w|\{)", expr)


def names(selector: str) -> list[str]:
    """Return the regular expressions that a selector's metric name must match."""
    plain = re.match(r"[a-zA-Z_:]+\w*", selector)
    return [plain.group()] if plain else re.findall(r'__name__=~"([^"]*)"', selector)


@dataclass
class Prometheus(Process):
    """A real Prometheus that scrapes ``targets``: job -> addresses. Use as a context manager."""

    targets: dict[str, list[str]]
    folder: Path

    health: ClassVar[str] = "/-/ready"

    def command(self) -> list[str]:
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": addresses}]}
                for job, addresses in self.targets.items()
            ],
        }
        path = self.folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        return [
            *("prometheus", f"--config.file={path}", f"--storage.tsdb.path={self.folder / 'data'}"),
            f"--web.listen-address={self.host}:{self.port}",
        ]

    def ask(self, path: str, **parameters: Any) -> Any:
        """Return what the HTTP API answers.

        Raises:
            urllib.error.HTTPError: the expression is wrong.
        """
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}") as reply:
            return json.load(reply)["data"]

    def at_once(self, expr: str, when: float | None = None) -> dict[str, float]:
        """Return an expression's values at a time, by all of their labels but the name."""
        found = {}
        for sample in self.ask("query", query=filled(expr), time=when or time.time())["result"]:
            labels = {k: v for k, v in sample["metric"].items() if k != "__name__"}
            found[", ".join(f"{k}={v}" for k, v in sorted(labels.items()))] = float(
                sample["value"][1]
            )
        return found

    def numbers(self, expr: str, since: float) -> int:
        """Return how many numbers an expression had since then; NaN is none."""
        return sum(
            value != "NaN" for line in self._over_time(expr, since) for _, value in line["values"]
        )

    def empty(self, shown: Iterable[Shown], since: float) -> set[tuple[str, str]]:
        """Return the board and title of those that had no number since then."""
        return {(one.board, one.title) for one in shown if not self.numbers(one.expr, since)}

    def nameless(self, shown: Iterable[Shown], since: float) -> set[tuple[str, str]]:
        """Return the board and title of those whose legend has labels that their series lack."""
        return {
            (one.board, one.title)
            for one in shown
            for line in self._over_time(one.expr, since)
            if not set(re.findall(r"{{(\w+)}}", one.legend)) <= line["metric"].keys()
        }

    def _over_time(self, expr: str, since: float) -> list[dict[str, Any]]:
        asked = {"query": filled(expr), "start": since, "end": time.time(), "step": SCRAPE_S}
        lines: list[dict[str, Any]] = self.ask("query_range", **asked)["result"]
        return lines

    def await_scrapes(self) -> None:
        """Wait until every target was asked for its present state; one that is down has none."""
        asked, deadline = time.time(), time.monotonic() + PATIENCE_S
        while not self._all_scraped_since(asked):
            assert time.monotonic() < deadline, "Prometheus does not scrape"
            time.sleep(0.1)

    def _all_scraped_since(self, then: float) -> bool:
        up = self.ask("query", query="timestamp(up)")["result"]
        wanted = sum(len(addresses) for addresses in self.targets.values())
        return sum(float(sample["value"][1]) > then for sample in up) == wanted
