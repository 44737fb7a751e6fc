"""What policies see of an engine: made when something changes, and always as it is. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router import cache_admin
from kvconnect.router.engine_spec import engine_spec
from kvconnect.router.fleet import engines
from kvconnect.router.fleet.engines import Engine
from kvconnect.router.fleet.handoff_probes import Prober
from kvconnect.router.fleet.kv_subscriber import Subscriber
from kvconnect.router.policy.fleet_view import EngineView, ModelKnowledge, Role, Target
from kvconnect.router.policy.loads import Loads
from kvconnect.router.policy.prompt_times import (
    FEWEST,
    NOTHING_KNOWN,
    STALE_S,
    PromptTimer,
    StartedPrompt,
)
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.policy.target_choice import TargetChoice
from kvconnect.router.requests.engine_bodies import EngineTicket, TicketKind

CHOSEN = TargetChoice(Target(0), RankingReason.ONLY, 10)
STEPS = (0.0, 0.5, 1.5, 6.0, 61.0, STALE_S + 1)


def made_engine() -> Engine:
    spec = engine_spec("prefill", "http://engine")
    return Engine(Role.PREFILL, 0, spec, Loads(5.0), lambda _: None, PromptTimer())


class Life:
    """An engine to which things happen."""

    def __init__(self) -> None:
        self.engine = made_engine()
        self.now = time.monotonic() + 1  # breakers ignore what began before an engine was up
        self.prompts: list[StartedPrompt] = []
        self.announced: list[AbstractContextManager[None]] = []
        self.open = 0

    def ups(self) -> None:
        self.engine.mark(up=True)

    def downs(self) -> None:
        self.engine.mark(up=False)

    def drains(self) -> None:
        self.engine.drain()

    def returns(self) -> None:
        self.engine.draining = False

    def learns(self) -> None:
        models = ({"a": {}}, {"a": {}, "b": {}}, {})
        self.engine.info.models = models[(len(self.engine.info.models) + 1) % 3]

    def is_confirmed(self) -> None:
        self.engine.info.confirmed = True

    def is_updated(self) -> None:
        self.engine.info.version += "1"

    def is_announced(self) -> None:
        self.announced.append(self.engine.awaited(CHOSEN))
        self.announced[-1].__enter__()

    def is_not_awaited(self) -> None:
        if self.announced:
            self.announced.pop().__exit__(None, None, None)

    def is_asked(self) -> None:
        self.engine.began(CHOSEN, self.now)
        self.open += 1
        self.prompts.append(self.engine.timer.begin(0, 10, self.now, seen=bool(self.open % 2)))

    def answers(self) -> None:
        if self.open:
            self.open -= 1
            self.engine.ended(CHOSEN, computed=False)
            self.engine.breaker.succeeded()
            self.engine.timer.end(self.prompts.pop(), self.now, measured=bool(self.open % 3))

    def arrives(self) -> None:
        self.engine.timer.arrived("push", 10, 0.5, self.now)

    def fails(self) -> None:
        self.engine.breaker.failed(self.now, self.now)

    def reports(self) -> None:
        loads = self.engine.loads
        loads.report(loads.ask(self.now), {0: 50.0 + self.now, 1: 7.0})

    def holds(self) -> None:
        for kind in TicketKind:
            self.engine.hold_ticket(kind, 0, EngineTicket(f"{kind}{self.now}", 60.0), self.now)


EVENTS: tuple[Callable[[Life], None], ...] = tuple(
    getattr(Life, name)
    for name in vars(Life)
    if not name.startswith("_") and callable(getattr(Life, name))
)


def made_anew(engine: Engine, now: float) -> EngineView:
    """Return the view of an engine of which nothing is remembered."""
    engine._view = engine.info._names = engine.timer._shown = None
    engine.loads._shown = ()
    engine._valid.clear()
    return engine.view(now, proven=False)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(STEPS)), max_size=40))
def test_a_view_is_what_it_would_be_made_anew(
    events: list[tuple[Callable[[Life], None], float]],
) -> None:
    life = Life()
    for happens, step_s in events:
        happens(life)
        for passed_s in (0.0, step_s):
            life.now += passed_s
            seen = life.engine.view(life.now, proven=False)
            assert seen == made_anew(life.engine, life.now)


def test_times_that_were_not_measured_again_are_not_seen_any_more() -> None:
    life = Life()
    for _ in range(FEWEST):
        life.arrives()
    for passed_s, known in ((0.0, True), (STALE_S, True), (0.1, False)):
        life.now += passed_s
        times = life.engine.view(life.now, proven=False).times
        assert ("push" in times.arrival) is known
        assert (times.arrival_s is not None) is known


def test_times_are_worked_out_only_for_who_asks_for_them(monkeypatch: Any) -> None:
    life, asked = Life(), 0
    at = PromptTimer.at

    def count(timer: PromptTimer, now: float) -> Any:
        nonlocal asked
        asked += 1
        return at(timer, now)

    monkeypatch.setattr(PromptTimer, "at", count)
    for _ in range(FEWEST):
        life.is_asked()
        life.arrives()
        plain = life.engine.view(life.now, proven=False, timed=False)
    assert (asked, plain.times) == (0, NOTHING_KNOWN)
    timed = life.engine.view(life.now, proven=False)
    assert (asked, timed.times) == (1, at(life.engine.timer, life.now))
    assert timed.times != NOTHING_KNOWN
    assert replace(timed, times=NOTHING_KNOWN) == plain
    assert life.engine.view(life.now, proven=False, timed=False) == plain


def test_what_nothing_told_of_is_not_seen() -> None:
    """The control: without these signs, views would be remembered for good."""
    life = Life()
    life.ups()
    seen = life.engine.view(life.now, proven=False)
    life.engine.loads._own[0] += 1
    assert life.engine.view(life.now, proven=False) == seen
    assert made_anew(life.engine, life.now) != seen


def test_a_proof_is_seen() -> None:
    engine = made_engine()
    for proven in (False, True, False):
        assert engine.view(1.0, proven=proven).proven is proven


def test_models_are_not_confirmed_after_a_restart() -> None:
    engine = made_engine()

    def seen() -> tuple[ModelKnowledge, frozenset[str], str]:
        view = engine.view(1.0, proven=False)
        return view.knowledge, view.models, view.version

    assert seen() == (ModelKnowledge.NONE, frozenset(), "")
    engine.mark(up=True)
    info = engine.info
    info.models, info.version, info.confirmed = {"a": {}}, "1", True
    assert seen() == (ModelKnowledge.CONFIRMED, {"a"}, "1")
    engine.mark(up=False)
    engine.mark(up=True)
    assert seen() == (ModelKnowledge.EARLIER, {"a"}, "")
    info.models, info.confirmed = {"b": {}}, True
    assert seen()[:2] == (ModelKnowledge.EARLIER, {"a"}), "the answer came from the former server"


def test_an_announced_request_is_a_load_and_the_trial() -> None:
    engine, now = made_engine(), time.monotonic()
    for _ in range(engines.FAILURES):
        engine.breaker.failed(now - 10, now - 10)
    assert engine.view(now, proven=False).trusted
    with engine.awaited(CHOSEN):
        view = engine.view(now, proven=False)
        assert ([load.own for load in view.ranks], view.trusted) == ([10], False)
        assert engine.open == 1
    assert ([load.own for load in engine.loads.at(now)], engine.open) == ([0], 0)
    with engine.awaited():
        assert ([load.own for load in engine.loads.at(now)], engine.open) == ([0], 1)


def test_ranks_from_before_a_restart_are_not_used() -> None:
    engine = made_engine()
    engine.mark(up=True)
    engine.loads.report(engine.loads.ask(1.0), dict.fromkeys(range(4), 0.0))
    prober = Prober(Mock(), Mock(), Mock())

    def ranks() -> tuple[Any, ...]:
        probed = {prober._target(engine).target.rank for prober._turn in range(8)}
        followed = Subscriber(engine, None, Mock())._ranks()
        return probed, followed, cache_admin._ranks(engine)

    assert ranks() == ({0, 1, 2, 3}, [0, 1, 2, 3], [0, 1, 2, 3])
    engine.mark(up=False)
    engine.mark(up=True)
    assert ranks() == ({None}, [None], [None])
    assert engine.view(2.0, proven=False).targets[0][0] == Target(0)


def test_an_engine_to_which_nothing_happens_costs_nothing_new(monkeypatch: Any) -> None:
    life = Life()
    for event in (life.ups, life.learns, life.reports, life.holds, life.is_asked, life.answers):
        event()
    made = Mock(wraps=EngineView)
    monkeypatch.setattr(engines, "EngineView", made)
    for _ in range(100):
        life.engine.view(life.now, proven=True)
        life.now += 0.01
    assert made.call_count == 1
    life.is_asked()  # the control
    life.engine.view(life.now, proven=True)
    assert made.call_count == 2
