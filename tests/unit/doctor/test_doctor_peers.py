"""``kvconnect doctor peers`` against real workers on loopback, and against what is none."""

from __future__ import annotations

import errno
import json
import mmap
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvconnect import cli
from kvconnect.cache.head_shards import HeadUnit
from kvconnect.doctor import Finding, cache_peers
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.cache_messages import CacheHello, CacheMessage, Found, encode
from kvconnect.protocol.hello import Reject
from kvconnect.settings import check_settings
from kvconnect.tiers.peers import same_machine
from kvconnect.tiers.peers.peer_agent import SharedBlocks, start_agent
from kvconnect.transport.base import MessageReceived, PeerId

HELLO = CacheHello(engine=bytes(16), format=b"f", layout=b"l", groups=[{0: 1}])


class Workers:
    """Workers of engines with a key."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.key_file = self.key(folder / "key")
        self.other_key = self.key(folder / "other")

    def key(self, path: Path) -> str:
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        return str(path)

    def start(self, form: bytes = b"a format", **settings: str | bool) -> str:
        host = HostArena(1, mmap.PAGESIZE, "off")
        self._stack.callback(host.close)
        units = [[(HeadUnit(0, ((0, mmap.PAGESIZE),)),)]]
        peers = {"serve": True, **settings}
        config = check_settings({"cache_peers": peers, "key_file": self.key_file})
        agent = start_agent(config, SharedBlocks(host, units, form, b"layout"), 0)
        self._stack.callback(agent.close)
        assert agent.address is not None
        return "{}:{}".format(*agent.address)

    def ask(self, *addresses: str, key_file: str | None = None) -> tuple[Finding, ...]:
        key = self.key_file if key_file is None else key_file
        return cache_peers.examine(addresses, key, "").findings


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(stack, tmp_path)


def test_workers_that_answer(workers: Workers) -> None:
    first, second = workers.start(), workers.start()
    found = workers.ask(first, second)
    assert [(each.name, each.status) for each in found] == [(first, "ok"), (second, "ok")]
    assert all(f"format {b'a format'.hex()[:8]}" in each.value for each in found)


def test_a_worker_with_other_blocks_than_the_rest(workers: Workers) -> None:
    addresses = [workers.start(), workers.start(), workers.start(b"b other")]
    found = workers.ask(*addresses)
    assert [each.status for each in found] == ["ok", "ok", "warn"]
    assert "nobody else" in found[2].value and "same weights" in found[2].fix
    (alone,) = workers.ask(addresses[2])  # the control: nobody to compare it with
    assert alone.status == "ok"


def test_whether_memory_can_be_read(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    address, other = workers.start(same_machine="memory"), workers.start()
    memory, network = workers.ask(address, other)
    assert memory.value.endswith("; its memory can be read")
    assert "its memory" not in network.value

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(same_machine, "read_process", refused)
    (found,) = workers.ask(address)
    assert (found.status, found.value.rpartition("; ")[2]) == (
        "warn",
        "its memory cannot be read: not permitted",
    )
    assert "ptrace_scope" in found.fix


def test_another_key(workers: Workers) -> None:
    address = workers.start()
    (found,) = workers.ask(address, key_file=workers.other_key)
    assert (found.status, found.fix) == ("fail", "give both sides the same --key-file")


@pytest.mark.parametrize(
    ("message", "said", "fix"),
    [
        (Reject("protocol", "9 to 9 there"), "9 to 9 there", "same version"),
        (HELLO, "", ""),  # the control
        (replace(HELLO, protocol=(9, 9)), "9 to 9 there", "same version"),
        (Reject("other", "busy"), "busy", "use the port"),
        (Found(1, b""), "Found before its hello", "use the port"),
    ],
    ids=["refusal", "hello", "hello of another version", "another refusal", "no hello"],
)
def test_a_worker_that_does_not_agree(message: CacheMessage, said: str, fix: str) -> None:
    worker = cache_peers._Worker("192.0.2.1:7000", "192.0.2.1")
    assert worker.take(MessageReceived(PeerId(1), encode(message)), lambda _: None)
    assert (worker.finding is None) == (said == "") == (worker.hello is not None)
    if worker.finding is not None:
        assert said in worker.finding.value and fix in worker.finding.fix


def test_nobody_there(workers: Workers) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        there = workers.start()
        found = workers.ask(nobody, there)
    assert [each.status for each in found] == ["fail", "ok"]
    assert "cache_peers" in found[0].fix


def test_a_port_that_never_answers(workers: Workers) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (found,) = cache_peers.examine([address], workers.key_file, "", wait_s=0.2).findings
    assert (found.status, found.value) == ("fail", "no answer within 0.2 s")


def test_the_command(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    address = workers.start()
    command = ["doctor", "peers", "--key-file", workers.key_file]
    assert cli.main([*command, "--json", address]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == address
    other = ["doctor", "peers", "--key-file", workers.other_key, address]
    assert cli.main(other) == 1
    assert "fail" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "somewhere:1"])
    assert ended.value.code == 2
    assert "use an IP address and a port" in capsys.readouterr().err
