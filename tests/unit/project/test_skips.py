"""A skip that is not on the list fails in CI, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import MAY_SKIP

ROOT = Path(__file__).resolve().parents[3]
TESTS = {
    "test_run.py": "import pytest\ndef test_it():\n    pytest.skip({reason!r})\n",
    "test_mark.py": "import pytest\n@pytest.mark.skip(reason={reason!r})\ndef test_it(): pass\n",
    "test_module.py": "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n",
}


@pytest.mark.parametrize(
    ("reason", "ci", "passes"),
    [
        ("etcd is missing", "true", False),
        (MAY_SKIP[0], "true", True),
        ("etcd is missing", "", True),
    ],
)
def test_a_skip_in_ci(tmp_path: Path, reason: str, ci: str, passes: bool) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text.format(reason=reason))
    (tmp_path / "conftest.py").write_text("from tests.skips import *\n")
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    options = ["-q", "-c", os.devnull, "--rootdir", tmp_path, "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path],
        env={
            **os.environ,
            **{"CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) is passes, done.stdout
    failed = re.findall(r"^(?:FAILED|ERROR) \S*/(\w+\.py)", done.stdout, re.MULTILINE)
    assert sorted(failed) == ([] if passes else sorted(TESTS)), done.stdout
    told = done.stdout.count(f"skipped in CI: Skipped: {reason}")
    assert (told >= len(TESTS), told == 0) == (not passes, passes), done.stdout
