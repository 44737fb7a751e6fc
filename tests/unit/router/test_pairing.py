"""Which probes of hand-offs are due, what they prove, and where requests go then. No I/O."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.fleet.pairing import RETRY_S, EnginePair, Pairing
from kvconnect.router.policy.choice import FailedTargets, RoutedRequest, choose
from kvconnect.router.policy.fleet_view import EngineView, FleetView, Role
from kvconnect.router.policy.rules import RoutingRules

INTERVAL_S = 60.0

# What is due ------------------------------------------------------------------------------------


def grid(prefill: int, decode: int) -> list[EnginePair]:
    return [EnginePair(p, d) for p in range(prefill) for d in range(decode)]


class Run:
    """Probes whose outcome is known: a pair works unless it or one of its engines is faulty."""

    def __init__(self, pairs: list[EnginePair], faulty: set[Any]) -> None:
        self.pairs, self.faulty = pairs, faulty
        self.pairing = Pairing(INTERVAL_S)
        self.now = 0.0

    def works(self, pair: EnginePair) -> bool:
        return not self.faulty.intersection((pair, *pair.engines))

    def look(self) -> list[EnginePair]:
        """Probe what is due."""
        due = self.pairing.due(self.pairs, self.now)
        for pair in due:
            self.pairing.began(pair)
        for pair in due:
            if self.works(pair):
                self.pairing.passed(pair, self.now)
            else:
                self.pairing.failed(pair, "no KV", self.now)
        self.now += 1.0
        return due

    def unproven(self) -> set[Any]:
        return {engine for engine in self.engines() if not self.pairing.proven(engine)}

    def engines(self) -> set[Any]:
        return {engine for pair in self.pairs for engine in pair.engines}


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 5), (4, 4), (7, 3)])
def test_each_engine_is_probed_once_an_interval_with_changing_partners(
    prefill: int, decode: int
) -> None:
    run = Run(grid(prefill, decode), set())
    seen: set[EnginePair] = set()
    for _ in range(2 * max(prefill, decode)):
        start, found = run.now, []
        while run.now < start + INTERVAL_S:
            found += run.look()
        assert len(found) == max(prefill, decode)
        assert {engine for pair in found for engine in pair.engines} == run.engines()
        seen.update(found)
    assert seen == set(run.pairs), "every pair has its turn"


ENGINES = st.tuples(st.sampled_from(list(Role)), st.integers(0, 2))


@given(st.integers(1, 4), st.integers(1, 4), st.sets(ENGINES, max_size=3), st.integers(0, 200))
def test_faulty_engines_are_found_and_the_others_cleared(
    prefill: int, decode: int, faulty: set[Any], healthy_for: int
) -> None:
    run = Run(grid(prefill, decode), set())
    for _ in range(healthy_for):
        run.look()
    run.faulty = faulty
    for pair in run.pairs:  # requests fail there, too
        run.pairing.recheck(pair)
    for _ in range(int(INTERVAL_S + 4 * RETRY_S)):
        assert len(run.look()) <= len(run.pairs)
    if any(map(run.works, run.pairs)):  # else nobody can tell who is at fault
        assert run.unproven() == faulty & run.engines()
    run.faulty = set()
    for _ in range(int(INTERVAL_S + 2 * RETRY_S)):
        run.look()
    assert run.unproven() == set() and run.pairing.broken == {}


def test_a_pair_alone_can_be_broken() -> None:
    run = Run(grid(2, 2), {EnginePair(0, 1)})
    for _ in range(int(4 * INTERVAL_S)):
        run.look()
    assert run.pairing.broken == {EnginePair(0, 1): "no KV"}
    assert run.unproven() == set()


def test_what_was_lost_is_probed_anew_and_an_old_verdict_does_not_count() -> None:
    pair, pairing = EnginePair(0, 0), Pairing(INTERVAL_S)
    pairing.began(pair)
    assert pairing.due([pair], 0.0) == [], "one probe at a time"
    pairing.forget((Role.DECODE, 0))
    pairing.passed(pair, 0.0)
    assert not pairing.proven((Role.PREFILL, 0))
    assert pairing.due([pair], 0.0) == [pair]
    pairing.began(pair)
    pairing.void(pair, 0.0)
    assert pairing.due([pair], RETRY_S - 1) == [] and pairing.due([pair], RETRY_S) == [pair]


# Where requests go ------------------------------------------------------------------------------


def chosen(prefill: str, decode: str, broken: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs that get requests; a letter per engine: ``+`` proven, ``-`` not."""
    engines = [
        tuple(EngineView(i, True, proven=sign == "+") for i, sign in enumerate(signs))
        for signs in (prefill, decode)
    ]
    view, found = FleetView(engines[0], engines[1], broken), set()
    for turn in range(48):
        choice = choose(
            view,
            RoutedRequest(turn, 10),
            FailedTargets(),
            RoutingRules(pull=True),
        )
        assert choice is not None and choice.prefill is not None
        found.add((choice.prefill.target.engine, choice.decode.target.engine))
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "broken", "want"),
    [
        ("--", "-", set(), {(0, 0), (1, 0)}),  # nobody is proven: all serve
        ("+-", "+", set(), {(0, 0)}),
        ("++", "++", {(0, 1)}, {(0, 0), (1, 0), (1, 1)}),
        ("++", "+-", {(0, 0)}, {(1, 0)}),
        ("+-", "+", {(0, 0)}, {(1, 0)}),  # better unproven than broken
        ("++", "+", {(0, 0), (1, 0)}, {(0, 0), (1, 0)}),  # better broken than nothing
    ],
)
def test_broken_pairs_and_unproven_engines_wait_while_there_are_others(
    prefill: str, decode: str, broken: set[tuple[int, int]], want: set[tuple[int, int]]
) -> None:
    # What is not wanted of all that the two orders of turns could reach.
    assert chosen(prefill, decode, broken) <= want
    assert {p for p, _ in chosen(prefill, decode, broken)} == {p for p, _ in want}
