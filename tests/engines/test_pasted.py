"""README, the quick start of vLLM and the examples, pasted; SGLang's are in ``tests/sglang``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

TIMEOUT_S = 1800
WITHOUT = """```sh
vllm serve MODEL
```

```sh
kvconnect try http://127.0.0.1:8000
```
"""


def paste(page: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/in-netns", sys.executable, "-m", "tests.pasted", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart-vllm.md"])
def test_blocks_do_what_the_page_says(page: str) -> None:
    done = paste(ROOT / page)
    assert done.returncode == 0, done.stdout
    assert "verdict" in done.stdout


@pytest.mark.parametrize(
    "name", ["offload", "disk", "shared-store", "two-engines", "prefill-decode-vllm"]
)
def test_examples_work(name: str) -> None:
    done = paste(ROOT / "examples" / f"{name}.sh")
    assert done.returncode == 0, done.stdout


def test_a_quick_start_without_the_connector_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(WITHOUT)
    done = paste(page)
    assert done.returncode == 1
    assert "runs without KVConnect" in done.stdout
