"""Loads: reports add only what is not the router's own, and nothing is counted twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.router.policy.fleet_view import (
    TargetLoad,
)
from kvconnect.router.policy.loads import LoadQuery, Loads


class LoadsMachine(RuleBasedStateMachine):
    """Requests come and go on four ranks while reports arrive late, wrong or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.loads = Loads(stale_s=10.0)
        self.running: list[tuple[int | None, int]] = []
        self.asked: list[LoadQuery] = []

    @rule(rank=st.none() | st.integers(0, 3), tokens=st.integers(0, 1000))
    def begin(self, rank: int | None, tokens: int) -> None:
        if rank is not None and rank >= len(self.loads.own):
            rank = None
        self.loads.begin(rank, tokens, self.now)
        self.running.append((rank, tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.loads.end(*self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(passed=st.floats(0, 8))
    def time_passes(self, passed: float) -> None:
        self.now += passed

    @rule()
    def ask(self) -> None:
        self.asked.append(self.loads.ask(self.now))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), totals=st.lists(st.integers(-5, 3000), min_size=0, max_size=4))
    def report(self, data: st.DataObject, totals: list[int]) -> None:
        asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        used = self.loads.report(asked, dict(enumerate(totals)))
        assert not (used and (not totals or min(totals) < 0))

    @rule()
    def lost(self) -> None:
        self.loads.forget()

    @invariant()
    def own_tokens_are_those_of_running_requests(self) -> None:
        want = Counter[int]()
        for rank, tokens in self.running:
            want[rank or 0] += tokens
        assert all(self.loads.own[rank] == want[rank] for rank in range(len(self.loads.own)))

    @invariant()
    def nothing_is_negative(self) -> None:
        for load in self.loads.at(self.now):
            assert load.own >= 0 and (load.foreign is None or load.foreign >= 0)

    def teardown(self) -> None:
        while self.running:
            self.loads.end(*self.running.pop())
        assert sum(self.loads.own) == 0


TestLoads = LoadsMachine.TestCase


def tokens(loads: Loads, now: float) -> list[tuple[int, int | None]]:
    return [load[:2] for load in loads.at(now)]


def test_a_report_adds_only_what_is_not_ones_own() -> None:
    loads = Loads(stale_s=10.0)
    loads.begin(None, 500, 0.0)
    assert tokens(loads, 0.0) == [(500, None)]
    assert loads.report(loads.ask(0.0), {0: 700.0, 1: 30.0})
    assert tokens(loads, 0.0) == [(500, 200), (0, 30)]
    loads.begin(1, 1000, 0.5)
    assert tokens(loads, 0.5) == [(500, 200), (1000, 30)], "between two reports it is added"
    asked = loads.ask(1.0)
    loads.end(None, 500)
    assert loads.report(asked, {0: 700, 1: 1030})
    assert tokens(loads, 1.0) == [(0, 200), (1000, 30)], "covered, so it counts once"
    loads.end(1, 1000)
    assert tokens(loads, 1.0) == [(0, 200), (0, 30)]
    assert [load.sent for load in loads.at(1.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    "totals", [{}, {0: -1}, {0: 5, 1: -1}, {1: 5}, {0: float("nan")}, {0: float("inf")}]
)
def test_a_report_that_makes_no_sense_is_discarded(totals: dict[int, float]) -> None:
    loads = Loads(stale_s=10.0)
    assert loads.report(loads.ask(0.0), {0: 9})
    assert not loads.report(loads.ask(1.0), totals)
    assert loads.at(1.0) == (TargetLoad(0, 9),)


def test_a_stale_report_is_discarded_and_an_old_one_says_nothing() -> None:
    loads = Loads(stale_s=10.0)
    early, late = loads.ask(1.0), loads.ask(2.0)
    assert loads.report(late, {0: 5})
    assert not loads.report(early, {0: 0}), "overtaken"
    assert not loads.report(late, {0: 0}), "twice"
    assert loads.at(12.0) == (TargetLoad(0, 5),)
    assert loads.at(12.1) == (TargetLoad(0, None),)


def test_requests_end_after_an_engine_came_back_with_fewer_ranks() -> None:
    loads = Loads(stale_s=10.0)
    assert loads.report(loads.ask(0.0), {0: 0, 1: 0, 2: 0})
    loads.begin(2, 50, 0.0)
    assert len(loads.at(0.0)) == 3
    loads.forget()
    assert [load.foreign for load in loads.at(0.5)] == [None], "how many it has is unknown"
    assert loads.report(loads.ask(1.0), {0: 0})
    assert loads.at(1.0) == (TargetLoad(0, 0),)
    loads.end(2, 50)
    assert loads.own == (0, 0, 0)
