"""Life cycles as tables: state -> event -> state.

An event that is missing in a state's row is a bug of the caller, never bad input: it raises, naming
state and event. Every state handles a lost peer, a deadline and an abort; final states ignore every
event. ``tests/unit/disaggregation/test_states.py`` tests this, and all tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Generic, TypeVar

from kvconnect.errors import Misuse


class Event(StrEnum):
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


def row(lost: S, ended: S, others: Mapping[Event, S]) -> dict[Event, S]:
    """Return a row. ``lost``: state after a lost peer; ``ended``: after a deadline or an abort."""
    return {Event.PEER_LOST: lost, Event.EXPIRE: ended, Event.ABORT: ended, **others}
