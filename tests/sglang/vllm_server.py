"""A vLLM server in the tests of SGLang: it lives in an environment of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.engines.server import Server

VLLM = Path(__file__).parents[2] / ".venv" / "bin" / "python"


@dataclass
class Vllm(Server):
    """vLLM by that environment's interpreter."""

    def command(self) -> list[str]:
        return [str(VLLM), *super().command()[1:]]
