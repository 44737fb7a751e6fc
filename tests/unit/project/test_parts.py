"""The parts of ``make test``: together they run every test file, each of them once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
APART = "tests/outside/"
"""Tests of others, which ``python -m tests.outside`` runs."""


def runs() -> list[list[str]]:
    """Return what ``make test`` gives to each of its runs of pytest."""
    command = ["make", "--dry-run", "--no-print-directory", "test"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=outside, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.replace("\\\n", "")
    found = re.findall(r"&& [^&\n]*\bpytest (tests/[^&\n]+) &&", lines)
    return [shlex.split(arguments) for arguments in found]


def is_run(file: str, arguments: Iterable[str]) -> bool:
    """Say whether a run of pytest with these arguments runs a test file."""
    words = list(arguments)
    left_out = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    return is_in(file, [word for word in words if word.startswith("tests")]) and not is_in(
        file, left_out
    )


def is_in(file: str, places: Iterable[str]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


def wrong(files: Iterable[str], parts: list[list[str]]) -> Iterator[str]:
    """Yield the files that no part runs, or more than one."""
    for file in files:
        count = sum(is_run(file, arguments) for arguments in parts)
        if count != 1:
            yield f"{file} is run {count} times"


def test_every_test_file_is_run_once() -> None:
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    files = [path for path in paths if not path.startswith(APART)]
    parts = runs()
    assert len(parts) == 7 and len(files) > 300
    assert [*wrong(files, parts)] == []


def test_a_file_of_a_new_folder_and_one_of_two_parts_are_found() -> None:
    """Negative controls."""
    parts = [["tests/unit", "--ignore=tests/unit/router"], ["tests/unit/router"], ["tests/unit/a"]]
    files = ["tests/unit/router/test_a.py", "tests/new/test_b.py", "tests/unit/a/test_c.py"]
    assert [*wrong(files, parts)] == [
        "tests/new/test_b.py is run 0 times",
        "tests/unit/a/test_c.py is run 2 times",
    ]
    assert [*wrong(["tests/unit/ab/test_d.py"], parts)] == []
