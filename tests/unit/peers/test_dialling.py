"""Which workers an agent keeps connections to, and when it tries again. Agents that do so over a
network are in ``tests/unit/tiers/test_peers.py``."""

from __future__ import annotations

import threading

import pytest

from kvconnect.peers import dialling
from kvconnect.peers.dialling import IDLE_S, MOST_NAMED, Dialler
from kvconnect.testing.inproc import InprocTransport
from kvconnect.transport.base import Disconnect, PeerId

WAIT_S = 60.0
AT = ("10.0.0.1", 1)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for connections, of which none is made here."""
    monkeypatch.setattr(dialling, "GREET_S", 0.0)


class Dialled(InprocTransport):
    """Connects to nobody; keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[object] = []
        self.dialled: dict[PeerId, tuple[str, int]] = {}

    def connect(self, host: str, port: int) -> PeerId:
        peer = PeerId(100 + len(self.dialled))
        self.dialled[peer] = host, port
        return peer

    def submit(self, order: object) -> None:
        self.orders.append(order)


class Dialling:
    """A dialler without a network."""

    def __init__(self, *configured: tuple[str, int]) -> None:
        self.now = 0.0
        self.network = Dialled()
        self.dialler = Dialler(self.network, configured, lambda: self.now)

    def name(self, *ports: int) -> None:
        """Name workers, and do not wait for their connections."""
        self.now += 0.001
        self.dialler.peers(tuple(("10.0.0.1", port) for port in ports))

    def dropped(self) -> list[tuple[str, int]]:
        """The connections that were given up."""
        orders = [order for order in self.network.orders if isinstance(order, Disconnect)]
        return [self.network.dialled[order.peer] for order in orders]


def test_named_workers_are_forgotten_when_nobody_names_them_for_long() -> None:
    dial = Dialling(("10.0.0.9", 1))
    dial.dialler.tick(dial.now)
    dial.name(1, 2)
    dial.now = IDLE_S - 1
    dial.name(2)
    dial.dialler.tick(IDLE_S + 1)
    assert dial.dropped() == [("10.0.0.1", 1)]
    dial.dialler.tick(2 * IDLE_S)
    assert dial.dropped() == [("10.0.0.1", 1), ("10.0.0.1", 2)]
    assert len(dial.dialler) == 1, "what is configured stays"
    dial.name(1)
    assert list(dial.network.dialled.values()).count(("10.0.0.1", 1)) == 2


def test_so_many_named_workers_are_connected_to() -> None:
    dial = Dialling(("10.0.0.9", 1))
    for port in range(1, MOST_NAMED + 1):
        dial.name(port)
    assert dial.dropped() == []
    dial.name(1)  # not the oldest any more
    dial.name(9999)
    assert dial.dropped() == [("10.0.0.1", 2)]
    assert len(dial.dialler) == MOST_NAMED + 1


def test_a_named_worker_is_tried_again_with_back_off() -> None:
    dial = Dialling()
    dial.name(1)
    (peer,) = dial.network.dialled
    dial.name(1)
    assert len(dial.network.dialled) == 1, "it is being connected to"
    dial.dialler.lost(peer, dial.now)
    dial.name(1)
    dial.dialler.tick(60.0)
    assert len(dial.network.dialled) == 1, "it was lost a moment ago, and ticks do not dial it"
    dial.now = 60.0
    dial.name(1)
    assert len(dial.network.dialled) == 2


def test_who_waits_for_a_connection_goes_on_when_it_answers_or_ends_or_all_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialling, "GREET_S", WAIT_S)
    for end in ("answered", "lost", "forget", "close"):
        dial = Dialling(AT)
        dial.dialler.tick(0.0)
        (peer,) = dial.network.dialled
        found: list[list[PeerId]] = []
        asking = threading.Thread(
            target=lambda found=found, dial=dial: found.append(dial.dialler.peers((AT,)))
        )
        asking.start()
        assert not found
        acts = {
            "answered": lambda dial=dial, peer=peer: dial.dialler.answered(peer),
            "lost": lambda dial=dial, peer=peer: dial.dialler.lost(peer, 0.0),
            "forget": lambda dial=dial, peer=peer: dial.dialler.forget(peer),
            "close": dial.dialler.close,
        }
        acts[end]()
        asking.join(WAIT_S / 2)
        assert found == [[] if end in ("lost", "forget") else [peer]]


def test_a_connection_that_this_side_ended_is_made_again_at_once() -> None:
    for ends in (True, False):
        dial = Dialling(AT)
        dial.dialler.tick(0.0)
        (peer,) = dial.network.dialled
        if ends:
            dial.dialler.end(peer)
        dial.dialler.lost(peer, 0.0)
        dial.dialler.tick(0.0)
        assert len(dial.network.dialled) == (2 if ends else 1)
