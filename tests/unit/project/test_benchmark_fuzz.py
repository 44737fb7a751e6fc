"""The benchmark of long random runs adds up what both engines' fuzzers print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import fuzz
from tests.small import smoke


def _prints(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


@pytest.mark.smokes("fuzz")
def test_fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = {
        "vllm": _prints("Triton is not there.\nvLLM 0.32.0: 30 runs in 0.50 hours, 1 failed"),
        "sglang": _prints("SGLang: 12 runs in 0.25 hours, 0 failed"),
    }
    found = smoke(monkeypatch, tmp_path, "fuzz", COMMANDS=commands)
    assert found == {"fuzz_runs": 42, "fuzz_hours": 0.75, "fuzz_wrong": 1}


def test_a_fuzzer_that_crashed_is_no_success() -> None:
    with pytest.raises(ValueError, match="did not come to its end: a traceback"):
        fuzz.figures(["SGLang: 12 runs in 0.25 hours, 0 failed", "a traceback"])
