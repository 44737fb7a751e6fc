"""Blocks in host memory and on disk are forgotten when the engine sleeps and its KV cache goes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.platforms import current_platform

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not current_platform.is_cuda(), reason="no CUDA device")
def test_tiers_are_emptied_by_levels_that_free_the_cache() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sleeping"],
        env={**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["before"] == [0, 384]
    assert found["level 0"] == [384, 384]  # control: only scheduling stops, and all is kept
    # All is forgotten, and the engine that woke stores and loads again.
    assert found["level 1"] == found["level 2"] == [0, 384]
