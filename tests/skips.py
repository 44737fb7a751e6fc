"""In CI a test may be skipped only for a reason on this list: any other skip fails.

A skip that nobody sees hides what set-up forgot to install. The reasons name what a machine of CI
cannot have.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

MAY_SKIP = (
    "no CUDA device",
    "No module named 'cupy'",  # which is of no use without one
    "no compute-sanitizer",
    "no Docker",
    "Docker without Compose",
    "no nvcc",
    "no cuda.h",
    "no cuobjdump",
    "mounting a file system is not permitted here",
)


IN_CI = os.environ.get("CI") == "true"


def _forbidden(reason: str) -> bool:
    return IN_CI and not reason.endswith(MAY_SKIP)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if _forbidden(reason):
            report.outcome, report.longrepr = "failed", f"skipped in CI: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if _forbidden(reason):
            report.outcome, report.longrepr = "failed", f"skipped in CI: {reason}"
    return report
