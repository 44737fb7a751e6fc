"""Rooms of a prefill engine: nothing that peers say is raised in SGLang's scheduler thread."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnect.disaggregation.messages import TransferEvent
from kvconnect.engines.sglang import rooms as rooms_module
from kvconnect.engines.sglang.rooms import PrefillRooms
from kvconnect.errors import Misuse
from tests.hostile import rooms as hostile

ROOM = hostile.ROOMS[0]


def declined_and_computed(play: hostile.Peers, count: int) -> None:
    """SGLang opens a room, decode declines it, and SGLang sends the first blocks of its prompt."""
    play.opens(ROOM)
    play.pumps()
    play.declines(ROOM, 1, hostile.RANKS[1])
    play.computes(ROOM, count, push=False)


def asks(play: hostile.Peers, peer: int, early: bool = True) -> None:
    play.read(peer, ROOM, early, hostile.RANKS[0], [(hostile.KV, 0, hostile.BLOCKS)])


def refused(play: hostile.Peers) -> Any:
    return play.agent.counted.data.get("counters", {}).get("handoff_refused", {})


def test_nothing_that_peers_say_is_raised_in_the_schedulers_thread() -> None:
    outcome = hostile.run(80)
    assert outcome.cases == 80
    assert not outcome.crashes, outcome.notes


def test_the_play_finds_a_prefix_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a room whose prefix follows every reader."""

    def joins(self: Any, room: int, found: Any, notice: TransferEvent) -> None:
        found.joined.add(notice.reader)
        found.prefix = notice.first
        found.waiting = frozenset(found.joined)
        self._ready(room)

    monkeypatch.setattr(PrefillRooms, "_join", joins)
    assert hostile.run(2000).crashes


def test_a_room_that_decode_declined_begins_anew_when_it_is_used_again() -> None:
    """The first request was given up after some of its blocks had been offered."""
    play = hostile.Peers()
    declined_and_computed(play, 1)
    play.closes(ROOM)
    declined_and_computed(play, hostile.BLOCKS)
    assert play.failed == []
    assert ROOM in play.served
    assert not refused(play)


def test_blocks_of_a_room_that_was_closed_are_not_sent() -> None:
    """Their pages are another request's by now."""
    play = hostile.Peers()
    declined_and_computed(play, 1)
    asks(play, 1)
    assert play.agent.in_flight  # the control: while the room is open, they are sent
    play.lost(1)
    play.closes(ROOM)
    asks(play, 1)
    assert not play.agent.in_flight


def test_a_room_used_again_waits_until_the_request_before_it_is_over() -> None:
    play = hostile.Peers()
    play.opens(ROOM)
    asks(play, 1)
    play.computes(ROOM, 1, push=False)
    assert play.agent.in_flight
    play.closes(ROOM)
    play.opens(ROOM)
    play.pumps()
    assert ROOM not in play.ready
    play.pages_leave()
    play.pumps()
    asks(play, 2)
    play.pumps()
    assert ROOM in play.ready
    play.computes(ROOM, hostile.BLOCKS, push=False)
    assert [peer for peer, _ in play.agent.in_flight] == [2]
    assert play.failed == []


def test_a_reader_of_the_request_before_is_not_waited_for() -> None:
    """It asked, but SGLang closed the room before it heard of that, and opened it again."""
    play = hostile.Peers()
    declined_and_computed(play, 1)
    asks(play, 1)
    play.closes(ROOM)
    play.opens(ROOM)
    play.pages_leave()
    for _ in range(3):
        play.pumps()
    assert ROOM not in play.ready


def test_a_request_given_up_does_not_withdraw_the_next_one() -> None:
    """Nothing was offered and nobody had asked when SGLang closed the room."""
    play = hostile.Peers()
    play.opens(ROOM)
    play.closes(ROOM)
    play.opens(ROOM)
    asks(play, 1)
    play.computes(ROOM, hostile.BLOCKS, push=False)
    assert play.agent.in_flight
    assert play.failed == []


def test_a_prefix_that_sglang_was_told_stays() -> None:
    """A stage that took an earlier request's state for this one's counts pages from it."""
    play = hostile.Peers()
    play.opens(ROOM)
    assert play.box.tell_prefix(ROOM) == 0
    play.read(1, ROOM, False, hostile.RANKS[0], [(hostile.KV, 2, hostile.BLOCKS - 2)])
    play.pumps()
    ((room, why),) = play.failed
    assert room == ROOM and "this stage had begun" in why
    play.box.send(ROOM, play.box.prefix(ROOM), play.requests[ROOM].pages[:4], [], None)
    assert not play.agent.in_flight


def test_a_prefix_that_is_the_one_told_is_served() -> None:
    """The control."""
    play = hostile.Peers()
    play.opens(ROOM)
    assert play.box.tell_prefix(ROOM) == 0
    asks(play, 1)
    play.computes(ROOM, hostile.BLOCKS, push=False)
    assert play.agent.in_flight
    assert play.failed == []


def test_an_error_of_one_room_ends_that_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: it is counted and logged, and the scheduler's thread goes on."""
    agent, failed = hostile.Agent(), []
    box = PrefillRooms(
        agent,  # type: ignore[arg-type]
        hostile.RANKS[0],
        [4, 1],
        lambda _: None,
        lambda _: None,
        lambda room, why: failed.append((room, why)),
    )
    requests = [hostile.Request(box, agent, room) for room in hostile.ROOMS]

    def breaks(*_: Any) -> None:
        raise Misuse("nobody has thought of this")

    with monkeypatch.context() as patched:
        patched.setattr(rooms_module, "OfferBlocks", breaks)
        requests[0].begin()
        requests[0].send(1)
    assert failed == [(hostile.ROOMS[0], "Misuse: nobody has thought of this")]
    assert "nobody has thought of this" in caplog.text
    assert agent.counted.data["counters"]["handoff_refused"] == {"other": 1}
    requests[1].begin()
    requests[1].send(1)
    assert len(failed) == 1
