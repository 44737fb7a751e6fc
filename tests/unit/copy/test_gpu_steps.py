"""Every measurement of ``scripts/gpu_run`` runs in small, so that no GPU's time goes into a slip in
one. Other tests run the other steps; the last test here knows which."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import copy_cuda
from scripts.gpu import phases
from scripts.gpu.steps import Step

MEASURE = "scripts.gpu.measure"
BY_OTHERS = {
    "probe": "test_gpu_run.py",
    "build": "test_build_kernels.py",
    "descriptors": "test_gpu_run.py",
    "tests-*": "test_gpu_tests.py",
}


def measures(step: Step) -> bool:
    return MEASURE in step.command


MEASUREMENTS = [step for step in phases.copies() if measures(step)]


@pytest.mark.parametrize("step", MEASUREMENTS, ids=lambda step: step.name)
def test_a_measurement_runs_in_small(
    step: Step, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.dry is not None
    monkeypatch.setattr(sys, "argv", list(step.dry[step.dry.index(MEASURE) :]))
    assert importlib.import_module(MEASURE).main() == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures and all(value is None or value == value for value in figures.values())


def test_a_measurement_that_does_not_exist_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(sys, "argv", [MEASURE, "no_such_part", "--dry"])
    with pytest.raises(AttributeError, match="measure_no_such_part"):
        importlib.import_module(MEASURE).main()


def test_every_step_is_run_by_a_test() -> None:
    others = [step.name for step in phases.copies() if not measures(step)]
    kinds = {"tests-*" if name.startswith("tests-") else name for name in others}
    assert kinds == BY_OTHERS.keys()
    assert {f"copies-page-{page}" for page in copy_cuda.PAGES} < {
        step.name for step in MEASUREMENTS
    }
    tests = Path(__file__).resolve().parents[2]
    for file in BY_OTHERS.values():
        assert any(tests.rglob(file)), file
