"""An SGLang server with the linker, and prompts that fill more than its cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.engines.models import prompt_tokens
from tests.sglang.scenario import NEW
from tests.sglang.server import SglangServer

LENGTHS = (100, 333, 200, 480, 260, 400)  # more than the cache holds
ROOM = 1024  # tokens on the device
LINKER = {"linker": "FaultyLinker", "linker_module_path": "tests.sglang.faulty_linker"}


class Reply(NamedTuple):
    tokens: tuple[int, ...]
    host: int  # tokens of the prompt that came from the host tier


class Linked(NamedTuple):
    """A server and the file that says what goes wrong in it."""

    server: SglangServer
    fault: Path

    def ask(self, prompt: list[int]) -> Reply:
        reply = json.loads(self.server.post("/generate", self.server.body(prompt, NEW)))
        details = reply["meta_info"].get("cached_tokens_details") or {}
        return Reply(tuple(reply["output_ids"]), details.get("host", 0))

    def ask_all(self, prompts: list[list[int]]) -> list[Reply]:
        """Ask one after the other, so that each finds the device full of the others."""
        return [self.ask(prompt) for prompt in prompts]


def linker_args(**settings: object) -> tuple[str, ...]:
    config = {**LINKER, "linker_extra_config": settings}
    return (
        "--enable-unified-cache-external-linker",
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
    )


def prompts(number: int) -> list[list[int]]:
    """Texts that share no page with those of another number."""
    return [
        prompt_tokens(length, 90_000 + 9000 * number + 811 * i) for i, length in enumerate(LENGTHS)
    ]
