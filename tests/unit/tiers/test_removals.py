"""Hints reach secondary tiers: ``drop`` removes blocks there, ``demote`` writes them first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.cache.groups import CacheGroup
from kvconnect.cache.keys import block_key
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.hints.plan import HintPlan, WrittenFirst, no_slots
from kvconnect.offload.index import HostIndex
from kvconnect.protocol.cache_hints import read_hints
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import SHARED, PrefetchDecision, TierLimits, TierPlan
from kvconnect.tiers import removals as module
from kvconnect.tiers.messages import (
    ABSENT,
    NOT_REMOVED,
    REMOVED,
    RemovalAnswer,
    RemoveBlocks,
    TierAnswer,
    WriteBackBlocks,
)
from kvconnect.tiers.removals import DroppedBlock, Removals
from kvconnect.types import Block

TOKENS = 4
SLOTS = 16
DEADLINE_S = 10.0
PROMPT = [f"p{n}".encode() for n in range(4)]
OTHERS = [f"other{n}".encode() for n in range(SLOTS)]

Task = WriteBackBlocks | RemoveBlocks


def key(block_hash: bytes) -> bytes:
    return block_key(SHARED, 0, block_hash)


class Bench:
    """The parts of a scheduler that hints concern, and a disk that is a set of keys."""

    def __init__(self, workers: int = 1, share: int = 4, reused: bool = False) -> None:
        self.groups = (CacheGroup(TOKENS),)
        self.workers = workers
        self.index = HostIndex(SLOTS, 1, make_policy("lru", SLOTS), 0.5)
        self.stats = OffloadingConnectorStats()
        self.hints = HintPlan(self.index, self.groups, self.stats)
        limits = TierLimits(workers, DEADLINE_S, 5.0, share, reused)
        choose = lambda offer: PrefetchDecision(len(offer.tiers))  # noqa: E731
        rest = (self.stats, limits, choose, lambda *_: None)
        self.plan = TierPlan(self.index, self.groups, *rest)
        self.removals = Removals(self.plan.write_backs, self.hints.outcomes, workers, DEADLINE_S)
        self.written_first: WrittenFirst = self.plan.write_backs.waiting
        self.disk: set[bytes] = set()
        self.numbers = count()

    def store(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            slot = self.index.reserve(0, block_hash)
            assert slot is not None
            self.settle(block_hash, slot)

    def settle(self, block_hash: bytes, slot: int, now: float = 0.0) -> None:
        """The store of a block ends."""
        self.index.commit([slot])
        self.plan.write_backs.stored(0, block_hash, key(block_hash))
        self.hints.settled([Block(0, block_hash)], [], now, self.written_first)

    def hint(self, name: str, hashes: Sequence[bytes] = PROMPT) -> dict[str, int] | None:
        """A request with a hint comes and ends."""
        tokens = TOKENS * len(hashes)
        self.hints.add("r", read_hints({name: True}), b"t", [hashes], tokens, 0.0)
        _, blocks = self.hints.released("r")
        if name == "drop":
            dropped = [DroppedBlock(key(it[1]), self.hints.absent(it)) for it in blocks]
            self.removals.add(dropped)
        else:
            for block in blocks:
                self.plan.write_backs.demoted(*block, key(block[1]))
        return self.hints.finish("r", 0.0, name == "drop", self.written_first)

    def take(self, now: float = 0.0) -> list[Task]:
        """Return the work of a step."""
        jobs: list[WriteBackBlocks] = self.plan.take(now).write_backs
        return [*jobs, *self.removals.take(now)]

    def do(self, task: Task, now: float = 0.0) -> None:
        """Every worker does its work, and answers."""
        for _ in range(self.workers):
            if isinstance(task, WriteBackBlocks):
                self.disk.update(task.keys)
                self.plan.on_answer(TierAnswer(task.job, b"\1" * len(task.keys)), now)
                self.hints.written(self.plan.take_ended())
            else:
                found = bytes(REMOVED if it in self.disk else ABSENT for it in task.keys)
                self.removals.on_answer(RemovalAnswer(task.job, found))
        if isinstance(task, RemoveBlocks):
            self.disk.difference_update(task.keys)

    def run(self) -> None:
        """Do all the work there is."""
        while tasks := self.take():
            for task in tasks:
                self.do(task)

    def press(self, blocks: int) -> None:
        """Evict as many blocks."""
        room = SLOTS - self.index.slots.used
        for _ in range(blocks + room):
            slot = self.index.reserve(0, b"press%d" % next(self.numbers))
            assert slot is not None
            self.index.commit([slot])  # not to be written back
        self.index.check()

    def ready(self) -> int:
        return len(self.index.ready_slots(0, PROMPT))

    def outcomes(self) -> dict[str, float]:
        counters: dict[str, dict[str, float]] = self.stats.data["counters"]
        return counters.get("cache_hint_blocks", {})


def keys(hashes: Sequence[bytes]) -> set[bytes]:
    return set(map(key, hashes))


# drop ---------------------------------------------------------------------------------------------


def test_dropped_blocks_leave_host_memory_and_the_disk_and_are_counted_once() -> None:
    bench = Bench(workers=2, share=8)
    bench.store([*PROMPT, *OTHERS[:2]])
    bench.run()
    slot = bench.index.slot_of(0, PROMPT[3])
    assert slot is not None
    bench.index.remove([slot])  # it is on the disk only
    assert bench.disk == keys([*PROMPT, *OTHERS[:2]])
    assert bench.hint("drop", [*PROMPT, b"nowhere"]) == {"dropped": 3, "pending": 2}
    assert bench.ready() == 0 and bench.outcomes() == {}
    assert bench.removals.busy
    bench.run()
    assert bench.disk == keys(OTHERS[:2])
    assert bench.outcomes() == {"dropped": 4, "missing": 1}
    assert not bench.removals.busy


def test_control_without_the_hint_the_disk_keeps_them() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.run()
    bench.index.remove(bench.index.ready_slots(0, PROMPT))
    bench.run()
    assert bench.disk == keys(PROMPT)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_block_that_is_being_written_is_removed_after_that(ordered: bool) -> None:
    bench = Bench()
    bench.store(PROMPT[:2])
    (write,) = bench.take()
    bench.hint("drop", PROMPT[:3])
    if not ordered:  # the negative control: it comes back
        bench.plan.write_backs.running.clear()
    (removal,) = bench.take()
    assert removal.keys == tuple(map(key, PROMPT[2:3] if ordered else PROMPT[:3]))
    bench.do(removal)
    assert not bench.removals.busy and bench.take() == []  # the write-back keeps the engine awake
    bench.do(write)
    assert bench.removals.busy is ordered
    bench.run()
    assert bench.disk == (set() if ordered else keys(PROMPT[:2]))
    assert not bench.index.slots.used
    assert bench.outcomes() == {"dropped": 2, "missing": 1}


def test_a_queued_block_is_not_written_once_it_is_dropped() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.hint("drop")
    (removal,) = bench.take()
    assert isinstance(removal, RemoveBlocks)


def test_a_block_that_is_being_stored_is_dropped_when_that_ends_and_counted_there() -> None:
    bench = Bench()
    bench.disk.update(keys(PROMPT[:2]))  # an older copy
    slot = bench.index.reserve(0, PROMPT[0])
    assert slot is not None
    assert bench.hint("drop", PROMPT[:2]) == {"pending": 2}
    bench.run()
    assert bench.disk == set() and bench.outcomes() == {"dropped": 1}
    bench.settle(PROMPT[0], slot)
    bench.run()
    assert bench.disk == set() and bench.outcomes() == {"dropped": 2}
    assert not bench.index.slots.used


@pytest.mark.parametrize("found", [True, False])
def test_a_block_that_is_being_prefetched_is_dropped_too(found: bool) -> None:
    bench = Bench()
    slot = bench.index.reserve(0, PROMPT[0])
    assert slot is not None
    assert bench.hint("drop", PROMPT[:1]) == {"pending": 1}
    blocks = [Block(0, PROMPT[0])]
    if found:
        bench.index.commit([slot])
    else:
        bench.index.abandon([slot])
    bench.hints.settled(blocks if found else [], [] if found else blocks, 0.0)
    assert bench.ready() == 0 and bench.outcomes() == {"dropped" if found else "missing": 1}
    bench.store(PROMPT)
    assert bench.ready() == 4  # the hint is over


def test_a_tier_that_fails_and_workers_that_do_not_answer_are_told_from_success() -> None:
    bench = Bench(workers=2)
    bench.store(PROMPT)
    bench.run()
    bench.hint("drop")
    (removal,) = bench.take(0.0)
    answers = [bytes([REMOVED, ABSENT, REMOVED, ABSENT]), bytes([NOT_REMOVED, REMOVED, 0, 0])]
    for found in answers:
        bench.removals.on_answer(RemovalAnswer(removal.job, found))
    assert bench.outcomes() == {"stayed": 1, "dropped": 3}
    bench.hint("drop")
    (late,) = bench.take(0.0)
    assert bench.take(20.0) == [] and bench.removals.busy
    assert bench.take(20.0) == [] and not bench.removals.busy
    assert bench.outcomes() == {"stayed": 5, "dropped": 3}
    bench.hint("drop", PROMPT[:1])
    (removal,) = bench.take(20.0)
    for one in (late, late):  # too late, or of another length
        bench.removals.on_answer(RemovalAnswer(one.job, bytes([REMOVED])))
    bench.removals.on_answer(RemovalAnswer(removal.job, bytes(2)))
    assert bench.removals.busy and bench.outcomes() == {"stayed": 5, "dropped": 3}


def test_the_queue_is_bounded_and_jobs_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_QUEUED", 5)
    monkeypatch.setattr(module, "_JOB_BLOCKS", 2)
    bench = Bench()
    bench.hint("drop", OTHERS[:7])
    assert bench.outcomes() == {"stayed": 2}
    (first,) = bench.take()
    assert len(first.keys) == 2 and bench.take() == []
    bench.do(first)
    bench.run()
    assert bench.outcomes() == {"stayed": 2, "missing": 5}


# demote -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["queued", "pending", "skipped", "failed"])
def test_demoted_blocks_are_on_the_disk_before_they_go_from_host_memory(state: str) -> None:
    bench = Bench()
    bench.store(OTHERS[:4])
    if state == "pending":
        bench.run()
        slots = [bench.index.reserve(0, block_hash) for block_hash in PROMPT]
        assert bench.hint("demote") == {"pending": 4}
        for block_hash, slot in zip(PROMPT, slots, strict=True):
            assert slot is not None
            bench.settle(block_hash, slot)
    else:
        if state == "skipped":
            bench.store(PROMPT)
            assert bench.stats.data["counters"]["tier_skipped_blocks"] == {"": 4}
        bench.run()
        if state != "skipped":
            bench.store(PROMPT)
        if state == "failed":
            (failed,) = bench.take()
            bench.plan.on_answer(TierAnswer(failed.job, bytes(4)), 0.0)
        if state != "queued":
            assert bench.take() == []  # the control: without the hint, they are not written
        assert bench.hint("demote") == {"demoted": 4}
    bench.press(4)  # before they are written, older ones are evicted
    assert bench.ready() == 4 and not keys(PROMPT) & bench.disk
    bench.run()
    assert keys(PROMPT) <= bench.disk and bench.outcomes() == {"demoted": 4}
    bench.store([b"new"])
    bench.press(3)
    assert bench.ready() == 0 and bench.index.has(0, b"new")


def test_a_demotion_waits_for_its_own_write_back_only() -> None:
    bench = Bench(share=8)
    bench.store(OTHERS[:4])  # older, queued first
    bench.run()
    bench.store(PROMPT)
    bench.hint("demote")
    bench.press(4)
    assert bench.ready() == 4 and not bench.index.ready_slots(0, OTHERS[:1])  # still younger
    (write,) = bench.take()
    bench.press(2)  # meets them: a job reads them
    assert bench.ready() == 4
    bench.do(write)
    bench.press(4)
    assert bench.ready() == 0 and keys(PROMPT) <= bench.disk


@pytest.mark.parametrize("why", ["written", "reused", "no_tier"])
def test_without_anything_to_write_a_demotion_is_immediate(why: str) -> None:
    bench = Bench(share=8, reused=why == "reused")
    if why == "no_tier":
        bench.written_first = no_slots
    bench.store(OTHERS[:4])
    bench.store(PROMPT)
    if why == "written":
        bench.run()
    bench.hint("demote")
    bench.press(4)
    assert bench.ready() == 0
    assert len(bench.index.ready_slots(0, OTHERS[:4])) == 4


def test_a_newer_hint_ends_a_demotion_that_waits() -> None:
    bench = Bench()
    bench.store(PROMPT)
    bench.hint("demote")
    bench.hints.add("r", read_hints({"pin": 60}), b"t", [PROMPT], TOKENS * 4, 0.0)
    bench.hints.finish("r", 0.0)
    bench.run()
    bench.press(8)
    assert bench.ready() == 4
    bench.index.check()


def test_a_slot_that_has_another_block_by_now_is_not_demoted() -> None:
    bench = Bench()
    bench.store(PROMPT[:1])
    bench.hint("demote", PROMPT[:1])
    (slot,) = bench.index.ready_slots(0, PROMPT[:1])
    bench.index.remove([slot])
    bench.store([b"new"])
    assert bench.index.slot_of(0, b"new") == slot
    bench.run()
    bench.press(0)
    bench.press(1)
    assert bench.index.slot_of(0, b"new") is None  # by its age
    assert not bench.hints._demoting


# At random ----------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Stores, hints, and write-backs and removals that end in any order. A dropped block is on the
    disk afterwards only if it was stored again after the drop."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.open: list[Task] = []
        self.storing: dict[bytes, int] = {}
        self.gone: set[bytes] = set()
        self.asked = 0

    blocks = st.lists(st.sampled_from(PROMPT), min_size=1, max_size=4, unique=True)

    @rule(block=st.sampled_from(PROMPT), at_once=st.booleans())
    def store(self, block: bytes, at_once: bool) -> None:
        if not self.bench.index.has(0, block):
            slot = self.bench.index.reserve(0, block)
            if slot is not None:
                self.storing[block] = slot
                self.gone.discard(block)
        if at_once and self.storing:
            self.stored()
            self.step()

    @precondition(lambda self: self.storing)
    @rule()
    def stored(self) -> None:
        block, slot = self.storing.popitem()
        self.bench.settle(block, slot)

    @rule(blocks=blocks)
    def drop(self, blocks: list[bytes]) -> None:
        blocks = self.unhinted(blocks)
        self.bench.hint("drop", blocks)
        self.gone.update(blocks)
        self.asked += len(blocks)
        self.step()

    @rule(blocks=blocks)
    def demote(self, blocks: list[bytes]) -> None:
        blocks = self.unhinted(blocks)
        self.bench.hint("demote", blocks)
        self.asked += len(blocks)

    def unhinted(self, blocks: list[bytes]) -> list[bytes]:
        """Return the blocks without those that already wait for a hint: there, the last one wins
        and is counted."""
        return [it for it in blocks if (0, it) not in self.bench.hints._waiting]

    @rule()
    def step(self) -> None:
        self.open += self.bench.take()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.open) - 1))
        self.bench.do(self.open.pop(number))

    @invariant()
    def slots_add_up(self) -> None:
        self.bench.index.check()
        self.bench.index.check()

    @invariant()
    def nothing_comes_back(self) -> None:
        removals = self.bench.removals
        due = {block.key for block in (*removals._queue, *removals._held)}
        due.update(*(task.keys for task in self.open))
        assert not (self.bench.disk & keys(sorted(self.gone))) - due

    def teardown(self) -> None:
        for block, slot in self.storing.items():
            self.bench.settle(block, slot)
        for task in reversed(self.open):  # a write-back that is not waited for ends last
            self.bench.do(task)
        self.bench.run()
        assert not self.bench.disk & keys(sorted(self.gone))
        assert not any(self.bench.index.has(0, block) for block in self.gone)
        assert not self.bench.removals.busy and not self.bench.plan.write_backs.running
        assert sum(self.bench.outcomes().values()) == self.asked


TestLife = Life.TestCase
