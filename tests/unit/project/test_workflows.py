"""The workflows of continuous integration, which run elsewhere: what can be checked of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ZIZMOR = Path(sys.executable).with_name("zizmor")


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def commands_not_there(workflow: dict[str, Any], root: Path) -> list[str]:
    """Return the targets of ``make`` and the scripts that a workflow runs and that do not exist."""
    text = "\n".join(step.get("run", "") for step in steps(workflow))
    makefile = (root / "Makefile").read_text()
    targets = re.findall(r"\bmake ([\w-]+)", text)
    wrong = [each for each in targets if not re.search(rf"^{each}:", makefile, re.M)]
    scripts = re.findall(r"\b(?:scripts|deploy)/[\w./-]+", text)
    return wrong + [each for each in scripts if not (root / each).exists()]


def findings(folder: Path) -> str:
    """Return what the linter of workflows says, "" if it finds nothing."""
    command = [str(ZIZMOR), "--offline", "--quiet", "--no-progress", "--format=plain", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr if done.returncode else ""


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    assert [path.stem for path in WORKFLOWS] == ["images", "publish", "tests", "wheels"]
    assert findings(WORKFLOWS[0].parent) == ""
    # Control: an action that is not pinned, and text of a stranger in a command.
    bad = WORKFLOWS[2].read_text().replace("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4")
    bad = bad.replace("run: make test", "run: echo ${{ github.head_ref }}")
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "tests.yml").write_text(bad)
    said = findings(folder)
    assert "unpinned-uses" in said and "template-injection" in said


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_a_workflow_runs_what_exists_and_ends(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert commands_not_there(workflow, ROOT) == []
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] > 0
    # Control.
    workflow["jobs"] = {"bad": {"steps": [{"run": "make tset && scripts/whels dist"}]}}
    assert commands_not_there(workflow, ROOT) == ["tset", "scripts/whels"]


def test_wheels_are_used_with_every_version_of_python_that_is_claimed() -> None:
    (wheels,) = (path for path in WORKFLOWS if path.stem == "wheels")
    matrix = yaml.safe_load(wheels.read_text())["jobs"]["use"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [re.fullmatch(r".* :: (3\.\d+)", each) for each in project["classifiers"]]
    assert matrix["python"] == [each[1] for each in claimed if each]
    assert project["requires-python"] == f">={matrix['python'][0]}"
