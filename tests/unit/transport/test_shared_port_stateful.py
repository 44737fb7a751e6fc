"""Hand-offs and sharing of one process at one port, in any order of starts, ends, readers,
strangers and pages: each reader has its own service, and nobody is left without a listener."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvconnect.testing.page_memory import PageMemory
from kvconnect.testing.transport import ConnectedPair, Side
from kvconnect.transport.base import PeerDown, PeerUp
from kvconnect.transport.tcp.shared_port import SharedPort
from tests.links import result, tcp

SERVICES = ("handoff", "share")
services = st.sampled_from(SERVICES)


def made(service: str, port: SharedPort | None = None) -> Side:
    return Side(tcp(service=service, port=port, digest="off"), PageMemory(1 << 16, seed=1))


class Process(RuleBasedStateMachine):
    """A process and its readers."""

    patience_s = 60.0

    def until(self, side: Side, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + self.patience_s
        while not true():
            assert time.monotonic() < deadline
            side.poll()

    @initialize()
    def begin(self) -> None:
        self.port = SharedPort()
        self.address: tuple[str, int] | None = None
        self.up: dict[str, Side] = {}
        self.reads = 0
        self.readers: dict[str, list[Side]] = {service: [] for service in SERVICES}
        self.strangers: list[socket.socket] = []
        for service in SERVICES:
            self.start(service)

    @rule(service=services)
    def start(self, service: str) -> None:
        if service in self.up:
            return
        side = made(service, self.port)
        host, number = self.address or ("127.0.0.1", 0)
        found = side.transport.listen(host, number)
        assert self.address in (None, found)
        self.address = found
        self.up[service] = side

    @rule(service=services)
    def stop(self, service: str) -> None:
        side = self.up.pop(service, None)
        if side is None:
            return
        side.transport.close()
        for reader in self.readers[service]:
            self.until(reader, lambda reader=reader: reader.of(PeerDown))
            reader.transport.close()
        self.readers[service].clear()
        if not self.up:
            assert self.address is not None
            with socket.create_server(self.address):  # nothing listens there any more
                self.address = None

    @precondition(lambda self: self.address and sum(map(len, self.readers.values())) < 6)
    @rule(service=services)
    def connect(self, service: str) -> None:
        assert self.address is not None
        reader = made(service)
        found = result(reader, self.address)
        if isinstance(found, PeerDown):
            reader.transport.close()
            assert service not in self.up, found
            return
        self.readers[service].append(reader)
        assert service in self.up
        side = self.up[service]
        self.until(side, lambda: len(side.of(PeerUp)) >= len(self.readers[service]))

    @rule(service=services)
    def move(self, service: str) -> None:
        """Pages go to a reader that connected at any time before."""
        if service in self.up and self.readers[service]:
            reader, side = self.readers[service][0], self.up[service]
            pair = object.__new__(ConnectedPair)
            pair.reader, pair.source, pair.path = reader, side, "tcp"
            pair.of_reader = reader.of(PeerUp)[0].peer
            pair.of_source = side.of(PeerUp)[0].peer
            self.reads += 1
            pair.check_works(self.reads)

    @precondition(lambda self: self.address and len(self.strangers) < 8)
    @rule(said=st.sampled_from([b"", b"KV", b"GET / HTTP/1.1\r\n\r\n"]))
    def disturb(self, said: bytes) -> None:
        """Somebody connects, says something else or nothing, and stays."""
        assert self.address is not None
        stranger = socket.create_connection(self.address, timeout=20)
        self.strangers.append(stranger)
        with suppress(OSError):
            stranger.sendall(said)

    def teardown(self) -> None:
        for stranger in self.strangers:
            stranger.close()
        for side in (*self.up.values(), *chain.from_iterable(self.readers.values())):
            side.transport.close()


def test_any_order_of_events() -> None:
    chosen = settings(max_examples=30, stateful_step_count=20)
    run_state_machine_as_test(Process, settings=chosen)


def play() -> None:
    """One order of events that each fault below spoils."""
    process = Process()
    process.begin()
    try:
        for service in SERVICES:
            process.connect(service)
            process.move(service)
        for service in SERVICES:
            process.stop(service)
            for each in SERVICES:
                process.connect(each)
            process.start(service)
            process.connect(service)
    finally:
        process.teardown()


def test_one_order_of_events() -> None:
    play()


def _closes_it(self: SharedPort, member: Any, listener: socket.socket | None) -> None:
    self._members = {key: each for key, each in self._members.items() if each is not member}
    if listener is not None:
        listener.close()


def _takes_all(self: SharedPort, service: str) -> Any:
    return self._accepting


@pytest.mark.parametrize(("what", "broken"), [("leave", _closes_it), ("find", _takes_all)])
def test_negative_control(what: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedPort, what, broken)
    monkeypatch.setattr(Process, "patience_s", 1.0)
    with pytest.raises(AssertionError):
        play()
