"""Runs a benchmark as its command does, in this process and small."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common


def smoke(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *arguments: str, **sizes: Any
) -> dict[str, Any]:
    """Run ``benchmarks.NAME`` with constants of its module changed; return its figures.

    ``folder`` takes its results, and is where it runs.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = importlib.import_module(f"benchmarks.{name}")
    for constant, value in sizes.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(common, "RESULTS", folder)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(folder)
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        module.main()
    finally:  # what a process of its own may change
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, handler)
    (result,) = folder.glob("*.json")
    figures: dict[str, Any] = json.loads(result.read_text())["figures"]
    return figures
