"""``kvconnect try`` against real SGLang servers: one with the linker, and a pair that hands off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvconnect import cli
from tests.sglang.pd import decode_server, prefill_server, side_by_side
from tests.sglang.server import PAGE, SglangServer

FLAGS = ("--tokens", "480", "--rounds", "2", "--json")
ROOM = 1536  # tokens on the device
NO_FASTER = "prompts were loaded, and loading took as long as computing"
LINKER = {
    "linker": "KVConnectLinker",
    "linker_module_path": "kvconnect.engines.sglang.linker",
    "linker_extra_config": {"host_bytes": "64MiB"},
}
LINKER_ARGS = (
    "--enable-unified-cache-external-linker",
    *("--unified-cache-external-linker-backend", "dynamic"),
    *("--unified-cache-external-linker-config", json.dumps(LINKER)),
)


class Servers(NamedTuple):
    linked: SglangServer
    prefill: SglangServer
    decode: SglangServer


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    found = Servers(
        SglangServer(tokens=ROOM, texts=True, args=LINKER_ARGS),
        prefill_server(texts=True),
        decode_server(texts=True),
    )
    with side_by_side(*found):
        yield found


def try_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Return the command's exit code and what it found."""
    code = cli.main(["try", *words, *FLAGS])
    return code, json.loads(capsys.readouterr().out)


def test_a_server_with_the_linker_gains(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = try_json(capsys, servers.linked.url)
    # How much time a small model gains on a busy machine is left open.
    assert found["problem"] in ("", NO_FASTER)
    assert found["engine"] == "sglang"
    assert found["tokens_equal"]
    assert found["device_tokens"] == 0
    assert found["hit_tokens"]["host"] >= found["prompt_tokens"] - 2 * PAGE
    assert "other prompts" in found["evicted_by"]


def test_a_pair_hands_off(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--prefill", servers.prefill.url, "--decode", servers.decode.url)
    code, found = try_json(capsys, *pair)
    assert (code, found["problem"], found["tokens_equal"]) == (0, "", True)
    assert found["received"] == {"done": 9}  # with the prompt that is counted


def test_a_prefill_server_alone_is_refused_before_anything_is_tried(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one half: the trial ends in one line."""
    assert cli.main(["try", servers.prefill.url, *FLAGS, "--timeout", "5"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "the prefill half of a hand-off" in line
