"""Runs one file of tests/gpu: python -m scripts.gpu.run_tests FILE [--dry]

All skipped is no success: a test without its device, or without kernels, has shown nothing. Without
NIXL or vLLM, their files count as skipped. With ``--dry``, tests run on a pretended device; files
that need another one are collected.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.gpu.steps import SKIPPED
from tests.gpu.pretended import FILES_LEFT_OUT

LACKING = "no CUDA device"
OPTIONAL = "is not installed"
"""How the reason ends where a machine need not have what a whole file tests: NIXL or vLLM."""

NOTHING_COLLECTED = 5  # what pytest returns

COMMON = ("-v", "--timeout=120", "-p", "no:cacheprovider", "-W", "default")
"""A package that warns on this machine is no failure of a test."""


class Outcomes:
    """Counts what became of the tests."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def verdict(status: int, outcomes: Outcomes, dry: bool) -> int:
    """Return the exit status of the step for that of pytest."""
    if status not in (0, NOTHING_COLLECTED):
        return status
    if outcomes.passed and LACKING not in outcomes.skipped:
        return 0
    if dry:
        return 0 if outcomes.skipped else NOTHING_COLLECTED
    optional = outcomes.skipped and all(reason.endswith(OPTIONAL) for reason in outcomes.skipped)
    return SKIPPED if optional else 1


def main() -> int:
    dry = "--dry" in sys.argv[1:]
    files = [argument for argument in sys.argv[1:] if argument != "--dry"]
    options = list(COMMON)
    if dry and not any(Path(file).name in FILES_LEFT_OUT for file in files):
        options += ["-p", "tests.fakes.pretended_cuda"]
    outcomes = Outcomes()
    status = pytest.main([*options, *files], [outcomes])
    print(json.dumps(vars(outcomes)), flush=True)
    return verdict(int(status), outcomes, dry)


if __name__ == "__main__":
    sys.exit(main())
