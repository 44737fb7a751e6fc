"""``compute-sanitizer`` over kernels and batched copies, on a real device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CHOSEN = "reference and page8191 and kernel or packed or (xxhash and (1025 or 65552))"
"""Of ``test_cuda_copy.py``: each kernel once or twice, since every access is checked."""

LIMIT_S = 240.0


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
    tests = str(Path(__file__).with_name("test_cuda_copy.py"))
    made = subprocess.run(
        [*command, "-m", "pytest", "-q", tests, "-k", CHOSEN], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout[-4000:]
