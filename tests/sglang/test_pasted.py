"""SGLang's quick start, pasted block by block; vLLM's and the control are in ``tests/engines``."""

from __future__ import annotations

import subprocess
import sys

from tests.documents import ROOT
from tests.pasted import forking


def test_blocks_of_the_quick_start_do_what_it_says() -> None:
    with forking("sglang") as paste:
        passed, printed = paste("docs/quickstart-sglang.md")
    assert passed, printed
    assert "verdict" in printed


def test_an_example_with_servers_of_its_own() -> None:
    page = "examples/prefill-decode-sglang.sh"
    done = subprocess.run(
        ["scripts/in-netns", sys.executable, "-m", "tests.pasted", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "verdict" in done.stdout
