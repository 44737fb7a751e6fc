"""The bodies of ``tests/gpu`` run on a pretended device, so that no GPU meets a slip in them.

``tests/gpu/pretended.py`` lists those that cannot hold there, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from tests.gpu.pretended import FAIL, FILES_LEFT_OUT, LEFT_OUT, collected, not_run

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path) -> dict[str, str]:
    """Run all but what is left out; return ``passed``, ``failure`` or ``skipped`` by test."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert {*FILES_LEFT_OUT} < {file.name for file in files}
    report = folder / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.fakes.pretended_cuda"),
        *("-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"),
        *(str(file) for file in files if file.name not in FILES_LEFT_OUT),
        *(f"--deselect=tests/gpu/{test}" for test in LEFT_OUT),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert report.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        name = f"{file}.py::{case.attrib['name']}"
        found[name] = next((child.tag for child in case if child.tag != "properties"), "passed")
    return found


def test_bodies_hold_on_a_pretended_device(tmp_path: Path) -> None:
    found = run(tmp_path)
    wrong = {name for name, ending in found.items() if ending != "passed"}
    assert wrong <= {*FAIL} <= found.keys(), wrong - {*FAIL}
    assert len(wrong) > len(FAIL) / 2  # the control: the device is a pretended one
    assert len(found) - len(FAIL) >= 70


def test_what_does_not_run_here_is_counted() -> None:
    tests = collected()
    left = not_run(tests)
    assert {test.partition("::")[0] for test in left} >= FILES_LEFT_OUT.keys()
    assert left.keys() > {*FAIL}
    run_here = f"{len(tests) - len(left)} of {len(tests)}"
    assert run_here in " ".join((ROOT / "docs" / "copy.md").read_text().split()), run_here
    assert not_run(["test_cuda_copy.py::test_new"]) == {}  # negative control
