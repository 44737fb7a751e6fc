"""A model with a state per request beside attention, on real servers: handed off and offloaded,
with the tokens of a server that computes everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sglang.conftest import FAULTY
from tests.sglang.linker_server import ROOM, Linked, linker_args
from tests.sglang.linker_server import prompts as long_prompts
from tests.sglang.pd import LAYERWISE, ask_all, decode_server, prefill_server, side_by_side
from tests.sglang.scenario import CROWD, NEW, assert_quiet, prompts, tokens
from tests.sglang.server import SglangServer, plugin_path

LINEAR = Path(__file__).with_name("linear")
# SGLang's cache of prefixes with states takes pages of one token, without its extra buffers.
ARGS = ("--page-size", "1", "--disable-overlap-schedule", "--max-mamba-cache-size", "64")
NAME = "lfm2"


class Servers(NamedTuple):
    """``linked`` serves by itself, and offloads what its small cache evicts. While the file
    ``shift`` exists, ``prefill`` sends wrong state."""

    prefill: SglangServer
    decode: SglangServer
    linked: Linked
    shift: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    faults = tmp_path_factory.mktemp("fault")
    shift, linker = faults / "shift", faults / "linker"
    path = os.pathsep.join((str(FAULTY), plugin_path(LINEAR)["PYTHONPATH"]))
    env = {"PYTHONPATH": path, "KVCONNECT_FAULTY_STATE": str(shift), **LAYERWISE}
    p = prefill_server(model=NAME, env=env, args=ARGS)
    d = decode_server(model=NAME, env=plugin_path(LINEAR), args=ARGS)
    linked = SglangServer(
        model=NAME,
        tokens=ROOM,
        args=(*ARGS, *linker_args(host_bytes="256MiB", digest="full")),
        env={**plugin_path(LINEAR), "KVCONNECT_FAULTY_LINKER": str(linker)},
    )
    with side_by_side(p, d, linked):
        yield Servers(p, d, Linked(linked, linker), shift)


def test_handed_off(servers: Servers) -> None:
    p, d = servers.prefill, servers.decode
    want = [servers.linked.server.complete(prompt, NEW).tokens for prompt in prompts()]
    assert len(set(want)) == len(want)
    assert tokens(ask_all(p, d, prompts(), NEW, 1)) == want
    # Once more, of what the prefill server's prefix cache has.
    assert tokens(ask_all(p, d, prompts(), NEW, CROWD)) == want
    assert_quiet(p, d)
    assert "could not be followed" not in p.log.read_text()


def test_wrong_state_changes_the_tokens(servers: Servers) -> None:
    """The negative control: the state component of another slot shows."""
    p, d, asked = servers.prefill, servers.decode, prompts()[2:]
    right = tokens(ask_all(p, d, asked, NEW, CROWD))
    servers.shift.touch()
    try:
        wrong = tokens(ask_all(p, d, asked, NEW, CROWD))
    finally:
        servers.shift.unlink()
    assert wrong != right
    assert tokens(ask_all(p, d, asked, NEW, CROWD)) == right
    assert_quiet(p, d)


def test_offloaded(servers: Servers) -> None:
    linked, asked = servers.linked, long_prompts(0)
    linked.server.forget()
    computed = linked.ask_all(asked)
    assert all(reply.host == 0 for reply in computed)
    again = linked.ask_all(asked)
    assert [reply.tokens for reply in again] == [reply.tokens for reply in computed]
    assert all(reply.host for reply in again)
    linked.fault.write_text("shift")
    try:
        shifted = linked.ask_all(asked)
    finally:
        linked.fault.unlink()
    assert all(reply.host for reply in shifted)
    assert [reply.tokens for reply in shifted] != [reply.tokens for reply in computed]
    linked.server.forget()
