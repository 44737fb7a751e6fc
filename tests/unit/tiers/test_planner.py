"""The plan of the lower tiers, event by event and at random."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import block_key, tenant_of
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.index import HostIndex
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import (
    SHARED,
    LookupRequest,
    LookupResult,
    PrefetchDecision,
    TierLimits,
    TierPlan,
)
from kvconnect.tiers.messages import (
    SECONDARY_TIERS,
    LookupBlocks,
    PrefetchBlocks,
    TierAnswer,
    TierInstructions,
    WriteBackBlocks,
)
from kvconnect.types import FailureCause, Tier

PEER, REMOTE = map(SECONDARY_TIERS.index, (Tier.PEER, Tier.REMOTE))
FULL = (CacheGroup(4),)
HYBRID = (CacheGroup(4), CacheGroup(4, window=5))
WAIT_S = 5.0
DEADLINE_S = 10.0


@dataclass
class Bench:
    """A plan, its host tier, and a worker whose disk and server are dicts of keys."""

    groups: tuple[CacheGroup, ...] = FULL
    slots: int = 8
    workers: int = 1
    reused: bool = False
    worth: int = 1 << 20  # blocks
    patience: float = math.inf
    share: int = 4
    searches: bool = True
    first_keys: int = 1 << 14
    stored: dict[bytes, int] = field(default_factory=dict)  # what tier has a key
    prefetched: list[tuple[Tier, int, float]] = field(default_factory=list)
    offered: list[tuple[int, int, tuple[Tier, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = make_policy("lru", self.slots)
        self.index = HostIndex(self.slots, len(self.groups), policy)
        self.stats = OffloadingConnectorStats()
        flags = self.reused, self.searches, self.first_keys
        limits = TierLimits(self.workers, DEADLINE_S, WAIT_S, self.share, *flags)
        told = lambda *what: self.prefetched.append(what)  # noqa: E731
        self.plan = TierPlan(self.index, self.groups, self.stats, limits, self.choose, told)

    def choose(self, offer: LookupResult) -> PrefetchDecision:
        self.offered.append((offer.context, offer.block_tokens, tuple(offer.tiers)))
        return PrefetchDecision(min(self.worth, len(offer.tiers)), self.patience)

    def take(self, now: float = 0.0) -> TierInstructions:
        return self.plan.take(now)

    def do(self, task: LookupBlocks | PrefetchBlocks | WriteBackBlocks) -> bytes:
        """What a worker answers: what it has, or takes."""
        if isinstance(task, WriteBackBlocks):
            self.stored.update(dict.fromkeys(task.keys, 1))
        return bytes(self.stored.get(key, 0) for key in task.keys)

    def step(self, now: float = 0.0) -> TierInstructions:
        """Take the work and have every worker answer it."""
        work = self.take(now)
        tasks: list[LookupBlocks | PrefetchBlocks | WriteBackBlocks]
        tasks = [*work.lookups, *work.prefetches, *work.write_backs]
        for task in tasks:
            for _ in range(self.workers):
                self.plan.on_answer(TierAnswer(task.job, self.do(task)), now)
        return work

    def store(self, hashes: Sequence[bytes], group: int = 0) -> None:
        """Blocks come from the device."""
        for block_hash in hashes:
            slot = self.index.reserve(group, block_hash)
            assert slot is not None
            self.index.commit([slot])
            self.plan.write_backs.stored(group, block_hash, block_key(SHARED, group, block_hash))

    def request(
        self, hashes: Sequence[bytes], local: int = 0, prefix: bytes = SHARED
    ) -> LookupRequest:
        return LookupRequest([hashes] * len(self.groups), local, 4 * len(hashes), prefix)

    def ready(self, hashes: Sequence[bytes], group: int = 0) -> int:
        return len(self.index.ready_slots(group, hashes))

    def counted(self, name: str) -> dict[str, int]:
        found: dict[str, int] = self.stats.data["counters"].get(name, {})
        return found


def prompt(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(blocks)]


def keys(hashes: Sequence[bytes], group: int = 0, prefix: bytes = SHARED) -> list[bytes]:
    return [block_key(prefix, group, block_hash) for block_hash in hashes]


SOURCE = (("10.0.0.2", 7900),)


@pytest.mark.parametrize("searches", [True, False])
def test_a_source_is_asked_by_the_request_that_names_it(searches: bool) -> None:
    """Without other places to look, requests that name no source do not wait."""
    bench, hashes = Bench(searches=searches), prompt("a", 3)
    bench.stored = dict.fromkeys(keys(hashes), PEER)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0) is searches
    assert [lookup.source for lookup in bench.take().lookups] == [()] * searches
    named = bench.request(hashes)._replace(source=SOURCE)
    assert bench.plan.lookup("s", named, 0.0)
    (lookup,) = bench.step().lookups
    assert (lookup.source, list(lookup.keys)) == (SOURCE, keys(hashes))
    (prefetch,) = bench.step().prefetches
    assert list(prefetch.keys) == keys(hashes)
    assert not bench.plan.lookup("s", named, 0.0)
    assert bench.ready(hashes) == 3


def test_a_source_is_asked_for_what_others_lacked() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    named = bench.request(hashes)._replace(source=SOURCE)
    for req_id, request, asks in (
        ("r", bench.request(hashes), True),
        ("s", bench.request(hashes), False),  # control: it was missing a moment ago
        ("t", named, True),
        ("u", named._replace(source=(("10.0.0.3", 7900),)), True),
    ):
        assert bench.plan.lookup(req_id, request, 0.0) is asks
        assert bool(bench.step().lookups) is asks
        assert not bench.plan.lookup(req_id, request, 0.0), "it had nothing"


def test_what_host_memory_lost_comes_back_from_a_lower_tier() -> None:
    bench, hashes = Bench(), prompt("a", 3)
    bench.store(hashes)
    (write_back,) = bench.step().write_backs
    assert list(write_back.keys) == keys(hashes) and not bench.plan.busy
    bench.index.clear()
    assert bench.plan.lookup("r", bench.request(hashes), 1.0)
    (lookup,) = bench.step(1.0).lookups
    assert list(lookup.keys) == keys(hashes)
    assert bench.plan.lookup("r", bench.request(hashes), 2.0)  # found, not there yet
    (prefetch,) = bench.take(2.0).prefetches
    assert list(prefetch.keys) == keys(hashes) and bench.ready(hashes) == 0
    bench.plan.on_answer(TierAnswer(prefetch.job, bytes([1, 1, 1])), 4.0)
    assert not bench.plan.lookup("r", bench.request(hashes), 4.0)
    assert bench.ready(hashes) == 3
    assert bench.prefetched == [(Tier.DISK, 3, 3.0)]  # asked when its lookup ended, at 1.0
    assert bench.plan.on_load_planned("r") == {Tier.DISK: 12}
    assert bench.step(5.0).write_backs == []  # what was prefetched is not written again
    assert bench.plan.forget("r") is None
    assert not bench.index.slots.busy
    bench.index.check()


def test_a_prefix_of_which_host_memory_has_the_head_gets_the_rest() -> None:
    bench, hashes = Bench(), prompt("a", 4)
    bench.stored = dict.fromkeys(keys(hashes), REMOTE)
    bench.store(hashes[:1])
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    assert list(bench.step().lookups[0].keys) == keys(hashes[1:])
    assert bench.offered == [(4, 4, (Tier.REMOTE,) * 3)]
    bench.step()
    assert bench.ready(hashes) == 4


def test_nothing_found_means_one_lookup_and_then_none_for_a_while() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    assert bench.plan.lookup("r1", bench.request(hashes), 0.0)
    bench.step(0.0)
    assert not bench.plan.lookup("r1", bench.request(hashes), 0.0)
    assert not bench.plan.lookup("r2", bench.request(hashes), 4.0)
    assert bench.counted("tier_lookups") == {"": 1}
    bench.step(6.0)  # another engine may have written it by now
    assert bench.plan.lookup("r3", bench.request(hashes), 6.0)


def test_what_was_absent_and_is_written_can_be_found_at_once() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    assert bench.plan.lookup("r1", bench.request(hashes), 0.0)
    bench.step()
    bench.store(hashes)
    bench.step()
    bench.index.clear()
    assert bench.plan.lookup("r2", bench.request(hashes), 0.0)


def test_all_workers_must_have_a_block() -> None:
    bench, hashes = Bench(workers=2), prompt("a", 2)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    (lookup,) = bench.take().lookups
    bench.plan.on_answer(TierAnswer(lookup.job, bytes([1, 1])), 0.0)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.plan.on_answer(TierAnswer(lookup.job, bytes([REMOTE, 0])), 0.0)
    (prefetch,) = bench.take().prefetches
    assert list(prefetch.keys) == keys(hashes[:1])
    assert bench.offered == [(0, 4, (Tier.REMOTE,))]  # as slow as the slowest
    bench.plan.on_answer(TierAnswer(prefetch.job, b"\x01"), 0.0)
    bench.plan.on_answer(TierAnswer(prefetch.job, b"\x00"), 0.0)  # one rank's copy was bad
    assert not bench.plan.lookup("r", bench.request(hashes), 0.0)
    assert bench.ready(hashes) == 0 and not bench.index.slots.used


@pytest.mark.parametrize(("worth", "come"), [(0, 0), (2, 2), (9, 3)])
def test_only_what_is_worth_it_is_prefetched(worth: int, come: int) -> None:
    bench, hashes = Bench(worth=worth), prompt("a", 3)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step()
    bench.step()
    assert not bench.plan.lookup("r", bench.request(hashes), 0.0)
    assert bench.ready(hashes) == come
    assert bench.plan.forget("r") == ("recompute" if come < 3 else None)


@pytest.mark.parametrize(
    ("tokens", "worth", "come", "counted"),
    [
        (0, 0, 0, {}),
        (12, 0, 3, {"hinted": 1}),
        (4000, 0, 3, {"hinted": 1}),
        (11, 0, 2, {"hinted": 1}),
        (3, 0, 0, {}),
        (4, 2, 2, {}),
    ],
)
def test_a_hint_brings_what_is_not_worth_it(
    tokens: int, worth: int, come: int, counted: dict[str, int]
) -> None:
    bench, hashes = Bench(worth=worth), prompt("a", 3)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    wanted = bench.request(hashes)._replace(prefetch_tokens=tokens)
    assert bench.plan.lookup("r", wanted, 0.0)
    bench.step()
    bench.step()
    assert not bench.plan.lookup("r", wanted, 0.0)
    assert bench.ready(hashes) == come
    assert bench.counted("tier_decisions") == counted
    assert bench.plan.forget("r") == ("recompute" if come < 3 else None)


@pytest.mark.parametrize(("tokens", "waits"), [(0, False), (12, True)])
def test_a_request_with_a_hint_waits_until_the_deadline_of_jobs(tokens: int, waits: bool) -> None:
    bench, hashes = Bench(worth=0), prompt("a", 3)
    wanted = bench.request(hashes)._replace(prefetch_tokens=tokens)
    assert bench.plan.lookup("r", wanted, 0.0)
    bench.take(WAIT_S)
    assert bench.plan.lookup("r", wanted, WAIT_S) == waits
    bench.take(DEADLINE_S)
    assert not bench.plan.lookup("r", wanted, DEADLINE_S)
    assert bench.plan.forget("r") == "late"


def test_windowed_groups_prefetch_what_their_window_reaches() -> None:
    bench, hashes = Bench(HYBRID, slots=16, share=16), prompt("a", 4)
    bench.stored = dict.fromkeys([*keys(hashes), *keys(hashes, 1)[2:]], 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    asked = [key for _ in range(2) for lookup in bench.step().lookups for key in lookup.keys]
    assert asked == [*keys(hashes), keys(hashes, 1)[3]]
    (prefetch,) = bench.step().prefetches
    assert sorted(prefetch.keys) == sorted([*keys(hashes), keys(hashes, 1)[3]])


GEMMA = (*[CacheGroup(4, window=17)] * 3, CacheGroup(4))


def rounds(bench: Bench, request: LookupRequest) -> list[list[tuple[int, bytes]]]:
    """Have a request looked up and prefetched; return the blocks (group, hash) of each round."""
    asked = []
    assert bench.plan.lookup("r", request, 0.0)
    for _ in range(20):
        work = bench.step()
        if work.prefetches:
            return asked
        names = {
            request.key(number, block_hash): (number, block_hash)
            for number, row in enumerate(request.hashes)
            for block_hash in row
        }
        asked += [[names[key] for key in lookup.keys] for lookup in work.lookups]
    return asked


@pytest.mark.parametrize("most", [8, 1 << 14])
def test_a_prompt_of_any_length_is_looked_up_in_rounds(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading group comes first; of the others, only what the prefix found so far needs."""
    monkeypatch.setattr("kvconnect.tiers.search.MAX_KEYS", most)
    bench, hashes = Bench(GEMMA, slots=128, share=128, first_keys=most), prompt("a", 20)
    bench.stored = {key: 1 for number in range(4) for key in keys(hashes, number)}
    asked = rounds(bench, bench.request(hashes))
    lead = [block for block in (block for one in asked for block in one) if block[0] == 3]
    assert lead == [(3, block_hash) for block_hash in hashes]
    assert max(map(len, asked)) <= most
    assert sum(map(len, asked)) == 20 + 3 * 4
    assert not bench.plan.lookup("r", bench.request(hashes), 0.0)
    assert [bench.ready(hashes[16:], number) for number in range(3)] == [4, 4, 4]
    assert bench.ready(hashes, 3) == 20


@pytest.mark.parametrize(
    ("there", "asked"), [(0, [8]), (7, [8]), (8, [8, 64]), (20, [8, 64]), (100, [8, 64, 28])]
)
def test_where_each_key_costs_a_request_few_are_asked_for_in_vain(
    there: int, asked: list[int]
) -> None:
    bench, hashes = Bench(slots=128, share=128, first_keys=8), prompt("a", 100)
    bench.stored = dict.fromkeys([*keys(hashes[:there]), *keys(hashes[there + 1 :])], 1)
    assert [len(one) for one in rounds(bench, bench.request(hashes))] == asked
    assert bench.ready(hashes) == there


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("last", [0, 1, 7, 15, 31])
def test_where_windows_lack_blocks_the_prefix_ends_before(last: int, named: bool) -> None:
    """Windows are there up to the end of one block, full attention everywhere."""
    bench, hashes = Bench((CacheGroup(4), CacheGroup(4, window=5)), 128, share=128), prompt("a", 40)
    bench.stored = dict.fromkeys([*keys(hashes), keys(hashes, 1)[last]], 1)
    request = bench.request(hashes)._replace(source=SOURCE if named else ())
    asked = rounds(bench, request)
    assert len(asked) <= 4  # not one for each of 40 prefixes
    assert len({block for one in asked for block in one}) == sum(map(len, asked))
    assert (bench.ready(hashes), bench.ready(hashes[last:], 1)) == (last + 1, 1)


def test_behind_a_gap_of_the_leading_group_no_other_group_is_asked() -> None:
    bench, hashes = Bench(HYBRID, slots=16, share=16), prompt("a", 6)
    bench.stored = dict.fromkeys([*keys(hashes[:3]), *keys(hashes, 1)], 1)
    asked = rounds(bench, bench.request(hashes))
    assert asked == [[(0, it) for it in hashes], [(1, hashes[2])]]


def test_where_all_groups_have_windows_it_is_all_or_nothing() -> None:
    windowed = (CacheGroup(4, window=9),)
    for worth, come in ((1, 0), (2, 2)):
        bench, hashes = Bench(windowed, worth=worth), prompt("a", 4)
        bench.stored = dict.fromkeys(keys(hashes), 1)
        assert bench.plan.lookup("r", bench.request(hashes), 0.0)
        bench.step()
        bench.step()
        assert bench.offered == [(8, 4, (Tier.DISK, Tier.DISK))]
        assert bench.ready(hashes[2:]) == come


def test_tokens_are_those_of_the_group_with_full_attention() -> None:
    bench, hashes = Bench(HYBRID[::-1], slots=16, share=16), prompt("a", 4)
    bench.stored = dict.fromkeys([*keys(hashes), *keys(hashes, 1)], REMOTE)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    for _ in range(3):
        bench.step()
    assert bench.plan.on_load_planned("r") == {Tier.REMOTE: 16}


def test_a_request_does_not_wait_longer_than_it_may() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    (lookup,) = bench.take(0.0).lookups
    bench.take(WAIT_S)
    assert not bench.plan.lookup("r", bench.request(hashes), WAIT_S)
    assert bench.counted("tier_decisions") == {"late": 1}
    bench.plan.on_answer(TierAnswer(lookup.job, bytes([1, 1])), 6.0)
    assert bench.take(6.0).prefetches == []
    assert bench.plan.forget("r") == "late"


def test_a_prefetch_is_given_up_when_computing_would_have_been_faster() -> None:
    bench, hashes = Bench(patience=1.0), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step(0.0)
    (prefetch,) = bench.take(0.9).prefetches
    assert bench.plan.lookup("r", bench.request(hashes), 0.9)
    bench.take(1.0)
    assert not bench.plan.lookup("r", bench.request(hashes), 1.0)
    bench.plan.on_answer(TierAnswer(prefetch.job, bytes([1, 1])), 3.0)
    assert bench.prefetched == [(Tier.DISK, 2, 3.0)] and bench.plan.on_load_planned("r") == {}


def test_an_answer_that_never_comes_keeps_no_engine_awake_and_frees_no_slot() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step(0.0)
    (prefetch,) = bench.take(0.0).prefetches
    bench.take(20.0)
    assert bench.plan.busy  # an answer may have come during a long step
    bench.take(20.0)
    assert not bench.plan.busy
    assert bench.index.slots.used == 2  # the write may still land
    assert bench.counted("failed_blocks") == {"deadline": 2}
    bench.store(hashes[:1])  # others may bring it now: as here, who computes it
    assert bench.index.slots.used == 3
    bench.index.check()
    bench.plan.on_answer(TierAnswer(prefetch.job, bytes([1, 1])), 99.0)
    assert (bench.ready(hashes), bench.index.slots.used) == (1, 1)
    bench.index.check()


def test_nobody_follows_a_prefetch_for_longer_than_a_request_waits() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r1", bench.request(hashes), 0.0)
    bench.step(0.0)
    bench.take(0.0)  # it hangs
    assert bench.plan.lookup("r2", bench.request(hashes), WAIT_S - 0.1)  # the control
    assert not bench.plan.lookup("r3", bench.request(hashes), WAIT_S)
    longer = [*hashes, b"a2"]
    assert bench.plan.lookup(
        "r4", bench.request(longer), WAIT_S
    )  # what nobody brings is looked for
    (lookup,) = bench.take(WAIT_S).lookups
    assert list(lookup.keys) == keys(longer)[2:]


def test_lookups_that_no_worker_answers_are_not_kept() -> None:
    bench = Bench()
    for number in range(100):
        assert bench.plan.lookup(f"r{number}", bench.request(prompt(f"{number}", 2)), 0.0)
    lookups = bench.take(0.0).lookups
    assert len(bench.plan._jobs) == len(lookups) == 100
    bench.take(20.0)
    bench.take(20.0)
    assert len(bench.plan._jobs) == 0
    bench.plan.on_answer(TierAnswer(lookups[0].job, b"\1\1"), 21.0)  # is nobody's any more


def test_a_prefetch_that_hangs_leaves_room_for_others() -> None:
    bench, first, second = Bench(share=2), prompt("a", 2), prompt("b", 2)
    bench.stored = dict.fromkeys(keys([*first, *second]), 1)
    assert bench.plan.lookup("r1", bench.request(first), 0.0)
    bench.step(0.0)
    (hung,) = bench.take(0.0).prefetches
    assert bench.plan.lookup("r2", bench.request(second), 0.0)
    bench.step(0.0)
    assert not bench.take(0.0).prefetches  # the control: all room is taken
    bench.take(20.0)
    assert bench.plan.lookup("r3", bench.request(second), 20.0)
    bench.step(20.0)
    bench.step(20.0)
    assert bench.ready(second) == 2
    bench.plan.on_answer(TierAnswer(hung.job, b"\1\1"), 30.0)
    assert (bench.ready(first), bench.index.slots.used) == (0, 2)
    bench.index.check()


def test_a_write_back_that_hangs_leaves_room_for_others() -> None:
    bench = Bench(share=2)
    bench.store(prompt("a", 2))
    (hung,) = bench.take(0.0).write_backs
    bench.store(prompt("b", 2))
    assert not bench.take(0.0).write_backs  # the control
    assert not bench.take(20.0).write_backs
    (write_back,) = bench.take(20.0).write_backs
    assert list(write_back.keys) == keys(prompt("b", 2))
    assert bench.index.slots.busy == 4
    bench.plan.on_answer(TierAnswer(hung.job, b"\0\0"), 30.0)
    assert bench.index.slots.busy == 2
    bench.store(prompt("c", 2))
    assert not bench.take(30.0).write_backs  # what hung was counted once
    bench.plan.on_answer(TierAnswer(write_back.job, b"\1\1"), 30.0)
    assert len(bench.take(30.0).write_backs) == 1


def test_a_second_request_for_the_same_prefix_waits_for_the_first_ones_prefetch() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r1", bench.request(hashes), 0.0)
    bench.step()
    assert bench.plan.lookup("r2", bench.request(hashes), 0.0)
    work = bench.step()
    assert len(work.prefetches) == 1 and not work.lookups
    assert not bench.plan.lookup("r2", bench.request(hashes), 0.0)
    assert bench.ready(hashes) == 2


def test_requests_that_arrive_together_share_a_prefetch() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    for name in ("r1", "r2"):
        assert bench.plan.lookup(name, bench.request(hashes), 0.0)
    assert len(bench.step().lookups) == 2
    assert bench.plan.lookup("r2", bench.request(hashes), 0.0), "until the prefetch of r1 ends"
    work = bench.step()
    assert len(work.prefetches) == 1 and not work.lookups
    for name in ("r1", "r2"):
        assert not bench.plan.lookup(name, bench.request(hashes), 0.0)
    assert bench.ready(hashes) == 2


def test_what_a_request_waits_for_is_not_displaced_by_other_prefetches() -> None:
    bench, first, second = Bench(slots=4, share=4), prompt("a", 2), prompt("b", 4)
    bench.stored = dict.fromkeys([*keys(first), *keys(second)], 1)
    for name, hashes in (("r1", first), ("r2", second)):
        assert bench.plan.lookup(name, bench.request(hashes), 0.0)
        bench.step()
        bench.step()
    assert bench.ready(first) == 2
    assert bench.ready(second) == 2  # as much as there was room for
    bench.plan.on_load_planned("r1")
    bench.plan.on_load_planned("r2")
    assert not bench.index.slots.busy


@pytest.mark.parametrize("shared", [True, False])
def test_slots_that_many_requests_pin_count_once(shared: bool) -> None:
    """Control: slots of their own leave no room."""
    bench = Bench(slots=64, share=8)
    for number in range(4):
        head = prompt("head" if shared else f"head{number}", 4)
        own = prompt(f"own{number}", 1)
        if not bench.ready(head):
            bench.store(head)
        bench.stored.update(dict.fromkeys(keys(own), 1))
        assert bench.plan.lookup(f"r{number}", bench.request([*head, *own]), 0.0)
    prefetched = sum(len(bench.step().prefetches) for _ in range(3))
    assert prefetched == (4 if shared else 1)
    assert bench.counted("tier_decisions").get("no_space", 0) == 4 - prefetched
    for number in range(4):
        bench.plan.forget(f"r{number}")
    assert not len(bench.plan._pinned)
    bench.take()
    assert not bench.index.slots.pins.count(1) or bench.plan.write_backs.running


class Reads(list[bytes]):
    """Hashes of a prompt; counts how many of them are read."""

    def __init__(self, hashes: Sequence[bytes], seen: Counter[str]) -> None:
        super().__init__(hashes)
        self.seen = seen

    def __getitem__(self, at: Any) -> Any:
        got = super().__getitem__(at)
        self.seen["blocks"] += len(got) if isinstance(at, slice) else 1
        return got


@pytest.mark.parametrize("state", ["asked", "follows", "decided"])
@pytest.mark.parametrize("blocks", [10, 1000])
def test_a_request_that_waits_costs_the_same_for_any_prompt(state: str, blocks: int) -> None:
    bench, seen = Bench(slots=2 * blocks, share=2 * blocks), Counter[str]()
    hashes = prompt("a", blocks)
    request = bench.request(Reads(hashes, seen))
    bench.stored = dict.fromkeys(keys(hashes), 1)
    if state == "follows":
        assert bench.plan.lookup("first", bench.request(hashes), 0.0)
        bench.step()
        bench.take()  # its prefetch is under way
        assert bench.plan.lookup("r", request, 0.1)
    else:
        assert bench.plan.lookup("r", request, 0.0)
    if state == "decided":
        bench.step()
        bench.step()
    assert seen["blocks"] >= blocks  # the first look is at all of them
    seen.clear()
    for _ in range(10):
        assert bench.plan.lookup("r", request, 0.2) is (state != "decided")
    assert not seen["blocks"]


def test_a_prefetch_does_not_evict_the_head_of_its_own_prefix() -> None:
    bench, hashes = Bench(slots=4, share=4), prompt("a", 4)
    bench.store(hashes[:2])
    bench.store(prompt("b", 2))  # newer: by age alone, the head would leave
    bench.step()
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step()
    bench.step()
    assert bench.ready(hashes) == 4


def test_a_request_that_leaves_keeps_no_slot() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step()
    bench.step()
    assert bench.index.slots.busy == 2
    bench.plan.forget("r")
    assert not bench.index.slots.busy


def test_a_slot_that_got_another_block_is_not_written_under_the_old_name() -> None:
    bench, old, new = Bench(slots=1, share=1), prompt("a", 1), prompt("b", 1)
    bench.store(old)
    bench.store(new)  # queued behind it; there is room for one
    bench.step()
    assert bench.stored == {}
    bench.store(prompt("c", 1))
    bench.step()
    assert list(bench.stored) == keys(prompt("c", 1))


def test_behind_a_block_that_is_nowhere_nothing_is_looked_up() -> None:
    bench, hashes = Bench(), prompt("a", 3)
    bench.stored = dict.fromkeys(keys(hashes[1:]), 1)
    assert bench.plan.lookup("r1", bench.request(hashes[:1]), 0.0)
    bench.step()
    assert not bench.plan.lookup("r2", bench.request(hashes), 0.0)


def test_no_room_is_no_reason_to_wait() -> None:
    bench, hashes = Bench(slots=2, share=2), prompt("a", 2)
    bench.store(prompt("b", 2))
    bench.index.pin([0, 1])
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step()
    assert not bench.plan.lookup("r", bench.request(hashes), 0.0)
    assert bench.counted("tier_decisions") == {"no_space": 1}
    assert bench.plan.forget("r") == "no_space"


def test_blocks_may_have_other_names_in_lower_tiers() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    names = {block: b"name of " + block for block in hashes}
    bench.stored = dict.fromkeys(keys(list(names.values())), REMOTE)
    unnamed = bench.request(hashes)
    assert bench.plan.lookup("control", unnamed, 0.0)
    bench.step()
    assert not bench.plan.lookup("control", unnamed, 0.0) and not bench.ready(hashes)
    named = unnamed._replace(block_names=names)
    assert bench.plan.lookup("r", named, 1.0)
    bench.step(1.0)
    assert bench.plan.lookup("r", named, 1.0)
    (prefetch,) = bench.take(1.0).prefetches
    came = bench.plan.on_answer(TierAnswer(prefetch.job, bytes([REMOTE, REMOTE])), 1.0)
    places = list(zip(prefetch.keys, prefetch.slots, strict=True))
    assert came == ("r", [(0, block) for block in hashes], places, [])
    assert bench.ready(hashes) == 2
    assert bench.plan.on_load_planned("r") == {Tier.REMOTE: 8}


def test_another_tenant_finds_nothing() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    other = tenant_of("salt") + bytes(8)
    assert bench.plan.lookup("r", bench.request(hashes, prefix=other), 0.0)
    (lookup,) = bench.step().lookups
    assert list(lookup.keys) == keys(hashes, prefix=other)
    assert not bench.plan.lookup("r", bench.request(hashes, prefix=other), 0.0)


def test_write_backs_are_bounded_and_evicted_blocks_are_left_out() -> None:
    bench, hashes = Bench(slots=8, share=2), prompt("a", 8)
    bench.store(hashes[:4])
    assert bench.counted("tier_skipped_blocks") == {"": 2}
    (write_back,) = bench.take().write_backs
    assert list(write_back.keys) == keys(hashes[:2])
    bench.store(hashes[4:6])
    assert bench.take().write_backs == []  # two are under way
    (slot,) = bench.index.ready_slots(0, hashes[4:5])
    bench.index.quarantine(slot, FailureCause.COPY, bench.stats)
    bench.plan.on_answer(
        TierAnswer(write_back.job, bytes([0, 0])), 0.0
    )  # not written, not tried again
    (write_back,) = bench.take().write_backs
    assert list(write_back.keys) == keys(hashes[5:6])
    assert bench.counted("tier_skipped_blocks") == {"": 3}, "the one that left is counted, too"


def test_a_block_of_another_group_is_not_written_in_place_of_one_that_left() -> None:
    """Blocks of groups with one block size have the same hashes."""
    bench = Bench(groups=(CacheGroup(4), CacheGroup(4)), slots=2, share=1)
    first, late = prompt("a", 1), prompt("b", 1)
    bench.store(first)
    (write_back,) = bench.take().write_backs
    bench.store(late)  # waits
    (slot,) = bench.index.ready_slots(0, late)
    bench.index.quarantine(slot, FailureCause.COPY, bench.stats)
    assert bench.index.reserve(1, late[0]) == slot
    bench.index.commit([slot])
    bench.plan.on_answer(TierAnswer(write_back.job, bytes([1])), 0.0)
    assert bench.take().write_backs == []


def test_only_blocks_that_were_used_are_written_back_where_that_is_set() -> None:
    bench, hashes = Bench(reused=True), prompt("a", 2)
    bench.store(hashes)
    assert bench.step().write_backs == []
    (slot,) = bench.index.ready_slots(0, hashes[:1])
    for _ in range(2):
        bench.plan.write_backs.loaded(0, slot, block_key(SHARED, 0, hashes[0]))
    (write_back,) = bench.step().write_backs
    assert list(write_back.keys) == keys(hashes[:1])


def test_a_reset_makes_what_is_on_its_way_worthless() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.step()
    (prefetch,) = bench.take().prefetches
    bench.index.clear()
    bench.plan.reset()
    assert not bench.plan.lookup("r", bench.request(hashes), 0.0)
    bench.plan.on_answer(TierAnswer(prefetch.job, bytes([1, 1])), 0.0)
    assert bench.ready(hashes) == 0 and not bench.index.slots.used


@pytest.mark.parametrize("reused", [False, True])
def test_what_was_stored_before_a_reset_is_never_written_back(reused: bool) -> None:
    """Also where the host tier keeps it: a key that it gets later names other weights."""
    bench, hashes = Bench(reused=reused, share=1), prompt("a", 3)
    bench.store(hashes)
    slots = bench.index.ready_slots(0, hashes)
    now = [block_key(bytes([7]) * len(SHARED), 0, each) for each in hashes]
    if reused:
        bench.plan.write_backs.loaded(0, slots[0], keys(hashes)[0])
    (write_back,) = bench.take().write_backs  # of one block; others are queued, or not even that
    bench.plan.reset()
    assert not bench.plan.write_backs.waiting(slots)
    bench.plan.on_answer(TierAnswer(write_back.job, b"\0"), 0.0)  # it failed
    for block, slot, key in zip(hashes, slots, now, strict=True):
        bench.plan.write_backs.demoted(0, block, key)
        bench.plan.write_backs.loaded(0, slot, key)
    assert bench.step().write_backs == []
    later = prompt("b", 1)
    bench.store(later)  # control
    if reused:
        (slot,) = bench.index.ready_slots(0, later)
        bench.plan.write_backs.loaded(0, slot, keys(later)[0])
    assert [list(each.keys) for each in bench.step().write_backs] == [keys(later)]


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    bench, hashes = Bench(), prompt("a", 2)
    bench.stored = dict.fromkeys(keys(hashes), 1)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0)
    (lookup,) = bench.take().lookups
    bench.plan.on_answer(TierAnswer(lookup.job, b"\x01"), 0.0)  # of another length
    bench.plan.on_answer(TierAnswer(type(lookup.job)(99), bytes([1, 1])), 0.0)
    assert bench.plan.lookup("r", bench.request(hashes), 0.0) and bench.plan.busy


class Life(RuleBasedStateMachine):
    """Requests, stores, evictions, resets and answers in any order, from two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(HYBRID, slots=12, workers=2, share=5)
        self.now = 0.0
        self.open: list[
            tuple[LookupBlocks | PrefetchBlocks | WriteBackBlocks, int]
        ] = []  # and answers still to come
        self.asked: set[str] = set()
        self.reading: dict[int, list[int]] = {}

    names = st.sampled_from("abc")

    @rule(name=names, blocks=st.integers(1, 5), worth=st.integers(0, 5))
    def ask(self, name: str, blocks: int, worth: int) -> None:
        self.bench.worth = worth
        self.bench.plan.lookup(name, self.bench.request(prompt(name, blocks)), self.now)
        self.asked.add(name)

    @rule(name=names)
    def plan(self, name: str) -> None:
        self.bench.plan.on_load_planned(name)

    @rule(name=names)
    def forget(self, name: str) -> None:
        self.bench.plan.forget(name)
        self.asked.discard(name)

    @rule(name=names, group=st.integers(0, 1), block=st.integers(0, 4))
    def store(self, name: str, group: int, block: int) -> None:
        block_hash = prompt(name, 5)[block]
        if not self.bench.index.has(group, block_hash):
            slot = self.bench.index.reserve(group, block_hash)
            if slot is not None:
                self.bench.index.commit([slot])
                key = block_key(SHARED, group, block_hash)
                self.bench.plan.write_backs.stored(group, block_hash, key)

    @rule(seconds=st.floats(0.0, 6.0))
    def step(self, seconds: float) -> None:
        self.now += seconds
        work = self.bench.take(self.now)
        self.open += [(task, 2) for task in (*work.lookups, *work.prefetches, *work.write_backs)]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        task, left = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        one = st.sampled_from([0, 1, 1, 1, 2])
        found = bytes(data.draw(st.lists(one, min_size=len(task.keys), max_size=len(task.keys))))
        self.bench.plan.on_answer(TierAnswer(task.job, found), self.now)
        if left > 1:
            self.open.append((task, left - 1))

    @rule()
    def reset(self) -> None:
        self.bench.index.clear()
        self.bench.plan.reset()

    @invariant()
    def slots_add_up(self) -> None:
        self.bench.index.check()

    def teardown(self) -> None:
        """Once everything is answered and nobody waits, no slot is kept and nothing is open."""
        for task, left in self.open:
            for _ in range(left):
                self.bench.plan.on_answer(TierAnswer(task.job, bytes(len(task.keys))), self.now)
        for _ in range(20):
            self.bench.step(self.now)
        for name in self.asked:
            self.bench.plan.forget(name)
        assert not self.bench.plan.busy
        assert not self.bench.index.slots.busy
        self.bench.index.check()


TestLife = Life.TestCase
