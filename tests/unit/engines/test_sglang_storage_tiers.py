"""Tiers under SGLang's page store when one of them hangs: who waits, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvconnect.engines.sglang.storage_pages import PageStore
from kvconnect.offload.host_arena import HostArena
from kvconnect.settings import Settings
from kvconnect.tiers.backends import BlockOutcome, Store
from kvconnect.tiers.backends.memory import MemoryStore
from kvconnect.types import Tier

pytest.importorskip("xxhash")

PAGE = 4096
SLOTS = 8
SOON_S, WAIT_S = 1.0, 30.0  # a call is late after a second
KEYS = [b"page-%d" % n for n in range(16)]


class Hanging(MemoryStore):
    """Holds calls back, when told to."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.readable, self.writable = threading.Event(), threading.Event()
        self.readable.set(), self.writable.set()
        self.reads = 0

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[BlockOutcome]:
        self.writable.wait(WAIT_S)
        return super().put(keys, payloads)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[BlockOutcome]:
        self.reads += 1
        self.readable.wait(WAIT_S)
        return super().get(keys, buffers)


class Bench:
    def __init__(self) -> None:
        self.disk, self.remote = Hanging(), Hanging()
        stores: dict[Tier, Store] = {Tier.DISK: self.disk, Tier.REMOTE: self.remote}
        settings = Settings(wait_s=SOON_S, deadline_s=SOON_S, digest="full")
        self.store = PageStore(HostArena(SLOTS, PAGE, settings.digest), settings, stores)

    def put(self, number: int) -> None:
        assert self.store.put(KEYS[number], torch.full((PAGE,), number, dtype=torch.uint8))

    def fill(self, count: int) -> None:
        for number in range(count):
            self.put(number)
            self.settle()

    def settle(self) -> None:
        until(lambda: self.store.tiers is not None and not self.store.tiers.jobs)

    def where(self, keys: Sequence[bytes]) -> list[Tier | None]:
        return self.store.where(keys, PAGE, self.store.deadline())

    def read(self, number: int) -> bool:
        """Whether a page comes, with the right bytes."""
        with self.store.reading([KEYS[number]], PAGE, self.store.deadline()) as [page]:
            assert page is None or bool((page == number).all())
            return page is not None


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for store in (bench.disk, bench.remote):
        store.readable.set(), store.writable.set()
    bench.store.close()


def test_a_disk_that_hangs_costs_one_wait_and_the_remote_tier_serves(bench: Bench) -> None:
    bench.fill(16)
    assert bench.where(KEYS) == [Tier.DISK] * 8 + [Tier.HOST] * 8
    bench.disk.readable.clear()
    assert not bench.read(0)  # it waits
    until(lambda: bench.where(KEYS[:1]) == [Tier.REMOTE])
    assert bench.where(KEYS[:3]) == [Tier.REMOTE] * 3
    assert all(bench.read(number) for number in range(1, 8))
    assert (bench.disk.reads, bench.remote.reads) == (1, 7)
    stats = bench.store.take_stats()
    assert stats is not None
    assert stats.data["counters"]["store_failed_blocks"] == {"late": 1}
    assert stats.data["counters"]["failed_blocks"] == {"deadline": 1}


def test_the_control_a_disk_that_does_not_hang_serves(bench: Bench) -> None:
    bench.fill(16)
    assert all(bench.read(number) for number in range(8))
    assert bench.remote.reads == 0


def test_a_page_whose_fetch_hangs_comes_from_elsewhere_and_is_stored_again(bench: Bench) -> None:
    bench.fill(16)
    bench.disk.readable.clear()
    assert not bench.read(0)
    until(lambda: bench.read(0))  # once nobody may expect the fetch to end
    assert bench.remote.reads == 1
    assert bench.store.index.slots.used == SLOTS  # of which one may be written to yet
    bench.disk.readable.set()
    bench.settle()
    bench.store.index.check()
    assert bench.read(0)
    assert bench.store.index.slots.used == SLOTS - 1


def test_pages_are_written_to_the_other_tier_while_one_hangs(bench: Bench) -> None:
    bench.disk.writable.clear()

    def written() -> bool:
        """Storing goes on, and what hangs has no claim on the slots for ever."""
        for number in range(16):
            bench.store.put(KEYS[number], torch.full((PAGE,), number, dtype=torch.uint8))
        return bench.remote.usage().blocks >= 5

    until(written)
    assert bench.disk.usage().blocks == 0
    bench.disk.writable.set()
    bench.settle()
    assert bench.store.index.slots.busy == 0
    bench.store.index.check()


def test_tiers_are_not_asked_when_the_time_is_over(bench: Bench) -> None:
    bench.fill(16)
    assert bench.store.where(KEYS, PAGE, 0.0) == [None] * 8 + [Tier.HOST] * 8
    assert bench.where(KEYS) == [Tier.DISK] * 8 + [Tier.HOST] * 8  # control
    stats = bench.store.take_stats()
    assert stats is not None
    assert stats.data["counters"]["tier_lookups"] == {"": 1}


def test_closing_does_not_wait_for_a_call_that_hangs(bench: Bench) -> None:
    bench.fill(16)
    bench.disk.readable.clear()
    assert not bench.read(0)
    bench.store.close()
    assert not bench.remote.usage().available
    assert bench.disk.usage().available  # it is in use
