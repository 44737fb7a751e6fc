"""Two engines' workers in one process: agents, machines, sessions and a real transport."""

from __future__ import annotations

import math
import time
from array import array
from contextlib import ExitStack
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from kvconnect.disaggregation.messages import (  # noqa: E402
    DisaggregationInstructions,
    Keep,
    NoticeKind,
    OfferBlocks,
    Withdraw,
)
from kvconnect.errors import TransferFailed  # noqa: E402
from kvconnect.protocol.prompts import difference, identify  # noqa: E402
from kvconnect.types import FailureCause, JobId, Span  # noqa: E402
from tests.fakes.handoff_engine import (  # noqa: E402
    EPOCH,
    TRANSFER,
    WAIT_S,
    Engine,
    finished,
    notices,
    receive,
    table,
)

CASES = {
    "same": (Engine(), Engine()),
    "tp 2 to 1": (Engine(tp=2), Engine()),
    "tp 1 to 4": (Engine(), Engine(tp=4)),
    "tp 4 to 2": (Engine(tp=4), Engine(tp=2)),
    "small to large blocks": (Engine(block=16), Engine(block=64)),
    "large to small blocks, other layout": (Engine(block=32, nhd=True), Engine(block=16)),
    "all at once": (Engine(tp=2, block=32, nhd=True), Engine(tp=4, block=16)),
    "staged": (Engine(staged=True), Engine(staged=True, tp=2)),
    "key": (Engine(key=b"k" * 32), Engine(key=b"k" * 32)),
}


@pytest.mark.parametrize("when", ["pull", "push", "half"])
@pytest.mark.parametrize("case", CASES)
def test_pages_arrive(case: str, when: str, stack: ExitStack) -> None:
    """Asked after, before, and in the middle of prefill."""
    made, wanted = CASES[case]
    p = stack.enter_context(Engine(**{**settings(made), "sends": True}))
    d = stack.enter_context(Engine(**settings(wanted)))
    tokens = 150
    there, here = table(tokens, p.block), table(tokens, d.block)
    half = len(there) // 2
    p.fill(there, seed=1)
    p.step(offers=[OfferBlocks(TRANSFER)])
    if when == "push":
        d.step(receives=[receive(p.source(), here, tokens, early=True)])
    p.step(offers=[OfferBlocks(TRANSFER, (Span(0, 0, there[:half]),))])
    if when == "half":
        d.step(receives=[receive(p.source(), here, tokens, early=True)])
    p.step(offers=[OfferBlocks(TRANSFER, (Span(0, half, there[half:]),))])
    if when == "pull":
        d.step(receives=[receive(p.source(), here, tokens)])
    assert [report.failures for report in finished(d)] == [()] * d.tp
    want = p.content(there, tokens)
    assert want.abs().min() > 0
    assert torch.equal(d.content(here, tokens), want)
    # Negative control: two pages swapped are not equal.
    here[0], here[1] = here[1], here[0]
    assert not torch.equal(d.content(here, tokens), want)
    readers = {notice.reader for notice in notices(p, NoticeKind.DONE, d.tp)}
    assert {reader.tp_rank for reader in readers if reader} == set(range(d.tp))
    p.step(withdrawals=[Withdraw(TRANSFER, FailureCause.GONE)])
    assert len(notices(p, NoticeKind.WITHDRAWN, p.tp)) == p.tp


def settings(engine: Engine) -> dict[str, object]:
    names = ("tp", "block", "nhd", "staged", "key", "model", "digest")
    return {name: getattr(engine, name) for name in names}


@pytest.mark.parametrize(
    ("other", "field"),
    [({"model": "other"}, "model"), ({"key": b"x" * 32}, "auth"), ({"block": 24}, "block_tokens")],
)
def test_what_does_not_fit_is_refused(
    other: dict[str, object], field: str, stack: ExitStack
) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine(**other))  # type: ignore[arg-type]
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 2 * d.block)])
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.REFUSED}
    stats = d.agents[0].take_stats()
    assert stats is not None
    assert stats.data["counters"]["handoff_refused"] == {field: 1}


@pytest.mark.parametrize("early", [True, False])
def test_another_prompt_is_refused_and_both_sides_say_why(
    early: bool, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = identify([1, 2], "salt"), identify([1, 2], "another salt")
    p, d = stack.enter_context(Engine(sends=True)), stack.enter_context(Engine())
    blocks = array("q", [1, 2])
    offers = [OfferBlocks(TRANSFER, prompt=ours), OfferBlocks(TRANSFER, (Span(0, 0, blocks),))]
    wanted = replace(receive(p.source(), blocks, 32, early=early), prompt=theirs)
    if early:
        d.step(receives=[wanted])
        p.step(offers=offers)
    else:
        p.step(offers=offers)
        d.step(receives=[wanted])
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.PROMPT}
    (notice,) = notices(p, NoticeKind.MISMATCHED, 1)
    assert notice.detail == report.detail == difference(ours, theirs)
    assert report.detail in caplog.text
    stats = p.agents[0].take_stats()
    assert stats is not None
    assert stats.data["counters"]["handoff_refused"] == {"prompt": 1}
    # Control: the same read with prefill's prompt.
    d.step(receives=[replace(wanted, prompt=ours, job=JobId(2))])
    assert finished(d)[0].failures == ()


def test_an_old_incarnation_s_ticket_is_refused(stack: ExitStack) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(p.source(epoch=EPOCH + 1), array("q", [1, 2]), 32)])
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.REFUSED}


def test_another_worker_than_the_one_asked_is_refused(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """As with old addresses of workers that were started again in another order."""
    p, d = stack.enter_context(Engine(sends=True, tp=2)), stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    first, second = p.source().endpoints
    swapped = (first._replace(port=second.port), second._replace(port=first.port))
    source = replace(p.source(), endpoints=swapped)
    d.step(receives=[receive(source, array("q", [1, 2]), 32)])
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.REFUSED}
    assert "rank 0 of stage 0 was asked at 127.0.0.1:" in caplog.text
    assert "but tensor-parallel rank 1 of stage 0 answers" in caplog.text


def test_a_needed_worker_without_an_address_is_named(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = stack.enter_context(Engine(sends=True, tp=2)), stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    source = replace(p.source(), endpoints=p.source().endpoints[:1])
    d.step(receives=[receive(source, array("q", [1, 2]), 32)])
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.REFUSED}
    assert "no address of prefill's (stage, tensor rank) (0, 1)" in caplog.text
    stats = d.agents[0].take_stats()
    assert stats is not None
    assert stats.data["counters"]["handoff_refused"] == {"ticket": 1}


def test_a_transfer_that_is_not_there_is_gone(stack: ExitStack) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step()
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 32)])
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.GONE}


def test_a_peer_that_dies_fails_what_waits_for_it(stack: ExitStack) -> None:
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 32, early=True)])
    assert notices(p, NoticeKind.JOINED, 1)
    p.agents[0].close()
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.PEER}


def test_workers_whose_connection_ended_are_known_once(stack: ExitStack) -> None:
    """Whoever keeps addresses of workers forgets these: they may listen elsewhere now."""
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    source = p.source()
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(source, array("q", [1, 2]), 32, early=True)])
    assert notices(p, NoticeKind.JOINED, 1)
    assert d.agents[0].ended.take() == set()  # it is up
    p.agents[0].close()
    finished(d)
    assert d.agents[0].ended.take() == set(source.endpoints)
    assert d.agents[0].ended.take() == set()
    d.step(receives=[receive(source, array("q", [1, 2]), 32)])  # nobody listens there
    finished(d)
    assert d.agents[0].ended.take() == set(source.endpoints)
    assert p.agents[0].ended.take() == set()  # it connects to nobody


def test_who_asked_too_early_is_news_once_the_transfer_is_known(stack: ExitStack) -> None:
    """Without anything else from outside that would wake whoever looks at news only."""
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    agent = p.agents[0]
    p.step()
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 32, early=True)])
    deadline = time.monotonic() + WAIT_S
    while not agent._sending._sender._parked:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not agent.has_news
    agent.run(DisaggregationInstructions(offers=[OfferBlocks(TRANSFER)]))
    assert agent.has_news
    assert [notice.kind for notice in agent.poll()[1]] == [NoticeKind.JOINED]
    assert not agent.has_news


def reads(d: Engine) -> list[str]:
    """Which transfers' leases the decode engine goes on to renew."""
    return [transfer.hex() for transfer in d.agents[0]._receiving._renewals]


def test_a_decode_engine_that_makes_no_steps_renews_leases(stack: ExitStack) -> None:
    """A paused one, with requests that wait for their turn."""
    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(keeps=[Keep(TRANSFER, p.source(), every_s=0.01)])
    for _ in range(3):
        assert [notice.transfer for notice in notices(p, NoticeKind.RENEWED, 1)] == [TRANSFER]
    assert reads(d) == [TRANSFER.hex()]
    d.step(keeps=[Keep(TRANSFER, p.source())])
    assert reads(d) == []
    assert notices(p, NoticeKind.DECLINED, 1)
    d.step(keeps=[Keep(TRANSFER, p.source(), every_s=0.01)])
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 32)])
    assert reads(d) == []


def test_readers_do_not_wait_for_an_engine_that_makes_no_steps(stack: ExitStack) -> None:
    p = stack.enter_context(Engine(sends=True))
    agent = p.agents[0]
    machine = agent._sending._sender
    agent._sending._deadline_s = 0.0

    def stands(wanted: bool) -> bool:
        deadline = time.monotonic() + WAIT_S
        while machine.engine_paused is not wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        return machine.engine_paused

    p.step(offers=[OfferBlocks(TRANSFER)])
    agent.poll(ends_step=True)
    assert stands(True)
    agent.run(DisaggregationInstructions())  # what comes beside steps says nothing of them
    assert stands(True)
    p.step()
    assert not stands(False)
    agent.poll()
    assert agent._sending.step_ended_at == math.inf


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_thread_of_layers_is_not_silence(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine hears of it, and so does the other side, as of an agent that died. An error ends
    nothing (``test_layer_queue.py``)."""

    def end(*_: object) -> None:
        raise SystemExit

    p = stack.enter_context(Engine(sends=True))
    d = stack.enter_context(Engine())
    agent = p.agents[0]
    p.step(offers=[OfferBlocks(TRANSFER)])
    d.step(receives=[receive(p.source(), array("q", [1, 2]), 32, early=True)])
    assert notices(p, NoticeKind.JOINED, 1)
    assert not agent.has_news
    monkeypatch.setattr(agent._written, "_take", end)
    agent.begin_step(
        DisaggregationInstructions(offers=[OfferBlocks(TRANSFER, (Span(0, 0, array("q", [1])),))]),
        EPOCH,
    )
    agent.layer_written("layer0")
    deadline = time.monotonic() + WAIT_S
    while not agent.has_news and time.monotonic() < deadline:
        time.sleep(0.005)
    with pytest.raises(TransferFailed):
        agent.poll()
    (report,) = finished(d)
    assert {failure.cause for failure in report.failures} == {FailureCause.PEER}
