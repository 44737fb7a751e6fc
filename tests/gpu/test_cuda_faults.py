"""A lost device and refused page-locks: copies fail or are slower, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120  # a process that takes longer hangs


def assert_ends_well(case: str) -> None:
    """Run a case of ``faulty.py``; a lost device may break the end of its process, as torch's
    destructors find it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.faulty", case],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert f"{case} ended well" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_lost_device_fails_every_copy_and_stops_none_forever() -> None:
    assert_ends_well("illegal_access")


@pytest.mark.parametrize("case", ["memlock_limit", "locked_before"])
def test_without_a_page_lock_copies_are_right(case: str) -> None:
    assert_ends_well(case)
