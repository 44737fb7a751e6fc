"""``make bench`` runs every benchmark once per commit, and says how long that takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import bench

BENCHMARKS = bench.ROOT / "benchmarks"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Run the driver with benchmarks that only write their results; return their names."""
    names: list[str] = []

    def go(run: bench.Run) -> bool:
        names.append(run.name)
        run.file.write_text(json.dumps({"commit": "now"}))
        return run.name != "soak"

    def main(*arguments: str) -> list[str]:
        names.clear()
        assert bench.main(arguments) == int("soak" in names)
        return list(names)

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "commit", lambda folder: "now")
    monkeypatch.setattr(bench, "go", go)
    for needed in (bench.SGLANG, bench.PEERS):
        (tmp_path / needed).mkdir()
    return main


def test_every_benchmark_is_run_or_said_to_be_run_by_hand() -> None:
    """Control: a file without a command, such as a helper, is none."""
    files = [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("*/__main__.py")]
    commands = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in files
        if "\ndef main(" in path.read_text(encoding="utf-8")
    }
    by_hand = bench.BY_HAND.keys() - {"copy_cuda"}  # a part of copy.py
    assert {run.name for run in bench.PLAN} | by_hand == commands
    assert "common" not in commands


def test_an_interrupted_run_goes_on_where_it_was(ran: Callable[..., list[str]]) -> None:
    assert ran("plan", "store") == ["plan", "store"]
    rest = ran()
    assert rest == [run.name for run in bench.PLAN if run.name not in ("plan", "store")]
    assert ran() == []
    assert ran("plan", "--again") == ["plan"]


def test_a_result_of_another_commit_is_measured_again(
    ran: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"commit": "before"}))
    (tmp_path / "store.json").write_text(json.dumps({"commit": "now"}))
    assert ran("plan", "store") == ["plan"]


def test_what_needs_a_missing_environment_is_left_out(
    ran: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / bench.PEERS).rmdir()
    assert not {"choosing", "serve", "router"} & {*ran()}
    with pytest.raises(SystemExit):
        bench.main(["no_such"])


def test_nothing_is_run_to_say_what_would_be(ran: Callable[..., list[str]]) -> None:
    assert ran("--list") == []


def test_the_readme_says_how_long_each_takes() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    said = {
        (name, int(minutes))
        for name, minutes in re.findall(r"^\| `(\w+)[./].*\| +(\d+) \|$", text, re.M)
    }
    assert {(run.name, run.minutes) for run in bench.PLAN} <= said
