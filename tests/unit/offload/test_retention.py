"""Kept blocks survive, within bounds, and never take the room of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import Misuse
from kvconnect.offload import retention as module
from kvconnect.offload.eviction import EvictionPolicy, make_policy
from kvconnect.offload.retention import KeepOutcome, KeepTimes, Retention
from kvconnect.protocol.cache_hints import CacheHint

SLOTS = 12
FREE_PINS = [0] * SLOTS
A, B, C = b"a", b"b", b"c"
PINNED, RETAINED = KeepOutcome.PINNED, KeepOutcome.RETAINED
POLICIES = pytest.mark.parametrize("name", ["lru", "s3fifo"])


def kept(name: Any, share: float = 0.5, slots: int = SLOTS) -> Retention:
    """A tier that is full of used blocks."""
    policy = Retention(make_policy(name, slots), slots, share, lambda slot: bytes([slot]))
    policy.insert(range(slots), range(slots))
    return policy


def victims(policy: EvictionPolicy, pins: Sequence[int] = FREE_PINS) -> list[int]:
    """Everything that the policy evicts, in order."""
    found = []
    while (victim := policy.evict(pins)) is not None:
        found.append(victim)
    return found


@POLICIES
def test_a_pin_survives_the_eviction_of_all_others_and_then_ends(name: str) -> None:
    policy = kept(name)
    for slot in (11, 10):  # the first victims otherwise
        assert policy.keep(slot, KeepTimes(A, 10.0, 0.0), 0.0) is PINNED
    assert set(victims(policy)) == set(range(10))
    policy.check()
    assert policy.expire(9.9) == 0 and policy.evict(FREE_PINS) is None
    assert policy.expire(10.0) == 2
    assert set(victims(policy)) == {10, 11}
    policy.check()
    assert victims(kept(name))[:2] == [11, 10]  # control: without a pin


@POLICIES
def test_retained_blocks_are_evicted_last_and_pinned_ones_not_even_then(name: str) -> None:
    policy = kept(name)
    policy.keep(11, KeepTimes(A, 10.0, 0.0), 0.0)
    for slot in (10, 9):
        assert policy.keep(slot, KeepTimes(A, 0.0, 10.0), 0.0) is RETAINED
    assert victims(policy)[-2:] == [10, 9]
    policy.check()
    assert policy.kept.used(CacheHint.RETAIN) == 0 and policy.kept.used(CacheHint.PIN) == 1


class CountedPins(list[int]):
    """Counts how often a slot is looked at."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


@POLICIES
def test_retained_slots_that_are_read_are_met_once_by_many_evictions(name: str) -> None:
    policy = kept(name, slots=1000)
    for slot in range(400):
        assert policy.keep(slot, KeepTimes(bytes([slot % 2]), 0.0, 10.0), 0.0) is RETAINED
    for _ in range(600):  # all others; then those retained are set aside
        policy.evict([0] * 1000)
    first = policy.evict([0] * 1000)
    assert first is not None and first < 400
    pins = CountedPins(int(slot >= 100) for slot in range(1000))
    found = [policy.evict(pins) for _ in range(50)]
    assert all(slot is not None and slot < 100 for slot in found)
    assert pins.reads <= 400 + 50  # not each of 300 for each of 50 evictions
    policy.check()


@POLICIES
def test_a_retained_block_that_is_set_aside_and_used_again_is_the_last_one(name: str) -> None:
    policy = kept(name)
    for slot in (3, 2):
        policy.keep(slot, KeepTimes(A, 0.0, 10.0), 0.0)
    pins = [int(slot in (2, 3)) for slot in range(SLOTS)]
    while policy.evict(FREE_PINS if len(policy._aside[CacheHint.RETAIN]) < 2 else pins) is not None:
        assert policy.kept.used(CacheHint.RETAIN) == 2
    policy.touch([3])
    assert victims(policy) == [2, 3]


@POLICIES
def test_a_pin_turns_into_retention(name: str) -> None:
    policy = kept(name)
    assert policy.keep(5, KeepTimes(A, 10.0, 20.0), 0.0) is PINNED
    assert 5 not in victims(policy)
    assert policy.expire(10.0) == 0
    policy.check()
    assert policy.kept.used(CacheHint.RETAIN) == 1
    assert policy.expire(20.0) == 1
    assert victims(policy) == [5]


def test_a_later_hint_never_shortens_a_time() -> None:
    policy = kept("lru")
    policy.keep(5, KeepTimes(A, 100.0, 0.0), 0.0)
    policy.keep(5, KeepTimes(A, 10.0, 0.0), 0.0)
    assert policy.expire(99.0) == 0
    policy.keep(5, KeepTimes(A, 200.0, 0.0), 99.0)
    assert policy.expire(199.0) == 0 and policy.expire(200.0) == 1


def test_pins_are_bounded_in_all_and_by_tenant() -> None:
    policy = kept("lru", share=0.34)  # 4 slots, 2 for each tenant
    tenants = [A, A, A, B, B, C]
    outcomes = [policy.keep(n, KeepTimes(who, 10.0, 0.0), 0.0) for n, who in enumerate(tenants)]
    refused, none_left = KeepOutcome.NO_TENANT_SHARE, KeepOutcome.NO_SHARE
    assert outcomes == [PINNED, PINNED, refused, PINNED, PINNED, none_left]
    assert policy.keep(6, KeepTimes(C, 10.0, 20.0), 0.0) is RETAINED  # that share is free
    policy.expire(10.0)
    assert policy.keep(5, KeepTimes(C, 30.0, 0.0), 10.0) is PINNED
    policy.check()
    assert kept("lru", share=0).keep(0, KeepTimes(A, 10.0, 10.0), 0.0) is none_left


@POLICIES
def test_released_blocks_are_evicted_first(name: str) -> None:
    policy = kept(name)
    for slot in (11, 10):
        policy.keep(slot, KeepTimes(A, 10.0, 0.0), 0.0)
    for _ in range(SLOTS - 2):
        policy.evict(FREE_PINS)
    assert policy.evict(FREE_PINS) is None  # both are set aside
    policy.insert([0, 1], [0, 1])
    policy.demote([10, 11])
    policy.check()
    assert victims(policy)[:2] == [11, 10]


@POLICIES
def test_quarantine_and_reset_are_not_in_the_way_of_a_pin(name: str) -> None:
    policy = kept(name)
    for slot in (11, 3):
        policy.keep(slot, KeepTimes(A, 10.0, 0.0), 0.0)
    policy.evict(FREE_PINS)  # slot 11 is set aside, slot 3 is not
    policy.remove(11)
    policy.remove(3)
    policy.check()
    assert policy.kept.used(CacheHint.PIN) == 0
    policy.insert([11], [11])
    policy.keep(11, KeepTimes(A, 10.0, 0.0), 0.0)
    policy.clear()
    policy.check()
    assert policy.evict(FREE_PINS) is None and policy.expire(10.0) == 0


def test_memory_is_bounded_however_often_a_block_is_pinned(monkeypatch: Any) -> None:
    policy = kept("lru")
    for n in range(10_000):
        policy.keep(1, KeepTimes(A, 10.0 + n, 0.0), 0.0)
    assert len(policy.kept._ends) < 2 * module._SPARE_ENDS
    monkeypatch.setattr(module, "_SPARE_ENDS", 10**9)
    for n in range(10_000):
        policy.keep(1, KeepTimes(A, 1e5 + n, 0.0), 0.0)
    assert len(policy.kept._ends) > 2 * 1024


EVENTS = ["keep"] * 3 + ["insert"] * 2 + ["evict"] * 4 + ["touch", "remove", "demote", "time"]
History = list[tuple[str, list[int], KeepTimes, list[int]]]
history = st.lists(
    st.tuples(
        st.sampled_from([*EVENTS, "settle", "clear"]),
        st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=5),
        st.builds(
            KeepTimes,
            st.sampled_from([A, B]),
            st.sampled_from([0.0, 2, 9]),
            st.sampled_from([0.0, 5]),
        ),
        st.lists(st.sampled_from([0, 0, 1]), min_size=SLOTS, max_size=SLOTS),
    ),
    max_size=60,
)


class Game:
    """Gives a policy events, and checks every victim against what was promised."""

    def __init__(self, policy: Retention) -> None:
        self.policy = policy
        self.there: set[int] = set()
        self.pinned_until: Counter[int] = Counter()
        self.now = 0.0

    def insert(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        fresh = [slot for slot in slots if slot not in self.there]
        self.policy.insert(fresh, fresh)
        self.there.update(fresh)

    def keep(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        now = self.now
        wanted = KeepTimes(times.tenant, *(t and now + t for t in times[1:]))
        for slot in self.known(slots):
            if self.policy.keep(slot, wanted, now) is PINNED:
                self.pinned_until[slot] = max(self.pinned_until[slot], int(wanted.pinned_until))

    def time(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        self.now += 1
        self.policy.expire(self.now)

    def touch(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        self.policy.touch(self.known(slots))

    def settle(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        self.policy.settle(self.known(slots))

    def demote(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        self.policy.demote(self.known(slots))
        for slot in slots:
            del self.pinned_until[slot]

    def remove(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        for slot in self.known(slots)[:1]:
            self.policy.remove(slot)
            self.there.discard(slot)
            del self.pinned_until[slot]

    def clear(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        if len(slots) == 5:
            self.policy.clear()
            self.there.clear()
            self.pinned_until.clear()

    def evict(self, slots: list[int], times: KeepTimes, pins: list[int]) -> None:
        victim = self.policy.evict(pins)
        free = {s for s in self.there if not pins[s] and self.pinned_until[s] <= self.now}
        assert victim in free if free else victim is None
        self.there.discard(-1 if victim is None else victim)

    def known(self, slots: list[int]) -> list[int]:
        return [slot for slot in slots if slot in self.there]


def play(policy: Retention, history: History) -> None:
    game = Game(policy)
    for name, *given_ in history:
        getattr(game, name)(*given_)
        policy.check()
    policy.expire(game.now + 100)
    policy.check()
    assert set(victims(policy)) == game.there


@POLICIES
@given(history=history)
def test_no_pinned_block_is_evicted_and_every_other_one_can_be(name: Any, history: History) -> None:
    play(Retention(make_policy(name, SLOTS), SLOTS, 0.5, lambda slot: bytes([slot])), history)


class EvictsPins(Retention):
    """Takes pinned blocks like all others."""

    def evict(self, pins: Sequence[int]) -> int | None:
        victim = self._inner.evict(pins)
        self.kept.forget(-1 if victim is None else victim)
        return victim


class NeverGivesBack(Retention):
    """Leaks the slots that it has set aside."""

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._take_back(slot)
            self.kept.forget(slot)


class Unbounded(Retention):
    """Refuses nobody."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept._refusal = lambda kind, tenant: None  # type: ignore[method-assign]


PINS: History = [
    ("insert", list(range(SLOTS)), KeepTimes(A, 0, 0), []),
    ("keep", list(range(SLOTS)), KeepTimes(A, 2.0, 0), []),
    *[("evict", [], KeepTimes(A, 0, 0), FREE_PINS)] * SLOTS,
    ("time", [], KeepTimes(A, 0, 0), []),
]


@pytest.mark.parametrize("broken", [Unbounded, EvictsPins, NeverGivesBack])
def test_the_check_tells_a_broken_retention(broken: type[Retention]) -> None:
    play(Retention(make_policy("lru", SLOTS), SLOTS, 0.5, lambda slot: bytes([slot])), PINS)
    with pytest.raises((AssertionError, Misuse)):
        play(broken(make_policy("lru", SLOTS), SLOTS, 0.5, lambda slot: bytes([slot])), PINS)
