"""What results of benchmarks say of where they come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import common
from scripts import aims, headlines


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    run = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


def test_a_result_names_the_commit_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    assert common.commit(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    kept = tmp_path / "benchmarks" / "results" / "other.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    common.emit("speed", {"ratio": 0.123456})
    found = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert git(tmp_path, "rev-parse", "HEAD").startswith(found["commit"])
    assert len(found["commit"]) == 12
    assert json.loads(capsys.readouterr().out) == {"benchmark": "speed", "ratio": 0.1235}
    kept.write_text("[]")
    assert common.commit(tmp_path) == found["commit"], "a result changes nothing that is measured"
    # Control: what was measured is no commit if a file was changed.
    (tmp_path / "code.py").write_text("2")
    assert common.commit(tmp_path) == f"{found['commit']}+"


# How old they are ---------------------------------------------------------------------------------

RELEASES_OLD = 1


def stale(record: dict[str, object], changelog: str) -> str:
    """Say what is wrong with the age of a result; "" if nothing is.

    The result itself names the last release before its commit, so that no history is needed.
    """
    commit, release = str(record.get("commit", "")), record.get("release")
    if not commit or commit.endswith("+") or not release:
        return "it does not name the commit that it measured, and its last release"
    released = common.releases(changelog)
    if release not in released:
        return f"there is no release {release}"
    if (age := released.index(str(release))) > RELEASES_OLD:
        return f"it is older than {age} releases"
    return ""


def records() -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in common.RESULTS.glob("*.json")}


def test_results_are_of_this_release_or_the_last() -> None:
    changelog = common.CHANGELOG.read_text(encoding="utf-8")
    found = {name: fault for name, one in records().items() if (fault := stale(one, changelog))}
    assert not found


def test_the_commits_of_results_are_in_the_history() -> None:
    """In a clone that has all of it; one that CI makes may have the last commit alone."""
    root = common.CHANGELOG.parent
    if not (root / ".git").exists() or git(root, "rev-parse", "--is-shallow-repository") == "true":
        return
    for record in records().values():
        if commit := str(record.get("commit", "")).rstrip("+"):
            git(root, "merge-base", "--is-ancestor", commit, "HEAD")


def test_a_result_that_is_too_old_is_found() -> None:
    changelog = "# Changelog\n\n## 0.4 (unreleased)\n\n## 0.3\n\n## 0.2\n\n## 0.1\n"
    fresh: dict[str, object] = {"commit": "0123456789ab", "release": "0.3"}
    assert stale(fresh, changelog) == ""
    assert stale({**fresh, "release": "0.2"}, changelog) == ""
    assert stale({**fresh, "release": "0.1"}, changelog) == "it is older than 2 releases"
    assert "no release 9" in stale({**fresh, "release": "9"}, changelog)
    for without in ({}, {"release": "0.3"}, {"commit": "a"}, {**fresh, "commit": "a+"}):
        assert "does not name" in stale(without, changelog)


def test_the_readme_names_the_oldest_commit() -> None:
    """Control: a result that names none is older than all that do."""
    two = [{"commit": "b", "committed": 200}, {"commit": "a", "committed": 100}]
    assert headlines.oldest(two) == "Oldest commit: `a`."
    assert "unknown" in headlines.oldest([*two, {"figures": {}}])
    assert headlines.name_of(two[0]) == "`b`"
    assert headlines.name_of({}) == "unknown"


def test_figures_that_were_kept_are_as_old_as_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    before = {"commit": "a", "committed": 100, "release": "0.1"}
    common.emit("speed", {"ratio": 1.0}, before)
    found = json.loads((tmp_path / "speed.json").read_text())
    assert {key: found[key] for key in before} == before


@pytest.mark.parametrize("row", aims.AIMS, ids=lambda row: "-".join((row.file, *row.figures)))
def test_a_row_of_aims_has_figures(row: aims.Aim) -> None:
    assert len(row.aims) in (0, 1, len(row.figures))
    assert {*row.figures} <= headlines.figures_of(row.file).keys()


@pytest.mark.parametrize(
    ("value", "aim", "meets"),
    [
        *(
            (1.5, "<= 1.5", True),
            (1.51, "<= 1.5", False),
            (2.0, ">= 2", True),
            (1.9, ">= 2", False),
        ),
        *((0, "0", True), (1, "0", False), (9.0, "", True)),
    ],
)
def test_what_misses_its_aim(value: float, aim: str, meets: bool) -> None:
    assert aims.meets(value, aim) is meets
