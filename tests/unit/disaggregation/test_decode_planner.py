"""The decode worker's machine: exact coverage, failures by block, no end while a page can land."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from kvconnect.disaggregation.decode_actions import (
    Action,
    CancelReceive,
    ConfirmRead,
    ConnectPeer,
    ReportFinished,
    RequestPages,
)
from kvconnect.disaggregation.decode_planner import MAX_WAIT_S, DecodePlanner
from kvconnect.disaggregation.messages import PrefillSource, Receive
from kvconnect.disaggregation.wire_blocks import GroupView
from kvconnect.errors import ProtocolError
from kvconnect.offload.messages import FailedBlock
from kvconnect.types import Endpoint, FailureCause, JobId, Origin, Span, TransferId

T = TransferId(b"t" * 16)
ENDS = [Endpoint(0, 0, "127.0.0.1", 5), Endpoint(1, 0, "127.0.0.1", 6)]
SOURCE = PrefillSource("p", 7, tuple(ENDS), 2, 1)
ORIGINS = [Origin(end, "p", 7) for end in ENDS]
VIEWS = {0: GroupView(1, 9, (0, 1))}
STAGES = [{0: GroupView(1, 9, (0, -1))}, {0: GroupView(1, 9, (-1, 1))}]  # one layer each


def receive(job: int = 1, first: int = 0, ids: Any = (5, 6, 7), **other: Any) -> Receive:
    spans = (Span(0, first, array("q", ids)),)
    fields = {
        "source": SOURCE,
        "spans": spans,
        "tokens": tuple((s.first * 4, (s.first + len(s.block_ids)) * 4) for s in spans),
        "early": False,
        "deadline_s": 10.0,
        **other,
    }
    return Receive(job=JobId(job), req_id="r", transfer=T, **fields)


def receiver(heads: int = 1) -> DecodePlanner:
    return DecodePlanner([4], [2], [heads])


def asked(actions: list[Action]) -> list[tuple[int, int, int, list[int]]]:
    """(peer, read_id, first, ids) of what is asked for in group 0."""
    asks = [action for action in actions if isinstance(action, RequestPages)]
    return [(a.peer, a.read_id, s.first, list(s.block_ids)) for a in asks for s in a.spans]


def ended(actions: list[Action]) -> dict[int, str] | None:
    """Block -> cause of the failures of the one job that is finished; None if none is."""
    done = [action for action in actions if isinstance(action, ReportFinished)]
    if not done:
        return None
    (finished,) = done
    assert all(f[0] == 0 and f[2] == -1 for f in finished.report.failures)
    return {failure.block_id: failure.cause.value for failure in finished.report.failures}


def one_peer(job: Receive | None = None, views: Any = VIEWS) -> DecodePlanner:
    """A receiver that has asked peer 3 with read 1."""
    one = receiver()
    job = job or receive()
    assert one.receive(job, ENDS[:1], 0.0) == [ConnectPeer(ORIGINS[0])]
    assert asked(one.connected(ORIGINS[0], 3, views))
    return one


def two_peers() -> DecodePlanner:
    one = receiver()
    one.receive(receive(), ENDS, 0.0)
    for number in (0, 1):
        one.connected(ORIGINS[number], 3 + number, STAGES[number])
    return one


def test_a_job_is_finished_when_everything_came_and_the_transport_let_go() -> None:
    one = one_peer()
    assert one.received(3, 1, 9, range(0, 2), (), 1.0) == []
    assert one.received(3, 1, 1, range(2, 3), (), 1.0) == []
    assert one.received(3, 1, 0, range(2, 3), (), 1.0) == [ConfirmRead(3, 1, JobId(1))]
    assert ended(one.drained(3, 1)) == {}
    assert repr(one) == "<DecodePlanner 0 jobs, 0 reads>"
    assert one.drained(3, 1) == one.peer_lost(3) == one.drop(JobId(1)) == []


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("first", ["pages", "word"])
def test_a_counted_job_waits_for_the_prefills_word(first: str, counted: bool) -> None:
    """The word and the pages come over different connections, in any order."""
    one = one_peer(receive(counted=counted))
    steps = {
        "pages": lambda: one.received(3, 1, 9, range(3), (), 1.0),
        "word": lambda: one.ready(3, 1, 128),
    }
    confirmed = [ConfirmRead(3, 1, JobId(1))]
    before = steps.pop(first)()
    assert before == ([] if counted or first == "word" else confirmed)
    assert steps.popitem()[1]() == ([] if before else confirmed)
    (finished,) = one.drained(3, 1)
    assert isinstance(finished, ReportFinished) and not finished.report.failures
    assert finished.report.cached == (128 if not before else 0)
    assert one.ready(3, 1, 128) == []  # it is over


def test_a_counted_job_without_the_prefills_word_ends_in_time() -> None:
    one = one_peer(receive(counted=True))
    one.received(3, 1, 9, range(3), (), 1.0)
    assert one.tick(10.9) == []
    assert one.tick(11.0) == [CancelReceive(3, 1)]
    assert ended(one.drained(3, 1)) == {}  # the pages are all there


def test_peers_are_asked_for_once_and_shared() -> None:
    one = receiver()
    assert one.receive(receive(1), ENDS[:1], 0.0) == [ConnectPeer(ORIGINS[0])]
    assert one.receive(receive(2, ids=(8, 9)), ENDS[:1], 0.0) == []
    assert asked(one.connected(ORIGINS[0], 3, VIEWS)) == [(3, 1, 0, [5, 6, 7]), (3, 2, 0, [8, 9])]
    assert asked(one.receive(receive(3, ids=[1]), ENDS[:1], 0.0)) == [(3, 3, 0, [1])]
    one.peer_lost(3)
    newer = PrefillSource("p", 8, tuple(ENDS), 2, 1)  # another incarnation is another peer
    assert one.receive(receive(4, source=newer), ENDS[:1], 0.0) == [
        ConnectPeer(Origin(ENDS[0], "p", 8))
    ]


def test_peers_are_thanked_when_all_have_delivered() -> None:
    one = two_peers()
    assert one.received(3, 1, 9, range(3), (), 0.0) == []
    assert one.received(4, 2, 9, range(3), (), 0.0) == [
        ConfirmRead(3, 1, JobId(1)),
        ConfirmRead(4, 2, JobId(1)),
    ]
    assert ended(one.drained(4, 2)) is None
    assert ended(one.peer_lost(3)) == {}  # as good as quiet


@pytest.mark.parametrize("second", [True, False])
def test_blocks_without_all_heads_have_failed(second: bool) -> None:
    """Both peers have all layers, and each a half of the heads."""
    one, half = receiver(heads=4), {0: GroupView(1, 9, (0, 1), heads=2)}
    peers = 2 if second else 1
    one.receive(receive(), ENDS[:peers], 0.0)
    for number in range(peers):
        one.connected(ORIGINS[number], 3 + number, half)
        one.received(3 + number, 1 + number, 9, range(3), (), 0.0)
    outcomes = [ended(one.drained(3 + number, 1 + number)) for number in range(peers)]
    assert outcomes[-1] == ({} if second else dict.fromkeys((5, 6, 7), "refused"))


def test_only_tokens_that_are_needed_are_asked_for() -> None:
    views = {0: GroupView(2, 9, (0, 1))}  # wire blocks of two tokens
    job = receive(first=1, tokens=((6, 13),))  # blocks 1 to 3 are tokens 4 to 16
    one = receiver()
    one.receive(job, ENDS[:1], 0.0)
    assert asked(one.connected(ORIGINS[0], 3, views)) == [(3, 1, 3, [11, 12, 13, 14])]
    one.received(3, 1, 9, range(3, 7), (), 0.0)
    assert ended(one.drained(3, 1)) == {}


@pytest.mark.parametrize(
    ("number", "blocks"),
    [(9, range(0, 1)), (0, range(1, 2)), (5, range(2, 3)), (9, range(2, 4)), (9, range(2, 2))],
)
def test_what_was_not_asked_for_breaks_the_protocol(number: int, blocks: range) -> None:
    one = one_peer()
    one.received(3, 1, 9, range(0, 2), (), 0.0)
    with pytest.raises(ProtocolError, match=r"twice|not requested"):
        one.received(3, 1, number, blocks, (), 0.0)
    one.received(3, 1, 9, range(2, 3), (), 0.0)


def test_pages_that_come_after_everything_did_break_the_protocol() -> None:
    one = two_peers()
    one.received(3, 1, 9, range(3), (), 0.0)
    with pytest.raises(ProtocolError, match="twice"):
        one.received(3, 1, 0, range(1), (), 0.0)


def test_bad_digests_fail_their_blocks_only() -> None:
    one = one_peer(receive(), {0: GroupView(2, 9, (0, 1))})
    one.received(3, 1, 9, range(6), (3,), 0.0)
    assert ended(one.drained(3, 1)) == {6: "digest"}


def test_missing_blocks_fail_when_nothing_can_land_any_more() -> None:
    one = one_peer()
    one.received(3, 1, 9, range(0, 1), (), 0.0)
    one.received(3, 1, 0, range(1, 2), (), 0.0)
    actions = one.failed(3, 1, FailureCause.GONE)
    assert actions == [CancelReceive(3, 1)]
    assert one.failed(3, 1, FailureCause.PEER) == []
    assert one.received(3, 1, 1, range(1, 2), (), 0.0) == []  # on its way before; ignored
    assert ended(one.drained(3, 1)) == {6: "gone", 7: "gone"}


def test_a_lost_peer_ends_the_job_but_not_before_the_others_are_quiet() -> None:
    one = two_peers()
    one.received(3, 1, 9, range(2), (), 0.0)
    one.received(4, 2, 9, range(1), (), 0.0)
    assert one.peer_lost(3) == [CancelReceive(4, 2)]
    assert ended(one.drained(4, 2)) == {6: "peer", 7: "peer"}


def test_a_peer_that_is_lost_after_it_delivered_does_no_harm() -> None:
    one = two_peers()
    one.received(3, 1, 9, range(3), (), 0.0)
    assert one.peer_lost(3) == []
    assert one.received(4, 2, 9, range(3), (), 0.0) == [ConfirmRead(4, 2, JobId(1))]
    assert ended(one.drained(4, 2)) == {}


def test_no_connection_is_a_failure_of_everything() -> None:
    one = receiver()
    one.receive(receive(), ENDS, 0.0)
    one.connected(ORIGINS[0], 3, STAGES[0])
    assert one.refused(ORIGINS[1], FailureCause.REFUSED) == [CancelReceive(3, 1)]
    assert ended(one.drained(3, 1)) == {5: "refused", 6: "refused", 7: "refused"}
    assert ConnectPeer(ORIGINS[1]) in one.receive(receive(2), ENDS, 0.0)  # tried anew


def test_a_job_without_a_source_fails_at_once() -> None:
    actions = receiver().receive(receive(source=None), [], 0.0)
    assert ended(actions) == {5: "refused", 6: "refused", 7: "refused"}
    assert ended(receiver().receive(receive(ids=()), ENDS, 0.0)) is None
    nothing = receive(spans=(), tokens=())
    one = receiver()
    one.receive(nothing, ENDS[:1], 0.0)
    assert ended(one.connected(ORIGINS[0], 3, VIEWS)) == {}


@pytest.mark.parametrize("views", [{}, STAGES[0]])
def test_layers_that_nobody_brings_have_failed(views: Any) -> None:
    one = receiver()
    one.receive(receive(), ENDS[:1], 0.0)
    actions = one.connected(ORIGINS[0], 3, views)
    if views:
        one.received(3, 1, 9, range(3), (), 0.0)
        actions = one.drained(3, 1)
    assert ended(actions) == {5: "refused", 6: "refused", 7: "refused"}


def test_without_progress_a_job_ends_at_its_deadline() -> None:
    one = one_peer()
    assert one.tick(9.9) == []
    one.received(3, 1, 0, range(1), (), 9.9)
    one.alive(3, [7, 1], 19.8)
    assert one.tick(29.7) == []
    assert one.tick(29.9) == [CancelReceive(3, 1)]
    assert one.tick(99.9) == []  # the transport has not answered: the blocks are not safe
    assert ended(one.drained(3, 1)) == {5: "deadline", 6: "deadline", 7: "deadline"}


def test_signs_of_life_do_not_keep_a_job_for_ever() -> None:
    one = one_peer()
    one.alive(3, [1], MAX_WAIT_S - 1)
    assert one.tick(MAX_WAIT_S - 1) == []
    one.alive(3, [1], MAX_WAIT_S)
    assert one.tick(MAX_WAIT_S) == [CancelReceive(3, 1)]


def test_a_job_whose_deadline_is_longer_keeps_it() -> None:
    """SGLang's own limits may be."""
    one = one_peer(replace(receive(), deadline_s=2 * MAX_WAIT_S))
    one.alive(3, [1], MAX_WAIT_S)
    assert one.tick(2 * MAX_WAIT_S - 1) == []
    assert one.tick(2 * MAX_WAIT_S) == [CancelReceive(3, 1)]


def test_a_dropped_job_is_finished_all_the_same() -> None:
    one = one_peer()
    one.received(3, 1, 9, range(0, 2), (), 0.0)
    assert one.drop(JobId(1)) == [CancelReceive(3, 1)]
    assert one.drop(JobId(1)) == []
    assert ended(one.drained(3, 1)) == {7: "skipped"}
    waiting = receiver()
    waiting.receive(receive(), ENDS[:1], 0.0)
    assert ended(waiting.drop(JobId(1))) == {5: "skipped", 6: "skipped", 7: "skipped"}
    assert waiting.connected(ORIGINS[0], 3, VIEWS) == []


def test_the_report_names_the_job() -> None:
    job = receive(source=None, ids=[5])
    failure = FailedBlock(0, 5, -1, FailureCause.REFUSED)
    (finished,) = receiver().receive(job, [], 0.0)
    assert isinstance(finished, ReportFinished)
    assert (finished.job, finished.report.job, finished.report.failures) == (job, 1, (failure,))
