"""Rooms of a prefill engine: nothing that peers say is raised in SGLang's scheduler thread."""

from __future__ import annotations

from typing import Any

import pytest

from kvconnect.engines.sglang import rooms as rooms_module
from kvconnect.engines.sglang.rooms import Outbox
from kvconnect.errors import Misuse
from kvconnect.plan.instructions import Notice
from tests.hostile import rooms as hostile


def test_nothing_that_peers_say_is_raised_in_the_schedulers_thread() -> None:
    outcome = hostile.run(80)
    assert outcome.cases == 80
    assert not outcome.crashes, outcome.notes


def test_the_play_finds_a_prefix_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a room whose prefix follows every reader."""

    def joins(self: Any, room: int, found: Any, notice: Notice) -> None:
        found.joined.add(notice.reader)
        found.prefix = notice.first
        found.waiting = frozenset(found.joined)
        self._ready(room)

    monkeypatch.setattr(Outbox, "_join", joins)
    assert hostile.run(80).crashes


def test_an_error_of_one_room_ends_that_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: it is counted and logged, and the scheduler's thread goes on."""
    agent, failed = hostile.Agent(), []
    box = Outbox(
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
        patched.setattr(rooms_module, "Offer", breaks)
        requests[0].begin()
        requests[0].send(1)
    assert failed == [(hostile.ROOMS[0], "Misuse: nobody has thought of this")]
    assert "nobody has thought of this" in caplog.text
    assert agent.counted.data["counters"]["handoff_refused"] == {"other": 1}
    requests[1].begin()
    requests[1].send(1)
    assert len(failed) == 1
