"""Sessions of any service: an error ends one, a refusal is said once, a hello has its time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvconnect.errors import Misuse, ProtocolError, Refused, TransferFailed
from kvconnect.peers.sessions import HELLO_TIMEOUT_S, Session, Sessions, SessionState
from kvconnect.protocol import cache_messages
from kvconnect.protocol.hello import Reject
from kvconnect.testing.inproc import InprocTransport
from kvconnect.transport.base import Disconnect, PeerDown, PeerId, PeerMessage

BUG = ZeroDivisionError("a bug")
ERRORS = [ProtocolError("nonsense"), TransferFailed("stuck"), BUG]


class Recording(InprocTransport):
    """Sends to nobody and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[object] = []

    def submit(self, order: object) -> None:
        self.orders.append(order)

    def take(self, peer: int) -> tuple[list[object], int]:
        """Return the messages to a peer, and how often its connection was ended."""
        mine = [order for order in self.orders if order.peer == peer]  # type: ignore[attr-defined]
        said = [
            cache_messages.decode(order.payload) for order in mine if isinstance(order, PeerMessage)
        ]
        return said, sum(isinstance(order, Disconnect) for order in mine)


class Counting(Sessions[Session]):
    def __init__(self, transport: Recording) -> None:
        super().__init__(transport, cache_messages.encode)
        self.refused: list[str] = []
        self.errors = 0

    def note_refused(self, field: str) -> None:
        self.refused.append(field)

    def note_error(self) -> None:
        self.errors += 1


class Peers(RuleBasedStateMachine):
    """Peers of one agent that come, agree, say nonsense, refuse, stay silent and go.

    The model: who was refused or ended, by number; nobody else may hear of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transport = Recording()
        self.sessions = Counting(self.transport)
        self.now = 0.0
        self.last = 0
        self.agreed: dict[int, bool] = {}  # of live peers
        self.ended: set[int] = set()  # by this side, whether gone or not
        self.told: dict[int, str] = {}  # why this side refuses
        self.bugs = 0

    def pick(self, number: int) -> Session:
        session = self.sessions.get(PeerId(sorted(self.agreed)[number % len(self.agreed)]))
        assert session is not None
        return session

    @rule(inbound=st.booleans())
    def connects(self, inbound: bool) -> None:
        self.last += 1
        session = Session(PeerId(self.last), inbound, self.now)
        self.sessions.add(session)
        session.connected()
        self.agreed[self.last] = False

    @precondition(lambda self: self.agreed)
    @rule(number=st.integers(0, 9))
    def says_hello(self, number: int) -> None:
        session = self.pick(number)
        first = not self.agreed[session.peer] and session.peer not in self.ended
        with self.sessions.isolate(session.peer):
            session.greeted()
            assert first, "a second hello is taken"
            session.agree()
            self.agreed[session.peer] = True
        if not first:
            self.ended.add(session.peer)

    @precondition(lambda self: self.agreed)
    @rule(number=st.integers(0, 9), error=st.sampled_from(ERRORS))
    def causes_an_error(self, number: int, error: Exception) -> None:
        peer = self.pick(number).peer
        with self.sessions.isolate(peer):
            raise error
        if peer not in self.ended:
            self.bugs += error is BUG
        self.ended.add(peer)

    @precondition(lambda self: self.agreed)
    @rule(number=st.integers(0, 9), field=st.sampled_from(["weights", "protocol"]))
    def is_refused(self, number: int, field: str) -> None:
        peer = self.pick(number).peer
        with self.sessions.isolate(peer):
            raise Refused(field, "other")
        if peer not in self.ended:
            self.told[peer] = field
        self.ended.add(peer)

    @precondition(lambda self: self.agreed)
    @rule(number=st.integers(0, 9))
    def refuses(self, number: int) -> None:
        session = self.pick(number)
        self.sessions.on_reject(session, Reject("model", "other"))
        assert session.refusal
        self.ended.add(session.peer)

    @precondition(lambda self: self.agreed)
    @rule(number=st.integers(0, 9), refused=st.sampled_from(["", "auth"]))
    def is_lost(self, number: int, refused: str) -> None:
        session = self.pick(number)
        before = session.refusal
        gone, why = self.sessions.remove(PeerDown(session.peer, "gone", refused))
        assert gone is session
        assert why == (before or (refused and "gone"))
        del self.agreed[session.peer]
        assert self.sessions.remove(PeerDown(session.peer, "gone")) == (None, "")

    @rule(seconds=st.sampled_from([0.25, HELLO_TIMEOUT_S / 2, HELLO_TIMEOUT_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.sessions.tick(self.now)
        for peer, agreed in self.agreed.items():
            session = self.sessions.get(PeerId(peer))
            assert session is not None
            if not agreed and self.now - session.since > HELLO_TIMEOUT_S:
                self.ended.add(peer)

    @invariant()
    def each_is_ended_once_and_nobody_else_is(self) -> None:
        for peer in range(1, self.last + 1):
            said, ends = self.transport.take(peer)
            assert ends == (peer in self.ended), "another peer's connection, or one again"
            field = self.told.get(peer)
            assert said == ([] if field is None else [Reject(field, "other")])

    @invariant()
    def what_is_live_is_known(self) -> None:
        assert {session.peer for session in self.sessions} == set(self.agreed)
        assert len(self.sessions) == len(self.agreed)
        for session in self.sessions:
            agreed = self.agreed[session.peer] and session.peer not in self.ended
            assert session.agreed == agreed
        assert self.sessions.errors == self.bugs


def run() -> None:
    limits = settings(
        max_examples=100, stateful_step_count=25, deadline=None, phases=[Phase.generate]
    )
    run_state_machine_as_test(Peers, settings=limits)


def test_peers_in_any_order() -> None:
    run()


def _all_end(self: Sessions[Session], _peer: PeerId, error: Exception) -> None:
    for session in self:
        self.disconnect(session.peer, str(error))


def _says_nothing(self: Sessions[Session], peer: PeerId, error: Refused) -> None:
    self.disconnect(peer, str(error))


def _ends_again(self: Sessions[Session], peer: PeerId, reason: str) -> None:
    self._sessions[peer].state = SessionState.CLOSING
    self.transport.submit(Disconnect(peer, reason))


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Sessions, "end", _all_end),
        (Sessions, "reject", _says_nothing),
        (Sessions, "disconnect", _ends_again),
        (Sessions, "tick", lambda *_: None),
        (Session, "greeted", lambda _: None),
    ],
    ids=["all end", "no reason is told", "ended twice", "silence is kept", "two hellos"],
)
def test_a_fault_is_found(
    owner: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, Misuse)):
        run()


def test_a_silent_peer_keeps_its_session_until_its_time_is_over() -> None:
    sessions = Counting(transport := Recording())
    silent, up = (Session(PeerId(number), True, 0.0) for number in (1, 2))
    for session in (silent, up):
        sessions.add(session)
        session.connected()
    up.agree()
    sessions.tick(HELLO_TIMEOUT_S)
    assert not transport.orders
    sessions.tick(math.inf)
    assert transport.orders == [Disconnect(PeerId(1), "no hello within 20 s")]
