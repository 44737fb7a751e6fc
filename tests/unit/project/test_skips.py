"""A skip that is not on the list fails in CI, and nowhere else."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize(
    ("reason", "ci", "passes"),
    [
        ("etcd is missing", "true", False),
        (MAY_SKIP[0], "true", True),
        ("etcd is missing", "", True),
    ],
)
def test_a_skip_in_ci(tmp_path: Path, name: str, reason: str, ci: str, passes: bool) -> None:
    (tmp_path / name).write_text(TESTS[name].format(reason=reason))
    (tmp_path / "conftest.py").write_text("from tests.skips import *\n")
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) is passes, done.stdout
    assert (f"skipped in CI: Skipped: {reason}" in done.stdout) is not passes
