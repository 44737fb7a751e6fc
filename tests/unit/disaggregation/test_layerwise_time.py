"""Hand-offs while clocks jump: an hour in which a process was stopped, a wall clock that is set."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from kvconnect.disaggregation.messages import NoticeKind, OfferBlocks  # noqa: E402
from kvconnect.errors import Refused  # noqa: E402
from kvconnect.protocol.tickets import Ticket, issue, verify  # noqa: E402
from kvconnect.types import Endpoint, TransferId  # noqa: E402
from tests.fakes.handoff_engine import (  # noqa: E402
    TRANSFER,
    Engine,
    finished,
    hand_off,
    notices,
    receive,
    table,
)

LATER = TransferId(b"the next transfr")
HOUR_S = 3600.0
KEY = b"k" * 32
_monotonic, _time = time.monotonic, time.time


def a_connection_outlives_an_hour(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether peers that were stopped together still have their connection."""
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    hand_off(p, d, TRANSFER)
    (before,) = d.agents[0]._sessions._sessions
    monkeypatch.setattr(time, "monotonic", lambda: _monotonic() + HOUR_S)
    loop = d.agents[0]._sessions.transport._shared.loop  # type: ignore[attr-defined]
    deadline = _monotonic() + 60
    heard = loop.now()
    while loop.now() < heard + 2 and _monotonic() < deadline:  # several looks at the silence
        time.sleep(0.01)
    hand_off(p, d, LATER)
    return list(d.agents[0]._sessions._sessions) == [before]


def test_an_hour_in_which_the_process_was_stopped_is_nobody_s_silence(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert a_connection_outlives_an_hour(stack, monkeypatch)


def test_what_waits_through_an_hour_ends_and_the_next_one_works(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines have passed: each side says so once, keeps nothing, and goes on."""
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(p.source(), table(150, 16), 150, early=True)])
    assert notices(p, NoticeKind.JOINED, 1)
    monkeypatch.setattr(time, "monotonic", lambda: _monotonic() + HOUR_S)
    (report,) = finished(d)
    assert {failure.cause.value for failure in report.failures} <= {"deadline", "peer"}
    assert report.failures
    monkeypatch.setattr(time, "monotonic", lambda: _monotonic() + HOUR_S)
    hand_off(p, d, LATER)


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_is_set_changes_nothing_under_way(
    step: float, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    hand_off(p, d, TRANSFER)
    monkeypatch.setattr(time, "time", lambda: _time() + step)
    hand_off(p, d, LATER)


def test_tickets_follow_the_wall_clock_and_never_raise_anything_else() -> None:
    ticket = Ticket(
        transfer=bytes(16),
        engine_id="e",
        epoch=1,
        endpoints=(Endpoint(0, 0, "127.0.0.1", 22),),
        tp=1,
        pp=1,
        expires=1e9 + 30,
    )
    text = issue(ticket, KEY)
    for now in (0.0, 1e9 - 86_400, 1e9, 1e9 + 30):  # set back, or in time
        assert verify(text, (KEY,), now) == ticket
    for now in (1e9 + 61, 1e9 + 86_400, 1e18):
        with pytest.raises(Refused, match="expired"):
            verify(text, (KEY,), now)
