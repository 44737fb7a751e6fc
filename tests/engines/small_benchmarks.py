"""Runs benchmarks that need a vLLM engine, small, each in a process forked from one that has
imported vLLM.

    python -m tests.engines.small_benchmarks FOLDER NAME...

``FOLDER`` takes the results. A benchmark that fails ends this with its status.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.models import engine
from benchmarks.models.proof import rehearsal

WORK = {"prefill": (264, 1, 1, 1), "batch": (40, 2, 1, 1), "decode": (40, 2, 4, 1)}
HYBRID = {"qwen3_next": ("Qwen3NextForCausalLM", {})}
Small = tuple[tuple[str, ...], dict[str, Any]]
SMALL: dict[str, Small] = {
    "overhead": ((), {"WORK": WORK, "HOST_BYTES": "64MiB"}),
    "tiers_default": (("--rounds", "1"), {"MIXED": 8, "STORED_PROMPTS": 2}),
    "metrics": (("--rounds", "2"), {"REPEAT": 50, "PEERS": 4}),
    "hybrids": (("--rounds", "1"), {"_NAMES": HYBRID, "PROMPT": 330, "DISTANCES": (1,)}),
    "models.__main__": (("--only", "OPTForCausalLM", "--again"), {}),
}
"""Arguments, and other values of a module's constants."""


def run(name: str, folder: Path) -> None:
    """Run one benchmark in this process."""
    module: Any = importlib.import_module(f"benchmarks.{name}")
    arguments, constants = SMALL[name]
    for constant, value in constants.items():
        assert hasattr(module, constant), constant
        setattr(module, constant, value)
    if hasattr(module, "KEPT"):
        module.KEPT = folder / "kept.json"
    sys.argv = [name, *arguments]
    os.chdir(folder)
    module.main()


def poll_seldom(name: str, folder: Path) -> None:
    """Check what ``benchmarks/nixl.py`` changes of NIXL."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

    from benchmarks import nixl

    config = nixl.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == nixl.POLL_US
    assert nixl.NixlConnector is NixlConnector


def main() -> None:
    folder = Path(sys.argv[1])
    common.RESULTS = folder
    with tempfile.TemporaryDirectory() as scratch:
        engine.preload(rehearsal(Path(scratch)))
    works: dict[str, Callable[[str, Path], None]] = {"nixl": poll_seldom}
    for name in sys.argv[2:]:
        child = multiprocessing.get_context("fork").Process(
            target=works.get(name, run), args=(name, folder)
        )
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(f"{name} ended with {child.exitcode}")


if __name__ == "__main__":
    main()
