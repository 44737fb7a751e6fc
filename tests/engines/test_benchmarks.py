"""Benchmarks that look into an engine run to their end with one, small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import first_hit
from tests.engines.small_benchmarks import SMALL
from tests.small import smoke

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


@pytest.mark.smokes("first_hit")
def test_from_a_wheel_to_the_first_hit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # No index is asked: what the wheel needs is seen where the engine is.
    found = smoke(monkeypatch, tmp_path, "first_hit", INSTALL=("--no-deps",), DEMO=tmp_path)
    assert found["first_hit_s"] > found["install_s"]
    assert found["wheel_kib"] > 100
    assert "demo_s" not in found


def test_a_step_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(first_hit.FirstHitFailed, match="no such thing"):
        first_hit.run([sys.executable, "-c", "raise SystemExit('no such thing')"])
