"""Sessions: what a connection with a worker of another engine goes through, whatever it is for.

Both sides say hello; then they agree, or one of them tells the other why it does not. An error ends
the session that it came from. Other sessions, the agent's thread and the engine's go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

from kvconnect.errors import KVConnectError, ProtocolError, Refused, contained
from kvconnect.life_cycles import Event, StateTable, row
from kvconnect.protocol.hello import Reject
from kvconnect.transport.base import Disconnect, PeerDown, PeerId, PeerMessage, Transport

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 20.0
"""Seconds for which the other side's hello may take; a busy engine may be slow."""


class SessionState(StrEnum):
    """A connection between two workers."""

    CONNECTING = "connecting"
    GREETING = "greeting"  # Hellos are exchanged
    UP = "up"
    CLOSING = "closing"  # disconnected; the transport still has to confirm
    DOWN = "down"


SESSION = StateTable(
    SessionState.CONNECTING,
    {
        SessionState.CONNECTING: row(
            SessionState.DOWN, SessionState.CLOSING, {Event.CONNECTED: SessionState.GREETING}
        ),
        SessionState.GREETING: row(
            SessionState.DOWN,
            SessionState.CLOSING,
            {Event.AGREED: SessionState.UP, Event.REFUSED: SessionState.CLOSING},
        ),
        SessionState.UP: row(SessionState.DOWN, SessionState.CLOSING, {}),
        SessionState.CLOSING: row(SessionState.DOWN, SessionState.CLOSING, {}),
    },
)


@dataclass
class Session:
    """One connection. ``inbound``: the peer reads from this worker; otherwise this worker reads.

    ``since``: when it began, by the agent's clock. ``name``: the peer's, for logs and metrics.
    ``refusal``: why one side rejected the other.
    """

    peer: PeerId
    inbound: bool
    since: float
    address: str = ""
    name: str = ""
    state: SessionState = SESSION.start
    refusal: str = ""

    @property
    def agreed(self) -> bool:
        """Whether both sides have agreed."""
        return self.state is SessionState.UP

    def connected(self) -> None:
        """The connection is authenticated."""
        self.state = SESSION.after(self.state, Event.CONNECTED)

    def greeted(self) -> None:
        """The peer says hello.

        Raises:
            ProtocolError: it has done so before.
        """
        if self.state is not SessionState.GREETING:
            raise ProtocolError("a second hello")

    def agree(self) -> None:
        """Both sides have agreed."""
        self.state = SESSION.after(self.state, Event.AGREED)

    def closing(self) -> None:
        """This side closes the connection."""
        self.state = SESSION.after(self.state, Event.ABORT)


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The sessions of one agent, by peer. Not synchronised: the agent holds a lock if others ask.

    ``encode``: returns the bytes of a message of the agent's service.
    """

    def __init__(self, transport: Transport, encode: Callable[[Any], bytes]) -> None:
        self.transport = transport
        self._encode = encode
        self._sessions: dict[PeerId, S] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[S]:
        """Iterate over those there are now; they may end meanwhile."""
        return iter(list(self._sessions.values()))

    def get(self, peer: PeerId) -> S | None:
        """Return a live session."""
        return self._sessions.get(peer)

    def add(self, session: S) -> None:
        """A connection has been made, or begun."""
        self._sessions[session.peer] = session

    def send(self, peer: PeerId, message: object) -> None:
        """Send a message to a peer."""
        self.transport.submit(PeerMessage(peer, self._encode(message)))

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Close a connection; its ``PeerDown`` carries the reason."""
        session = self._sessions.get(peer)
        if session is not None and session.state is not SessionState.CLOSING:
            session.closing()
            self.transport.submit(Disconnect(peer, reason))

    def tick(self, now: float) -> None:
        """Disconnect peers that say no hello in time; call this a few times per second."""
        for session in self._sessions.values():
            greeting = session.state is SessionState.GREETING
            if greeting and now - session.since > HELLO_TIMEOUT_S:
                self.disconnect(session.peer, f"no hello within {HELLO_TIMEOUT_S:g} s")

    def reject(self, peer: PeerId, error: Refused) -> None:
        """Tell the peer why it is refused, and disconnect."""
        session = self._sessions.get(peer)
        if session is not None:
            session.refusal = str(error) or error.field
        self.note_refused(error.field)
        self.send(peer, Reject(field=error.field, message=str(error)))
        self.disconnect(peer, str(error))

    def on_reject(self, session: S, message: Reject) -> None:
        """The peer has rejected this worker."""
        if session.refusal:
            return  # both sides rejected
        session.refusal = message.message or message.field
        self.note_refused(message.field)
        self.disconnect(session.peer, f"refused by the peer: {message.message}")

    def remove(self, event: PeerDown) -> tuple[S | None, str]:
        """A connection is gone; return its session, and why one side refused the other, if it did.
        Who refuses closes the connection, and may do so before this side does."""
        session = self._sessions.pop(event.peer, None)
        if event.refused:
            self.note_refused(event.refused)
        return session, (session.refusal if session else "") or (event.refused and event.reason)

    def isolate(self, peer: PeerId) -> AbstractContextManager[None]:
        """Contain errors of work for one peer: an error ends that peer's connection only."""
        return contained(partial(self.end, peer))

    def end(self, peer: PeerId, error: Exception) -> None:
        """End a session after an error. Unexpected errors are bugs of KVConnect: they are logged
        and counted."""
        session = self._sessions.get(peer)
        if session is not None and session.state is SessionState.CLOSING:
            return
        if isinstance(error, Refused):
            self.reject(peer, error)
            return
        if not isinstance(error, KVConnectError):
            name = session.name if session is not None else "a peer"
            text = "%s: unexpected error in KVConnect; this connection ends"
            logger.error(text, name, exc_info=error)
            self.note_error()
        reason = f"{type(error).__name__}: {error}"
        if session is None:
            self.transport.submit(Disconnect(peer, reason))
        else:
            self.disconnect(peer, reason)

    def note_refused(self, field: str) -> None:
        """One side has refused the other, for this field of ``REFUSAL_FIELDS``."""

    def note_error(self) -> None:
        """An unexpected error has ended a session."""
