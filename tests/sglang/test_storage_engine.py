"""Real servers with HiCache over KVConnect: what neither the device nor HiCache has room for comes
back from the storage backend, with the same tokens; with a disk, also after kill -9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.engines.models import prompt_tokens
from tests.sglang.scenario import NEW, moved_bytes, settled
from tests.sglang.server import PAGE, SglangServer
from tests.sglang.storage_server import (
    LENGTHS,
    at_work,
    hits,
    server,
    written,
)

ASKED = [prompt_tokens(length, 170_000 + 811 * i) for i, length in enumerate(LENGTHS)]


class Reply(NamedTuple):
    tokens: list[int]
    found: int  # tokens of the prompt that came from the storage backend


def ask_all(running: SglangServer) -> list[Reply]:
    """Ask one after the other."""
    replies = []
    for prompt in ASKED:
        reply = json.loads(running.post("/generate", running.body(prompt, NEW)))
        details = reply["meta_info"].get("cached_tokens_details") or {}
        replies.append(Reply(reply["output_ids"], details.get("storage", 0)))
    return replies


def test_evicted_prompts_come_back_with_the_same_tokens() -> None:
    with server() as running:
        computed = ask_all(running)
        assert all(reply.found == 0 for reply in computed)
        again = ask_all(running)
        assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
        assert all(reply.found for reply in again)
        running.kill()
        running.restart()
        lost = ask_all(running)  # the control: there is no disk
        assert [reply.tokens for reply in lost] == [reply.tokens for reply in computed]
        assert all(reply.found == 0 for reply in lost)


def test_pages_on_disk_outlive_kill_9(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path), "capacity": "64MiB", "min_free": 0}
    with server(disk=disk) as running:
        lines = running.log.read_text().splitlines()
        (start,) = [line for line in lines if " on SGLang " in line]  # one, of the first rank
        assert str(tmp_path) in start
        computed = ask_all(running)
        assert all(reply.found == 0 for reply in computed)
        pages = sum(length // PAGE for length in LENGTHS)
        assert settled(lambda: written(running) >= pages and not at_work(running), True)
        assert moved_bytes(running, "DISK_to_CPU") == 0
        running.kill()
        running.restart()
        again = ask_all(running)
        assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
        assert all(reply.found for reply in again)
        found = sum(reply.found for reply in again)
        assert settled(lambda: hits(running, "disk") >= found, True)
        assert moved_bytes(running, "DISK_to_CPU") > 0
