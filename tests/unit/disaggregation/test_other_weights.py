"""Agents of engines with other weights, and engines that get new weights while they serve."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvconnect.disaggregation.messages import OfferBlocks
from kvconnect.protocol.identity import Identity, Weights
from kvconnect.types import FailureCause, JobId, Span, TransferId
from tests.fakes.handoff_engine import TRANSFER, Engine, finished, hand_off, receive

NEXT, THIRD = TransferId(b"another transfer"), TransferId(b"the last transfe")
BLOCKS = array("q", [1, 2])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def update(engine: Engine, version: str, *, mixes: bool = False) -> None:
    identity = Identity(weights=Weights(version=version), mixes_weights=mixes)
    for agent in engine.agents:
        agent.set_identity(identity)


def causes(p: Engine, d: Engine, transfer: TransferId) -> set[FailureCause]:
    """Ask for what is offered as ``transfer``, again if the connection ends meanwhile; return why
    it does not come."""
    while True:
        d.step(receives=[replace(receive(p.source(), BLOCKS, 32), transfer=transfer, job=JobId(9))])
        (report,) = finished(d)
        found = {failure.cause for failure in report.failures}
        if found != {FailureCause.PEER}:
            return found


def refusals(engine: Engine) -> dict[str, int]:
    stats = engine.agents[0].take_stats()
    assert stats is not None
    found: dict[str, int] = stats.data["counters"].get("handoff_refused", {})
    return found


def test_other_weights_under_one_name_are_refused_and_both_sides_say_which(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    p = stack.enter_context(Engine(sends=True, weights="one"))
    d = stack.enter_context(Engine(weights="two"))
    p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, BLOCKS),))])
    assert causes(p, d, TRANSFER) == {FailureCause.REFUSED}
    assert refusals(d) == {"weights": 1}
    said = "weights is 'files two' on the decode side, 'files one' on the prefill side"
    assert said in caplog.text
    assert said in next(iter(d.agents[0].ended.refusals.values()))


def test_an_update_of_one_side_is_refused_until_the_other_follows(stack: ExitStack) -> None:
    p, d = stack.enter_context(Engine(sends=True)), stack.enter_context(Engine())
    hand_off(p, d)
    update(p, "2")
    p.step(offers=[OfferBlocks(NEXT, (Span(0, 0, BLOCKS),))])
    assert causes(p, d, NEXT) == {FailureCause.REFUSED}
    update(d, "2")
    hand_off(p, d, THIRD)


@pytest.mark.parametrize("updated", [True, False])
def test_what_was_offered_before_an_update_is_not_read_after_it(
    stack: ExitStack, updated: bool
) -> None:
    """Although both sides have the new weights: these blocks are of the former ones."""
    p, d = stack.enter_context(Engine(sends=True)), stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, BLOCKS),))])
    if updated:  # else the control
        update(p, "2")
        update(d, "2")
    assert causes(p, d, TRANSFER) == ({FailureCause.GONE} if updated else set())


def test_a_read_that_waits_for_pages_fails_when_the_weights_change(stack: ExitStack) -> None:
    """Whichever side changes; and it is not completed by pages that arrive meanwhile."""
    p, d = stack.enter_context(Engine(sends=True)), stack.enter_context(Engine())
    for number, side in enumerate((p, d)):
        transfer = TransferId(bytes([number]) * 16)
        p.step(offers=[OfferBlocks(transfer)])
        wanted = replace(receive(p.source(), BLOCKS, 32, early=True), transfer=transfer)
        d.step(receives=[wanted])
        update(side, "2")
        p.step(offers=[OfferBlocks(transfer, (Span(0, 0, BLOCKS),))])
        (report,) = finished(d)
        assert {failure.cause for failure in report.failures} <= {
            *(FailureCause.PEER, FailureCause.REFUSED, FailureCause.GONE)
        }
        assert report.failures


def test_the_same_weights_again_end_no_session(stack: ExitStack) -> None:
    p, d = stack.enter_context(Engine(sends=True)), stack.enter_context(Engine())
    hand_off(p, d)
    for engine in (p, d):
        engine.agents[0].set_identity(Identity(weights=Weights(files="tiny")))
    hand_off(p, d, NEXT)
    stats = d.agents[0].take_stats()
    assert stats is not None
    assert not stats.data["counters"].get("handoff_peer_failures")


def test_weights_are_mixed_if_both_sides_say_so_and_loudly(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = stack.enter_context(Engine(sends=True)), stack.enter_context(Engine())
    update(p, "1", mixes=True)
    update(d, "2")
    p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, BLOCKS),))])
    assert causes(p, d, TRANSFER) == {FailureCause.REFUSED}
    update(d, "2", mixes=True)
    hand_off(p, d, NEXT)
    said = "weights is 'version 2' on the decode side, 'version 1' on the prefill side"
    warnings = [line for line in caplog.messages if "as mix_weights says" in line]
    assert len(warnings) == 2 and all(said in warning for warning in warnings)
    for engine in (p, d):
        stats = engine.agents[0].take_stats()
        assert stats is not None
        assert stats.data["gauges"]["handoff_mixed_weights_peers"] == {"": 1}
