"""How long a call of HiCache's waits for slow tiers, and who does not wait at all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvconnect.engines.sglang.host_pages import MOST_WAIT_S
from kvconnect.tiers.backends import memory
from kvconnect.types import Tier
from tests.sglang.linker_bench import slots_of
from tests.sglang.storage_bench import Make, elsewhere, host_pool, serving, storages
from tests.sglang.tiered_storage import KEYS, REMOTE, Shared, counted, fill, settle

SIDES = (PoolName.SWA, PoolName.MAMBA)


class Gated(Shared):
    """Holds lookups back, too."""

    def exists(self, keys: Sequence[bytes]) -> list[int]:
        self._pass()
        return super().exists(keys)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    gated = Gated()
    monkeypatch.setattr(memory, "MemoryStore", lambda _: gated)
    yield gated
    gated.gate.set()


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    with serving():
        yield


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with storages(monkeypatch) as make_storage:
        yield make_storage


def test_sglangs_own_thread_asks_host_memory_alone(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Gated
) -> None:
    """Decode asks there how much of a prompt it may promise, at each step."""
    storage = make(host_pool(monkeypatch), **REMOTE)
    fill(storage)
    counted(storage)
    server.gate.clear()
    assert storage.batch_exists(KEYS) == 0  # its first pages are at the server
    assert storage.batch_exists([*KEYS[4:], KEYS[0]]) == 8
    assert storage.batch_exists_v2(KEYS[4:]).kv_hit_pages == 8
    assert counted(storage).keys().isdisjoint({"tier_lookups", "hit_tokens_host", "miss_tokens"})

    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(storage.batch_exists(KEYS)))
    other.start()  # the control
    tiers = storage.pages.store.tiers
    while not (tiers and tiers.jobs):
        assert other.is_alive()
        time.sleep(0.002)
    assert storage.batch_exists(KEYS[4:]) == 8
    server.gate.set()
    other.join()
    assert found == [12]
    settle(storage)
    assert counted(storage)["tier_lookups"] == 1


def test_one_call_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Gated
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, **REMOTE)
    for name in SIDES:
        storage.register_mem_host_pool_v2(pool, name)
    tiers, deadlines = storage.pages.store.tiers, []
    assert tiers is not None

    def lookup(keys: Sequence[bytes], _: int, deadline: float) -> list[Tier | None]:
        deadlines.append(deadline)
        return [Tier.REMOTE] * len(keys)

    def load(_keys: Sequence[bytes], _: int, deadline: float) -> dict[bytes, int]:
        deadlines.append(deadline)
        return {}

    monkeypatch.setattr(tiers, "lookup", lookup)
    monkeypatch.setattr(tiers, "load", load)
    every = [
        PoolTransfer(name, slots_of([1]), keys=KEYS[:1], hit_policy=PoolHitPolicy.ALL_PAGES)
        for name in SIDES
    ]
    assert elsewhere(storage.batch_exists_v2, KEYS[:1], every).kv_hit_pages == 1
    assert len(deadlines) == 3 and len(set(deadlines)) == 1
    deadlines.clear()
    read = elsewhere(storage.batch_get_v2, every)
    assert read == {name: [False] for name in SIDES}
    assert len(deadlines) == 2 and len(set(deadlines)) == 1


@pytest.mark.parametrize(("wait_s", "alone", "together"), [(3, 3, 3), (5, 5, 4), (30, 8, 4)])
def test_threads_that_a_flush_joins_wait_less_than_sglang_does(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Make,
    server: Gated,
    wait_s: int,
    alone: int,
    together: int,
) -> None:
    """For two calls where a second pool's pages are read with those of the first."""
    pool = host_pool(monkeypatch)
    with caplog.at_level(logging.WARNING, "kvconnect"):
        storage = make(pool, wait_s=wait_s, **REMOTE)
    text = f"wait_s={wait_s}: HiCache's threads wait 8 s at most, since a flush joins them"
    said = [record.message for record in caplog.records if "wait_s=" in record.message]
    assert said == ([text] if wait_s > MOST_WAIT_S else [])

    def waits() -> float:
        with monkeypatch.context() as frozen:
            frozen.setattr(time, "monotonic", lambda: 100.0)
            return storage.pages.deadline() - 100.0

    assert waits() == alone
    storage.register_mem_host_pool_v2(pool, PoolName.SWA)
    assert waits() == together
