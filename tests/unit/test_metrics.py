"""The metrics catalogue: consistent, documented, and what the library really records."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvconnect.metrics.catalog import CATALOG, Family, Part, families, markdown_table
from kvconnect.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
)

ROOT = Path(__file__).resolve().parents[2]


def test_names_are_unique_and_leave_the_suffix_to_the_client() -> None:
    names = [family.name for family in families("vllm:")]
    assert len(names) == len(set(names))
    assert not any(name.endswith(("_total", "_count", "_sum", "_bucket")) for name in names)
    assert not list(families("sglang:"))[len(CATALOG) :], "an alias belongs to its engine only"


def test_rows_agree_with_what_stats_record() -> None:
    for row in CATALOG:
        assert (row.kind == "histogram") == (row.part is Part.BUCKETS) == bool(row.buckets)
        if row.part is Part.BUCKETS:
            assert row.buckets == (SIZE_BUCKETS if row.name == TRANSFER_SIZE else TIME_BUCKETS)
        if row.part is not Part.VALUE:
            assert any(r.name == row.recorded_as and r.part is Part.BUCKETS for r in CATALOG)
        gauges = {r.name for r in CATALOG if r.kind == "gauge"}
        for alias in row.aliases:
            assert alias.only is None or (row.label and alias.only in row.label.values)
            assert alias.per is None or (row.kind == "gauge" and alias.per in gauges)


def test_documentation_is_up_to_date() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == markdown_table(), "python -m kvconnect.metrics.catalog > docs/metrics.md"
    # Control: the text depends on the catalogue.
    assert all(f"`{family.exposed}`" in text for family in families("vllm:"))
    assert "`vllm:kvconnect_lookup_total`" not in text


RECORDERS = {"count": COUNTERS, "gauge": GAUGES, "observe": HISTOGRAMS}


def recorded_names(source: str) -> Iterator[tuple[str, str]]:
    """(section, name) of every ``...stats.count("name", ...)`` and the like in ``source``."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in RECORDERS
            and "stats" in ast.unparse(node.func.value)
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield RECORDERS[node.func.attr], str(node.args[0].value)


def test_the_library_records_only_names_of_the_catalogue() -> None:
    known = {(row.section, row.recorded_as) for row in CATALOG}
    for path in sorted((ROOT / "kvconnect").rglob("*.py")):
        assert set(recorded_names(path.read_text())) <= known, path
    # Control: a misspelt name would be seen.
    assert set(recorded_names("self._stats.count('lookup', 1)")) - known


def test_a_family_without_alias_shows_its_own_row() -> None:
    family = next(families("vllm:"))
    assert family == Family("vllm:kvconnect_transfer_bytes", CATALOG[0])
    assert family.exposed == "vllm:kvconnect_transfer_bytes_total"
