"""Floods of connections that prove nothing: honest peers get in, and the log stays of use."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack

import pytest

from kvconnect.protocol.addresses import source_of
from kvconnect.protocol.auth import NONCE_BYTES, SESSION_BYTES, ClientAuth, Opening
from kvconnect.transport import Security
from kvconnect.transport.tcp import listener, rejection_log
from kvconnect.transport.tcp.rejection_log import RejectionLog
from tests.links import side

KEY = b"k" * 32
OPENING = Opening("control", b"s" * SESSION_BYTES, 0, 1)


class Slow:
    """An honest peer's connection, one step at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=60)
        self.auth = ClientAuth(KEY, OPENING, b"n" * NONCE_BYTES)

    def open(self) -> bytes:
        """Send the opening; return the answer to the challenge, still to be sent."""
        self.socket.sendall(self.auth.start())
        return self.auth.feed(self.socket.recv(4096))

    def prove(self, proof: bytes) -> bool:
        self.socket.sendall(proof)
        try:
            said = self.socket.recv(4096)
        except ConnectionError:
            return False
        if said:
            self.auth.feed(said)
        return self.auth.done


def flood(address: tuple[str, int], source: str, count: int, stack: ExitStack) -> None:
    """Open connections that say nothing."""
    for _ in range(count):
        stack.enter_context(
            socket.create_connection(address, timeout=60, source_address=(source, 0))
        )


def until_crowded(stranger: socket.socket) -> None:
    """Wait until so many came after it that it was given up."""
    assert stranger.recv(1) == b""


def let_in_behind_a_flood(flooder: str, stack: ExitStack) -> bool:
    """Whether an honest peer, slow between its steps, comes in while ``flooder`` floods."""
    victim = stack.enter_context(side(Security(key=KEY), silent_s=600.0, dead_after_s=60.0))
    address = victim.transport.listen("127.0.0.1", 0)
    first = stack.enter_context(
        socket.create_connection(address, timeout=60, source_address=(flooder, 0))
    )
    honest = Slow(address)
    stack.enter_context(honest.socket)
    try:
        proof = honest.open()
        flood(address, flooder, 64, stack)
        until_crowded(first)
        return honest.prove(proof)
    except ConnectionError:
        return False


@pytest.mark.parametrize("flooder", ["127.0.0.2", "127.0.0.1"])
def test_a_flood_turns_itself_away(
    flooder: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another address, and from the very one that the honest peer has."""
    monkeypatch.setattr(listener, "MAX_IN_AUTH", 8)
    assert let_in_behind_a_flood(flooder, stack)


@pytest.mark.parametrize("flooder", ["127.0.0.2", "127.0.0.1"])
def test_giving_up_the_oldest_would_lock_honest_peers_out(
    flooder: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(listener, "MAX_IN_AUTH", 8)
    monkeypatch.setattr(listener, "oldest_of_busiest", lambda strangers: strangers[0])
    assert not let_in_behind_a_flood(flooder, stack)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.4", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_what_counts_as_one_source(one: str, other: str, same: bool) -> None:
    assert (source_of(one) == source_of(other)) is same


# The log ----------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "rejected" in record.message]
    caplog.clear()
    return found


def test_the_log_neither_fills_nor_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    said = RejectionLog()
    for number in range(5000):
        said.say(f"10.0.{number // 256}.{number % 256}", "no key: x", 0.0)
    assert len(lines(caplog)) == rejection_log.LINES_PER_MINUTE
    assert len(said._logged_at) <= rejection_log.MAX_KINDS
    said.say("10.9.9.9", "no key: y", 60.0)  # was mute for good
    (line,) = lines(caplog)
    assert "10.9.9.9: rejected: no key: y (4980 more since" in line


def test_the_same_trouble_is_told_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    said = RejectionLog()
    again = rejection_log.AGAIN_S
    for now in (0.0, 1.0, again - 1, again, again + 1):
        said.say("10.1.2.3", "no key: x", now)
    assert len(lines(caplog)) == 2
    said.say("10.1.2.3", "another reason", 301.0)
    assert len(lines(caplog)) == 1


def test_many_addresses_are_remembered_up_to_a_bound(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection_log, "LINES_PER_MINUTE", 10_000)
    said = RejectionLog()
    for number in range(3000):
        said.say(str(number), "x", 0.0)
    assert len(said._logged_at) == rejection_log.MAX_KINDS
    assert len(lines(caplog)) == 3000
