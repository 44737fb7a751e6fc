"""Workers with the same KV share one host tier: the first stores for all, and all load."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator

import pytest
import torch

from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy import make_copier
from kvconnect.errors import ConfigError
from kvconnect.offload.host_arena import arena_bytes
from kvconnect.offload.host_tier import HostTier
from kvconnect.offload.messages import GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.offload.shared_memory import SharedMemory
from kvconnect.types import FailureCause, JobId

BLOCKS, SLOTS = 4, 6
BLOCK = mmap.PAGESIZE
GEOMETRY = Geometry((GroupGeometry((ByteRun(0, BLOCK, BLOCK),), BLOCKS),))


class Worker:
    """One of two workers, each with half of the memory for ``SLOTS`` slots."""

    def __init__(self, memory: SharedMemory | None) -> None:
        self.area = torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8)
        share = SLOTS * BLOCK // 2
        self.tier = HostTier(share, "full", GEOMETRY, self.area, make_copier, shared=memory)

    def step(self, job: StoreBlocks | LoadBlocks) -> None:
        loads, stores = ([job], []) if isinstance(job, LoadBlocks) else ([], [job])
        self.tier.begin(loads, stores)
        self.tier.submit_stores()

    def report(self) -> JobReport:
        while True:
            for done in self.tier.poll():
                return done.report


def part(block: int, slot: int) -> tuple[GroupBlocks]:
    return (GroupBlocks(0, array("q", [block]), array("q", [slot])),)


def store(block: int, slot: int) -> StoreBlocks:
    return StoreBlocks(JobId(1), part(block, slot), 5.0)


def load(block: int, slot: int) -> LoadBlocks:
    return LoadBlocks(JobId(2), "r", part(block, slot), 5.0, sync=False)


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    nbytes = arena_bytes(SLOTS, BLOCK)
    first = SharedMemory.make(nbytes, 2)
    second = SharedMemory.open(first.offer(), nbytes, 1, 2)
    first.close()
    found = Worker(first), Worker(second)
    yield found
    for worker in found:
        worker.tier.close()


def test_both_have_the_slots_of_both_shares(workers: tuple[Worker, Worker]) -> None:
    assert [worker.tier.store.num_slots for worker in workers] == [SLOTS, SLOTS]
    assert [worker.tier.stores for worker in workers] == [True, False]
    alone = Worker(None)
    assert (alone.tier.store.num_slots, alone.tier.stores) == (SLOTS // 2, True)
    alone.tier.close()


def test_one_stores_and_the_other_loads(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    first.area[:BLOCK] = 7
    for worker in workers:
        worker.step(store(0, 5))
        assert worker.report() == JobReport(JobId(1), (), pytest.approx(0, abs=5))
    second.step(load(2, 5))
    assert second.report().failures == ()
    assert second.area[2 * BLOCK : 3 * BLOCK].eq(7).all()


def test_what_the_other_has_on_its_device_is_not_stored(workers: tuple[Worker, Worker]) -> None:
    """The first one's store would be torn if both wrote."""
    first, second = workers
    first.area[:BLOCK], second.area[:BLOCK] = 7, 9
    first.step(store(0, 5))
    first.report()
    second.step(store(0, 5))
    second.report()
    assert set(first.tier.store.view(5)) == {7}


def test_the_other_sees_a_slot_whose_bytes_have_changed(workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    first.step(store(0, 5))
    first.report()
    first.tier.store.view(5)[0] ^= 1
    second.step(load(2, 5))
    (failure,) = second.report().failures
    assert failure.cause is FailureCause.DIGEST


def test_a_share_that_is_too_small_is_refused() -> None:
    memory = SharedMemory.make(arena_bytes(1, BLOCK), 2)
    memory.close()
    area = torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="less than one block"):
        HostTier(BLOCK // 4, "off", GEOMETRY, area, make_copier, shared=memory)
