"""Picks: by load, by turn, by session and by cached prefix; nobody starves."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.policy import choice
from kvconnect.router.policy.choice import RoutedRequest, choose_target
from kvconnect.router.policy.fleet_view import EngineView, Role, Target, TargetLoad
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.ranking import (
    Candidate,
    RankingJob,
    RankingPolicy,
    RankingReason,
    pick,
    tokens_at,
)
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.policy.target_choice import TargetChoice

LOAD_AWARE = (RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE)


def candidates(*loads: tuple[int, int | None], hits: dict[int, float] | None = None) -> Any:
    """One candidate per (own, foreign)."""
    hits = hits or {}
    return [
        Candidate(Target(place), TargetLoad(*load), f"w{place}", hits.get(place, 0.0))
        for place, load in enumerate(loads)
    ]


def picked(policy: RankingPolicy, some: list[Candidate], **job: Any) -> int:
    return pick(
        policy, some, RankingJob(**{"tokens": 100, "turn": 0, **job})
    ).candidate.target.engine


LOADS = st.lists(
    st.tuples(st.integers(0, 10**6), st.none() | st.integers(0, 10**6)), min_size=1, max_size=9
)
JOBS = st.builds(
    RankingJob,
    tokens=st.integers(0, 10**5),
    turn=st.integers(0, 10**6),
    draw=st.floats(0, 1, exclude_max=True),
    session=st.text(max_size=5),
)


@given(st.sampled_from(list(RankingPolicy)), LOADS, JOBS)
def test_a_pick_is_one_of_the_candidates_and_always_the_same(
    policy: RankingPolicy, loads: list[tuple[int, int | None]], job: RankingJob
) -> None:
    some = candidates(*loads)
    found = pick(policy, some, job)
    assert found.candidate in some
    assert pick(policy, some, job) == found


@given(st.sampled_from(LOAD_AWARE), LOADS, JOBS)
def test_unknown_is_never_picked_while_a_known_one_is_idle(
    policy: RankingPolicy, loads: list[tuple[int, int | None]], job: RankingJob
) -> None:
    some = candidates(*loads, (0, 0))
    assert pick(policy, some, job).candidate.load.foreign is not None


@given(st.permutations([(0, None), (0, 0)]), JOBS)
def test_of_two_the_unknown_is_not_picked_before_an_idle_one(
    two: list[tuple[int, int | None]], job: RankingJob
) -> None:
    found = pick(RankingPolicy.POWER_OF_TWO, candidates(*two), job)
    assert found.candidate.load.foreign == 0


@given(LOADS, JOBS)
def test_least_tokens_takes_the_least(loads: list[tuple[int, int | None]], job: RankingJob) -> None:
    some = candidates(*loads)
    place = pick(RankingPolicy.LEAST_TOKENS, some, job).candidate.target.engine
    assert tokens_at(some)[place] == min(tokens_at(some))


def test_an_unknown_one_counts_as_busy_as_the_busiest_known() -> None:
    assert tokens_at(candidates((5, None), (1, 10), (0, 70))) == [75, 11, 70]
    assert picked(RankingPolicy.LEAST_TOKENS, candidates((0, None), (0, 10))) == 1
    assert picked(RankingPolicy.LEAST_TOKENS, candidates((0, None), (11, 10))) == 0, (
        "it gets its turn"
    )


@pytest.mark.parametrize(
    "policy", [RankingPolicy.LEAST_TOKENS, RankingPolicy.CACHE_AWARE, RankingPolicy.ROUND_ROBIN]
)
def test_equal_ones_take_turns(policy: RankingPolicy) -> None:
    some = candidates((7, 0), (7, 0), (7, 0))
    assert [picked(policy, some, turn=turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


def test_of_equal_ones_the_one_that_was_sent_to_longest_ago_is_picked() -> None:
    some = [Candidate(Target(n), TargetLoad(7, 0, sent)) for n, sent in enumerate([3.0, 1.0, 2.0])]
    assert {picked(RankingPolicy.LEAST_TOKENS, some, turn=turn) for turn in range(6)} == {1}


@pytest.mark.parametrize("policy", [RankingPolicy.RANDOM, RankingPolicy.POWER_OF_TWO])
def test_draws_are_spread_evenly(policy: RankingPolicy) -> None:
    some = candidates((0, 0), (0, 0), (0, 0), (0, 0))
    found = Counter(
        picked(policy, some, draw=draw / 1200, turn=draw * 7919 // 1200) for draw in range(1200)
    )
    assert all(250 <= found[place] <= 350 for place in range(4)), found


def test_power_of_two_takes_the_less_busy_of_its_two() -> None:
    some = candidates((3, 0), (2, 0), (1, 0))
    found = Counter(
        picked(RankingPolicy.POWER_OF_TWO, some, draw=draw / 600) for draw in range(600)
    )
    assert found == {2: 400, 1: 200}, "the busiest of all never wins"


def test_cache_aware_weighs_a_hit_against_the_load() -> None:
    def where(load: int, hit: float) -> tuple[int, RankingReason]:
        found = pick(
            RankingPolicy.CACHE_AWARE,
            candidates((load, 0), (0, 0), hits={0: hit}),
            RankingJob(1000, 1),
        )
        return found.candidate.target.engine, found.why

    assert where(0, 900.0) == (0, RankingReason.HIT)
    assert where(899, 900.0) == (0, RankingReason.HIT)
    assert where(901, 900.0) == (1, RankingReason.NO_HIT), "too busy for what it saves"
    assert where(0, 0.0)[1] is RankingReason.NO_HIT


@given(LOADS, st.dictionaries(st.integers(0, 8), st.floats(0, 1000)), JOBS)
def test_cache_aware_never_adds_more_load_than_it_saves(
    loads: list[tuple[int, int | None]], hits: dict[int, float], job: RankingJob
) -> None:
    some = candidates(*loads, hits=hits)
    found = pick(RankingPolicy.CACHE_AWARE, some, job).candidate
    tokens = tokens_at(some)
    assert tokens[found.target.engine] - min(tokens) <= found.hit + 1e-6


def test_a_session_stays_and_only_those_of_a_lost_target_move() -> None:
    some = candidates(*[(0, 0)] * 5)
    sessions = [f"s{n}" for n in range(200)]
    before = {session: picked(RankingPolicy.SESSION, some, session=session) for session in sessions}
    assert len(set(before.values())) == 5
    assert before == {s: picked(RankingPolicy.SESSION, some, session=s, turn=3) for s in sessions}
    after = {
        session: picked(RankingPolicy.SESSION, some[:4], session=session) for session in sessions
    }
    assert all(after[session] == place for session, place in before.items() if place != 4)


def test_a_session_moves_on_from_a_target_that_is_too_busy() -> None:
    idle = candidates(*[(0, 0)] * 4)
    home = picked(RankingPolicy.SESSION, idle, session="s", tokens=10)
    loads = [(0, 0)] * 4
    loads[home] = (10_000, 0)
    found = pick(RankingPolicy.SESSION, candidates(*loads), RankingJob(10, 0, 0.0, "s"))
    assert found.why is RankingReason.SPILLED and found.candidate.target.engine != home
    assert pick(RankingPolicy.SESSION, idle, RankingJob(10, 0)).why is RankingReason.NO_SESSION


@given(st.sampled_from(list(RankingPolicy)), st.integers(2, 6), st.integers(0, 2**32))
def test_nobody_starves(policy: RankingPolicy, number: int, seed: int) -> None:
    """Requests that stay: each target gets some, whichever the policy."""
    own, found = [0] * number, Counter[int]()
    for turn in range(40 * number):
        some = candidates(*[(tokens, 0) for tokens in own])
        draw = (seed + turn * 2654435761) % 2**32 / 2**32
        place = picked(policy, some, turn=turn, draw=draw, session=f"{seed} {turn}")
        own[place] += 100
        found[place] += 1
    assert len(found) == number, found


@pytest.mark.parametrize("policy", RankingPolicy)
@pytest.mark.parametrize("role", Role)
def test_a_single_target_is_not_ranked(
    policy: RankingPolicy, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    rankings = Mock(wraps=pick)
    monkeypatch.setattr(choice, "pick", rankings)
    rules, only = RoutingRules(policy, policy), EngineView(7, True)

    def found(*engines: EngineView, **more: Any) -> TargetChoice:
        return choose_target(engines, RoutedRequest(3, 100, **more), role, rules)

    assert found(only) == TargetChoice(Target(7), RankingReason.ONLY, 100)
    assert not rankings.called
    # The control: where something is cached, or there are several targets.
    cached = found(only, hits={role: {Target(7): CacheHit(64, 60.0)}})
    assert cached == TargetChoice(Target(7), RankingReason.ONLY, 36, 64, loading=4)
    found(only, EngineView(8, True))
    found(EngineView(7, True, (TargetLoad(), TargetLoad())))
    assert rankings.call_count >= 3


def test_streams_with_a_common_prefix_fill_more_than_one_target() -> None:
    """Also where no engine reports its load."""
    rules = RoutingRules(RankingPolicy.CACHE_AWARE, RankingPolicy.CACHE_AWARE)
    hits = {Role.DECODE: {Target(0): CacheHit(8000, 8000.0)}}
    own = [0, 0]
    for turn in range(64):
        engines = [EngineView(at, True, (TargetLoad(load),)) for at, load in enumerate(own)]
        request = RoutedRequest(turn, 8050, hits=hits)
        found = choose_target(engines, request, Role.DECODE, rules)
        own[found.target.engine] += found.load_tokens
        if found.target.engine:
            break
    assert turn == 8, "eight cached tokens are as much load as a computed one"
    assert own == [8 * (50 + 1000), 8050]
