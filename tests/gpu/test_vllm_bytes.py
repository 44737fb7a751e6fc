"""Blocks that vLLM computed on the device have the same bytes after eviction and reload."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.platforms import current_platform  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not current_platform.is_cuda(), reason="no CUDA device")
def test_blocks_have_their_bytes_after_eviction_and_reload() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.engine"],
        env={**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["evicted"] and found["cached"] == [0, 384]
    assert len(found["same"]) == 4 and all(found["same"])
    assert all(found["gone"])  # negative control
