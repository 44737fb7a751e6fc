"""When an engine should change its role; a simulated hour shows that roles do not oscillate."""

from __future__ import annotations

import statistics

import pytest

from kvconnect.router.policy.fleet_view import EngineView, FleetView, Role, TargetLoad
from kvconnect.router.policy.prompt_times import LinearTime, PromptTimes
from kvconnect.router.policy.role_balance import (
    BACK_FACTOR,
    LONG_S,
    LOOK_S,
    PAUSE_S,
    SPARE_SHARE,
    SUSTAINED_S,
    RoleBalance,
    RoleWait,
    Waits,
    waits_of,
)
from tests.unit.router.role_simulator import Outcome, Simulation, conversations

P, D = Role.PREFILL, Role.DECODE
BUSY, IDLE = LONG_S, LONG_S * SPARE_SHARE


def waits(prefill_s: float | None, decode_s: float | None, engines: int = 3) -> Waits:
    return {P: RoleWait(engines, prefill_s), D: RoleWait(engines, decode_s)}


def looks(balance: RoleBalance, now: Waits, begin_s: float, end_s: float) -> list[Role | None]:
    times = range(int(begin_s), int(end_s), int(LOOK_S))
    return [balance.look(now, float(second)) for second in times]


@pytest.mark.parametrize(
    ("now", "needy"),
    [
        (waits(BUSY, IDLE), P),
        (waits(IDLE, BUSY), D),
        (waits(BUSY, None), P),
        (waits(0.9 * BUSY, 0.0), None),
        (waits(BUSY, 1.1 * IDLE), None),
        (waits(BUSY, BUSY), None),
        (waits(None, None), None),
        (waits(BUSY, IDLE, engines=1), None),  # the last engine of its role stays
    ],
)
def test_a_role_gets_an_engine_after_a_while(now: Waits, needy: Role | None) -> None:
    balance = RoleBalance()
    assert set(looks(balance, now, 0, SUSTAINED_S)) == {None}
    assert balance.look(now, SUSTAINED_S) is needy


def test_a_wait_that_ends_begins_anew() -> None:
    balance = RoleBalance()
    looks(balance, waits(BUSY, IDLE), 0, SUSTAINED_S)
    assert balance.look(waits(IDLE, IDLE), SUSTAINED_S) is None
    again = looks(balance, waits(BUSY, IDLE), SUSTAINED_S + LOOK_S, 2 * SUSTAINED_S)
    assert set(again) == {None}
    # Control: it is proposed if the wait goes on.
    assert balance.look(waits(BUSY, IDLE), 2 * SUSTAINED_S + LOOK_S) is P


@pytest.mark.parametrize("made", [True, False])
def test_after_a_change_and_after_a_refusal_nothing_changes_for_long(made: bool) -> None:
    balance = RoleBalance()
    if made:
        balance.changed(P, 0.0)
    else:
        balance.refused(0.0)
    assert set(looks(balance, waits(BUSY, IDLE), 0, PAUSE_S)) == {None}
    assert balance.look(waits(BUSY, IDLE), PAUSE_S) is P


def test_a_change_is_undone_later_and_later() -> None:
    balance = RoleBalance()
    balance.changed(P, 0.0)
    begin, back = PAUSE_S, waits(IDLE, BUSY)
    looks(balance, back, begin, begin + BACK_FACTOR * SUSTAINED_S)
    assert balance.look(back, begin + (BACK_FACTOR - 0.5) * SUSTAINED_S) is None
    undone = begin + BACK_FACTOR * SUSTAINED_S
    assert balance.look(back, undone) is D
    balance.changed(D, undone)
    begin, forth = undone + PAUSE_S, waits(BUSY, IDLE)
    seen = looks(balance, forth, begin, begin + BACK_FACTOR**2 * SUSTAINED_S)
    assert set(seen) == {None}
    assert balance.look(forth, begin + BACK_FACTOR**2 * SUSTAINED_S) is P


def test_waits_are_those_of_engines_that_are_up() -> None:
    line = LinearTime(0.5, 0.001)
    busy = PromptTimes(line, waiting_tokens={0: 3000, 1: 1000}, arrival_s=0.4)
    ranks = (TargetLoad(), TargetLoad())
    prefill = (
        EngineView(0, True, ranks, times=busy),
        EngineView(1, True, times=PromptTimes(line)),
        EngineView(2, True),
        EngineView(3, False, times=busy),
    )
    decode = (EngineView(0, True, times=busy), EngineView(1, True))
    found = waits_of(FleetView(prefill, decode))
    assert found == {P: RoleWait(3, pytest.approx(1.0)), D: RoleWait(2, pytest.approx(0.4))}
    assert waits_of(FleetView((), ())) == {P: RoleWait(0, None), D: RoleWait(0, None)}


# A simulated hour ---------------------------------------------------------------------------------


class Eager:
    """Control: the side that waits longer gets an engine at once, without hysteresis."""

    def look(self, now: Waits, _: float) -> Role | None:
        prefill_s, decode_s = now[P].wait_s, now[D].wait_s
        if prefill_s is None or decode_s is None or prefill_s == decode_s:
            return None
        return P if prefill_s > decode_s else D

    def changed(self, role: Role, now: float) -> None: ...


@pytest.fixture(scope="module", params=[1.5, 2.0, 2.5])
def hour(request: pytest.FixtureRequest) -> Outcomes:
    """An hour at a rate, with every split of six engines, by each policy."""
    asked = conversations(request.param, 1.0)
    return {
        name: [Simulation(n, 6 - n, made and made()).run(asked) for n in range(1, 6)]
        for name, made in (("static", None), ("balance", RoleBalance), ("eager", Eager))
    }


Outcomes = dict[str, list[Outcome]]


def test_roles_do_not_oscillate(hour: Outcomes) -> None:
    assert max(one.reversals for one in hour["balance"]) <= 1
    assert max(len(one.changes) for one in hour["balance"]) <= 4
    # Control: without hysteresis, they do.
    assert min(one.reversals for one in hour["eager"]) > 50


def test_roles_follow_the_load(hour: Outcomes) -> None:
    """Whatever the engines do first, the hour's last half is as good as with the best split, or
    nearly so; a bad one stays bad otherwise."""

    def late(outcomes: list[Outcome]) -> list[float]:
        return [statistics.median(one.ttft_s[len(one.ttft_s) // 2 :]) for one in outcomes]

    best = min(late(hour["static"]))
    assert statistics.median(late(hour["balance"])) < 1.5 * best
    assert max(late(hour["balance"])) < 5 * best
    assert max(late(hour["static"])) > 500 * best, "control"
