"""Steps that overlap, as on GPUs: no order of events breaks a promise.

A CPU engine runs one step at a time, so what asynchronous scheduling, several batches in flight and
draft tokens do to the connector is tried here (``overlap.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvconnect.disaggregation.leases import Leases
from kvconnect.engines.vllm import disaggregation, scheduler
from kvconnect.engines.vllm.device_blocks import DeviceBlocks
from kvconnect.errors import Misuse
from kvconnect.protocol.handoff_request import TICKET_KEY
from tests.engines.overlap import Clock, Engine, Mode
from tests.engines.siblings import CLAIMS, Sibling

MODES = {
    "one step": Mode(1),
    "one step, drafts": Mode(1, drafts=2),
    "two steps": Mode(2),
    "two steps, drafts": Mode(2, drafts=2),
    "three steps": Mode(3),
    "two steps, prefill": Mode(2, role="kv_producer"),
    "two steps, decode": Mode(2, role="kv_consumer"),
    "two steps, beside another connector": Mode(2, place=0),
}
PROMPTS = [
    tuple(start + number % 3 for number in range(length))
    for start in (1, 2)
    for length in (5, 12, 17, 30)
]
EVENTS = ["arrive"] * 3 + ["schedule", "execute", "update"] * 5 + ["work"] * 4 + ["read", "answer"]
EVENTS += ["abort", "forget", "forget", "reset", "pause", "time_passes", "rest", "rest"]
CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    for module in (disaggregation, scheduler):
        monkeypatch.setattr(module, "time", CLOCK)
    yield CLOCK


def sends(mode: Mode) -> bool:
    return mode.role != "kv_consumer"


def receives(mode: Mode) -> bool:
    return mode.role != "kv_producer"


class Overlap(RuleBasedStateMachine):
    """Events at every point of steps that overlap."""

    mode: ClassVar[Mode]
    seen: ClassVar[Counter[str]]

    @initialize()
    def start(self) -> None:
        CLOCK.now = 1000.0  # else a story depends on those before it
        self.engine = Engine(self.mode, CLOCK, seen=self.seen)
        Sibling.has = 8
        self.sound = True

    @rule(event=st.sampled_from(EVENTS), data=st.data())
    def happens(self, event: str, data: st.DataObject) -> None:
        self.sound = False
        getattr(self, event)(data)
        self.sound = True

    def arrive(self, data: st.DataObject) -> None:
        engine = self.engine
        if len(engine.alive) > 5:
            return
        prompt = data.draw(st.sampled_from(PROMPTS))
        kinds = ["plain", "plain"] + ["send"] * 2 * sends(engine.mode)
        kind = data.draw(st.sampled_from(kinds + ["receive", "n=2"] * receives(engine.mode)))
        params: dict[str, Any] | None = None
        if kind == "send":
            params = {"do_remote_decode": True, "do_remote_prefill": False}
        elif kind != "plain":
            params = engine.ticket(prompt)
        engine.add(prompt, params)
        if kind == "n=2":
            engine.add(prompt, dict(params or {}))

    def schedule(self, data: st.DataObject) -> None:
        self.engine.schedule()

    def execute(self, data: st.DataObject) -> None:
        self.engine.accepted = data.draw(st.integers(0, self.engine.mode.drafts))
        self.engine.execute()

    def update(self, data: st.DataObject) -> None:
        self.engine.update()

    def work(self, data: st.DataObject) -> None:
        device = self.engine.device
        for _ in range(data.draw(st.integers(1, 3))):
            if device.jobs:
                number = data.draw(st.integers(0, len(device.jobs) - 1))
                device.run(number, fails=data.draw(st.integers(0, 3)) == 3)

    def read(self, data: st.DataObject) -> None:
        if known := list(self.engine.device.offered):
            self.engine.device.serve(data.draw(st.sampled_from(known)))

    def answer(self, data: st.DataObject) -> None:
        if withdrawn := self.engine.device.withdrawn:
            self.engine.device.answer(data.draw(st.integers(0, len(withdrawn) - 1)))

    def abort(self, data: st.DataObject) -> None:
        if alive := self.engine.alive:
            self.engine.abort(data.draw(st.sampled_from(alive)))

    def reset(self, data: st.DataObject) -> None:
        self.engine.scheduler.reset_prefix_cache(reset_connector=True)

    def forget(self, data: st.DataObject) -> None:
        """Let all end; the host tier remembers what the device forgets."""
        for _ in range(8):
            self.rest(data)
            self.work(data)
        self.engine.scheduler.reset_prefix_cache()

    def pause(self, data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(["keep", "wait", "abort"]))
        forget, reads = not data.draw(st.integers(0, 3)), data.draw(st.booleans())
        self.engine.pause(mode, forget, reads)
        for _ in range(data.draw(st.integers(0, 2))):
            self.arrive(data)
            self.engine.settle("a pause with new requests")
        self.engine.resume()

    def time_passes(self, data: st.DataObject) -> None:
        CLOCK.now += data.draw(st.sampled_from([1.0, 20.0, 100.0]))

    def rest(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 4))):
            self.engine.schedule()
            self.engine.execute()
            self.engine.update()

    @invariant()
    def books_balance(self) -> None:
        if getattr(self, "sound", False):
            self.engine.check()

    def teardown(self) -> None:
        if getattr(self, "sound", False):  # else it has failed already
            self.engine.end()


def run(mode: Mode, examples: int = 60) -> Counter[str]:
    """Play so many stories; return what happened in them."""

    class One(Overlap):
        seen: ClassVar[Counter[str]] = Counter()

    One.mode = mode
    run_state_machine_as_test(
        One,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,  # the negative controls have to find something
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return One.seen


@pytest.mark.parametrize("name", MODES)
def test_any_order_of_events(name: str) -> None:
    mode = MODES[name]
    seen = run(mode)
    wanted = {
        "StoreBlocks done",
        "LoadBlocks done",
        "new weights",
        *(["accepted"] if mode.drafts else []),
    }
    wanted |= {"handed off"} if sends(mode) else set()
    wanted |= {"Receive done"} if receives(mode) else set()
    wanted |= {"loaded inside"} if mode.place is not None else set()
    assert {what for what in wanted if not seen[what]} == set(), seen


CONTROLS: dict[str, tuple[list[tuple[Any, str]], str]] = {
    "blocks that are stored or handed off are not held": (
        [(DeviceBlocks, "hold"), (DeviceBlocks, "release")],
        "is nobody's any more|wrong KV|free",
    ),
    "a lease keeps a paused engine awake": ([(Leases, "busy")], "never ends"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_negative_control(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, error = CONTROLS[name]
    for where, what in places:
        always = property(bool) if what == "busy" else lambda *_: None
        monkeypatch.setattr(where, what, always)
    with pytest.raises((AssertionError, Misuse), match=error):
        run(MODES["two steps"], 200)


class Forgetful(set[str]):
    """What is added does not stay."""

    def add(self, _: str) -> None:
        pass


@pytest.mark.parametrize("name", ["two steps", "two steps, drafts"])
def test_load_after_failed_hand_off(name: str) -> None:
    """vLLM 0.32 keeps room for what each load that has begun still needs. For one that failed and
    is tried again from the host tier it does so twice, which a prompt of half the pool never gets,
    and all other requests wait behind it."""
    engine = _fail_hand_off(Engine(MODES[name], CLOCK), tuple(range(30)))
    engine.end()
    assert engine.seen["LoadBlocks done"] == 1  # there is room for both
    engine = _fail_hand_off(Engine(MODES[name], CLOCK), tuple(range(60)))
    engine.end()
    assert engine.seen["LoadBlocks done"] == 0
    engine = Engine(MODES[name], CLOCK)
    engine.half.handoff.failed = Forgetful()
    with pytest.raises(AssertionError, match="never ends"):
        _fail_hand_off(engine, tuple(range(60))).end()


def _fail_hand_off(engine: Engine, prompt: tuple[int, ...]) -> Engine:
    """The host tier has a prompt that a peer fails to send."""
    engine.add(prompt)
    engine.settle("the first request")
    assert engine.scheduler.reset_prefix_cache()
    engine.add(prompt, engine.ticket(prompt))
    engine.schedule()
    engine.execute()
    engine.update()
    engine.device.run(0, fails=True)
    return engine


@pytest.mark.parametrize("place", [0, 1])
def test_another_connector_s_failed_load_spoils_nothing_here(place: int) -> None:
    """It loads inside the step, whose stores are under way when vLLM hears that the load failed."""
    _load_in_vain(place)


def test_control_of_another_connector_s_failed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "foreign_failures", lambda *_: set())
    with pytest.raises(AssertionError, match="reads wrong KV"):
        _load_in_vain(0)


def _load_in_vain(place: int) -> None:
    engine, prompt = Engine(Mode(1, place=place), CLOCK), tuple(range(30))
    engine.settle("the first step")
    Sibling.has, Sibling.fails, Sibling.ended = 16, True, 0
    first = engine.add(prompt)
    engine.schedule()
    assert engine.seen["spoiled"] == 1
    while engine.device.jobs:
        engine.device.run(0, fails=False)
    engine.update()
    engine.settle("the request whose load failed")
    Sibling.has, Sibling.fails = 0, False
    assert engine.scheduler.reset_prefix_cache()
    second = engine.add(prompt)
    engine.settle("a request that computes all")
    assert engine.scheduler.reset_prefix_cache()
    third = engine.add(prompt)
    engine.settle("a request that loads what was stored")
    assert engine.seen["LoadBlocks done"] >= 1
    for name in (first, second, third):
        engine.expect_right(name)
    assert Sibling.ended == 3
    engine.end()


@pytest.mark.parametrize("place", [0, 1])
def test_two_connectors_that_hand_off(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answer, and what one of them is asked for is not taken by the other."""
    engine, prompt = Engine(Mode(1, place=place), CLOCK), tuple(range(30))
    engine.settle("the first step")
    asked = {"do_remote_decode": True, "transfer_id": "ab" * 16}
    sent = engine.add(prompt, dict(asked))
    engine.settle("a prefill for both")
    assert engine.answers[sent].items() >= {**CLAIMS, "transfer_id": "ab" * 16}.items()
    assert TICKET_KEY in engine.answers[sent]
    for theirs in (CLAIMS, {**CLAIMS, "transfer_id": "their own kind of name"}):
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        Sibling.has = 16
        received = engine.add(prompt, dict(theirs))
        engine.settle("what the other one brings")
        Sibling.has = 0
        assert engine.seen.pop("loaded inside") == 4  # blocks
        engine.expect_right(received)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    ticket = {key: engine.ticket(prompt)[key] for key in ("transfer_id", TICKET_KEY)}
    received = engine.add(prompt, ticket)
    engine.settle("what KVConnect brings")
    assert engine.seen["Receive done"] == 1
    engine.expect_right(received)
    engine.end()
    monkeypatch.setattr(engine.half.handoff, "alone", True)  # control
    engine.add(prompt, dict(asked))
    with pytest.raises(RuntimeError, match="Key clash"):
        engine.settle("a prefill for both")


def test_stores_given_up_end_without_anybody_waiting() -> None:
    """A reset leaves them to the workers: the engine rests after the step in which the workers look
    at their weights, and the slots of the stores come back later."""
    engine = Engine(MODES["two steps"], CLOCK)
    engine.add(tuple(range(12)))
    for _ in range(20):
        engine.schedule()
        engine.execute()
        engine.update()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(2):
        engine.schedule()
        engine.execute()
        engine.update()
    assert not (engine.steps or engine.scheduler.has_requests())
    assert engine.device.jobs and engine.half.plan.index.slots.busy
    engine.end()
