"""What the type check says of files outside of the package: those that name what is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = Path(__file__).resolve().parents[3] / "pyproject.toml"
HELPER = "def known(a: int) -> int:\n    return a\n"


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "demo", "tests"])
@pytest.mark.parametrize(
    ("use", "error"),
    [
        ("helper.known(1)", ""),
        ("helper.gone(1)", "attr-defined"),
        ("helper.known()", "call-arg"),
        ("helper.known(1, 2)", "call-arg"),
        ("known(1)", "name-defined"),
    ],
)
def test_a_rename_that_was_not_followed_is_an_error(
    folder: str, use: str, error: str, tmp_path: Path
) -> None:
    place = tmp_path / folder
    place.mkdir()
    (place / "helper.py").write_text(HELPER)
    (place / "user.py").write_text(f"from {folder} import helper\n\n\ndef run():\n    {use}\n")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", SETTINGS, "--cache-dir", "cache", folder],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode == 0) == (not error), run.stdout + run.stderr
    assert f"[{error}]" in run.stdout if error else "Success" in run.stdout
