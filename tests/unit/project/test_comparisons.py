"""What pytest says of an unequal comparison is short in CI, too: a test that fails must end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEST = "def test_it():\n    assert [*range(100)] == [*range(100, 200)]\n"

IN_CI = {"CI": "true", "BUILD_NUMBER": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("settings", "is_cut"), [("tests.conftest", True), ("tests.skips", False)])
def test_a_long_comparison_in_ci(tmp_path: Path, settings: str, is_cut: bool) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text(f"import {settings}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, tmp_path],
        env={**os.environ, **IN_CI},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert ("Full output truncated" in done.stdout) is is_cut, done.stdout
