"""Servers that are killed, and settings that cannot work: one clear error, and the others go on."""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvconnect.transport.nixl.agent import PACKAGES
from tests.engines.models import prompt_tokens
from tests.engines.ranks import until
from tests.engines.server import Answer, ServerDied
from tests.sglang.pd import ask, ask_all, decode_server, prefill_server, room, side_by_side
from tests.sglang.scenario import (
    CROWD,
    NEW,
    Fleet,
    assert_quiet,
    moved_so_far,
    page_bytes,
    pages,
    prompts,
    settled,
    tokens,
    traded,
)
from tests.sglang.server import PAGE, SglangServer, plugin_path

LONG = 256  # tokens of an answer during which a server is killed
BROKEN = "libucp.so.0: cannot open shared object file"


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The server answers with an error that says all these words."""
    with pytest.raises(urllib.error.HTTPError) as failed:
        yield
    with failed.value as error:
        said = error.read().decode()
    assert all(word in said for word in words), said


def in_flight(p: SglangServer, d: SglangServer) -> list[Future[Answer]]:
    """Ask for long answers; return when pages are on their way or there."""
    pool = ThreadPoolExecutor(CROWD)
    asked = [pool.submit(ask, p, d, prompt, LONG) for prompt in prompts(4)[:CROWD]]
    pool.shutdown(wait=False)
    until(
        lambda: d.used_tokens() > 0 or all(future.done() for future in asked),
        "decode has pages for a request",
    )
    return asked


def peers(server: SglangServer) -> float:
    """Return to how many workers a server is connected, as far as it knows."""
    return server.metric("sglang:kvconnect_handoff_peers", state="up")


def outcome(future: Future[Answer]) -> int:
    """Number of tokens, or 0 for a request that ended in an error; it must end."""
    try:
        return len(future.result().tokens)
    except urllib.error.HTTPError as error:
        error.close()
        return 0
    except (OSError, http.client.HTTPException):  # a connection that broke
        return 0


@pytest.mark.parametrize(
    ("victim", "busy"), [("prefill", True), ("prefill", False), ("decode", True)]
)
def test_a_server_is_killed_and_comes_back(fleet: Fleet, victim: str, busy: bool) -> None:
    """Without requests, no failure tells the decode server that ranks listen elsewhere now."""
    p, d = fleet.chunks, fleet.tcp
    want = [fleet.single.complete(prompt, NEW).tokens for prompt in prompts()]
    before = moved_so_far(p, d)
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == want
    # Who has published these bytes has also published with whom they were exchanged.
    traded(p, d, before, pages(prompts()) * page_bytes())
    asked = in_flight(p, d) if busy else []
    dead, survivor = (p, d) if victim == "prefill" else (d, p)
    connected = peers(survivor)
    assert not busy or not all(future.done() for future in asked)
    dead.kill()
    try:
        outcomes = {outcome(future) for future in asked}
        assert outcomes <= {0, LONG}
        assert victim != "decode" or 0 in outcomes
        assert_quiet(survivor)
        assert settled(partial(peers, survivor), connected - 1) == connected - 1
    finally:
        dead.restart()  # other tests share it
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == want
    # Who had no part in it has not noticed.
    assert tokens(ask_all(fleet.layers, d, prompts(), NEW, CROWD)) == want
    assert_quiet(p, d)


def test_a_decode_server_goes_only_where_it_may(fleet: Fleet) -> None:
    """The address comes from the client: 192.0.2.1 is nobody's, and in no list."""
    prompt = prompt_tokens(40)
    with refused("192.0.2.1", "peers"):
        fleet.tcp.complete(prompt, NEW, **{**room(fleet.chunks), "bootstrap_host": "192.0.2.1"})
    assert_quiet(fleet.tcp)


def test_decode_servers_of_another_kind(fleet: Fleet) -> None:
    """Each is refused with both values, and the prefill server still serves the others."""
    other_pages = decode_server(args=("--page-size", str(2 * PAGE)))
    other_type = decode_server(args=("--dtype", "bfloat16"))
    prompt = prompts()[4]

    def turned_away(p: SglangServer, other: SglangServer, *words: str) -> None:
        with refused(*words):
            ask(p, other, prompt, NEW)

    sources = (fleet.layers, fleet.chunks)
    with side_by_side(other_pages, other_type), ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(turned_away, p, *other)
            for p in sources
            for other in (
                (other_pages, f"page_size={PAGE}", f"page_size={2 * PAGE}"),
                (other_type, "float32", "bfloat16"),
            )
        ]
        for each in asked:
            each.result()
        for p in sources:
            want = fleet.single.complete(prompt, NEW).tokens
            assert ask(p, fleet.tcp, prompt, NEW).tokens == want
            assert_quiet(p, fleet.tcp)


def end_of(server: SglangServer) -> str:
    """Return what a server says that does not start."""
    with pytest.raises(ServerDied) as died, server:
        pass
    return str(died.value)


def left_of(server: SglangServer) -> list[str]:
    """Return the names of a server's processes: each server has a session of its own."""
    left = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:  # it ended just now
            continue
        state, _, _, session, *_ = rest.split()
        if int(session) == server.process.pid and state != "Z":
            left.append(name)
    return left


@pytest.fixture
def without_nixl(tmp_path: Path) -> dict[str, str]:
    """The environment of a server in which NIXL is installed but cannot be imported."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ImportError({BROKEN!r})\n")
    return plugin_path(tmp_path)


def test_nixl_that_is_asked_for_and_cannot_be_imported(without_nixl: dict[str, str]) -> None:
    """One error, and no process is left. The control is in the fleet: the same decode server
    starts where NIXL can be imported, and so does one here that may do without it."""
    servers = (
        prefill_server(settings={"transport": "nixl"}, env=without_nixl),
        decode_server("nixl", env=without_nixl),
    )
    with ThreadPoolExecutor(len(servers)) as pool:
        said = list(pool.map(end_of, servers))
    for server, log in zip(servers, said, strict=True):
        assert "not healthy after" not in log  # it ended by itself
        (line,) = {line for line in log.splitlines() if "kvconnect: transport=" in line}
        assert all(word in line for word in ("'nixl'", BROKEN, "pip install", "'tcp'")), line
        assert settled(partial(left_of, server), []) == []
    with prefill_server(env=without_nixl) as server:  # transport "auto"
        assert left_of(server)
        assert BROKEN in server.log.read_text()


def test_servers_that_cannot_start() -> None:
    servers = (
        prefill_server(env={"SGLANG_PLUGINS": "something_else"}),
        prefill_server(args=("--tokenizer-worker-num", "2")),
        prefill_server(settings={"transprot": "tcp", "disk": {"paht": "/x"}}),
        prefill_server(backend="nixl", env={"KVCONNECT_TAKEOVER": "nicsel"}),
    )
    with ThreadPoolExecutor(len(servers)) as pool:
        hidden, tokenizers, unknown, nothing_to_take = pool.map(end_of, servers)
    assert "invalid choice: 'kvconnect'" in hidden
    assert "tokenizer-worker-num" in tokenizers and "KVCONNECT_TAKEOVER" in tokenizers
    (line,) = {line for line in unknown.splitlines() if "kvconnect: transprot=" in line}
    for word in ("'transport'", "disk.paht='/x'", "'disk.path'", "disk.capacity=None"):
        assert word in line, line
    assert "Load weight begin" not in unknown
    assert "nicsel" in nothing_to_take and "nixl" in nothing_to_take
