"""What breaks is recomputed or refused; nothing crashes, hangs or stays behind."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.models import BLOCK_SIZE
from tests.engines.pd import raw
from tests.engines.scenario import (
    BLOCKS,
    COUNT,
    CPU_TO_GPU,
    FULL,
    HOST,
    NEW,
    ONE_STEP_AT_A_TIME,
    ask,
    ask_anew,
    assert_nothing_leaks,
    block_bytes,
    expected,
    hit_tokens,
    prompts,
    tokens,
)
from tests.engines.server import STOP_TIMEOUT_S, Server, ServerDied, kv_transfer

FAULTY = "tests.engines.faulty"
ARENA_BYTES = 1111 * block_bytes("llama")  # a size that nothing else in a process has


def test_a_flipped_byte_is_caught_and_recomputed() -> None:
    connector = kv_transfer("FlipsByte", FAULTY, host_bytes=HOST, digest="full")
    with Server("llama", connector) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        server.settle()
        assert tokens(ask_anew(server)) == expected("llama").fresh
        server.settle()
        for what in ("failed_blocks", "quarantined_blocks", "failed_requests"):
            assert server.metric(f"vllm:kvconnect_{what}_total", cause="digest") == COUNT
        # The block before the flipped one was kept: only the others are computed again.
        assert hit_tokens(server) == COUNT * FULL
        recomputed = server.metric("vllm:kvconnect_recomputed_tokens_total")
        assert recomputed == COUNT * (FULL - BLOCK_SIZE)
        assert_nothing_leaks(server)


def test_negative_control_without_digests_the_flipped_byte_changes_tokens() -> None:
    connector = kv_transfer("FlipsByte", FAULTY, host_bytes=HOST, digest="off")
    with Server("llama", connector) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) != expected("llama").fresh
        assert server.metric("vllm:kvconnect_failed_blocks_total", cause="digest") == 0


@pytest.mark.parametrize("digest", ["full", "off"])
def test_an_older_state_is_caught_by_its_digest_alone(digest: str) -> None:
    connector = kv_transfer("LoadsOldStates", FAULTY, host_bytes=HOST, digest=digest)
    asked = prompts(length=FULL + 1)  # a convolution forgets a wrong state after two tokens
    with Server("lfm2", connector) as server:
        fresh = [server.complete(prompt, NEW).tokens for prompt in asked]
        again = [server.complete(prompt, NEW).tokens for prompt in asked]
        assert (again == fresh) == (digest == "full")
        server.settle()
        caught = server.metric("vllm:kvconnect_failed_requests_total", cause="digest")
        assert caught == (COUNT if digest == "full" else 0)
        assert_nothing_leaks(server)


@pytest.mark.parametrize("in_step", [False, True], ids=["async", "sync"])
def test_a_load_that_raises_is_recomputed_once(in_step: bool) -> None:
    extra = {"sync_load_bytes": HOST if in_step else 0}
    args = ONE_STEP_AT_A_TIME if in_step else ()
    connector = kv_transfer("LoadRaises", FAULTY, host_bytes=HOST, **extra)
    with Server("llama", connector, args=args) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        for _ in range(2):
            server.settle()
            assert tokens(ask_anew(server)) == expected("llama").fresh
        # A hit is always a prompt's full blocks here, so tokens count the requests that had one.
        hits = hit_tokens(server) / FULL
        assert hits >= COUNT
        assert_each_hit_failed_once(server, hits, readmitted=0 if in_step else hits)
        # Four requests at once, which share the blocks.
        server.post("/reset_prefix_cache")
        answer = raw(server, prompts()[0], NEW, n=4, temperature=1.0, top_k=1)
        found = [tuple(choice["token_ids"]) for choice in answer["choices"]]
        assert found == [expected("llama").fresh[0]] * 4
        assert_nothing_leaks(server)
        assert server.metric("vllm:kvconnect_failed_requests_total", cause="copy") > hits


@pytest.mark.parametrize("model", ["gemma3", "mistral"])
def test_a_load_that_raises_starts_a_windowed_request_over_once(model: str) -> None:
    blocks = 32 if model == "mistral" else BLOCKS
    with Server(model, kv_transfer("LoadRaises", FAULTY, host_bytes=HOST), blocks) as server:
        for _ in range(2):
            assert tokens(ask(server)) == expected(model).fresh
        assert_each_hit_failed_once(server, hits=COUNT, readmitted=COUNT)


def assert_each_hit_failed_once(server: Server, hits: float, readmitted: float) -> None:
    """So many requests were promised blocks and computed all of them; none was promised any again.

    ``readmitted``: how many of them the engine had parked, and so admits, and looks up, once more.
    """
    server.settle()
    assert server.metric("vllm:kvconnect_failed_requests_total", cause="copy") == hits
    assert server.metric("vllm:kvconnect_recomputed_tokens_total") == hit_tokens(server)
    assert server.metric("vllm:kvconnect_transfer_bytes_total", **CPU_TO_GPU) == 0
    asked = server.metric("vllm:request_success_total")
    assert server.metric("vllm:kvconnect_lookups_total") == asked + readmitted
    assert_nothing_leaks(server)


def test_kill_9_leaves_nothing_that_a_restart_trips_over() -> None:
    first = Server("llama", kv_transfer(host_bytes=ARENA_BYTES))
    with first:
        ask(first)
        arenas = [
            mapping
            for pid in first.pids()
            for mapping in mappings(read(f"/proc/{pid}/maps"))
            if mapping.nbytes == ARENA_BYTES
        ]
        # Neither a name nor a second owner: the kernel frees it with the process.
        assert arenas == [Mapping(ARENA_BYTES, shared=False, name="")]
        alive = {pid: start_of(pid) for pid in first.pids()}
        assert len(alive) > 1
        first.kill()
        wait_until_gone(alive)
    with Server("llama", kv_transfer(host_bytes=HOST), port=first.port) as second:
        assert tokens(ask(second)) == expected("llama").fresh
        assert_nothing_leaks(second)


def test_a_shared_or_named_mapping_would_be_seen() -> None:
    """Control of the test above, on made-up text of ``/proc/<pid>/maps``."""
    text = """\
7f0000000000-7f0000700000 rw-p 00000000 00:00 0
7f0001000000-7f0001700000 rw-s 00000000 00:1a 17                         /dev/shm/some name
7f0002000000-7f0002001000 r--p 00003000 08:01 42                         /usr/lib/libc.so.6
"""
    assert mappings(text) == [
        Mapping(7 << 20, shared=False, name=""),
        Mapping(7 << 20, shared=True, name="/dev/shm/some name"),
        Mapping(4096, shared=False, name="/usr/lib/libc.so.6"),
    ]


def test_a_killed_worker_ends_the_server_instead_of_hanging_it() -> None:
    with Server("llama", kv_transfer(host_bytes=HOST)) as server:
        workers = [pid for pid in server.pids() if b"Worker" in _command_line(pid)]
        assert workers
        server.kill(workers)
        assert server.process.poll() is not None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"role": "kv_producer", "listen": "off"}, "listen='off' is not usable: a kv_producer"),
        ({"host_bites": "4GiB"}, "host_bites='4GiB' is not usable: unknown setting"),
        ({"host_bytes": "4000GiB"}, "GiB in this machine for 1 engines; use less"),
        ({"host_bytes": "60KiB"}, "this worker's share is less than one block of 65536 bytes"),
    ],
)
def test_bad_settings_end_the_start_with_one_clear_error(
    setting: dict[str, str], message: str
) -> None:
    with pytest.raises(ServerDied) as died, Server("llama", kv_transfer(**setting)):
        pass
    errors = set(re.findall(r"ConfigError: (.*)", str(died.value)))
    assert len(errors) == 1
    assert message in errors.pop()


def test_two_data_parallel_engines_share_a_machine() -> None:
    args = ("--data-parallel-size", "2")
    # Room for less than half of the prompts each, however they are shared out.
    with Server("llama", kv_transfer(host_bytes=HOST), blocks=36, args=args) as server:
        for _ in range(3):
            assert tokens(ask(server)) == expected("llama").fresh
        assert hit_tokens(server) > 0
        assert_nothing_leaks(server)


class Mapping(NamedTuple):
    """One range of a process's memory; ``name`` is empty where no file is behind it."""

    nbytes: int
    shared: bool
    name: str


def mappings(text: str) -> list[Mapping]:
    """Read the text of ``/proc/<pid>/maps``."""
    found = []
    for line in text.splitlines():
        area, mode, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in area.split("-"))
        found.append(Mapping(end - start, "s" in mode, " ".join(name)))
    return found


def wait_until_gone(processes: dict[int, str]) -> None:
    """Wait for processes that were killed; one that nobody has asked about yet counts as gone.
    ``processes``: when each began, since a number may soon belong to another process."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(start_of(pid) == start for pid, start in processes.items() if start):
        assert time.monotonic() < deadline, "killed processes still run"
        time.sleep(0.1)


def start_of(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; empty if it has ended."""
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # from the third one on
    # Threads outlive the first one for a moment, and keep the sockets open.
    if not fields or (fields[0] == "Z" and int(fields[17]) <= 1):
        return ""
    return fields[19]


def read(path: str) -> str:
    """Return the text of a process's file; empty if the process has ended."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
