"""Life cycles as tables: state -> event -> state.

An event that is missing in a state's row is a bug of the caller, never bad input: it raises, naming
state and event. Every state handles a lost peer, a deadline and an abort; final states ignore every
event.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from kvconnect.errors import Misuse


class Event(str, Enum):
    """Events of all life cycles. The first three can happen at any time."""

    PEER_LOST = "PeerLost"
    EXPIRE = "Expire"
    ABORT = "Abort"
    CONNECTED = "Connected"  # the connection is authenticated
    AGREED = "Agreed"  # both sides' geometry fits
    REFUSED = "Refused"  # the geometry does not fit
    JOINED = "Joined"  # a reader asked
    COMPUTED = "Computed"  # the request is over, and all of its blocks are offered
    SERVED = "Served"  # every reader has every page, or left
    ANSWERED = "Answered"  # every worker has answered
    STARTED = "Started"  # pages may move from now on
    COMPLETED = "Completed"  # the reader has every requested page
    DRAINED = "Quiet"  # nothing is in flight any more
    PLANNED = "Planned"  # blocks are allocated and the receive is ordered


ANY_TIME = (Event.PEER_LOST, Event.EXPIRE, Event.ABORT)


class SessionState(str, Enum):
    """A connection between two workers."""

    CONNECTING = "connecting"
    GREETING = "greeting"  # Hellos are exchanged
    UP = "up"
    CLOSING = "closing"  # disconnected; the transport still has to confirm
    DOWN = "down"


class Lease(str, Enum):
    """The prefill scheduler's promise to keep the blocks of one transfer."""

    GROWING = "growing"  # the request runs, no reader has asked
    STREAMING = "streaming"  # the request runs, a reader has asked
    WAITING = "waiting"  # the request is over, no reader has asked
    READING = "reading"  # the request is over, a reader has asked
    WITHDRAWN = "withdrawn"  # workers were told to stop
    RELEASED = "released"


class TransferState(str, Enum):
    """One read request, on either side."""

    REQUESTED = "asked"  # waits for the connection or the transfer's offer
    MOVING = "moving"
    COMPLETE = "complete"  # the reader has every page
    STOPPING = "stopping"  # pages in flight end, no more are sent
    OVER = "over"


class Handoff(str, Enum):
    """One request's hand-off, as the decode scheduler sees it."""

    PENDING = "wanted"
    RECEIVING = "receiving"
    DROPPING = "dropping"  # not needed any more, but pages may still be written
    SETTLED = "settled"


S = TypeVar("S", bound=Enum)


class StateTable(Generic[S]):
    """One life cycle. Immutable; any thread."""

    def __init__(self, start: S, table: Mapping[S, Mapping[Event, S]]) -> None:
        """``table``: state -> event -> state. States without a row of their own are final: no event
        of the table changes them."""
        self.start = start
        events = {event for row in table.values() for event in row}
        reached = {state for row in table.values() for state in row.values()}
        self.final = frozenset(reached - set(table))
        self._table = {**table, **{state: dict.fromkeys(events, state) for state in self.final}}

    @property
    def rows(self) -> Mapping[S, Mapping[Event, S]]:
        """The whole table, final states included."""
        return self._table

    def after(self, state: S, event: Event) -> S:
        """Return the next state.

        Raises:
            Misuse: the event cannot happen in this state.
        """
        following = self._table[state].get(event)
        if following is None:
            kind = type(state).__name__
            raise Misuse(f"{kind} is {state.value}: {event.value} cannot happen")
        return following


def _row(lost: S, ended: S, others: Mapping[Event, S]) -> dict[Event, S]:
    """Return a row. ``lost``: state after a lost peer; ``ended``: after a deadline or an abort."""
    return {Event.PEER_LOST: lost, Event.EXPIRE: ended, Event.ABORT: ended, **others}


SESSION = StateTable(
    SessionState.CONNECTING,
    {
        SessionState.CONNECTING: _row(
            SessionState.DOWN, SessionState.CLOSING, {Event.CONNECTED: SessionState.GREETING}
        ),
        SessionState.GREETING: _row(
            SessionState.DOWN,
            SessionState.CLOSING,
            {Event.AGREED: SessionState.UP, Event.REFUSED: SessionState.CLOSING},
        ),
        SessionState.UP: _row(SessionState.DOWN, SessionState.CLOSING, {}),
        SessionState.CLOSING: _row(SessionState.DOWN, SessionState.CLOSING, {}),
    },
)

LEASE = StateTable(
    Lease.GROWING,
    {
        Lease.GROWING: _row(
            Lease.GROWING,
            Lease.WITHDRAWN,
            {Event.JOINED: Lease.STREAMING, Event.COMPUTED: Lease.WAITING},
        ),
        Lease.STREAMING: _row(
            Lease.STREAMING,
            Lease.WITHDRAWN,
            {
                Event.JOINED: Lease.STREAMING,
                Event.COMPUTED: Lease.READING,
                Event.SERVED: Lease.WITHDRAWN,
            },
        ),
        Lease.WAITING: _row(Lease.WAITING, Lease.WITHDRAWN, {Event.JOINED: Lease.READING}),
        Lease.READING: _row(
            Lease.READING,
            Lease.WITHDRAWN,
            {Event.JOINED: Lease.READING, Event.SERVED: Lease.WITHDRAWN},
        ),
        Lease.WITHDRAWN: _row(
            Lease.WITHDRAWN,
            Lease.WITHDRAWN,
            {
                Event.JOINED: Lease.WITHDRAWN,
                Event.COMPUTED: Lease.WITHDRAWN,
                Event.SERVED: Lease.WITHDRAWN,
                Event.ANSWERED: Lease.RELEASED,
            },
        ),
    },
)

TRANSFER = StateTable(
    TransferState.REQUESTED,
    {
        TransferState.REQUESTED: _row(
            TransferState.OVER, TransferState.OVER, {Event.STARTED: TransferState.MOVING}
        ),
        TransferState.MOVING: _row(
            TransferState.OVER, TransferState.STOPPING, {Event.COMPLETED: TransferState.COMPLETE}
        ),
        TransferState.COMPLETE: _row(TransferState.OVER, TransferState.STOPPING, {}),
        TransferState.STOPPING: _row(
            TransferState.OVER, TransferState.STOPPING, {Event.DRAINED: TransferState.OVER}
        ),
    },
)

HANDOFF = StateTable(
    Handoff.PENDING,
    {
        Handoff.PENDING: {
            Event.PEER_LOST: Handoff.PENDING,
            Event.EXPIRE: Handoff.PENDING,  # the engine decides how long a request may wait
            Event.ABORT: Handoff.SETTLED,
            Event.PLANNED: Handoff.RECEIVING,
        },
        Handoff.RECEIVING: {
            Event.PEER_LOST: Handoff.RECEIVING,  # only workers know when writes end
            Event.EXPIRE: Handoff.RECEIVING,
            Event.ABORT: Handoff.DROPPING,
            Event.ANSWERED: Handoff.SETTLED,
        },
        Handoff.DROPPING: _row(
            Handoff.DROPPING, Handoff.DROPPING, {Event.ANSWERED: Handoff.SETTLED}
        ),
    },
)
