"""Real servers with HiCache over KVConnect: what neither the device nor HiCache has room for comes
back from the storage backend, with the same tokens; with a disk, also after kill -9."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.models import prompt_tokens
from tests.engines.server import REQUEST_TIMEOUT_S
from tests.servers import free_port
from tests.sglang.scenario import NEW, moved_bytes, settled
from tests.sglang.server import PAGE, SglangServer
from tests.sglang.storage_server import (
    LENGTHS,
    STORAGE,
    at_work,
    attachable,
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


def managed(running: SglangServer, method: str, path: str, body: Any = None) -> str:
    """Do what only an administrator may; return what the server says."""
    request = urllib.request.Request(
        f"{running.url}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer admin"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def attach(running: SglangServer, **settings: Any) -> str:
    """Attach a storage backend at run time; return what the server says of it."""
    asked = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps({**STORAGE, **settings}),
    }
    return managed(running, "PUT", "/hicache/storage-backend", asked)


def test_a_storage_that_one_rank_cannot_use_is_attached_to_none() -> None:
    """The ranks of a server plan alike: they would wait for each other."""
    port = free_port()
    peers = {"listen": f"127.0.0.1:{port}", "ask": [], "ask_s": 1.0}
    with attachable(tp=2) as running, socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))  # of the second rank
        taken.listen()
        managed(running, "POST", "/flush_cache?timeout=60")  # it warms up
        refusal = attach(running, cache_peers=peers)
        assert f"127.0.0.1:{port + 1}" in refusal and "on another rank" in refusal
        computed = ask_all(running)
        managed(running, "POST", "/flush_cache?timeout=60")
        assert "successfully" in attach(running), "nothing is attached"
        assert [reply.found for reply in ask_all(running)] == [0] * len(ASKED)
        managed(running, "POST", "/flush_cache?timeout=60")
        again = ask_all(running)
        assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
        assert all(reply.found for reply in again)
