"""Where a worker serves the blocks of its host tier: at the port of hand-offs."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconnect.cache.head_shards import HeadUnit
from kvconnect.errors import ConfigError
from kvconnect.offload.host_arena import HostArena
from kvconnect.settings.validation import check_settings
from kvconnect.tiers.peers.peer_agent import PeerAgent, SharedBlocks, start_agent
from kvconnect.transport.tcp.shared_port import SharedPort
from tests.links import side

UNITS = [[(HeadUnit(0, ((0, mmap.PAGESIZE),)),)]]


@pytest.fixture
def blocks() -> Iterator[SharedBlocks]:
    host = HostArena(1, mmap.PAGESIZE, "off")
    yield SharedBlocks(host, UNITS, b"a format", b"layout")
    host.close()


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return str(path)


def started(blocks: SharedBlocks, key: str, port: SharedPort, **settings: object) -> PeerAgent:
    return start_agent(check_settings({"key_file": key, **settings}), blocks, 0, port)


def test_blocks_are_served_at_the_port_of_hand_offs(blocks: SharedBlocks, key: str) -> None:
    port = SharedPort()
    agent = started(blocks, key, port, cache_peers={"serve": True})
    try:
        with side(port=port) as handoff:
            assert handoff.transport.listen("127.0.0.1", 0) == agent.address
    finally:
        agent.close()


def test_the_former_setting_opens_a_second_port_and_says_so(
    blocks: SharedBlocks, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = SharedPort()
    agent = started(blocks, key, port, cache_peers={"listen": "127.0.0.1:0"})
    try:
        with side(port=port) as handoff:
            assert handoff.transport.listen("127.0.0.1", 0) != agent.address
    finally:
        agent.close()
    assert "set serve in cache_peers" in caplog.text


def test_who_only_asks_listens_nowhere(blocks: SharedBlocks, key: str) -> None:
    agent = started(blocks, key, SharedPort(), cache_peers={"ask": ["127.0.0.1:9"]})
    agent.close()
    assert agent.address is None


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"cache_peers": {"serve": True}, "listen": "off"}, "listen"),
        ({"cache_peers": {"serve": True, "listen": "127.0.0.1:0"}}, "listen"),
        ({"cache_peers": {"serve": False}}, "ask"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, object], field: str, blocks: SharedBlocks, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        started(blocks, key, SharedPort(), **settings)
    assert caught.value.field.rpartition(".")[2] == field
