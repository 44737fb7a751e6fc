"""The storage backend on HiCache's real host pools: bytes, damage, bounds, and what keys carry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2StateDType
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import mamba

from kvconnect.engines.sglang.host_pages import HostPages
from kvconnect.engines.sglang.storage import KVConnectStorage
from kvconnect.engines.sglang.storage_backends import stored_format
from kvconnect.errors import ConfigError, Incompatible
from tests.sglang.linker_bench import PAGE, mamba2_state, mamba_pools, names, slots_of
from tests.sglang.storage_bench import (
    PAGE_BYTES,
    RANKS,
    Make,
    host_pool,
    name_of,
    pages_of,
    serving,
    storages,
)

KEYS = names(4)

pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture(scope="module")
def published() -> Iterator[None]:
    with serving():
        yield


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make storages as SGLang does; each has room for eight pages."""
    with storages(monkeypatch) as make_storage:
        yield make_storage


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_come_back_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch, make: Make, layout: str
) -> None:
    pool = host_pool(monkeypatch, layout)
    storage = make(pool)
    wanted = pages_of(pool, range(1, 5))
    assert storage.batch_set_v1(KEYS, slots_of(range(1, 5))) == [True] * 4
    pool.kv_buffer.fill_(-1)
    assert storage.batch_exists([*KEYS, "other"]) == 4
    assert storage.batch_get_v1([*KEYS, "other"], slots_of(range(11, 16))) == [True] * 4 + [False]
    assert pages_of(pool, range(11, 15)) == wanted
    assert pages_of(pool, range(15, 16)) == pages_of(pool, range(1, 2)) != wanted[:1]


def test_the_copying_interface_moves_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool)
    wanted = pages_of(pool, range(1, 3))
    values = [pool.get_data_page(number * PAGE, flat=True) for number in (1, 2)]
    assert storage.batch_set(KEYS[:2], values)
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    found = storage.batch_get(KEYS[:3], targets)
    assert found[2] is None
    for page, target, bytes_of in zip(found, targets, wanted, strict=False):
        assert page is target
        assert target.view(torch.uint8).numpy().tobytes() == bytes_of
    plain = storage.get(KEYS[0])
    assert plain is not None
    assert torch.equal(plain, values[0])
    assert storage.get(KEYS[0], torch.zeros(3)) is None
    assert storage.exists(KEYS[0])
    storage.clear()
    assert not storage.exists(KEYS[0])


def test_a_damaged_page_is_a_miss_from_then_on(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool)
    storage.batch_set_v1(KEYS, slots_of(range(1, 5)))
    store = storage.pages.store
    slot = store.index.slot_of(0, name_of(storage, KEYS[1]))
    assert slot is not None
    store.memory.view(slot, PAGE_BYTES)[PAGE_BYTES - 1] ^= 1
    untouched = pages_of(pool, range(12, 13))
    assert storage.batch_get_v1(KEYS, slots_of(range(11, 15))) == [True, False, True, True]
    assert pages_of(pool, range(12, 13)) == untouched
    assert storage.batch_exists(KEYS) == 1
    taken = store.take_stats()
    assert taken is not None
    assert taken.reduce()["quarantined_blocks_digest"] == 1


def test_without_digests_damage_is_not_seen(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, digest="off")
    storage.batch_set_v1(KEYS, slots_of(range(1, 5)))
    storage.pages.store.memory.view(0, PAGE_BYTES)[0] ^= 1
    assert storage.batch_get_v1(KEYS, slots_of(range(11, 15))) == [True] * 4  # the control
    assert pages_of(pool, range(11, 15)) != pages_of(pool, range(1, 5))


def test_a_full_store_evicts_and_stays_within_its_bytes(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool)
    keys = names(12)
    assert storage.batch_set_v1(keys, slots_of(range(1, 13))) == [True] * 12
    assert [storage.exists(key) for key in keys] == [False] * 4 + [True] * 8
    assert storage.pages.store.memory.nbytes == 8 * PAGE_BYTES
    assert not storage.set("large", torch.zeros(PAGE_BYTES + 1, dtype=torch.uint8))


def test_a_page_that_is_read_is_not_evicted(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, host_bytes=PAGE_BYTES)
    storage.batch_set_v1(KEYS[:1], slots_of([1]))
    with storage.pages.reading(PoolName.KV, KEYS[:1]) as (page,):
        assert page is not None
        assert storage.batch_set_v1(KEYS[1:2], slots_of([2])) == [False]
    assert storage.batch_set_v1(KEYS[1:2], slots_of([2])) == [True]


def test_threads_read_and_write_at_once(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, host_bytes=5 * PAGE_BYTES)
    wanted = pages_of(pool, range(1, 9))
    wrong: list[str] = []

    def work(shift: int) -> None:
        for turn in range(60):
            number = (turn * 3 + shift) % 8
            storage.batch_set_v1(names(1, start=number), slots_of([number + 1]))
            with storage.pages.reading(PoolName.KV, names(1, start=number)) as (page,):
                if page is not None and page.view(torch.uint8).numpy().tobytes() != wanted[number]:
                    wrong.append(f"{shift}/{turn}")

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert storage.pages.store.index.slots.busy == 0


def test_side_pools_count_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.SWA)
    storage.batch_set_v1(KEYS, slots_of(range(1, 5)))
    state = PoolTransfer(
        PoolName.SWA, slots_of([5]), keys=[KEYS[1]], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    assert storage.batch_set_v2([state]) == {PoolName.SWA: [True]}
    found = storage.batch_exists_v2(KEYS, [state])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.SWA: 2}
    every = replace(state, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(KEYS, [every]).restorable_prefix_pages == []
    assert storage.batch_exists_v2(KEYS).restorable_prefix_pages == [1, 2, 3, 4]
    read = replace(state, host_indices=slots_of([6]))
    assert storage.batch_get_v2([read]) == {PoolName.SWA: [True]}
    assert pages_of(pool, range(5, 6)) == pages_of(pool, range(6, 7))
    crooked = replace(state, host_indices=slots_of([5])[:-1])
    assert storage.batch_set_v2([crooked]) == {PoolName.SWA: [False]}


def test_names_and_formats_carry_what_bytes_depend_on(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    pool, other = host_pool(monkeypatch), host_pool(monkeypatch, "layer_first")
    ranks = (
        RANKS,
        replace(RANKS, tp_size=2),
        replace(RANKS, tp_size=2, tp_rank=1),
        replace(RANKS, pp_size=2, pp_rank=1),
    )

    def told(storage: KVConnectStorage) -> str:
        return str((name_of(storage, KEYS[0]), stored_format(storage._ranks)))

    seen = {told(make(pool, rank)) for rank in ranks} | {told(make(other))}
    assert len(seen) == len(ranks) + 1
    assert told(make(pool)) in seen  # the control


def test_states_of_another_type_of_the_same_size_have_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mamba, "host_memory_budget_bytes", lambda nbytes: nbytes)
    store: Any = SimpleNamespace()
    forms = []
    for temporal in (torch.float16, torch.bfloat16, torch.float16):
        types = Mamba2StateDType(conv=torch.bfloat16, temporal=temporal)
        states = mamba_pools(replace(mamba2_state(), dtype=types))[1].mamba_pool
        buffers = states.get_device_pool_infos()[0].buffer_info
        pool = mamba.MambaPoolHost(
            buffers, 1.0, 0, device_capacity=8, pin_memory=False, layout="page_first"
        )
        forms.append(HostPages(store, {PoolName.MAMBA: pool}, RANKS)._form(PoolName.MAMBA))
    half, other, again = forms
    assert half == again and half.nbytes == other.nbytes and half.text != other.text


def test_what_cannot_be_used_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    pool = host_pool(monkeypatch)
    with pytest.raises(ConfigError, match="did you mean 'host_bytes'"):
        make(pool, host_byte=1)
    with pytest.raises(ConfigError, match=f"a page takes {PAGE_BYTES}"):
        make(pool, host_bytes=4096)
    with pytest.raises(
        Incompatible,
        match=r"^kvconnect: this server .*latent attention on 2 ranks.*: run it without",
    ):
        make(pool, replace(RANKS, is_mla_model=True, tp_size=2))
    assert make(pool, replace(RANKS, is_mla_model=True)).batch_exists(KEYS) == 0
