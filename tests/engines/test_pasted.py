"""README, the quick start of vLLM and the examples, pasted; SGLang's are in ``tests/sglang``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.pasted import forking

WITHOUT = """```sh
vllm serve MODEL
```

```sh
kvconnect try http://127.0.0.1:8000
```
"""
Paste = Callable[[str], tuple[bool, str]]


@pytest.fixture(scope="module")
def paste() -> Iterator[Paste]:
    with forking("vllm") as run:
        yield run


def test_readme_with_an_engine_of_its_own() -> None:
    done = subprocess.run(
        ["scripts/in-netns", sys.executable, "-m", "tests.pasted", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "verdict" in done.stdout


def test_blocks_of_the_quick_start_do_what_it_says(paste: Paste) -> None:
    passed, printed = paste("docs/quickstart-vllm.md")
    assert passed, printed
    assert "verdict" in printed


@pytest.mark.parametrize(
    "name", ["offload", "disk", "shared-store", "two-engines", "prefill-decode-vllm"]
)
def test_examples_work(paste: Paste, name: str) -> None:
    passed, printed = paste(str(ROOT / "examples" / f"{name}.sh"))
    assert passed, printed


def test_a_quick_start_without_the_connector_fails(paste: Paste, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(WITHOUT)
    passed, printed = paste(str(page))
    assert not passed
    assert "runs without KVConnect" in printed
