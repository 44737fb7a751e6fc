"""Benchmarks use what a user gets: whatever they set of KVConnect has a reason, in one table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.settings import REASONS, chosen
from kvconnect.settings import Settings

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MEASURED = {"disk", "remote", "cache_peers"}
"""Tiers, of which there are none by default."""
CHECKED = set(Settings.__struct_fields__) - MEASURED
CHOSEN = "chosen"
HELPERS = {"prefill_config", "decode_config"}
"""Of tests, which have settings of their own."""
ELSEWHERE = {
    ("copy_model.py", "wait_s"),
    ("handoff_beside.py", "digest"),
    ("handoff_beside.py", "listen"),
    ("plan.py", "deadline_s"),
    ("scheduler_ops.py", "deadline_s"),
    ("scheduler_ops.py", "wait_s"),
    ("sharing.py", "listen"),
    ("transport.py", "connections"),
}
"""Arguments of a planner, addresses of peers, a figure, and what is the default where settings are
read: names of settings, but none."""


def settings_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield what a file sets of KVConnect, as a keyword or as a key of an object: the benchmark
    that it is a choice of, "" where it does not say, and the setting."""
    tree = ast.parse(source)
    said = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == CHOSEN:
            benchmark = ast.literal_eval(node.args[0])
            for word in node.keywords:
                said.add(word)
                yield benchmark, word.arg or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node not in said and node.arg in CHECKED:
            yield "", node.arg
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            yield from [("", name)] if name in HELPERS else []
        if isinstance(node, ast.Dict):
            keys = {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            yield from (("", key) for key in sorted(keys & CHECKED))


def found() -> set[tuple[str, str, str]]:
    """Return (file, benchmark, setting) of everything that is set."""
    return {
        (path.relative_to(BENCHMARKS).as_posix(), benchmark, setting)
        for path in BENCHMARKS.rglob("*.py")
        if path.name != "settings.py"
        for benchmark, setting in settings_of(path.read_text(encoding="utf-8"))
    }


def test_what_is_not_the_default_has_a_reason() -> None:
    everything = found()
    elsewhere = {(file, setting) for file, benchmark, setting in everything if not benchmark}
    assert elsewhere == ELSEWHERE, "set it by benchmarks.settings.chosen"
    reasons = {(name, setting) for name, settings in REASONS.items() for setting in settings}
    assert {(benchmark, setting) for _, benchmark, setting in everything if benchmark} == reasons
    assert {setting for _, setting in reasons} <= CHECKED


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('kv_transfer(load_when="always")', [("", "load_when")]),
        ('{"digest": "off", "disk": {}}', [("", "digest")]),
        ('kv_transfer(**chosen("tiers", load_when="always"))', [("tiers", "load_when")]),
        ('chosen("tiers", **{"load_when": "always"})', [("tiers", ""), ("", "load_when")]),
        ("pd.decode_config()", [("", "decode_config")]),
        ("model(threads=1)", []),
    ],
)
def test_a_setting_anywhere_else_is_seen(source: str, seen: list[tuple[str, str]]) -> None:
    assert list(settings_of(source)) == seen


@pytest.mark.smokes("settings")
def test_a_setting_without_a_reason_is_an_error() -> None:
    assert chosen("tiers", load_when="always") == {"load_when": "always"}
    assert Settings().load_when == "faster", "no choice if it is the default"
    with pytest.raises(KeyError, match=r"benchmarks.tiers sets store_rate: leave the default"):
        chosen("tiers", store_rate=1)
    with pytest.raises(KeyError, match=r"benchmarks.new sets load_when"):
        chosen("new", load_when="always")
