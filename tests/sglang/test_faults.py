"""Servers that are killed, and settings that cannot work: one clear error, and the others go on."""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.engines.models import prompt_tokens
from tests.engines.server import Answer, ServerDied
from tests.sglang.pd import ask, ask_all, decode_server, prefill_server, room, side_by_side
from tests.sglang.scenario import CROWD, NEW, Fleet, assert_quiet, prompts, tokens
from tests.sglang.server import PAGE, SglangServer

LONG = 256  # tokens of an answer during which a server is killed


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
    while not d.used_tokens() and not all(future.done() for future in asked):
        pass
    return asked


def outcome(future: Future[Answer]) -> int:
    """Number of tokens, or 0 for a request that ended in an error; it must end."""
    try:
        return len(future.result().tokens)
    except urllib.error.HTTPError as error:
        error.close()
        return 0
    except (OSError, http.client.HTTPException):  # a connection that broke
        return 0


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_server_is_killed_and_comes_back(fleet: Fleet, victim: str) -> None:
    p, d = fleet.chunks, fleet.tcp
    want = [fleet.single.complete(prompt, NEW).tokens for prompt in prompts()]
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == want
    asked = in_flight(p, d)
    dead = p if victim == "prefill" else d
    dead.kill()
    assert {outcome(future) for future in asked} <= {0, LONG}
    survivor = d if victim == "prefill" else p
    assert_quiet(survivor)
    dead.restart()
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
    with side_by_side(other_pages, other_type):
        for p in (fleet.layers, fleet.chunks):
            with refused(f"page_size={PAGE}", f"page_size={2 * PAGE}"):
                ask(p, other_pages, prompt, NEW)
            with refused("float32", "bfloat16"):
                ask(p, other_type, prompt, NEW)
            want = fleet.single.complete(prompt, NEW).tokens
            assert ask(p, fleet.tcp, prompt, NEW).tokens == want
            assert_quiet(p, fleet.tcp)


def end_of(server: SglangServer) -> str:
    """Return what a server says that does not start."""
    with pytest.raises(ServerDied) as died, server:
        pass
    return str(died.value)


def test_servers_that_cannot_start() -> None:
    servers = (
        prefill_server(env={"SGLANG_PLUGINS": "something_else"}),
        prefill_server(args=("--tokenizer-worker-num", "2")),
        prefill_server(settings={"transprot": "tcp"}),
        prefill_server(backend="nixl", env={"KVCONNECT_TAKEOVER": "nicsel"}),
    )
    with ThreadPoolExecutor(len(servers)) as pool:
        hidden, tokenizers, unknown, nothing_to_take = pool.map(end_of, servers)
    assert "invalid choice: 'kvconnect'" in hidden
    assert "tokenizer-worker-num" in tokenizers and "KVCONNECT_TAKEOVER" in tokenizers
    assert "transprot" in unknown and "'transport'" in unknown
    assert "nicsel" in nothing_to_take and "nixl" in nothing_to_take
