"""The life cycles are total, lead to an end, and name what cannot happen."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnect.disaggregation.states import HANDOFF, LEASE, TRANSFER, Handoff, Lease, TransferState
from kvconnect.errors import Misuse
from kvconnect.life_cycles import ANY_TIME, Event, StateTable
from kvconnect.peers.sessions import SESSION, SessionState

TABLES: dict[Any, StateTable[Any]] = {
    SessionState: SESSION,
    Lease: LEASE,
    TransferState: TRANSFER,
    Handoff: HANDOFF,
}


def reached(table: StateTable[Any], start: Any) -> set[Any]:
    found, todo = {start}, [start]
    while todo:
        for state in table.rows[todo.pop()].values():
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def faults(table: StateTable[Any], states: Any) -> list[str]:
    """What is wrong with a table: the walk that every life cycle must pass."""
    wrong = [f"{state} is never reached" for state in set(states) - reached(table, table.start)]
    for state, row in table.rows.items():
        wrong += [f"{state} does not handle {event}" for event in ANY_TIME if event not in row]
        if not reached(table, state) & table.final:
            wrong.append(f"{state} never ends")
        if state in table.final and set(row.values()) != {state}:
            wrong.append(f"{state} is final and moves on")
    return wrong


@pytest.mark.parametrize("states", TABLES, ids=lambda states: states.__name__)
def test_a_table_is_total_and_ends(states: Any) -> None:
    table: StateTable[Any] = TABLES[states]
    assert faults(table, states) == []
    assert set(table.rows) == set(states)
    assert len(table.final) == 1


@pytest.mark.parametrize("states", TABLES, ids=lambda states: states.__name__)
def test_late_events_leave_a_final_state_alone(states: Any) -> None:
    table: StateTable[Any] = TABLES[states]
    (final,) = table.final
    events = {event for row in table.rows.values() for event in row}
    assert {table.after(final, event) for event in events} == {final}


@pytest.mark.parametrize("states", TABLES, ids=lambda states: states.__name__)
def test_an_event_outside_the_table_names_state_and_event(states: Any) -> None:
    table: StateTable[Any] = TABLES[states]
    missing = [
        (state, event) for state in states for event in Event if event not in table.rows[state]
    ]
    assert missing
    for state, event in missing:
        with pytest.raises(Misuse, match=f"{state.value}: {event.value}"):
            table.after(state, event)


def row(state: Any) -> dict[Event, Any]:
    return dict.fromkeys(ANY_TIME, state)


def test_the_walk_sees_bad_tables() -> None:
    up, closing, down = SessionState.UP, SessionState.CLOSING, SessionState.DOWN
    good = StateTable(up, {up: row(down)})
    assert faults(good, [up, down]) == []
    assert faults(good, [up, closing, down]) == [f"{closing} is never reached"]
    deaf = StateTable(up, {up: {Event.PEER_LOST: down, Event.ABORT: down}})
    assert f"{up} does not handle {Event.EXPIRE}" in faults(deaf, [up, down])
    endless = StateTable(up, {up: row(closing) | {Event.DRAINED: down}, closing: row(closing)})
    assert faults(endless, [up, closing, down]) == [f"{closing} never ends"]


def test_every_event_is_in_some_table() -> None:
    used = {event for table in TABLES.values() for row in table.rows.values() for event in row}
    assert used == set(Event)
