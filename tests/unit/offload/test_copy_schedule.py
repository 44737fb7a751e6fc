"""Which chunk is launched next, and how large it is."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest

from kvconnect.copy.base import MAX_DESCRIPTORS, MAX_IN_FLIGHT, Copier, Direction
from kvconnect.offload import copy_schedule
from kvconnect.offload.copy_schedule import (
    CHUNK_BYTES,
    CHUNK_S,
    Chunks,
    ChunkSize,
    CopySchedule,
    RateLimiter,
)
from kvconnect.offload.messages import GroupBlocks
from kvconnect.types import TransferType

LOAD, STORE = TransferType.CPU_TO_GPU, TransferType.GPU_TO_CPU
MIB = 1 << 20


def blocks(count: int, group: int = 0, first: int = 0) -> GroupBlocks:
    numbers = range(first, first + count)
    return GroupBlocks(group, array("q", numbers), array("q", numbers))


@dataclass(eq=False)
class Job:
    kind: TransferType
    chunks: Chunks
    awaits_fence: bool = False


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [25e9, 55e9, 400e9])
def test_a_chunk_takes_the_same_time_at_every_rate(rate: float) -> None:
    size = ChunkSize()
    assert size.nbytes == CHUNK_BYTES  # nothing is known
    for _ in range(20):
        size.copied(size.nbytes, size.nbytes / rate)
    assert size.nbytes / rate == pytest.approx(CHUNK_S)


def test_a_slow_link_gets_no_smaller_chunks() -> None:
    size = ChunkSize()
    for _ in range(20):
        size.copied(CHUNK_BYTES, 1.0)
    assert size.nbytes == CHUNK_BYTES


def test_a_slow_launch_makes_chunks_longer_within_bounds() -> None:
    size = ChunkSize()
    size.copied(CHUNK_BYTES, CHUNK_BYTES / 55e9)
    for _ in range(40):
        size.launched(0.004)
    assert size.nbytes / 55e9 == pytest.approx(0.008, rel=0.01)
    for _ in range(40):
        size.launched(10.0)
    assert size.nbytes / 55e9 == pytest.approx(copy_schedule._MAX_CHUNK_S)
    for _ in range(80):
        size.launched(0.0001)
    assert size.nbytes / 55e9 == pytest.approx(CHUNK_S)


def test_the_tail_of_a_job_says_nothing_of_the_rate() -> None:
    size = ChunkSize()
    size.copied(CHUNK_BYTES, CHUNK_BYTES / 55e9)
    before = size.nbytes
    size.copied(4096, 1.0)
    size.copied(CHUNK_BYTES, 0.0)  # a clock that stands still
    assert size.nbytes == before
    size.copied(CHUNK_BYTES, 1.0)  # the control
    assert size.nbytes < before


# Chunks ------------------------------------------------------------------------------------------


def cut_all(chunks: Chunks, nbytes: int, block_bytes: list[int]) -> list[tuple[int, list[int]]]:
    found = []
    while chunks:
        part = chunks.cut(nbytes, block_bytes)
        assert list(part.block_ids) == list(part.slots)
        found.append((part.group, list(part.slots)))
    return found


def test_parts_are_cut_by_the_bytes_of_their_group() -> None:
    parts = [blocks(5), blocks(0), blocks(2, 1, 5)]
    assert cut_all(Chunks(parts), 2 * MIB, [MIB, 4 * MIB]) == [
        (0, [0, 1]),
        (0, [2, 3]),
        (0, [4]),
        (1, [5]),  # larger than a chunk
        (1, [6]),
    ]
    assert cut_all(Chunks(parts, whole=True), 1, [MIB, MIB]) == [(0, [*range(5)]), (1, [5, 6])]


def test_a_chunk_has_no_more_descriptors_than_one_call_takes() -> None:
    class Batches(Copier):
        store = load = None  # type: ignore[assignment]

        def descriptors(self, direction: Direction, group: int) -> int:
            return (128, 0, 2000)[group]

    assert MAX_DESCRIPTORS == 1024
    most = [Batches().most_blocks("load", group) for group in range(3)]
    chunks = Chunks([blocks(20), blocks(20, 1), blocks(2, 2)])
    found = []
    while chunks:
        part = chunks.cut(1 << 30, [MIB] * 3, most)
        found.append((part.group, len(part.slots)))
    assert found == [(0, 8), (0, 8), (0, 4), (1, 20), (2, 1), (2, 1)]


def test_what_descriptors_take_makes_no_chunk_longer() -> None:
    with_them, without = ChunkSize(), ChunkSize()
    for size in (with_them, without):
        size.copied(CHUNK_BYTES, CHUNK_BYTES / 55e9)
    for _ in range(40):
        with_them.launched(0.004, round(0.004 / copy_schedule.DESCRIPTOR_S))
        without.launched(0.004)  # the control
    assert with_them.nbytes / 55e9 == pytest.approx(CHUNK_S)
    assert without.nbytes / 55e9 == pytest.approx(0.008, rel=0.01)


def test_the_rest_is_what_was_not_cut() -> None:
    chunks = Chunks([blocks(5), blocks(2, 1, 5)])
    chunks.cut(2 * MIB, [MIB, MIB])
    rest = [(part.group, list(part.slots)) for part in chunks.rest()]
    assert rest == [(0, [2, 3, 4]), (1, [5, 6])]
    assert not chunks and list(chunks.rest()) == []


# Order -------------------------------------------------------------------------------------------


def test_loads_go_first_and_each_direction_has_its_own_flights() -> None:
    schedule: CopySchedule[Job] = CopySchedule([CHUNK_BYTES])
    load, store = Job(LOAD, Chunks([blocks(9)])), Job(STORE, Chunks([blocks(9)]))
    assert schedule.next(0.0) is None
    schedule.add(store)
    schedule.add(load)
    for job in (load, store):
        for number in range(MAX_IN_FLIGHT):
            assert schedule.next(0.0) is job
            assert list(schedule.cut(job).slots) == [number]
            schedule.launched(job.kind, CHUNK_BYTES, 0.0)
    assert schedule.next(0.0) is None
    schedule.ended(STORE)
    assert schedule.next(0.0) is store
    schedule.ended(LOAD)
    assert schedule.next(0.0) is load
    schedule.remove(load)
    assert schedule.next(0.0) is store
    assert repr(schedule) == "<CopySchedule 0 loads, 1 stores queued>"


def test_a_store_that_awaits_its_fence_holds_back_stores_alone() -> None:
    schedule: CopySchedule[Job] = CopySchedule([CHUNK_BYTES])
    first, second = (Job(STORE, Chunks([blocks(1)])) for _ in range(2))
    load = Job(LOAD, Chunks([blocks(1)]))
    first.awaits_fence = True
    for job in (first, second):
        schedule.add(job)
    assert schedule.next(0.0) is None  # the second is behind the same stream's work, or later
    schedule.add(load)
    assert schedule.next(0.0) is load
    schedule.remove(load)
    first.awaits_fence = False
    assert schedule.next(0.0) is first


def test_a_rate_limit_holds_back_stores_alone() -> None:
    schedule: CopySchedule[Job] = CopySchedule([CHUNK_BYTES], store_rate=CHUNK_BYTES)
    assert schedule.delay(0.0) is None
    load, store = Job(LOAD, Chunks([blocks(1)])), Job(STORE, Chunks([blocks(2)]))
    schedule.add(store)
    schedule.launched(STORE, CHUNK_BYTES, 0.0)
    assert schedule.next(0.5) is None and schedule.delay(0.5) == 0.5
    schedule.add(load)
    assert schedule.next(0.5) is load
    schedule.remove(load)
    assert schedule.next(1.0) is store and schedule.delay(1.0) is None


def test_a_pause_saves_nothing_up() -> None:
    limiter = RateLimiter(100)
    limiter.consume(50, 0.0)
    assert limiter.delay(0.0) == 0.5
    assert limiter.delay(100.0) == 0.0
    limiter.consume(200, 100.0)
    assert limiter.delay(100.0) == 2.0
    free = RateLimiter(0)
    free.consume(1 << 40, 0.0)
    assert free.delay(0.0) == 0.0  # negative control
