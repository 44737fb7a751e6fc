"""The metrics catalogue: consistent, documented, and what the library really records."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvconnect.cache.groups import CacheGroup
from kvconnect.observability.metrics.catalog import CATALOG, SGLANG, VLLM, families
from kvconnect.observability.metrics.model import EntryPart, Family
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.offload.planner import OffloadLimits, OffloadPlan, gauges
from kvconnect.protocol.cache_hints import CacheHint, IgnoredHint
from kvconnect.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    OTHER,
    SIZE_BUCKETS,
    TIME_BUCKETS,
    TRANSFER_SIZE,
    TRANSFER_WIRE,
    OffloadingConnectorStats,
)
from kvconnect.tiers.cost_model import LoadReason
from kvconnect.types import FailureCause, PromptSource, Tier, TransferType
from scripts.dashboards.document import markdown_table

ROOT = Path(__file__).resolve().parents[3]


def test_names_are_unique_and_leave_the_suffix_to_the_client() -> None:
    for prefix in (VLLM, SGLANG):
        names = [family.name for family in families(prefix)]
        assert len(names) == len(set(names))
        assert not any(name.endswith(("_total", "_count", "_sum", "_bucket")) for name in names)
        assert all(name.startswith(prefix) for name in names), "an alias belongs to its engine"


def test_engines_share_rows_but_for_those_that_one_of_them_cannot_have() -> None:
    rows = {
        prefix: {family.metric.name for family in families(prefix) if family.alias is None}
        for prefix in (VLLM, SGLANG)
    }
    assert rows[VLLM] == {row.name for row in CATALOG}
    missing = {"recomputed_tokens", "prompt_tokens", "handoff_expired_leases", "handoff_leases"}
    missing |= {"tier_decisions", "tier_waiting_requests"}  # HiCache decides, and has a queue
    missing |= {"cache_hints", "ignored_cache_hints", "cache_hint_blocks", "host_blocks_kept"}
    assert rows[VLLM] - rows[SGLANG] == missing
    assert {p for row in CATALOG for p in row.absent} <= {VLLM, SGLANG}
    assert [f.name for f in families(SGLANG) if f.alias] == ["sglang:kvcache_transfer_latency"]


def test_rows_agree_with_what_stats_record() -> None:
    for row in CATALOG:
        assert (row.kind == "histogram") == (row.part is EntryPart.BUCKETS) == bool(row.buckets)
        if row.part is EntryPart.BUCKETS:
            assert row.buckets == (SIZE_BUCKETS if row.name == TRANSFER_SIZE else TIME_BUCKETS)
        if row.part is not EntryPart.VALUE:
            assert any(r.name == row.recorded_as and r.part is EntryPart.BUCKETS for r in CATALOG)
        gauges = {r.name for r in CATALOG if r.kind == "gauge"}
        for alias in row.aliases:
            assert set(alias.only) <= set(row.label.values if row.label else ())
            assert alias.per is None or (row.kind == "gauge" and alias.per in gauges)


def test_only_what_the_payload_bounds_has_an_open_label() -> None:
    open_rows = [row for row in CATALOG if row.label and row.label.limit]
    assert {row.label.name for row in open_rows if row.label} == {"peer"}
    for row in open_rows:
        assert row.section == COUNTERS and row.label and OTHER in row.label.values


def test_vllms_names_show_what_they_are_about() -> None:
    shown: dict[str, set[str]] = {}
    for family in families("vllm:"):
        if family.alias and family.metric.label and family.metric.label.name == "transfer_type":
            about = re.sub("_(load|store|total|bytes|time|size).*", "", family.name)
            shown.setdefault(about, set()).update(family.values)
    assert shown == {
        "vllm:kv_offload": {"GPU_to_CPU", "CPU_to_GPU"},
        "vllm:kv_offload_tiering_read": {"DISK_to_CPU", "PEER_to_CPU", "REMOTE_to_CPU"},
        "vllm:kv_offload_tiering_write": {"CPU_to_DISK", "CPU_to_REMOTE"},
        "vllm:nixl": {"RECV"},
    }
    # Control: the rows behind them have more.
    assert {"SEND", "RECV"} <= set(next(families("vllm:")).values)


def test_documentation_is_up_to_date() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == markdown_table(), "python -m scripts.dashboards.document > docs/metrics.md"
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


def test_the_gauges_of_a_plan_are_the_gauges_of_the_catalogue() -> None:
    index = HostIndex(2, 1, make_policy("lru", 2))
    limits = OffloadLimits(workers=1, deadline_s=1.0, held_blocks=1)
    plan = OffloadPlan((CacheGroup(4),), index, OffloadingConnectorStats(), limits)
    shown = [(name, label or "") for name, _, label in gauges(plan, 0.0, 64)]
    assert len(shown) == len(set(shown))
    assert set(shown) == {series for series in series_of("gauge") if not of_others(series)}
    # Control: the comparison is by label value too.
    assert ("ledger_held_blocks", "load") in series_of("gauge")
    assert ("ledger_held_blocks", "") not in series_of("gauge")


def of_others(series: tuple[str, str]) -> bool:
    """Whether a gauge is not one of the host tier's plan."""
    return of_handoff(series) or series[0].startswith("tier_")


def of_handoff(series: tuple[str, str]) -> bool:
    """Whether a (name, label value) is about hand-off between engines, not about the tiers."""
    own_values = ("SEND", "RECV", "send", "recv", "peer", "refused", "gone")
    return series[0].startswith("handoff_") or series[1] in own_values


def library_sources() -> list[str]:
    return [
        path.read_text()
        for path in sorted((ROOT / "kvconnect").rglob("*.py"))
        # They define the names; they record nothing.
        if path.name not in ("catalog.py", "types.py")
    ]


def test_the_library_records_every_series_of_hand_off() -> None:
    sources = library_sources()
    wanted = {s for s in series_of("counter") | series_of("histogram") if of_handoff(s)}
    assert wanted - recorded_series(sources) == set()
    # Gauges are set from what a plan yields, so their names alone are looked for.
    words = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
    }
    assert {
        name for name, _ in series_of("gauge") if name.startswith(("handoff_", "tier_"))
    } <= words


def test_the_library_records_every_series_of_offload() -> None:
    sources = library_sources()
    wanted = {s for s in series_of("counter") | series_of("histogram") if not of_handoff(s)}
    assert wanted - recorded_series(sources) == set()
    # Controls: a call taken out of the sources is missed, and so is one cause of several.
    call = 'count("evicted_blocks"'
    assert any(call in source for source in sources)
    without = [source.replace(call, 'count("lookups"') for source in sources]
    assert wanted - recorded_series(without) == {("evicted_blocks", "host")}
    member = "FailureCause.MISSING"
    assert any(member in source for source in sources)
    without = [source.replace(member, "FailureCause.COPY") for source in sources]
    missed = {("failed_blocks", "missing"), ("failed_requests", "missing")}
    assert wanted - recorded_series(without) == missed


def series_of(kind: str) -> set[tuple[str, str]]:
    """(recorded name, label value) of every row of that kind; ``""`` for an unlabelled row."""
    return {
        (row.recorded_as, value)
        for row in CATALOG
        if (row.section == HISTOGRAMS if kind == "histogram" else row.kind == kind)
        for value in (row.label.values if row.label else ("",))
    }


# An expression that ends so takes any value of the enum that the sources make.
LABEL_ENUMS = {
    "cause": FailureCause,
    "kind": TransferType,
    "_TYPE": TransferType,
    "tier": Tier,
    "reason": LoadReason,
    "source": PromptSource,
    "hint": CacheHint,
    "ignored": IgnoredHint,
}


# A plain variable of a label's name takes any of its words that the sources contain.
WORDS = {
    name: {v for row in CATALOG if row.label and row.label.name == name for v in row.label.values}
    for name in ("outcome", "role", "thread")
}
# A row with the value ``other`` is given words that a call site cannot know: one call makes all.
OPEN = {
    row.recorded_as: set(row.label.values)
    for row in CATALOG
    if row.label and OTHER in row.label.values
}


class Source(NamedTuple):
    """Calls on stats in one source, and the constants and dotted names that it has."""

    calls: tuple[ast.Call, ...]
    made: frozenset[str]


@cache
def read(source: str) -> Source:
    nodes = list(ast.walk(ast.parse(source)))
    calls = tuple(
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and "stats" in ast.unparse(node.func.value)
    )
    kinds = (ast.Attribute, ast.Constant)
    return Source(calls, frozenset(ast.unparse(node) for node in nodes if isinstance(node, kinds)))


def recorded_series(sources: list[str]) -> set[tuple[str, str]]:
    """(name, label value) of everything that calls in ``sources`` can count or observe."""
    made = {name for source in sources for name in read(source).made}
    found = set()
    for call in (call for source in sources for call in read(source).calls):
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr == "record_transfer":
            kinds = label_values(call.args[0], made)
            found |= {(name, kind) for name in (TRANSFER_SIZE, TRANSFER_WIRE) for kind in kinds}
        elif call.func.attr in ("count", "observe"):
            label = next((word.value for word in call.keywords if word.arg == "label"), None)
            name = str(ast.literal_eval(call.args[0]))
            values = OPEN.get(name)
            if values is None and isinstance(label, ast.Name) and label.id in WORDS:
                values = {word for word in WORDS[label.id] if repr(word) in made}
            elif values is None:
                values = label_values(label, made)
            found |= {(name, value) for value in values}
    return found


def label_values(label: ast.expr | None, made: Collection[str]) -> set[str]:
    """Values that a label's expression can take, given all expressions of the sources."""
    if label is None:
        return {""}
    if isinstance(label, ast.Constant):
        return {str(label.value)}
    if isinstance(label, ast.IfExp):
        return label_values(label.body, made) | label_values(label.orelse, made)
    owner = ast.unparse(label).removesuffix(".value")  # "Tier.HOST", "failure.cause", "_TYPE[x]"
    kind = LABEL_ENUMS.get(re.sub(r"\[.*?\]", "", owner).rpartition(".")[2])
    enums = (*Tier, *TransferType, *LoadReason, *IgnoredHint)
    named = [m for m in enums if f"{type(m).__name__}.{m.name}" == owner]
    members = list(kind) if kind else named
    assert members, f"label={ast.unparse(label)}: which values?"
    return {m.value for m in members if f"{type(m).__name__}.{m.name}" in made}


def test_the_search_for_recorded_series_understands_the_labels_of_hand_off() -> None:
    source = """
self._stats.count("handoff_sent_requests", label="done" if ok else "expired")
self._stats.count("expired_jobs", label=TransferType.RECV.value)
self._stats.observe("handoff_wire_seconds", seconds, label=role)
role = "recv"
self._stats.count("handoff_refused", label=error.field)
self._stats.count("handoff_peer_bytes", nbytes, label=peer)
self._stats.count("handoff_failures", label=report.failures[0].cause.value)
FailureCause.PEER, FailureCause.GONE
"""
    found = recorded_series([source])
    assert {v for name, v in found if name == "handoff_sent_requests"} == {"done", "expired"}
    assert {s for s in found if s[0] in ("expired_jobs", "handoff_wire_seconds")} == {
        ("expired_jobs", "RECV"),
        ("handoff_wire_seconds", "recv"),
    }
    assert ("handoff_refused", "auth") in found and ("handoff_peer_bytes", OTHER) in found
    assert {v for name, v in found if name == "handoff_failures"} == {"peer", "gone"}


def test_a_family_without_alias_shows_its_own_row() -> None:
    family = next(families("vllm:"))
    assert family == Family("vllm:kvconnect_transfer_bytes", CATALOG[0])
    assert family.exposed == "vllm:kvconnect_transfer_bytes_total"
