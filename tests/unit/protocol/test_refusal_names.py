"""Refusals between engines are counted by the names that the code raises them with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvconnect.errors import Refused
from kvconnect.observability.metrics.prometheus import PromMetrics
from kvconnect.protocol.hello import REFUSAL_FIELDS, Reject
from kvconnect.stats import OTHER, OffloadingConnectorStats

PACKAGE = Path(__file__).resolve().parents[3] / "kvconnect"
BETWEEN_CLIENT_AND_ROUTER = "router"  # its refusals are answers, and no labels
NAMED_BY = {"Refused": 0, "PeerDown": 2, "_match": 0, "_mismatch": 0, "refuse": 1}
"""Call -> which of its arguments is the name."""


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each refusal in a source, those included that loops go through."""
    tree = ast.parse(source)
    loops = {
        node.target.id: node.iter
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        place = NAMED_BY.get(called, len(node.args))
        named = node.args[place : place + 1]
        if called == "count" and "handoff_refused" in ast.unparse(node):
            named = [word.value for word in node.keywords if word.arg == "label"]
        for value in named:
            found = loops.get(value.id, value) if isinstance(value, ast.Name) else value
            for constant in found.elts if isinstance(found, ast.Tuple) else [found]:
                if isinstance(constant, ast.Constant) and constant.value:
                    yield node.lineno, str(constant.value)


def raised() -> list[tuple[str, int, str]]:
    return [
        (str(path.relative_to(PACKAGE)), line, name)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != BETWEEN_CLIENT_AND_ROUTER
        for line, name in names_in(path.read_text(encoding="utf-8"))
    ]


def test_every_name_that_is_raised_is_in_the_list() -> None:
    found = raised()
    assert {"auth", "tls", "address", "ticket", "params", "rate", "kv_heads", "block_tokens"} <= {
        name for _, _, name in found
    }, "the search finds what is known to be there"
    assert not [each for each in found if each[2] not in REFUSAL_FIELDS]


def test_a_name_that_is_not_in_the_list_is_found() -> None:
    source = """
raise Refused("moon_phase", "full")
for name in ("window", "tide"):
    _match(name, 1, 2, "wait")
events.put(PeerDown(number, "reason", "weather"))
stats.count("handoff_refused", label="season")
"""
    names = {name for _, name in names_in(source)}
    assert names - REFUSAL_FIELDS == {"moon_phase", "tide", "weather", "season"}


@pytest.mark.parametrize("field", sorted(REFUSAL_FIELDS))
def test_each_name_is_a_label_of_its_own(field: str) -> None:
    registry = CollectorRegistry()
    types: dict[type[Any], Any] = {
        cls: partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)
    }
    metrics = PromMetrics(types, ["engine"], {0: ["0"]})
    stats = OffloadingConnectorStats()
    stats.count("handoff_refused", label=Reject(field=Refused(field, "x").field, message="x").field)
    metrics.observe(stats.data)
    name = "vllm:kvconnect_handoff_refused_total"
    assert registry.get_sample_value(name, {"engine": "0", "field": field}) == 1
    assert registry.get_sample_value(name, {"engine": "0", "field": OTHER}) == (field == OTHER)
