"""What the type check says of files outside of the package: those that name what is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = Path(__file__).resolve().parents[3] / "pyproject.toml"
HELPER = "def known(a: int) -> int:\n    return a\n"
FOLDERS = ("benchmarks", "scripts", "demo", "tests")
ERRORS = {
    "helper.known(1)": "",
    "helper.gone(1)": "attr-defined",
    "helper.known()": "call-arg",
    "helper.known(1, 2)": "call-arg",
    "known(1)": "name-defined",
}
"""Uses of the helper, and the error of each."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what one type check of all uses in all folders prints: it starts for seconds."""
    root = tmp_path_factory.mktemp("types")
    for folder in FOLDERS:
        place = root / folder
        place.mkdir()
        (place / "helper.py").write_text(HELPER)
        for number, use in enumerate(ERRORS):
            text = f"from {folder} import helper\n\n\ndef run():\n    {use}\n"
            (place / f"user{number}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", SETTINGS, "--cache-dir", "cache"]
    run = subprocess.run(
        [*command, *FOLDERS], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(("number", "error"), list(enumerate(ERRORS.values())), ids=ERRORS)
def test_a_rename_that_was_not_followed_is_an_error(
    folder: str, number: int, error: str, printed: str
) -> None:
    lines = [line for line in printed.splitlines() if f"{folder}/user{number}.py:" in line]
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == bool(error), printed
    assert all(f"[{error}]" in line for line in errors), printed
