"""Eviction order: exact LRU against a naive model, S3-FIFO against what it is for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.offload.eviction import LRU, S3FIFO, EvictionPolicy, make_policy
from kvconnect.offload.eviction import lru as lru_module
from kvconnect.offload.index import HostIndex

SLOTS = 8
FREE_PINS = [0] * 1000


class NaiveLRU(EvictionPolicy):
    """One list, least recently used first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def insert(self, slots: Sequence[int], hashes: Sequence[int]) -> None:
        self.touch(slots)

    def touch(self, slots: Sequence[int]) -> None:
        self.order = [slot for slot in self.order if slot not in slots] + list(reversed(slots))

    def settle(self, slots: Sequence[int]) -> None:
        self.touch(slots)

    def demote(self, slots: Sequence[int]) -> None:
        self.order = [*reversed(slots), *(slot for slot in self.order if slot not in slots)]

    def remove(self, slot: int) -> None:
        self.order.remove(slot)

    def evict(self, pins: Sequence[int]) -> int | None:
        victim = next((slot for slot in self.order if not pins[slot]), None)
        met = self.order if victim is None else self.order[: self.order.index(victim)]
        self.order = [*self.order[len(met) :], *met]  # those pinned count as used
        if victim is not None:
            self.order.remove(victim)
        return victim

    def clear(self) -> None:
        self.order = []


class KeepsOrderOfInsertion(LRU):
    """A broken LRU: a touch changes nothing."""

    def touch(self, slots: Sequence[int]) -> None:
        if not all(self._stamp[slot] for slot in slots):
            super().touch(slots)


Event = tuple[str, list[int], list[int]]
events = st.lists(
    st.tuples(
        st.sampled_from(
            ["insert", "touch", "settle", "demote", "evict", "evict", "remove", "clear"]
        ),
        st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=5),
        st.lists(st.sampled_from([0, 0, 1]), min_size=SLOTS, max_size=SLOTS),
    ),
    max_size=40,
)


def play(policy: EvictionPolicy, naive: NaiveLRU, events: list[Event]) -> None:
    """Give both the same events, those that a policy may be given, and compare their victims."""
    for name, slots, pins in events:
        known = [slot for slot in slots if slot in naive.order]
        if name == "insert":
            fresh = [slot for slot in slots if slot not in naive.order]
            policy.insert(fresh, fresh)
            naive.insert(fresh, fresh)
        elif name == "touch":
            policy.touch(known)
            naive.touch(known)
        elif name == "settle":
            policy.settle(known)
            naive.settle(known)
        elif name == "demote":
            policy.demote(known)
            naive.demote(known)
        elif name == "remove" and known:
            policy.remove(known[0])
            naive.remove(known[0])
        elif name == "evict":
            assert policy.evict(pins) == naive.evict(pins)
        elif name == "clear" and len(slots) == 5:
            policy.clear()
            naive.clear()
    while naive.order:
        assert policy.evict(FREE_PINS) == naive.evict(FREE_PINS)
    assert policy.evict(FREE_PINS) is None


@given(events)
def test_lru_is_exact(events: list[Event]) -> None:
    play(LRU(SLOTS), NaiveLRU(), events)


def test_the_comparison_tells_a_broken_lru() -> None:
    history: list[Event] = [
        ("insert", [0], []),
        ("insert", [1], []),
        ("touch", [0], []),
        ("evict", [], [0] * SLOTS),
    ]
    play(LRU(SLOTS), NaiveLRU(), history)
    with pytest.raises(AssertionError):
        play(KeepsOrderOfInsertion(SLOTS), NaiveLRU(), history)


def test_lru_evicts_the_tail_of_a_prompt_before_its_head() -> None:
    policy = LRU(SLOTS)
    policy.insert([3, 1, 4], [0, 0, 0])
    assert [policy.evict(FREE_PINS) for _ in range(4)] == [4, 1, 3, None]
    policy.insert([5, 2, 6], [0, 0, 0])
    policy.touch([5, 2])
    assert [policy.evict(FREE_PINS) for _ in range(3)] == [6, 2, 5]


def test_lru_keeps_the_head_of_a_request_that_filled_its_blocks_one_after_the_other() -> None:
    policy = LRU(SLOTS)
    for slot in (3, 1, 4):
        policy.insert([slot], [0])
    policy.settle([3, 1, 4])
    assert [policy.evict(FREE_PINS) for _ in range(3)] == [4, 1, 3]


def test_for_s3fifo_the_end_of_a_request_is_no_further_use() -> None:
    policy = S3FIFO(SLOTS)
    for slot in (3, 1):
        policy.insert([slot], [slot])
    policy.settle([3, 1])
    assert [policy.evict(FREE_PINS) for _ in range(2)] == [3, 1]
    assert len(policy._ghost) == 2  # left as one-offs


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
@given(events=events)
def test_pinned_and_absent_slots_are_never_evicted(name: str, events: list[Event]) -> None:
    policy = make_policy(name, SLOTS)  # type: ignore[arg-type]
    there: set[int] = set()
    for event, slots, pins in events:
        known = [slot for slot in slots if slot in there]
        if event == "insert":
            fresh = [slot for slot in slots if slot not in there]
            policy.insert(fresh, fresh)
            there.update(fresh)
        elif event == "touch":
            policy.touch(known)
        elif event in ("settle", "demote"):
            getattr(policy, event)(known)
        elif event == "remove" and known:
            policy.remove(known[0])
            there.discard(known[0])
        elif event == "clear" and len(slots) == 5:
            policy.clear()
            there.clear()
        elif event == "evict":
            victim = policy.evict(pins)
            if victim is None:
                assert all(pins[slot] for slot in there)
            else:
                assert victim in there and not pins[victim]
                there.discard(victim)
    assert {policy.evict(FREE_PINS) for _ in range(len(there))} == there
    assert policy.evict(FREE_PINS) is None


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
def test_demoted_blocks_are_the_next_victims_unless_they_are_used_again(name: str) -> None:
    policy = make_policy(name, SLOTS)  # type: ignore[arg-type]
    policy.insert(range(SLOTS), range(SLOTS))
    policy.demote([0, 1, 2])
    policy.touch([1])
    assert [policy.evict(FREE_PINS) for _ in range(2)] == [2, 0]
    assert policy.evict(FREE_PINS) == SLOTS - 1
    control = make_policy(name, SLOTS)  # type: ignore[arg-type]
    control.insert(range(SLOTS), range(SLOTS))
    assert control.evict(FREE_PINS) == SLOTS - 1


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
def test_a_tier_without_slots_evicts_nothing(name: str) -> None:
    policy = make_policy(name, 0)  # type: ignore[arg-type]
    policy.insert([], [])
    policy.touch([])
    policy.clear()
    assert policy.evict([]) is None


def test_lru_memory_is_bounded_however_often_blocks_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grown(policy: LRU) -> int:
        policy.insert(range(SLOTS), range(SLOTS))
        for _ in range(200):
            policy.touch([0, 1, 2])
        return sum(len(slots) for _, slots in policy._batches)

    monkeypatch.setattr(lru_module, "_SWEEP_MIN", 16)
    policy = LRU(SLOTS)
    assert grown(policy) <= 2 * SLOTS + 16 + 3
    assert sorted(policy.evict(FREE_PINS) or 0 for _ in range(SLOTS)) == list(range(SLOTS))
    monkeypatch.setattr(LRU, "_sweep", lambda self: None)
    assert grown(LRU(SLOTS)) > 2 * SLOTS + 16 + 3


class Counted(list[int]):
    """Numbers by slot; counts how often one is read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


class CountedQueue(deque[Any]):
    """Counts the entries that are added, taken and looked at, of all queues together."""

    operations = 0

    def append(self, entry: Any) -> None:
        CountedQueue.operations += 1
        super().append(entry)

    def popleft(self) -> Any:
        CountedQueue.operations += 1
        return super().popleft()

    def __iter__(self) -> Iterator[Any]:
        CountedQueue.operations += len(self)
        return super().__iter__()


class ScansPinned(LRU):
    """Looks at each slot, the pinned ones too, in each eviction."""

    def evict(self, pins: Sequence[int]) -> int | None:
        if all(pins[slot] for slot in range(len(self._stamp))):
            return None
        return super().evict([pins[slot] for slot in range(len(self._stamp))])


class SearchesQueues(S3FIFO):
    """Looks for the entry of a slot that is removed."""

    def remove(self, slot: int) -> None:
        for queue in (self._small, self._main, self._demoted):
            if any(entry[0] == slot for entry in queue.entries):
                break
        super().remove(slot)


def operations(
    policy: LRU | S3FIFO, slots: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> float:
    """Return the operations for each of many evictions, removals and demotions in a tier where the
    oldest quarter of the slots is pinned, as by write-backs to a slow disk."""
    monkeypatch.setattr(CountedQueue, "operations", 0)
    pins, stamps = Counted([0] * slots), Counted([0] * slots)
    policy._stamp = stamps  # type: ignore[assignment]
    for start in range(0, slots, 100):
        policy.insert(range(start, start + 100), range(start, start + 100))
    pins[: slots // 4] = [1] * (slots // 4)
    pins.reads = stamps.reads = CountedQueue.operations = 0
    for number in range(rounds):
        victim = policy.evict(pins)
        assert victim is not None
        policy.insert([victim], [slots + number])
        if number % 3 == 1:
            policy.remove(victim)
            policy.insert([victim], [slots + number])
        elif number % 3 == 2:
            policy.demote([victim])
    return (pins.reads + stamps.reads + CountedQueue.operations) / rounds


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
def test_evictions_removals_and_demotions_cost_the_same_in_any_tier(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over as many as there are slots: a pinned slot is met once in that time."""
    monkeypatch.setattr("kvconnect.offload.eviction.lru.deque", CountedQueue)
    monkeypatch.setattr("kvconnect.offload.eviction.s3fifo.deque", CountedQueue)
    small, large = (
        operations(make_policy(name, slots), slots, slots, monkeypatch)  # type: ignore[arg-type]
        for slots in (1000, 30_000)
    )
    assert large <= 2 * small  # large tiers sweep more often
    broken = ScansPinned if name == "lru" else SearchesQueues
    small, large = (operations(broken(n), n, 50, monkeypatch) for n in (1000, 10_000))
    assert large > 3 * small


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_tier_of_which_every_slot_is_in_use_is_not_searched(policy: Any) -> None:
    index = HostIndex(4, 1, make_policy(policy, 4))
    slots = [index.reserve(0, bytes([number])) or 0 for number in range(4)]
    index.commit(slots[:3])
    index.pin(slots[:3])
    evictions: list[Any] = []
    real = index.policy.evict
    index.policy.evict = lambda pins: evictions.append(pins) or real(pins)  # type: ignore[method-assign]
    assert index.reserve(0, b"new") is None and not evictions
    index.unpin(slots[:1])  # control
    assert index.reserve(0, b"new") == slots[0] and evictions


class Tier:
    """Just enough of a tier to ask what survives: block -> slot, filled through a policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.slot_of: dict[int, int] = {}
        self.block_in: dict[int, int] = {}
        self.free = list(range(capacity))
        self.pins = [0] * capacity

    def use(self, block: int) -> bool:
        """Use a block; return whether it was there."""
        if block in self.slot_of:
            self.policy.touch([self.slot_of[block]])
            return True
        if not self.free:
            victim = self.policy.evict(self.pins)
            assert victim is not None
            del self.slot_of[self.block_in.pop(victim)]
            self.free.append(victim)
        slot = self.free.pop()
        self.slot_of[block], self.block_in[slot] = slot, block
        self.policy.insert([slot], [hash(block)])
        return False


@pytest.mark.parametrize(("name", "survivors"), [("s3fifo", 50), ("lru", 0)])
def test_only_s3fifo_keeps_a_working_set_through_a_scan(name: str, survivors: int) -> None:
    tier = Tier(make_policy(name, 100), 100)  # type: ignore[arg-type]
    working_set = range(50)
    for _ in range(2):
        for block in working_set:
            tier.use(block)
    for block in range(1000, 2000):  # ten times the capacity, each block once
        tier.use(block)
    assert sum(block in tier.slot_of for block in working_set) == survivors


def test_s3fifo_a_returning_block_goes_to_the_main_queue() -> None:
    policy = S3FIFO(20)
    tier = Tier(policy, 20)
    for block in range(21):
        tier.use(block)
    assert 0 not in tier.slot_of  # left the small queue as a one-off, and is remembered
    tier.use(0)
    for block in range(100, 140):
        tier.use(block)
    assert 0 in tier.slot_of
    assert 1 not in tier.slot_of  # came only once


def test_s3fifo_remembers_no_more_blocks_than_the_tier_has() -> None:
    policy = S3FIFO(10)
    tier = Tier(policy, 10)
    for block in range(500):
        tier.use(block)
    assert len(policy._ghost) == 10
    assert hash(489) in policy._ghost and hash(479) not in policy._ghost
    policy.clear()
    assert not policy._ghost


def test_s3fifo_evicts_the_tail_of_a_prompt_before_its_head() -> None:
    policy = S3FIFO(4)
    policy.insert([0, 1, 2, 3], [10, 11, 12, 13])
    assert [policy.evict([0] * 4) for _ in range(4)] == [3, 2, 1, 0]
