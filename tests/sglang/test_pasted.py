"""SGLang's quick start, pasted block by block; vLLM's and the control are in ``tests/engines``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import ROOT

TIMEOUT_S = 1800


@pytest.mark.parametrize("page", ["docs/quickstart-sglang.md", "examples/prefill-decode-sglang.sh"])
def test_blocks_do_what_the_page_says(page: str) -> None:
    done = subprocess.run(
        ["scripts/in-netns", sys.executable, "-m", "tests.pasted", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    assert "verdict" in done.stdout
