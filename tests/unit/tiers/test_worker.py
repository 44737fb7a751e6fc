"""A worker's secondary tiers: lookups, prefetches and write-backs on their own threads."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence

import pytest

from kvconnect.cache.keys import block_key
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostArena
from kvconnect.tiers import SHARED
from kvconnect.tiers.backends import BlockOutcome, Store
from kvconnect.tiers.backends.memory import MemoryStore
from kvconnect.tiers.messages import (
    ABSENT,
    NOT_REMOVED,
    REMOVED,
    SECONDARY_TIERS,
    LookupBlocks,
    PrefetchBlocks,
    RemovalAnswer,
    RemoveBlocks,
    TierAnswer,
    WriteBackBlocks,
)
from kvconnect.tiers.worker import TierWorker
from kvconnect.types import JobId, Tier

pytest.importorskip("xxhash")

SIZES = (5000, 9000)  # of a block, per group: neither is whole pages
GEOMETRY = Geometry(tuple(GroupGeometry((ByteRun(0, size, size),), 4) for size in SIZES))
SLOTS = 8
WAIT_S = 20.0
JOB = JobId(1)
DISK, REMOTE = map(SECONDARY_TIERS.index, (Tier.DISK, Tier.REMOTE))


class Fragile(MemoryStore):
    """Raises, or holds calls back, when told to."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.gate = threading.Event()
        self.gate.set()
        self.readable = threading.Event()
        self.readable.set()
        self.entered = threading.Semaphore(0)  # by writes
        self.reads = 0
        self.count = threading.Lock()
        self.broken = False

    def remove(self, keys: Sequence[bytes]) -> list[BlockOutcome]:
        assert threading.current_thread().name.startswith("kvconnect-write-")
        self.gate.wait(WAIT_S)
        if self.broken:
            raise OSError("told to")
        return super().remove(keys)

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        self.entered.release()
        self.gate.wait(WAIT_S)
        if self.broken:
            raise OSError("told to")
        return super().put(keys, payloads)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        with self.count:
            self.reads += 1
        self.readable.wait(WAIT_S)
        if self.broken:
            raise OSError("told to")
        return super().get(keys, buffers)


class Bench:
    def __init__(self) -> None:
        self.host = HostArena(SLOTS, GEOMETRY.slot_bytes, "full")
        self.disk, self.remote = Fragile(), Fragile()
        self.now = 0.0
        self.later: list[TierAnswer] = []
        stores: dict[Tier, Store] = {Tier.DISK: self.disk, Tier.REMOTE: self.remote}
        self.tiers = TierWorker(stores, self.host, GEOMETRY, clock=lambda: self.now)

    def fill(self, slot: int, group: int = 0, seed: int = 1) -> bytes:
        content = bytes((slot * 7 + seed + i) % 251 for i in range(SIZES[group]))
        self.host.view(slot, len(content))[:] = content
        self.host.seal(slot, len(content))
        return content

    def do(self, task: LookupBlocks | PrefetchBlocks | WriteBackBlocks | RemoveBlocks) -> bytes:
        self.tiers.submit([task])
        return self.answer().found

    def reading(self, calls: int) -> None:
        """Wait until the disk has been read so often, and notice what is late by then."""
        deadline = time.monotonic() + WAIT_S
        while self.disk.reads < calls:
            assert time.monotonic() < deadline, "no call"
            time.sleep(0.001)

    def next_answer(self) -> TierAnswer:
        """Return the answers one by one."""
        if not self.later:
            deadline = time.monotonic() + WAIT_S
            while not self.later:
                assert time.monotonic() < deadline, "no answer"
                self.wait()
                self.later += self.tiers.poll()
        return self.later.pop(0)

    def wait(self) -> None:
        self.tiers.news.wait(0.1)
        self.tiers.news.clear()

    def answer(self) -> TierAnswer:
        deadline = time.monotonic() + WAIT_S
        while not (answers := self.tiers.poll()):
            assert time.monotonic() < deadline, "no answer"
            self.wait()
        (answer,) = answers
        return answer


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.disk.gate.set()
    bench.disk.readable.set()
    bench.tiers.close()


def key(number: int, group: int = 0) -> bytes:
    return block_key(SHARED, group, bytes([number]) * 32)


def write_back(numbers: Sequence[int], group: int = 0) -> WriteBackBlocks:
    return WriteBackBlocks(JOB, tuple(key(n, group) for n in numbers), array("q", numbers), 10.0)


def prefetch(numbers: Sequence[int], slots: Sequence[int], group: int = 0) -> PrefetchBlocks:
    return PrefetchBlocks(JOB, tuple(key(n, group) for n in numbers), array("q", slots), 10.0)


@pytest.mark.parametrize("group", [0, 1])
def test_blocks_that_were_written_back_come_back_sealed(bench: Bench, group: int) -> None:
    contents = [bench.fill(slot, group) for slot in (0, 1)]
    assert bench.do(write_back([0, 1], group)) == b"\1\1"
    assert bench.do(LookupBlocks(JOB, (key(0, group), key(5, group), key(1, group)))) == b"\1\0\1"
    assert bench.do(prefetch([1, 0], [4, 5], group)) == b"\1\1"
    for slot, content in ((4, contents[1]), (5, contents[0])):
        assert bench.host.view(slot, SIZES[group]) == content
        bench.host.verify(slot, SIZES[group])
    bench.host.view(4)[0] ^= 1
    with pytest.raises(Corrupt):
        bench.host.verify(4, SIZES[group])


def test_the_second_tier_has_what_the_first_lost(bench: Bench) -> None:
    bench.fill(0), bench.fill(1)
    bench.do(write_back([0, 1]))
    MemoryStore.remove(bench.disk, [key(0)])
    assert bench.do(LookupBlocks(JOB, (key(0), key(1)))) == bytes([REMOTE, DISK])
    assert bench.do(prefetch([0, 1, 2], [4, 5, 6])) == bytes([REMOTE, DISK, 0])


def test_what_a_tier_has_is_not_written_again(bench: Bench) -> None:
    """Another engine has written it, or this one, before it left host memory."""
    bench.fill(0)
    assert bench.do(write_back([0])) == b"\1"
    MemoryStore.remove(bench.remote, [key(0)])
    bench.fill(0, seed=2), bench.fill(1, seed=2)
    assert bench.do(write_back([0, 1])) == b"\1\1", "they have all of them"
    for store, number, first in ((bench.disk, 0, 1), (bench.remote, 0, 2), (bench.disk, 1, 9)):
        assert store.get([key(number)], [bench.host.view(6, SIZES[0])]) == [BlockOutcome.OK]
        assert bench.host.view(6, SIZES[0])[0] == first


def test_a_block_that_rotted_in_host_memory_is_not_signed_by_a_tier(bench: Bench) -> None:
    bench.fill(0), bench.fill(1)
    bench.host.view(0)[17] ^= 1
    assert bench.do(write_back([0, 1])) == b"\0\1"
    assert bench.do(LookupBlocks(JOB, (key(0), key(1)))) == b"\0\1"


def test_a_record_of_another_length_is_not_there(bench: Bench) -> None:
    bench.disk.put([key(0)], [bench.host.view(0, 100)])
    assert bench.do(LookupBlocks(JOB, (key(0),))) == b"\0"
    assert bench.do(prefetch([0], [1])) == b"\0"


def test_a_store_that_raises_finds_nothing_and_the_next_job_is_done(bench: Bench) -> None:
    bench.fill(0)
    bench.disk.broken = True
    assert bench.do(write_back([0])) == bytes([REMOTE])  # the other tier has taken it
    assert bench.do(LookupBlocks(JOB, (key(0),))) == bytes([REMOTE])
    bench.disk.broken = False
    assert bench.do(write_back([0])) == b"\1"
    bench.disk.broken = True
    assert bench.do(prefetch([0], [1])) == bytes([REMOTE])
    bench.remote.broken = True
    assert bench.do(prefetch([0], [1])) == b"\0"


def test_a_system_without_threads_ends_no_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is refused where its tier has no thread; else those that are there make it."""

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench.fill(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert bench.do(write_back([0])) == b"\0"
        assert bench.do(LookupBlocks(JOB, (key(0),))) == b"\0"
    bench.now += 1.0  # tried again
    assert bench.do(write_back([0])) == bytes([DISK])
    bench.disk.gate.clear()
    bench.fill(1)
    bench.fill(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        bench.tiers.submit([write_back([1]), write_back([2])])  # one thread each
        assert bench.tiers.poll() == []
        bench.disk.gate.set()
        assert [bench.next_answer().found for _ in range(2)] == [bytes([DISK])] * 2


def test_past_its_deadline_a_job_moves_nothing(bench: Bench) -> None:
    for slot in range(3):
        bench.fill(slot)
    bench.disk.gate.clear(), bench.remote.gate.clear()
    bench.tiers.submit(
        [write_back([0]), write_back([1]), write_back([2])]
    )  # the third waits for threads
    bench.now = 11.0
    bench.disk.gate.set(), bench.remote.gate.set()
    found: list[TierAnswer] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < 3:
        assert time.monotonic() < deadline
        bench.wait()
        found += bench.tiers.poll()
    assert bench.do(LookupBlocks(JOB, (key(2),))) == b"\0"


def test_a_write_back_that_hangs_delays_no_prefetch(bench: Bench) -> None:
    for slot in range(4):
        bench.fill(slot)
    bench.do(write_back([0]))
    bench.disk.gate.clear()
    bench.tiers.submit([write_back([1]), write_back([2]), write_back([3])])
    assert bench.do(prefetch([0], [4])) == b"\1"


def test_large_jobs_are_cut_and_answered_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.tiers, "_batch_blocks", 2)
    contents = [bench.fill(slot) for slot in range(5)]
    assert bench.do(write_back(range(5))) == bytes([1] * 5)
    for slot in range(5):
        bench.host.view(slot)[:] = bytes(GEOMETRY.slot_bytes)
    assert bench.do(prefetch(range(5), range(5))) == bytes([1] * 5)
    assert [bench.host.view(slot, SIZES[0]) for slot in range(5)] == contents


def test_what_the_stores_record_is_handed_over_with_how_they_are(bench: Bench) -> None:
    bench.fill(0)
    bench.remote.close()
    bench.do(write_back([0]))
    stats = bench.tiers.take_stats()
    assert stats is not None
    assert stats.data["counters"]["store_failed_blocks"] == {"unavailable": 1}
    assert stats.data["gauges"]["tier_available"] == {"disk": True, "remote": False}
    assert bench.tiers.take_stats() is None


def test_closing_drops_what_waits_and_ends_what_runs(bench: Bench) -> None:
    for slot in range(3):
        bench.fill(slot)
    bench.disk.gate.clear()
    bench.tiers.submit([write_back([0]), write_back([1]), write_back([2])])
    for _ in range(2):  # as many threads write
        assert bench.disk.entered.acquire(timeout=WAIT_S)
    for _ in range(3):  # none of them waits for the other tier
        assert bench.remote.entered.acquire(timeout=WAIT_S)
    threading.Timer(0.1, bench.disk.gate.set).start()
    bench.tiers.close()
    assert len(bench.tiers.poll()) == 2
    assert bench.disk.usage() == (0, 0, 1 << 24, False)
    bench.tiers.close()


def test_a_store_that_cannot_be_closed_keeps_no_other_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill(0)
    bench.do(write_back([0]))

    def close() -> None:
        raise OSError("told to")

    monkeypatch.setattr(bench.disk, "close", close)
    with pytest.raises(OSError, match="told to"):
        bench.tiers.close()
    assert not bench.remote.usage().available


# Removals ---------------------------------------------------------------------------------------


def removal(numbers: Sequence[int]) -> RemoveBlocks:
    return RemoveBlocks(JOB, tuple(key(number) for number in numbers), 10.0)


def test_blocks_are_removed_from_every_tier_and_no_others_are(bench: Bench) -> None:
    for slot in range(3):
        bench.fill(slot)
    bench.do(write_back(range(3)))
    MemoryStore.remove(bench.disk, [key(0)])
    bench.tiers.submit([removal([0, 1, 7])])
    answer = bench.answer()
    assert isinstance(answer, RemovalAnswer)
    assert answer.found == bytes([REMOVED, REMOVED, ABSENT])
    assert bench.do(LookupBlocks(JOB, (key(0), key(1), key(2)))) == b"\0\0\1"


def test_many_blocks_are_removed_in_many_calls(bench: Bench) -> None:
    bench.fill(0)
    bench.do(write_back([0]))
    keys = (*(block_key(SHARED, 0, bytes([n // 250, n % 250])) for n in range(600)), key(0))
    assert bench.do(RemoveBlocks(JOB, keys, 10.0)) == bytes(600) + bytes([REMOVED])


def test_a_tier_that_fails_to_remove_says_so_and_the_others_do(bench: Bench) -> None:
    bench.fill(0)
    bench.do(write_back([0]))
    bench.disk.broken = True
    assert bench.do(removal([0])) == bytes([NOT_REMOVED])
    assert bench.remote.exists([key(0)]) == [0] and bench.disk.exists([key(0)]) != [0]


def test_a_tier_that_hangs_keeps_nobody_from_the_answer_of_later_removals(bench: Bench) -> None:
    bench.fill(0)
    bench.do(write_back([0]))
    bench.disk.gate.clear()
    bench.tiers.submit([removal([0])])
    deadline = time.monotonic() + WAIT_S
    while bench.remote.exists([key(0)]) != [0]:  # the other tier is done, the disk hangs
        assert time.monotonic() < deadline
        time.sleep(0.001)
    threads = bench.tiers._tiers.writers[Tier.DISK]
    while not threads._running:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bench.tiers.poll() == []
    bench.now += 5.0
    assert bench.do(removal([0])) == bytes([NOT_REMOVED])  # refused: a call is late
    bench.disk.gate.set()
    assert bench.answer().found == bytes([REMOVED])


# A tier that hangs ------------------------------------------------------------------------------


def hung(bench: Bench) -> None:
    """Both tiers have blocks 0 to 7; four reads of the disk hang, and are late."""
    for slot in range(8):
        bench.fill(slot)
    assert bench.do(write_back(range(8))) == bytes([1] * 8)
    bench.disk.readable.clear()
    bench.tiers.submit(
        PrefetchBlocks(JobId(10 + n), (key(n),), array("q", [n]), 30.0) for n in range(4)
    )
    bench.reading(4)
    assert bench.tiers.poll() == []
    bench.now += 5.0


def test_when_the_disk_hangs_the_remote_tier_goes_on_serving(bench: Bench) -> None:
    hung(bench)
    for number in range(4, 8):
        assert bench.do(LookupBlocks(JOB, (key(number),))) == bytes([REMOTE])
        assert bench.do(prefetch([number], [number])) == bytes([REMOTE])
    bench.fill(4, seed=3)
    assert bench.do(write_back([4])) == b"\1"  # what is written has threads of its own
    stats = bench.tiers.take_stats()
    assert stats is not None
    assert stats.data["gauges"]["tier_available"] == {"disk": False, "remote": True}
    assert stats.data["counters"]["store_failed_blocks"] == {"late": 4}
    assert bench.disk.reads == 4


def test_the_control_a_disk_that_does_not_hang_is_asked(bench: Bench) -> None:
    hung(bench)
    bench.now -= 0.1
    bench.tiers.submit([LookupBlocks(JOB, (key(5),))])
    assert bench.tiers.poll() == []  # it waits for a thread of the disk
    bench.disk.readable.set()
    found = [bench.next_answer() for _ in range(5)]
    assert sorted(answer.found for answer in found) == [b"\1"] * 5
    assert bench.do(prefetch([5], [5])) == b"\1"


def test_what_waited_for_a_disk_that_hangs_goes_to_the_next_tier(bench: Bench) -> None:
    for slot in range(6):
        bench.fill(slot)
    bench.do(write_back(range(6)))
    bench.disk.readable.clear()
    bench.tiers.submit(
        PrefetchBlocks(JobId(10 + n), (key(n),), array("q", [n]), 30.0) for n in range(4)
    )
    bench.reading(4)
    bench.tiers.submit([prefetch([4], [4]), LookupBlocks(JobId(2), (key(5), key(7)))])
    bench.now = 4.9
    assert bench.tiers.poll() == []
    bench.now = 5.0
    assert {bench.next_answer() for _ in range(2)} == {
        TierAnswer(JOB, bytes([REMOTE])),
        TierAnswer(JobId(2), b"\0\0"),
    }


def test_a_disk_that_comes_back_is_probed_and_used(bench: Bench) -> None:
    hung(bench)
    assert bench.do(prefetch([5], [5])) == bytes([REMOTE])
    bench.disk.readable.set()
    found = {bench.next_answer() for _ in range(4)}
    assert found == {TierAnswer(JobId(10 + n), b"\1") for n in range(4)}
    assert bench.do(prefetch([5], [5])) == bytes([REMOTE])  # it hung until just now
    bench.now += 1.0
    assert bench.do(prefetch([5], [5])) == b"\1"
    assert bench.do(prefetch([6], [6])) == b"\1"


def test_lookups_of_a_disk_that_hangs_do_not_pile_up(bench: Bench) -> None:
    hung(bench)
    bench.now -= 5.0
    bench.tiers.submit(LookupBlocks(JobId(100 + n), (key(n % 8),)) for n in range(5000))
    threads = bench.tiers._tiers.readers[Tier.DISK]
    assert len(threads._queue) == 4096
    bench.now += 5.0
    answers = []
    deadline = time.monotonic() + WAIT_S
    while len(answers) < 5000:
        assert time.monotonic() < deadline
        answers += bench.tiers.poll()
        bench.wait()
    assert {answer.job for answer in answers} == {100 + n for n in range(5000)}
    assert not threads._queue


def test_closing_does_not_wait_for_a_call_that_hangs(bench: Bench) -> None:
    hung(bench)
    bench.tiers.close()
    assert bench.disk.usage().available  # it was not closed, as it is in use
    assert not bench.remote.usage().available
    bench.disk.readable.set()


def test_all_threads_of_a_tier_end_with_it(bench: Bench) -> None:
    bench.fill(0)
    bench.do(write_back([0]))
    mine = [t for t in threading.enumerate() if t.name.startswith("kvconnect-write-")]
    assert mine
    bench.tiers.close()
    for thread in mine:
        thread.join(WAIT_S)
        assert not thread.is_alive()
