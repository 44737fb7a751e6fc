"""Whatever a peer says ends its own connection at most; what it makes this side keep is bounded."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from kvconnect.disaggregation import prefill_planner as machine  # noqa: E402
from kvconnect.disaggregation.messages import NoticeKind, OfferBlocks  # noqa: E402
from kvconnect.disaggregation.prefill_actions import (  # noqa: E402
    DropPeer,
    RefuseRead,
    SendPages,
)
from kvconnect.disaggregation.prefill_executor import PrefillExecutor  # noqa: E402
from kvconnect.disaggregation.prefill_planner import PrefillPlanner  # noqa: E402
from kvconnect.disaggregation.prefill_reads import ServedRead  # noqa: E402
from kvconnect.disaggregation.sessions import HandoffSessions  # noqa: E402
from kvconnect.protocol.codec import MessageReader  # noqa: E402
from kvconnect.protocol.messages import HandoffHello  # noqa: E402
from kvconnect.transport.tcp.peer import Peer  # noqa: E402
from kvconnect.types import FailureCause, Rank, Span, TransferId  # noqa: E402
from tests.fakes.handoff_engine import (  # noqa: E402
    TRANSFER,
    Engine,
    finished,
    hand_off,
    notices,
    receive,
    table,
)
from tests.unit.disaggregation.prefill_steps import T, ask, refusals, sender, span, written  # noqa: E402

WAIT_S = 60.0


def until(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def errors_counted(engine: Engine) -> float:
    with engine.agents[0].stats() as stats:
        counted: dict[str, float] = stats.data["counters"].get("handoff_peer_errors", {})
        return counted.get("", 0)


@pytest.mark.parametrize("where", ["hello", "message", "up"])
def test_an_error_that_a_peer_raises_ends_its_connection_alone(
    where: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the agent's own thread, wherever the peer's words are applied."""
    p = stack.enter_context(Engine(sends=True))
    bad = stack.enter_context(Engine())
    good = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    with monkeypatch.context() as patch:
        owner, name = {
            "hello": (HandoffSessions, "on_hello"),
            "message": (PrefillExecutor, "on_message"),
            "up": (HandoffSessions, "on_up"),
        }[where]
        real = getattr(owner, name)

        def fail(self: object, subject: object, *rest: object) -> object:
            inbound = rest[0].epoch == 7 if rest and isinstance(rest[0], HandoffHello) else True
            if getattr(subject, "inbound", inbound):
                raise ZeroDivisionError("a bug")
            return real(self, subject, *rest)

        patch.setattr(owner, name, fail)
        bad.step(receives=[receive(p.source(), array("q", [1, 2]), 32, early=True)])
        (report,) = finished(bad)
    assert {failure.cause for failure in report.failures} == {FailureCause.PEER}
    assert errors_counted(p) >= 1
    hand_off(p, good)


def test_an_error_for_a_reader_in_the_engine_s_step_ends_its_connection_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step()
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 32, early=True)])
    agent = p.agents[0]
    until(lambda: agent._sending._sender._parked)
    with monkeypatch.context() as patch:
        patch.setattr(ServedRead, "start", lambda self: 1 / 0)
        p.step(
            offers=[OfferBlocks(TRANSFER)]
        )  # by whom it is asked for: raised in this thread before
        (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.PEER}
    assert errors_counted(p) == 1
    until(lambda: not len(agent._sessions))
    hand_off(p, d)


def test_carrying_out_an_action_ends_one_connection_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(p.source(), table(150, 16), 150, early=True)])
    assert notices(p, NoticeKind.JOINED, 1)
    with monkeypatch.context() as patch:
        patch.setattr(PrefillExecutor, "_send", lambda *_: 1 / 0)
        p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, table(150, 16)),))])
        (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.PEER}
    assert errors_counted(p) == 1


@pytest.mark.parametrize(
    ("owner", "name"), [(Peer, "_on_message"), (Peer, "join"), (MessageReader, "feed")]
)
def test_an_error_in_the_transport_s_thread_ends_one_connection_alone(
    owner: type, name: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_: 1 / 0)
        d.step(receives=[receive(p.source(), array("q", [1, 2]), 32, early=True)])
        (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.PEER}
    hand_off(p, d)


# What the machine keeps -------------------------------------------------------------------------


def kept(one: PrefillPlanner) -> int:
    book = one._transfers
    return sum(map(len, book.readers.values())) + sum(len(k.readers) for k in book.offered.values())


def test_asking_and_giving_up_again_and_again_keeps_nothing() -> None:
    one = written(span(0, 5, 6))
    for read_id in range(1000):
        actions = one.on_request(ask(read_id), 0.0)
        sent = sum(isinstance(action, SendPages) for action in actions)
        assert sent == 1
        one.cancel(3, read_id)
        one.drained(3, read_id)
        assert kept(one) == 0


def test_reads_that_do_not_fall_quiet_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_READS", 4)
    one = written(span(0, 5, 6))
    for read_id in range(6):
        actions = one.on_request(ask(read_id), 0.0)
        one.cancel(3, read_id)
    assert refusals(actions) == [(3, 5, "refused")]
    assert kept(one) == 2 * 4
    assert not refusals(one.on_request(ask(0, peer=4), 0.0))  # another peer is served
    for read_id in range(4):
        one.drained(3, read_id)
    assert not refusals(one.on_request(ask(9, reader=Rank(0, 2, 0, 1)), 0.0))


def test_a_reader_that_has_everything_is_remembered_until_the_transfer_ends() -> None:
    one = written(span(0, 5, 6, 7, 8))
    one.on_request(ask(0), 0.0)
    one.sent(3, 0)
    one.done(3, 0)
    assert kept(one) == 2
    assert refusals(one.on_request(ask(1), 0.0)) == [(3, 1, "refused")]
    one.peer_lost(3)
    assert kept(one) == 0


def test_one_peer_cannot_take_all_room_for_early_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_PARKED_READS", 10)
    one = sender()
    for read_id in range(20):
        one.on_request(ask(read_id, early=True, transfer=TransferId(bytes([read_id]) * 16)), 0.0)
    assert len(one._parked) == 5
    assert not refusals(one.on_request(ask(0, peer=4, early=True), 0.0))


def test_an_error_in_the_step_names_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = written(span(0, 5, 6))
    one.on_request(ask(0), 0.0)
    one.offer(OfferBlocks(T, (span(2, 7),)))
    monkeypatch.setattr(ServedRead, "send", lambda *_: 1 / 0)
    for actions in (one.layer_written(0, 0, None), one.step_written(None)):
        (only,) = actions
        assert isinstance(only, DropPeer)
        assert only.peer == 3
        assert not isinstance(only, RefuseRead)


def test_the_last_word_of_a_reader_is_the_last_notice(stack: ExitStack) -> None:
    """It asks, leaves and asks again before the scheduler looks: it is still there."""
    p = stack.enter_context(Engine(sends=True))
    side = p.agents[0]._sending
    p.step(offers=[OfferBlocks(TRANSFER)])
    for read_id in range(3):
        side._run_actions(
            side._sender.on_request(ask(read_id, transfer=TRANSFER)._replace(held=read_id), 0.0)
        )
        if read_id < 2:
            side._run_actions(side._sender.cancel(3, read_id))
    kinds = [(n.kind, n.first) for n in side.take_notices()]
    assert kinds == [(NoticeKind.LEFT, 0), (NoticeKind.JOINED, 2)]
