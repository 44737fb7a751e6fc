"""Every transport passes the conformance checks, and the checks notice one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing import transport as checks
from kvconnect.testing.inproc import InprocTransport
from kvconnect.testing.transport import check_transport
from kvconnect.transport import ConnectionOptions, Security, Transport, make_transport, page_io
from kvconnect.transport.base import (
    Disconnect,
    Drained,
    Event,
    IncomingPages,
    MessageReceived,
    OutgoingPages,
    PeerDown,
    PeerId,
    PeerMessage,
)
from tests.links import make_certificates

Order = PeerMessage | IncomingPages | OutgoingPages | Disconnect


def test_inproc() -> None:
    check_transport(InprocTransport)


@pytest.mark.parametrize(
    "options",
    [
        ConnectionOptions(),
        ConnectionOptions(connections=1, digest="off"),
        ConnectionOptions(connections=4, digest="full"),
    ],
    ids=["default", "one connection, no digests", "four connections, all digests"],
)
def test_tcp(options: ConnectionOptions) -> None:
    check_transport(lambda: make_transport("tcp", Security(key=b"k" * 32), options))


def test_tcp_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_io, "_native", None)
    check_transport(lambda: make_transport("tcp", Security(), ConnectionOptions(digest="full")))


def test_tcp_with_mutual_tls(tmp_path: Path) -> None:
    security = make_certificates(tmp_path)
    check_transport(lambda: make_transport("tcp", security, ConnectionOptions()))


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transport='pigeon'.*use tcp or nixl"):
        make_transport("pigeon", Security(), ConnectionOptions())


# Negative controls: transports that are wrong in one way -----------------------------------------


class Reordering(InprocTransport):
    def poll(self, timeout: float) -> list[Event]:
        events = super().poll(timeout)
        if all(isinstance(event, MessageReceived) for event in events):
            events.reverse()
        return events


class Corrupting(InprocTransport):
    """Sends another page of the same unit."""

    def submit(self, order: Order) -> None:
        if isinstance(order, OutgoingPages):
            order.ids[0] += 1
        super().submit(order)


class Impatient(InprocTransport):
    """Ignores fences."""

    def submit(self, order: Order) -> None:
        super().submit(order._replace(fence=None) if isinstance(order, OutgoingPages) else order)


class Hasty(InprocTransport):
    """Ignores the fences of what it expects."""

    def submit(self, order: Order) -> None:
        super().submit(order._replace(fence=None) if isinstance(order, IncomingPages) else order)


class Deaf(InprocTransport):
    """Says that a cancelled read has ended, but does nothing about it."""

    def cancel(self, peer: PeerId, read_id: int) -> None:
        self._events.put(Drained(peer, read_id))


class Talkative(InprocTransport):
    """Has more to say of a peer that is down."""

    def poll(self, timeout: float) -> list[Event]:
        events = super().poll(timeout)
        return events + [MessageReceived(e.peer, b"!") for e in events if isinstance(e, PeerDown)]


class Forgiving(InprocTransport):
    """Swallows pages that nobody asked for."""

    def submit(self, order: Order) -> None:
        if isinstance(order, OutgoingPages) and order.read_id == 9:
            return
        super().submit(order)


class Rude(InprocTransport):
    """Hangs up before the messages are out."""

    def submit(self, order: Order) -> None:
        super().submit(order)
        if isinstance(order, Disconnect) and order.peer in self._ends:
            orders = self._ends[order.peer].orders
            orders.rotate(1)


class Sleepy(InprocTransport):
    """Sleeps through being woken."""

    def wake(self) -> None: ...


class Sleepless(InprocTransport):
    """Once woken, never waits again."""

    woken = False

    def poll(self, timeout: float) -> list[Event]:
        return super().poll(0.0 if self.woken else timeout)

    def wake(self) -> None:
        self.woken = True
        super().wake()


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Reordering, checks.check_messages),
        (Corrupting, checks.check_pages),
        (Corrupting, checks.check_concurrent_reads),
        (Corrupting, checks.check_big),
        (Impatient, checks.check_fence),
        (Hasty, checks.check_reader_fence),
        (Deaf, checks.check_cancel_by_reader),
        (Deaf, checks.check_cancel_by_source),
        (Forgiving, checks.check_unasked),
        (Rude, checks.check_disconnect),
        (Sleepy, checks.check_wake),
        (Sleepless, checks.check_wake),
        (Talkative, checks.check_end),
    ],
)
def test_a_wrong_transport_is_noticed(
    make: Callable[[], Transport],
    check: Callable[[Callable[[], Transport], str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_PATIENCE_S", 0.5)
    with pytest.raises(AssertionError):
        check(make, "tcp")


def test_a_failed_check_is_named() -> None:
    with pytest.raises(AssertionError, match="check_messages: messages were changed or reordered"):
        check_transport(Reordering)


def test_who_waits_in_vain_is_told_why_peers_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with checks.pair(InprocTransport) as link:
        link.source.transport.submit(Disconnect(link.of_source, "enough"))
        link.until_down()
        monkeypatch.setattr(checks, "_PATIENCE_S", 0.0)
        with pytest.raises(AssertionError, match=r"for what never comes; ended peers: .*'enough'"):
            link.until(lambda: False, "what never comes")
