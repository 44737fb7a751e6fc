"""Both schedulers of a hand-off: leases of the prefill engine, arrivals at the decode engine."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from kvconnect.cache.groups import CacheGroup
from kvconnect.disaggregation import leases as handoff
from kvconnect.disaggregation.leases import LONGEST_LIFE_S, Leases
from kvconnect.disaggregation.limits import HandoffLimits
from kvconnect.disaggregation.messages import (
    Drop,
    Keep,
    NoticeKind,
    OfferBlocks,
    PrefillSource,
    Receive,
    ReceiveReport,
    TransferEvent,
    Withdraw,
)
from kvconnect.disaggregation.receives import Receives, SettledReceive
from kvconnect.errors import Misuse
from kvconnect.offload.messages import FailedBlock
from kvconnect.protocol.prompts import identify
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import Endpoint, FailureCause, Rank, Span, TransferId

T = TransferId(b"t" * 16)
SOURCE = PrefillSource("p", 7, (Endpoint(0, 0, "127.0.0.1", 5),), 1, 1)
ONE = Rank(0, 1, 0, 1)
PAIR = [Rank(0, 2, 0, 1), Rank(1, 2, 0, 1)]


Stats = OffloadingConnectorStats


@pytest.fixture
def stats() -> Stats:
    return Stats()


def leases(*groups: CacheGroup, workers: int = 1, stats: Stats | None = None) -> Leases:
    limits = HandoffLimits(workers, lease_s=10.0, deadline_s=20.0)
    return Leases(groups or (CacheGroup(4),), stats or Stats(), limits)


def spans(offers: list[OfferBlocks]) -> list[tuple[int, int, list[int]]]:
    return [(s.group, s.first, list(s.block_ids)) for offer in offers for s in offer.spans]


def counters(stats: Stats) -> dict[str, dict[str, int]]:
    counted: dict[str, dict[str, int]] = stats.data["counters"]
    return counted


def served(book: Leases, tokens: int = 10) -> Leases:
    """A lease whose request is over."""
    assert book.open("r", T, tokens, 0.0)
    book.offer("r", tokens, [[5, 6, 7]])
    assert book.finish("r", True, 1.0) == T
    book.take()
    return book


# What peers cannot do ---------------------------------------------------------------------------


def lives(kind: NoticeKind) -> float:
    """Return for how long a lease lives that somebody keeps, twice the limit at most."""
    book = served(leases())
    now = 1.0
    while now < 2 * LONGEST_LIFE_S:
        reader = None if kind is NoticeKind.RENEWED else ONE
        book.on_notice(TransferEvent(T, kind, reader), now)
        book.tick(now)
        _, withdrawals = book.take()
        if withdrawals:
            assert withdrawals == [Withdraw(T, FailureCause.DEADLINE)]
            break
        now += 5.0
    return now - 1.0


KEEPING = pytest.mark.parametrize("kind", [NoticeKind.RENEWED, NoticeKind.JOINED])


@KEEPING
def test_no_sign_of_life_keeps_a_lease_for_ever(kind: NoticeKind) -> None:
    assert LONGEST_LIFE_S <= lives(kind) <= LONGEST_LIFE_S + 10.0


@KEEPING
def test_without_the_limit_it_would(kind: NoticeKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(handoff, "LONGEST_LIFE_S", math.inf)
    assert lives(kind) >= 2 * LONGEST_LIFE_S - 5.0


def test_a_lease_that_is_to_live_longer_does() -> None:
    limits = HandoffLimits(1, lease_s=5 * LONGEST_LIFE_S, deadline_s=20.0)
    book = served(Leases((CacheGroup(4),), Stats(), limits))
    for now in (4 * LONGEST_LIFE_S, 4 * LONGEST_LIFE_S + 1):
        book.tick(now)
        assert book.take()[1] == []


def test_readers_of_one_lease_are_bounded() -> None:
    book = served(leases())
    for number in range(3000):
        book.on_notice(TransferEvent(T, NoticeKind.JOINED, Rank(number, 5000, 0, 1)), 2.0)
    assert len(book._leases[T].readers) == 1024


# Leases -----------------------------------------------------------------------------------------


def test_blocks_are_offered_as_they_fill_and_the_last_one_with_the_prompt() -> None:
    book = leases()
    assert book.open("r", T, 10, 0.0)
    assert book.offer("r", 3, [[5]]) == []
    assert book.take() == ([OfferBlocks(T)], [])  # the announcement
    assert book.offer("r", 8, [[5, 6]], cached_tokens=4) == [5, 6]
    assert book.offer("r", 8, [[5, 6]]) == []
    assert book.offer("r", 10, [[5, 6, 7]]) == [7]
    assert book.offer("r", 14, [[5, 6, 7, 8]]) == []  # nothing beyond the prompt
    offers, _ = book.take()
    assert spans(offers) == [(0, 0, [5, 6]), (0, 2, [7])]
    assert [offer.cached for offer in offers] == [4, 0]
    assert book.take() == ([], [])
    assert {n: v for n, v, _ in book.gauges(3.0)} == {
        "ledger_held_blocks": 3,
        "handoff_leases": 1,
        "jobs_in_flight": 1,
        "ledger_oldest_hold_seconds": 3.0,
    }
    assert len(book) == 1
    book.check()


def test_groups_are_offered_from_what_the_next_token_sees() -> None:
    book = leases(CacheGroup(4), CacheGroup(2, window=4), CacheGroup(2, chunk=8))
    book.open("r", T, 12, 0.0)
    table = [[1, 2, 3], [0, 0, 0, 0, 11, 12], [0, 0, 0, 0, 21, 22]]
    assert book.offer("r", 12, table) == [1, 2, 3, 11, 12, 21, 22]
    assert spans(book.take()[0]) == [(0, 0, [1, 2, 3]), (1, 4, [11, 12]), (2, 4, [21, 22])]


@pytest.mark.parametrize("table", [[5, 6, 0], [5, 6]])
def test_a_block_that_is_not_there_ends_the_lease(
    table: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    book = leases(CacheGroup(2), CacheGroup(4))
    book.open("r", T, 10, 0.0)
    other = [1, 2, 3, 4, 8]
    assert book.offer("r", 4, [other, table]) == [1, 2, 5]
    assert book.offer("r", 10, [other, table]) == []
    assert "request r: some of its blocks are missing" in caplog.text
    book.on_notice(TransferEvent(T, NoticeKind.JOINED, ONE), 1.0)  # before the engine's tick
    book.tick(1.0)
    book.tick(2.0)
    offers, withdrawals = book.take()
    assert spans(offers) == [(0, 0, [1, 2]), (1, 0, [5])]
    assert withdrawals == [Withdraw(T, FailureCause.GONE)]
    assert book.offer("r", 11, [other, [5, 6, 7]]) == []
    assert book.finish("r", True, 3.0) is None
    book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 3.0)
    assert book.take_released() == [1, 2, 5]
    book.check()


@pytest.mark.parametrize("group", [CacheGroup(2, window=6), CacheGroup(2, chunk=6)])
def test_windowed_groups_may_lack_their_first_blocks(group: CacheGroup) -> None:
    book = leases(group)
    book.open("r", T, 10, 0.0)  # sees blocks from 2 or 3 on
    assert book.offer("r", 8, [[9, 9, 0, 0, 7]]) == []
    assert book.offer("r", 10, [[9, 9, 0, 0, 7]]) == [7]
    assert spans(book.take()[0]) == [(0, 4, [7])]
    assert book.finish("r", True, 1.0) == T


def test_windowed_groups_have_no_gaps() -> None:
    book = leases(CacheGroup(2, window=8))
    book.open("r", T, 10, 0.0)  # sees blocks from 1 on
    assert book.offer("r", 6, [[0, 0, 6]]) == [6]
    assert book.offer("r", 10, [[0, 0, 0, 0, 7]]) == []
    book.tick(0.0)
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]


STATES = CacheGroup(8, states="some")


def test_a_state_is_offered_by_the_step_that_ends_where_decode_begins() -> None:
    book = leases(CacheGroup(4), STATES)
    book.open("r", T, 10, 0.0)
    assert book.offer("r", 8, [[5, 6], [3]]) == [5, 6]  # a state, but not the wanted one
    assert book.offer("r", 10, [[5, 6, 7], [0, 4]]) == [7, 4]
    # Block 0 of its group, wherever it is in the table: block sizes may differ.
    assert spans(book.take()[0]) == [(0, 0, [5, 6]), (0, 2, [7]), (1, 0, [4])]
    assert book.finish("r", True, 1.0) == T


@pytest.mark.parametrize(("computed", "table"), [(11, [0, 4]), (10, [0, 0])])
def test_a_later_state_or_none_is_not_offered(computed: int, table: list[int]) -> None:
    book = leases(STATES)
    book.open("r", T, 10, 0.0)
    assert book.offer("r", computed, [table]) == []
    book.tick(0.0)
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]


def test_a_state_is_received_as_one_token() -> None:
    book = Receives((STATES,), Stats(), HandoffLimits(1, 10.0, 20.0))
    book.open("r", T, SOURCE, early=False)
    book.plan("r", (Span(0, 0, array("q", [4])),), 8, 10, 0.0)
    ((receive,), _, _) = book.take()
    assert receive.tokens == ((0, 1),)


def test_a_transfer_has_one_lease() -> None:
    book = leases()
    assert book.open("r", T, 10, 0.0)
    assert not book.open("q", T, 10, 0.0)
    assert book.offer("q", 10, [[1, 2, 3]]) == []
    assert book.finish("q", True, 0.0) is None


@pytest.mark.parametrize(("completed", "computed"), [(False, 10), (True, 8)])
def test_what_is_not_complete_is_withdrawn(completed: bool, computed: int) -> None:
    book = leases()
    book.open("r", T, 10, 0.0)
    book.offer("r", computed, [[5, 6, 7]])
    assert book.finish("r", completed, 1.0) is None
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]
    assert book.offer("r", 10, [[5, 6, 7]]) == []


def test_blocks_return_when_every_worker_has_answered(stats: Stats) -> None:
    book = served(leases(workers=2, stats=stats))
    book.on_notice(TransferEvent(T, NoticeKind.JOINED, ONE), 1.0)
    book.on_notice(TransferEvent(T, NoticeKind.DONE, ONE), 2.0)
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]
    book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 2.0)
    assert book.take_released() == [] and book.busy
    book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 2.0)
    assert book.take_released() == [5, 6, 7]
    assert book.take_released() == [] and not book.busy
    assert (book.granted, book.returned) == (3, 3)
    assert counters(stats) == {"handoff_sent_requests": {"done": 1}}
    book.on_notice(TransferEvent(T, NoticeKind.LEFT, ONE), 2.0)  # late
    assert book.open("again", T, 10, 3.0)
    book.check()


def test_every_reader_of_the_other_engine_counts(stats: Stats) -> None:
    book = served(leases(stats=stats))
    for kind, reader in [
        (NoticeKind.JOINED, PAIR[0]),
        (NoticeKind.DONE, PAIR[0]),
        (NoticeKind.JOINED, PAIR[0]),  # another worker's, late
        (NoticeKind.JOINED, PAIR[1]),
    ]:
        book.on_notice(TransferEvent(T, kind, reader), 1.0)
        assert book.take()[1] == []
    book.on_notice(TransferEvent(T, NoticeKind.LEFT, PAIR[1]), 1.0)
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]
    assert counters(stats) == {"handoff_sent_requests": {"aborted": 1}}


def test_a_reader_that_left_may_come_back(stats: Stats) -> None:
    book = served(leases(stats=stats))
    for kind, reader in [
        (NoticeKind.JOINED, PAIR[0]),
        (NoticeKind.LEFT, PAIR[0]),
        (NoticeKind.JOINED, PAIR[0]),
        (NoticeKind.JOINED, PAIR[1]),
        (NoticeKind.DONE, PAIR[1]),
    ]:
        book.on_notice(TransferEvent(T, kind, reader), 1.0)
    assert book.take()[1] == []
    book.on_notice(TransferEvent(T, NoticeKind.DONE, PAIR[0]), 1.0)
    assert len(book.take()[1]) == 1
    assert counters(stats) == {"handoff_sent_requests": {"done": 1}}


def withdrawn_at(book: Leases, times: list[float]) -> float | None:
    for now in times:
        book.tick(now)
        if book.take()[1]:
            return now
    return None


def test_a_lease_ends_at_the_second_look_past_its_deadline(stats: Stats) -> None:
    book = served(leases(stats=stats))  # over at 1, lease 10
    assert withdrawn_at(book, [10.9, 11.0, 11.1]) == 11.1
    assert counters(stats)["handoff_expired_leases"] == {"": 1}
    assert counters(stats)["handoff_sent_requests"] == {"expired": 1}


def test_signs_of_life_extend_a_lease() -> None:
    book = served(leases())
    book.tick(11.0)
    book.on_notice(TransferEvent(T, NoticeKind.RENEWED), 11.0)
    assert withdrawn_at(book, [20.9, 20.95]) is None
    book.on_notice(TransferEvent(T, NoticeKind.JOINED, ONE), 20.9)
    assert withdrawn_at(book, [40.8, 40.85]) is None  # 20 seconds once somebody reads
    assert withdrawn_at(book, [40.9, 40.9]) == 40.9


def test_a_live_request_has_no_deadline_and_a_declined_one_ends() -> None:
    book = leases()
    book.open("r", T, 10, 0.0)
    assert withdrawn_at(book, [1e6, 2e6]) is None
    book.check()
    book.on_notice(TransferEvent(T, NoticeKind.DECLINED), 2e6)
    book.on_notice(TransferEvent(T, NoticeKind.DECLINED), 2e6)
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]
    assert book.finish("r", True, 2e6) is None


def test_a_preempted_request_gets_its_blocks_back_and_is_an_ordinary_one(stats: Stats) -> None:
    book = leases(stats=stats)
    book.open("r", T, 10, 0.0)
    book.offer("r", 4, [[5]])
    book.preempted("r", 1.0)
    book.preempted("r", 1.0)
    book.preempted("unknown", 1.0)
    assert book.take()[1] == [Withdraw(T, FailureCause.GONE)]
    book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 1.0)
    assert book.take_released() == [5]
    assert book.offer("r", 10, [[7, 8, 9]]) == [] and book.finish("r", True, 2.0) is None
    assert book.take() == ([], []) and not book.busy
    assert counters(stats) == {"handoff_sent_requests": {"aborted": 1}}
    book.check()


def test_a_lease_ends_when_its_only_reader_has_another_prompt() -> None:
    prompt, reader = identify([1], None), Rank(0, 1, 0, 1)
    for known in (False, True):
        book = leases()
        book.open("r", T, 10, 0.0, prompt)
        book.offer("r", 10, [[5, 6, 7]])
        (announced, _), _ = book.take()
        assert announced == OfferBlocks(T, prompt=prompt)
        if known:  # control: its own reader has come, so another one changes nothing
            book.on_notice(TransferEvent(T, NoticeKind.JOINED, reader), 1.0)
        book.on_notice(TransferEvent(T, NoticeKind.MISMATCHED, reader), 1.0)
        assert book.take()[1] == ([] if known else [Withdraw(T, FailureCause.GONE)])
        book.check()


def test_a_preempted_request_whose_blocks_are_all_held_is_handed_off_all_the_same() -> None:
    # Steps overlap: a request that has computed its prompt waits for its output, and is preempted.
    book = leases()
    book.open("r", T, 10, 0.0)
    book.offer("r", 10, [[5, 6, 7]])
    book.preempted("r", 1.0)
    assert book.take() == (
        [OfferBlocks(T), OfferBlocks(T, (Span(0, 0, array("q", [5, 6, 7])),))],
        [],
    )
    assert book.offer("r", 10, [[8, 9, 1]]) == []  # what it computes again
    book.check()
    assert book.finish("r", True, 3.0) == T
    assert withdrawn_at(book, [12.9, 12.95]) is None  # 10 seconds from its end
    assert withdrawn_at(book, [13.0, 13.0]) == 13.0


@pytest.mark.parametrize("req_id", ["r", None])
def test_a_held_prefill_is_not_held_for_ever_though_its_request_never_comes_back(
    req_id: str | None,
) -> None:
    book = leases()
    book.open("r", T, 10, 0.0)
    book.offer("r", 10, [[5, 6, 7]])
    for now in (1.0, 5.0, 10.9):  # a paused engine says so at every step
        book.preempted(req_id, now)
    assert withdrawn_at(book, [11.0, 11.0]) == 11.0
    assert book.finish("r", True, 12.0) is None
    book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 12.0)
    assert book.take_released() == [5, 6, 7] and not book.busy


def test_what_waits_for_a_paused_engine_does_not_keep_it_awake() -> None:
    book = leases()
    book.open("queued", T, 10, 0.0)
    assert len(book) == 1 and not book.busy
    half, other = "half done", TransferId(b"o" * 16)
    book.open(half, other, 10, 0.0)
    book.offer(half, 4, [[5]])
    assert book.busy
    book.take()
    book.preempted(None, 1.0)
    assert book.take() == ([], [Withdraw(other, FailureCause.GONE)]) and book.busy
    book.on_notice(TransferEvent(other, NoticeKind.WITHDRAWN), 1.0)
    assert book.take_released() == [5] and not book.busy
    book.withdraw_all(2.0)  # nothing of the queued one is computed: it is as good as before
    assert book.take() == ([], [])
    assert book.offer("queued", 10, [[6, 7, 8]]) == [6, 7, 8]
    assert book.finish("queued", True, 3.0) == T
    book.check()


def test_a_reset_ends_every_lease_once() -> None:
    book = served(leases())
    other = TransferId(b"o" * 16)
    book.open("alive", other, 10, 1.0)
    book.offer("alive", 4, [[8]])
    book.withdraw_all(2.0)
    book.withdraw_all(2.0)
    gone = FailureCause.GONE
    assert book.take()[1] == [Withdraw(T, gone), Withdraw(other, gone)]
    assert book.offer("alive", 10, [[8, 9, 10]]) == []
    for transfer in (T, other):
        book.on_notice(TransferEvent(transfer, NoticeKind.WITHDRAWN), 3.0)
    assert book.take_released() == [5, 6, 7, 8]
    assert book.finish("alive", True, 3.0) is None
    assert book.open("new", T, 10, 3.0)
    book.check()


def test_a_request_that_outlives_its_lease_offers_nothing() -> None:
    book = leases()
    book.open("r", T, 10, 0.0)
    book.offer("r", 4, [[5]])
    book.on_notice(TransferEvent(T, NoticeKind.DECLINED), 1.0)
    for state in ("withdrawn", "released"):
        assert book.offer("r", 8, [[5, 6]]) == [], state
        book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 1.0)
    assert book.take_released() == [5]
    assert book.finish("r", True, 2.0) is None
    book.check()


def test_an_unanswered_withdrawal_keeps_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    book = served(leases(workers=2))
    book.on_notice(TransferEvent(T, NoticeKind.DECLINED), 0.0)
    book.on_notice(TransferEvent(T, NoticeKind.WITHDRAWN), 0.0)
    for now in (39.0, 40.0, 50.0, 60.0):
        book.tick(now)
    assert [record.getMessage()[:9] for record in caplog.records] == ["1 workers"]
    assert book.take_released() == []
    assert ("ledger_held_blocks", 3, "send") in list(book.gauges(60.0))


def test_lease_check_sees_damage() -> None:
    book = served(leases())
    book.returned += 1
    with pytest.raises(Misuse, match="granted 3"):
        book.check()
    book = served(leases())
    book._leases[T].deadline = float("inf")
    with pytest.raises(Misuse, match="neither a deadline"):
        book.check()


# Receives ---------------------------------------------------------------------------------------


def receives(*groups: CacheGroup, workers: int = 1, stats: Stats | None = None) -> Receives:
    limits = HandoffLimits(workers, lease_s=30.0, deadline_s=20.0)
    return Receives(groups or (CacheGroup(4),), stats or Stats(), limits)


def planned(book: Receives, first: int = 1) -> Receive:
    book.open("r", T, SOURCE, False)
    span = Span(0, first, array("q", range(5, 9 - first)))
    receive = book.plan("r", [span], first * 4, 14, 1.0)
    assert book.take() == ([receive], [], [])
    return receive


def failed(receive: Receive, *blocks: int, cause: Any = FailureCause.PEER) -> ReceiveReport:
    return ReceiveReport(receive.job, tuple(FailedBlock(0, block, -1, cause) for block in blocks))


def test_a_receive_holds_its_blocks_until_every_worker_has_reported(stats: Stats) -> None:
    book = receives(workers=2, stats=stats)
    receive = planned(book)
    assert (receive.transfer, receive.source, receive.early) == (T, SOURCE, False)
    assert receive.tokens == ((4, 14),)
    assert not book.pending("r") and book.busy
    assert book.on_report(ReceiveReport(receive.job), 2.0) is None
    assert ("ledger_held_blocks", 3, "recv") in list(book.gauges(2.0))
    book.check()
    assert book.on_report(ReceiveReport(receive.job), 3.0) == SettledReceive("r", None, False)
    assert not book.busy and book.ledger.held == 0
    assert counters(stats) == {"handoff_received_requests": {"done": 1}}
    assert stats.data["histograms"]["handoff_latency_seconds"][""][0] == 2.0
    assert book.on_report(ReceiveReport(receive.job), 3.0) is None  # a second answer
    book.finish("r")
    assert book.take() == ([], [], [])
    book.check()


def test_needed_tokens_are_those_that_the_next_one_sees() -> None:
    book = receives(CacheGroup(8), CacheGroup(8, window=5), CacheGroup(8, chunk=4))
    book.open("r", T, SOURCE, True)
    whole = [Span(n, 0, array("q", [10 * n + 1, 10 * n + 2])) for n in range(3)]
    receive = book.plan("r", whole, 0, 14, 0.0)
    assert receive.tokens == ((0, 14), (10, 14), (12, 14))


def test_a_receive_has_its_requests_prompt_and_says_why_it_failed(
    stats: Stats, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = identify([1], None)
    for cause in (FailureCause.PROMPT, FailureCause.SKIPPED):
        caplog.clear()
        book = receives(stats=stats)
        book.open("r", T, SOURCE, True, prompt)
        receive = book.plan("r", [Span(0, 0, array("q", [5]))], 0, 4, 0.0)
        assert receive.prompt == prompt
        book.finish("r")  # vLLM ends the request first, and then passes on the report
        report = failed(receive, 5, cause=cause)
        book.on_report(replace(report, detail="the prompts differ"), 1.0)
        said = "request r: hand-off failed: the prompts differ" in caplog.text
        assert said is (cause is FailureCause.PROMPT)  # control: the client left
    assert counters(stats)["handoff_failures"] == {"prompt": 1}


@pytest.mark.parametrize("early", [True, False])
def test_the_prefills_cached_tokens_come_with_early_receives(early: bool) -> None:
    """vLLM passes them on itself in the ticket of a pull."""
    book = receives(workers=2)
    book.open("r", T, SOURCE, early)
    receive = book.plan("r", [Span(0, 0, array("q", [5]))], 0, 4, 0.0)
    assert receive.counted is early
    book.on_report(ReceiveReport(receive.job, cached=128), 1.0)
    settled = book.on_report(ReceiveReport(receive.job, cached=96), 1.0)
    assert settled == SettledReceive("r", None, False, cached=128 if early else None)


def test_failures_are_counted_by_cause_with_the_tokens_they_cost(stats: Stats) -> None:
    book = receives(workers=2, stats=stats)
    receive = planned(book)  # tokens 4 to 14 in blocks 5, 6, 7
    book.on_report(failed(receive, 6, 7, cause=FailureCause.SKIPPED), 2.0)
    settled = book.on_report(failed(receive, 6), 3.0)
    assert settled == SettledReceive("r", FailureCause.PEER, False, lost=6)
    assert counters(stats) == {
        "handoff_received_requests": {"failed": 1},
        "handoff_failures": {"peer": 1},
        "recomputed_tokens": {"": 6},
    }
    assert not book.pending("r")  # it is tried once


def test_with_several_groups_all_is_lost(stats: Stats) -> None:
    book = receives(CacheGroup(4), CacheGroup(4, window=3), stats=stats)
    receive = planned(book)
    book.on_report(failed(receive, 7), 2.0)
    assert counters(stats)["recomputed_tokens"] == {"": 10}


def test_a_refused_hand_off_has_no_source_and_fails(stats: Stats) -> None:
    book = receives(stats=stats)
    book.refuse("r", "ticket")
    assert book.pending("r")
    book.tick(1e9)
    receive = book.plan("r", [Span(0, 0, array("q", [5, 6]))], 0, 8, 1.0)
    assert receive.source is None
    book.on_report(failed(receive, 5, 6, cause=FailureCause.REFUSED), 2.0)
    assert counters(stats)["handoff_refused"] == {"ticket": 1}
    assert counters(stats)["handoff_failures"] == {"refused": 1}
    book.refuse("q", "ticket")
    book.finish("q")
    assert book.take()[2] == []  # nobody to tell


def test_workers_are_told_once_to_renew_the_lease_of_a_pending_request() -> None:
    book = receives()
    book.open("r", T, SOURCE, False)
    assert book.busy  # until they know
    for now in (1.0, 1e6):
        book.tick(now)
    assert book.take()[2] == [Keep(T, SOURCE, every_s=10.0)]
    assert book.pending("r") and not book.busy  # it waits for the engine, which may be paused
    book.plan("r", [], 0, 8, 2e6)
    book.tick(2e6)
    assert book.take()[2] == []


def test_of_requests_for_one_transfer_the_first_receives_it() -> None:
    # A client asked for several answers, and the proxy passed one ticket on.
    book = receives()
    assert book.open("0_r", T, SOURCE, False)
    assert not book.open("1_r", T, SOURCE, False)
    assert book.pending("0_r") and not book.pending("1_r")
    book.finish("1_r")
    assert book.pending("0_r") and book.take() == ([], [], [])
    receive = book.plan("0_r", [Span(0, 0, array("q", [5]))], 0, 4, 0.0)
    assert not book.open("2_r", T, SOURCE, False)
    book.on_report(ReceiveReport(receive.job), 1.0)
    assert not book.open("3_r", T, SOURCE, False)
    book.finish("0_r")
    assert book.open("later", T, SOURCE, False)
    book.check()


def test_a_request_that_is_over_says_so_once(stats: Stats) -> None:
    book = receives(stats=stats)
    book.open("r", T, SOURCE, False)
    book.finish("r")
    book.finish("r")
    assert book.take() == ([], [], [Keep(T, SOURCE)])
    book.open("full hit", T, SOURCE, False)
    book.decline("full hit")
    assert not book.pending("full hit")
    book.finish("full hit")
    assert book.take()[2] == [Keep(T, SOURCE)]
    assert counters(stats) == {"handoff_received_requests": {"aborted": 1}}
    with pytest.raises(KeyError):
        book.plan("r", [], 0, 8, 0.0)


def test_an_aborted_receive_is_dropped_and_holds_its_blocks_to_the_end(stats: Stats) -> None:
    book = receives(stats=stats)
    receive = planned(book)
    book.finish("r")
    assert book.take() == ([], [Drop(receive.job)], [])
    assert book.ledger.held == 3 and book.busy
    report = failed(receive, 5, 6, 7, cause=FailureCause.SKIPPED)
    assert book.on_report(report, 2.0) == SettledReceive("r", FailureCause.SKIPPED, True)
    assert counters(stats) == {"handoff_received_requests": {"aborted": 1}}
    assert book.ledger.held == 0


def test_a_failure_counts_though_its_request_is_over(stats: Stats) -> None:
    # An engine may fail the request first and pass the reports on after.
    book = receives(workers=2, stats=stats)
    receive = planned(book)
    book.finish("r")
    book.on_report(failed(receive, 5, 7, cause=FailureCause.SKIPPED), 2.0)
    settled = book.on_report(failed(receive, 6, 7, cause=FailureCause.DIGEST), 2.0)
    assert settled == SettledReceive("r", FailureCause.DIGEST, True)
    assert counters(stats) == {
        "handoff_received_requests": {"failed": 1},
        "handoff_failures": {"digest": 1},
    }


def test_a_receive_that_nobody_answers_is_counted_once_and_held(stats: Stats) -> None:
    book = receives(stats=stats)
    planned(book)
    for now in (40.0, 41.0, 42.0):
        book.tick(now)
    assert counters(stats) == {"expired_jobs": {"RECV": 1}}
    assert book.ledger.held == 3


def test_a_hand_off_is_planned_once_and_check_sees_damage() -> None:
    book = receives()
    receive = planned(book)
    with pytest.raises(Misuse, match="receiving: Planned"):
        book.plan("r", [], 0, 8, 0.0)
    book.ledger.settle(receive.job)
    with pytest.raises(Misuse, match="3 blocks are received into, 0 are held"):
        book.check()
    assert repr(book) == "<Receives 1 requests, 1 receives in flight>"


@pytest.mark.parametrize(
    ("waits", "computes", "read", "kept"),
    [
        (True, False, False, False),
        (True, True, False, True),  # blocks come back by themselves
        (False, False, False, True),  # nobody wants them here
        (True, False, True, True),  # the reader gets pages
    ],
)
def test_an_engine_without_blocks_renews_no_lease_that_nobody_reads(
    waits: bool, computes: bool, read: bool, kept: bool
) -> None:
    """Its reader may wait for blocks of another hand-off, whose prompt waits for this lease's."""
    book = served(leases())
    if waits:
        assert book.open("other", TransferId(b"o" * 16), 10, 1.0)
    if read:
        book.on_notice(TransferEvent(T, NoticeKind.JOINED, PAIR[0]), 1.5)
    book.stepped(computes)
    book.on_notice(TransferEvent(T, NoticeKind.RENEWED), 9.0)
    book.tick(12.0)  # the lease was for 10 s from 1.0 on
    book.tick(12.0)
    assert (T not in [order.transfer for order in book.take()[1]]) is kept
