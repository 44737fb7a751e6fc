"""The prefill worker's planner: every requested page goes out once, as early as it can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.disaggregation import prefill_planner as machine
from kvconnect.disaggregation.messages import NoticeKind, OfferBlocks, TransferEvent, Withdraw
from kvconnect.disaggregation.prefill_actions import (
    Action,
    AnnounceReady,
    CancelRead,
    RefuseRead,
    ReportNotice,
    ReportServed,
    SendAlive,
)
from kvconnect.disaggregation.prefill_planner import PrefillPlanner
from kvconnect.disaggregation.wire_blocks import GroupView, wire_ids
from kvconnect.errors import Misuse, ProtocolError
from kvconnect.types import FailureCause, Rank
from tests.unit.disaggregation.prefill_steps import (
    ONE,
    OTHER_PROMPT,
    PROMPT,
    T,
    U,
    ask,
    notices,
    pages,
    refusals,
    sender,
    span,
    written,
)

# What goes out, and when ------------------------------------------------------------------------


def test_what_is_readable_goes_out_at_once() -> None:
    one = written(span(0, 5, 6), span(2, 7))
    actions = one.on_request(ask(parts=[(0, 1, 9)]), 0.0)
    assert notices(actions) == ["joined"]
    assert pages(actions) == [(9, 1, [6, 7], "step")]


def test_layers_go_out_as_they_are_written_and_the_rest_with_the_step() -> None:
    one = sender(3)
    one.offer(OfferBlocks(T))
    one.on_request(ask(views={0: GroupView(1, 9, (0, -1, 1))}), 0.0)
    one.offer(OfferBlocks(T, (span(0, 5, 6),)))
    assert pages(one.layer_written(0, 2, "f2")) == [(1, 0, [5, 6], "f2")]
    assert pages(one.layer_written(0, 1, "f1")) == []  # the reader does not take it
    assert pages(one.step_written("step")) == [(0, 0, [5, 6], "step")]
    one.offer(OfferBlocks(T, (span(2, 7, 8, 9),)))  # no hook fires
    assert pages(one.step_written("next")) == [(9, 2, [7, 8], "next")]
    one.offer(OfferBlocks(T, (span(5, 10),)))
    assert pages(one.layer_written(0, 0, "f")) == []  # beyond what was requested


def test_a_layer_that_runs_again_in_a_step_sends_nothing_again() -> None:
    one = written(span(0, 5))
    one.offer(OfferBlocks(T, (span(1, 6),)))
    one.on_request(ask(), 0.0)
    assert pages(one.layer_written(0, 1, "first")) == [(1, 1, [6], "first")]
    assert one.layer_written(0, 1, "again") == []
    late = one.on_request(ask(read_id=2, reader=Rank(1, 2, 0, 1)), 0.0)
    assert pages(late) == [(9, 0, [5], "step"), (1, 1, [6], "first")]
    assert pages(one.step_written("end")) == [(0, 1, [6], "end")] * 2


def test_a_reader_hears_when_its_last_page_is_computed() -> None:
    one = written(span(0, 5))
    assert AnnounceReady(3, 1) not in one.on_request(ask(), 0.0)  # three more blocks are requested
    one.offer(OfferBlocks(T, (span(1, 6, 7, 8, 9),)))
    assert AnnounceReady(3, 1) not in one.layer_written(0, 0, None)
    assert one.step_written(None)[-1] == AnnounceReady(3, 1)


def test_a_reader_hears_what_the_engine_had_cached() -> None:
    for early in (True, False):
        one = sender()
        actions = one.on_request(ask(early=True), 0.0) if early else []
        one.offer(OfferBlocks(T))
        one.offer(OfferBlocks(T, (span(0, 5, 6),), cached=2))
        one.step_written(None)
        one.offer(OfferBlocks(T, (span(2, 7, 8),)))
        actions += one.step_written(None)
        actions += [] if early else one.on_request(ask(), 0.0)
        assert actions[-1] == AnnounceReady(3, 1, cached=2)


def test_a_reader_that_comes_during_a_step_gets_the_layers_written_so_far() -> None:
    one = written(span(0, 5))
    one.offer(OfferBlocks(U, (span(0, 1),)))  # of no interest
    one.offer(OfferBlocks(T, (span(1, 6),)))
    one.layer_written(0, 0, "f0")
    actions = one.on_request(ask(), 0.0)
    assert pages(actions) == [(9, 0, [5], "step"), (0, 1, [6], "f0")]
    assert pages(one.layer_written(0, 1, "f1")) == [(1, 1, [6], "f1")]
    assert pages(one.step_written("end")) == []


def test_readers_with_smaller_blocks_are_sent_parts_of_ours() -> None:
    one = written(span(1, 5, 6))
    actions = one.on_request(ask(views={0: GroupView(4, 9, (0, 1))}, parts=[(0, 3, 4)]), 0.0)
    assert pages(actions) == [(9, 4, [20, 21, 22], "step")]
    assert list(wire_ids(span(1, 5, 6), 4, 5, 10)) == [21, 22, 23, 24, 25]


def test_groups_that_the_two_do_not_share_stay_here() -> None:
    one = sender(2, 1)
    one.offer(OfferBlocks(T))
    one.on_request(ask(), 0.0)
    one.offer(OfferBlocks(T, (span(0, 5), span(0, 30, group=1))))
    assert pages(one.layer_written(1, 0, "f")) == []
    assert pages(one.step_written("end")) == [(9, 0, [5], "end")]


def sent_cells(actions: list[Action], view: GroupView) -> Counter[tuple[int, int]]:
    cells: Counter[tuple[int, int]] = Counter()
    for number, first, ids, _ in pages(actions):
        units = [u for u in view.unit_of_layer if u >= 0] if number == view.unit_all else [number]
        cells.update((block, unit) for block in range(first, first + len(ids)) for unit in units)
    return cells


@given(st.data())
def test_every_requested_page_is_sent_exactly_once(data: st.DataObject) -> None:
    one, view = sender(3), GroupView(data.draw(st.integers(1, 3)), 9, (4, -1, 5))
    first, count = data.draw(st.integers(0, 8)), data.draw(st.integers(1, 12))
    actions = one.offer(OfferBlocks(T))
    joined, blocks = False, 0
    for _ in range(data.draw(st.integers(1, 4))):
        fresh = data.draw(st.integers(0, 3))
        one.offer(OfferBlocks(T, (span(blocks, *range(blocks, blocks + fresh)),) if fresh else ()))
        blocks += fresh
        for layer in [None, *data.draw(st.permutations(range(3)))[: data.draw(st.integers(0, 3))]]:
            actions += one.layer_written(0, layer, None) if layer is not None else []
            if not joined and data.draw(st.booleans()):
                joined = True
                actions += one.on_request(ask(views={0: view}, parts=[(0, first, count)]), 0.0)
        actions += one.step_written(None)
    there = range(first, min(first + count, blocks * view.ratio))
    wanted = Counter((block, unit) for block in there for unit in (4, 5))
    assert sent_cells(actions, view) == (wanted if joined else Counter())
    for _, start, ids, _ in pages(actions):
        assert list(ids) == list(range(start, start + len(ids)))  # block n has the id n here


# Readers come and go ----------------------------------------------------------------------------


def test_early_readers_wait_for_the_prefill() -> None:
    one = sender()
    assert one.on_request(ask(early=True), 0.0) == []
    assert refusals(one.on_request(ask(read_id=2), 0.0)) == [(3, 2, "gone")]
    assert notices(one.offer(OfferBlocks(T))) == ["joined"]
    assert refusals(one.tick(100.0)) == []


@pytest.mark.parametrize("early", [True, False])
def test_a_reader_of_another_prompt_is_refused_at_once(early: bool) -> None:
    """Whoever comes first; and the scheduler hears how the prompts differ."""
    for wanted in (PROMPT, OTHER_PROMPT):
        one = sender()
        read = ask(early=early, prompt=wanted)
        actions = one.on_request(read, 0.0) if early else []
        actions += one.offer(OfferBlocks(T, prompt=PROMPT))
        actions += [] if early else one.on_request(read, 0.0)
        one.offer(OfferBlocks(T, (span(0, 5, 6, 7, 8),)))
        sent = pages(one.step_written("step"))
        if wanted == PROMPT:  # control
            assert (notices(actions), refusals(actions), len(sent)) == (["joined"], [], 1)
            continue
        refused, told = actions
        assert isinstance(refused, RefuseRead) and isinstance(told, ReportNotice)
        assert refused.cause is FailureCause.PROMPT and sent == []
        assert str(PROMPT) in refused.detail and str(OTHER_PROMPT) in refused.detail
        assert told.notice == TransferEvent(T, NoticeKind.MISMATCHED, ONE, detail=refused.detail)
        assert notices(one.on_request(ask(read_id=2, prompt=PROMPT), 1.0)) == ["joined"]


def test_a_transfer_without_a_prompt_is_for_no_reader_with_one() -> None:
    one = written(span(0, 5, 6, 7, 8))
    assert refusals(one.on_request(ask(prompt=PROMPT), 0.0)) == [(3, 1, "prompt")]


def test_an_early_decline_is_told_when_the_prefill_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MAX_PARKED_READS", 1)
    one = sender()
    one.tick(50.0)
    assert one.decline(U, 3, ONE) == one.decline(T, 3, ONE) == one.decline(T, 3, ONE) == []
    assert one.tick(51.0) + one.tick(60.9) == []
    assert notices(one.offer(OfferBlocks(U))) == []  # one too many to remember: the oldest went
    assert notices(one.offer(OfferBlocks(T))) == ["declined"]
    assert notices(one.offer(OfferBlocks(T, (span(0, 5),)))) == []


def test_a_reader_that_asks_again_gets_the_transfer_that_follows() -> None:
    """Under the same id; whether the first one is under way, complete or being withdrawn."""
    for state in ("moving", "complete", "stopping"):
        for reusable in (True, False):
            one = sender()
            one.offer(OfferBlocks(T, prompt=PROMPT, reusable=reusable))
            one.offer(OfferBlocks(T, (span(0, 5, 6, 7, 8),)))
            one.step_written("step")
            one.on_request(ask(early=True, prompt=PROMPT), 0.0)
            if state == "complete":
                one.sent(3, 1)
                one.done(3, 1)
            if state == "stopping":
                one.withdraw(Withdraw(T, FailureCause.GONE))
            again = one.on_request(ask(read_id=2, early=True, prompt=OTHER_PROMPT), 0.0)
            if not reusable:  # the control: an id that is used once
                assert refusals(again)
                continue
            assert again == []
            told = one.withdraw(Withdraw(T, FailureCause.GONE)) if state != "stopping" else []
            told += one.drained(3, 1)
            assert notices(told) == ["withdrawn"]
            assert notices(one.offer(OfferBlocks(T, prompt=OTHER_PROMPT))) == ["joined"]
            one.offer(OfferBlocks(T, (span(0, 1, 2, 3, 4),)))
            assert pages(one.step_written("next")) == [(9, 0, [1, 2, 3, 4], "next")]


def test_another_peer_cannot_wait_for_what_follows_a_read_under_way() -> None:
    """It asks for the same transfer: two requests have one id."""
    one = sender()
    one.offer(OfferBlocks(T, reusable=True))
    one.on_request(ask(early=True), 0.0)
    assert refusals(one.on_request(ask(peer=4, early=True), 0.0)) == [(4, 1, "refused")]
    one.cancel(3, 1)
    assert one.on_request(ask(peer=4, read_id=2, early=True), 0.0) == []
    assert refusals(one.tick(10.0)) == [(4, 2, "gone")]  # a wait has its end


def test_a_decline_of_the_transfer_that_follows_is_kept_for_it() -> None:
    for first in ("read", "declined"):
        one = sender()
        one.offer(OfferBlocks(T, reusable=True))
        if first == "read":
            one.on_request(ask(early=True), 0.0)
        else:
            assert notices(one.decline(T, 3, ONE)) == ["declined"]
        assert one.decline(T, 3, ONE) == []
        one.withdraw(Withdraw(T, FailureCause.GONE))
        assert notices(one.offer(OfferBlocks(T, reusable=True))) == ["declined"]
        # And of one that is asked for, and not any more.
        assert one.on_request(ask(read_id=2, early=True), 0.0) == []
        assert one.cancel(3, 2) == []
        one.withdraw(Withdraw(T, FailureCause.GONE))
        assert notices(one.offer(OfferBlocks(T, reusable=True))) == ["declined"]


def test_a_reader_says_what_it_has_although_it_needs_no_block_of_that_group() -> None:
    one = sender(2, 1)
    one.offer(OfferBlocks(T))
    views = {0: GroupView(1, 9, (0, 1)), 1: GroupView(1, 9, (0,))}
    (joined,) = one.on_request(ask(views=views, parts=[(1, 0, 1)], held=7), 0.0)
    assert isinstance(joined, ReportNotice) and joined.notice.first == 7


def test_an_early_decline_is_forgotten_in_time_or_when_someone_asks() -> None:
    one = sender()
    one.decline(T, 3, ONE)
    one.decline(U, 3, ONE)
    assert one.on_request(ask(early=True), 0.0) == []
    assert notices(one.offer(OfferBlocks(T))) == ["joined"]
    for now in (1.0, 11.0):
        one.tick(now)
    assert notices(one.offer(OfferBlocks(U))) == []


def test_early_readers_wait_for_a_time_and_in_limited_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MAX_PARKED_READS", 1)
    one = sender()
    one.on_request(ask(early=True), 0.0)
    assert refusals(one.on_request(ask(read_id=2, early=True), 0.0)) == [(3, 2, "refused")]
    assert refusals(one.tick(9.9)) == []
    assert refusals(one.tick(10.0)) == [(3, 1, "gone")]
    one.on_request(ask(read_id=3, early=True), 10.0)
    one.cancel(3, 3)
    one.on_request(ask(read_id=4, early=True), 10.0)
    one.peer_lost(3)
    assert one.offer(OfferBlocks(T)) == []


@pytest.mark.parametrize(
    "parts",
    [[], [(0, -1, 2)], [(0, 0, 0)], [(0, 0, 1), (0, 1, 1)], [(1, 0, 1)], [(0, 0, 1), (-1, 0, 1)]],
)
def test_what_must_not_be_asked(parts: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ProtocolError):
        written(span(0, 5)).on_request(ask(parts=parts), 0.0)


def test_a_want_is_asked_once() -> None:
    one = written(span(0, 5))
    one.on_request(ask(read_id=4), 0.0)
    for read_id in (4, 3):
        with pytest.raises(ProtocolError, match="does not follow"):
            one.on_request(ask(read_id=read_id), 0.0)
    # Numbers are the peer's own.
    one.on_request(ask(read_id=4, peer=8, reader=Rank(1, 2, 0, 1)), 0.0)


def test_a_replay_is_refused_unless_the_first_reader_left() -> None:
    one = written(span(0, 5))
    one.on_request(ask(), 0.0)
    assert refusals(one.on_request(ask(read_id=2), 0.0)) == [(3, 2, "refused")]
    assert one.cancel(3, 1)[0] == CancelRead(3, 1)
    actions = one.on_request(ask(read_id=3), 0.0)
    assert pages(actions) == [(9, 0, [5], "step")]
    one.sent(3, 3)
    assert notices(one.done(3, 3)) == ["done"]
    assert refusals(one.on_request(ask(read_id=4), 0.0)) == [(3, 4, "refused")]


def test_a_reader_whose_thanks_overtake_our_sockets_is_done_when_the_last_page_has_left() -> None:
    one = written(span(0, 5), span(1, 6))
    one.on_request(ask(parts=[(0, 0, 2)]), 0.0)
    assert one.done(3, 1) == []
    (served,) = one.sent(3, 1)
    assert served == ReportServed(3, 1, TransferEvent(T, NoticeKind.DONE, ONE))
    assert one.sent(3, 1) == []

    one = written(span(0, 5))
    one.on_request(ask(), 0.0)
    one.done(3, 1)
    assert notices(one.peer_lost(3)) == ["done"]  # not "left": it has everything


def test_readers_that_are_gone_get_nothing() -> None:
    one = written(span(0, 5))
    one.on_request(ask(), 0.0)
    one.on_request(ask(read_id=1, peer=4, reader=Rank(1, 2, 0, 1)), 0.0)
    assert notices(one.cancel(3, 1)) == ["left"]
    assert notices(one.peer_lost(4)) == ["left"]
    assert one.cancel(3, 1) == one.done(3, 1) == one.peer_lost(4) == one.sent(4, 1) == []
    one.offer(OfferBlocks(T, (span(1, 6),)))
    assert one.layer_written(0, 0, None) == one.step_written(None) == []


# The end ----------------------------------------------------------------------------------------


def lose(one: PrefillPlanner) -> list[Action]:
    return one.peer_lost(3)


def drained(one: PrefillPlanner) -> list[Action]:
    return one.drained(3, 1)


def send(one: PrefillPlanner) -> list[Action]:
    assert one.sent(3, 1) == []  # one of two
    return one.sent(3, 1)


@pytest.mark.parametrize("end", [lose, drained, send])
def test_withdrawn_is_told_when_nothing_is_in_flight(end: Callable[[PrefillPlanner], Any]) -> None:
    one = written(span(0, 5))
    one.on_request(ask(), 0.0)
    one.offer(OfferBlocks(T, (span(1, 6),)))
    one.step_written(None)  # two orders are in flight
    one.offer(OfferBlocks(T, (span(2, 7),)))
    actions = one.withdraw(Withdraw(T, FailureCause.DEADLINE))
    assert refusals(actions) == [(3, 1, "deadline")]
    assert CancelRead(3, 1) in actions and notices(actions) == []
    assert one.step_written(None) == []  # what was on offer is not sent
    assert refusals(one.on_request(ask(read_id=2), 0.0)) == ([(3, 2, "deadline")])
    assert end(one) == [ReportNotice(TransferEvent(T, NoticeKind.WITHDRAWN))]
    assert refusals(one.on_request(ask(read_id=5, peer=7), 0.0)) == [(7, 5, "gone")]
    assert repr(one) == "<PrefillPlanner 0 transfers, 0 reads>"


def test_an_idle_or_unknown_transfer_is_withdrawn_at_once() -> None:
    one = written(span(0, 5))
    one.on_request(ask(), 0.0)
    one.sent(3, 1)
    one.done(3, 1)
    done = [ReportNotice(TransferEvent(T, NoticeKind.WITHDRAWN))]
    assert one.withdraw(Withdraw(T, FailureCause.GONE)) == done
    assert one.withdraw(Withdraw(T, FailureCause.GONE)) == done
    assert one.drained(3, 1) == []


def test_a_reader_that_is_done_is_not_told_of_the_end() -> None:
    one = written(span(0, 5))
    one.on_request(ask(), 0.0)
    one.done(3, 1)
    assert one.withdraw(Withdraw(T, FailureCause.GONE)) == [CancelRead(3, 1)]  # still in flight


# Signs of life ----------------------------------------------------------------------------------


def test_heartbeats_say_what_is_still_to_come() -> None:
    one = written(span(0, 5))
    one.on_request(ask(), 0.0)  # four wire blocks requested, one is there
    one.offer(OfferBlocks(U))
    one.on_request(ask(read_id=2, transfer=U), 0.0)
    one.on_request(ask(read_id=1, peer=4, transfer=U, reader=Rank(1, 2, 0, 1)), 0.0)
    renewed = ReportNotice(TransferEvent(T, NoticeKind.RENEWED))
    assert one.tick(1.0) == [renewed, SendAlive(3, (1, 2)), SendAlive(4, (1,))]
    assert one.tick(1.5) == []
    one.sent(3, 1)
    assert renewed in one.tick(2.0)  # something moved
    assert renewed not in one.tick(3.0)
    one.offer(OfferBlocks(T, (span(1, 6, 7, 8),)))
    one.step_written(None)
    one.sent(3, 1)
    one.engine_paused = True  # a paused engine computes nothing, and readers need not wait for it
    assert not [action for action in one.tick(4.0) if isinstance(action, SendAlive)]
    one.engine_paused = False
    assert SendAlive(3, (2,)) in one.tick(5.0)  # all of the other is sent


def test_words_of_the_decode_engine_reach_the_scheduler() -> None:
    one = written(span(0, 5))
    assert notices(one.renew(T)) == ["renewed"]
    assert notices(one.decline(T, 3, ONE)) == ["declined"]
    assert one.renew(U) == one.decline(U, 3, ONE) == []


def test_the_engine_keeps_the_order() -> None:
    one = written(span(0, 5))
    one.offer(OfferBlocks(T, (span(1, 6),)))
    for group, layer in ((0, 2), (0, -1)):
        with pytest.raises(Misuse, match=f"layer {layer}"):
            one.layer_written(group, layer, None)
    one.layer_written(0, 0, None)
    with pytest.raises(Misuse, match="first layer"):
        one.offer(OfferBlocks(T))
    one.step_written(None)
    one.offer(OfferBlocks(T, (span(7, 6),)))
    with pytest.raises(Misuse, match="out of turn"):
        one.step_written(None)
