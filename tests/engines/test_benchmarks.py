"""Benchmarks that look into an engine run to their end with one, small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.small_benchmarks import SMALL

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0


@pytest.mark.smokes("overhead", "tiers_default", "metrics", "hybrids", "models", "nixl")
def test_each_ends_with_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines.small_benchmarks", str(tmp_path)]
    done = subprocess.run(
        [*command, "nixl", *SMALL], cwd=ROOT, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
    saved = {path.stem for path in tmp_path.glob("*.json")} - {"kept"}
    assert saved == {"overhead", "tiers_default", "metrics", "hybrids"}
