"""A short run of ``make fuzz``'s guided half, all that it has kept, and proof that it finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.guided import CORPUS, FOUND
from tests.fuzz.readers import CONTROL, TARGETS

ROOT = Path(__file__).resolve().parents[3]


def guided(name: str, runs: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.guided", name, "--runs", str(runs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_raise_nothing(name: str) -> None:
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    for path in kept:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs_raise_nothing(name: str) -> None:
    done = guided(name, 2000)
    assert done.returncode == 0, done.stderr


def test_a_planted_fault_is_found() -> None:
    done = guided(*CONTROL, runs=200_000)
    assert done.returncode == 1
    assert "KeyError: 'planted'" in done.stderr
    written = FOUND.glob("planted-crash-*")
    assert any(path.read_bytes().startswith(b"KVC") for path in written)
