"""What breaks is recomputed or refused; nothing crashes, hangs or stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.server import Server, ServerDied, kv_transfer
from tests.engines.test_offload import (
    HOST,
    ask,
    assert_nothing_leaks,
    expected,
    tokens,
)

FAULTY = "tests.engines.faulty"


def test_a_flipped_byte_is_caught_and_recomputed() -> None:
    connector = kv_transfer("FlipsByte", FAULTY, host_bytes=HOST, digest="full")
    with Server("llama", connector) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) == expected("llama").fresh
        failed = server.metric("vllm:kvconnect_failed_blocks_total", cause="digest")
        assert failed > 0
        assert server.metric("vllm:kvconnect_quarantined_blocks_total", cause="digest") == failed
        assert server.metric("vllm:kvconnect_failed_requests_total", cause="digest") == failed
        # The block before the flipped one was kept: only the others are computed again.
        hit = server.metric("vllm:kvconnect_hit_tokens_total", tier="host")
        assert 0 < server.metric("vllm:kvconnect_recomputed_tokens_total") < hit
        assert_nothing_leaks(server)


def test_negative_control_without_digests_the_flipped_byte_changes_tokens() -> None:
    connector = kv_transfer("FlipsByte", FAULTY, host_bytes=HOST, digest="off")
    with Server("llama", connector) as server:
        assert tokens(ask(server)) == expected("llama").fresh
        assert tokens(ask(server)) != expected("llama").fresh
        assert server.metric("vllm:kvconnect_failed_blocks_total", cause="digest") == 0


@pytest.mark.parametrize("extra", [{}, {"sync_load_bytes": "64MiB"}], ids=["async", "sync"])
def test_a_load_that_raises_is_recomputed(extra: dict[str, str]) -> None:
    connector = kv_transfer("LoadRaises", FAULTY, host_bytes=HOST, **extra)
    with Server("llama", connector) as server:
        for _ in range(3):
            assert tokens(ask(server)) == expected("llama").fresh
        assert server.metric("vllm:kvconnect_failed_requests_total", cause="copy") > 0
        assert_nothing_leaks(server)


def test_a_load_that_raises_with_several_groups_is_recomputed() -> None:
    connector = kv_transfer("LoadRaises", FAULTY, host_bytes=HOST)
    with Server("gemma3", connector) as server:
        for _ in range(2):
            assert tokens(ask(server)) == expected("gemma3").fresh
        assert server.metric("vllm:kvconnect_failed_requests_total", cause="copy") > 0
        assert_nothing_leaks(server)


def test_kill_9_leaves_nothing_that_a_restart_trips_over() -> None:
    connector = kv_transfer(host_bytes=HOST)
    first = Server("llama", connector)
    with first:
        ask(first)
        assert not _our_shared_memory()
        first.kill()
        assert not any(_alive(pid) for pid in first.pids()[1:])
    assert not _our_shared_memory()
    with Server("llama", connector, port=first.port) as second:
        assert tokens(ask(second)) == expected("llama").fresh
        assert_nothing_leaks(second)


def test_a_killed_worker_ends_the_server_instead_of_hanging_it() -> None:
    with Server("llama", kv_transfer(host_bytes=HOST)) as server:
        workers = [pid for pid in server.pids() if b"Worker" in _command_line(pid)]
        assert workers
        server.kill(workers)
        assert server.process.poll() is not None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"host_bites": "4GiB"}, "host_bites='4GiB' is not usable: unknown setting"),
        ({"host_bytes": "4000GiB"}, "GiB in this machine for 1 engines; use less"),
        ({"host_bytes": "60KiB"}, "this worker's share is less than one block of 65536 bytes"),
    ],
)
def test_bad_settings_end_the_start_with_one_clear_error(
    extra: dict[str, str], message: str
) -> None:
    with pytest.raises(ServerDied) as died, Server("llama", kv_transfer(**extra)):
        pass
    assert message in str(died.value)


def test_two_data_parallel_engines_share_a_machine() -> None:
    args = ("--data-parallel-size", "2")
    with Server("llama", kv_transfer(host_bytes=HOST), args=args) as server:
        for _ in range(3):
            assert tokens(ask(server)) == expected("llama").fresh
        assert server.metric("vllm:kvconnect_hit_tokens_total", tier="host") > 0
        assert_nothing_leaks(server)


def _our_shared_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "kvconnect" in name]


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
