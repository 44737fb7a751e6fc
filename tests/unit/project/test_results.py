"""What results of benchmarks say of where they come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import common


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
