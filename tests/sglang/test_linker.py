"""The linker on real pools in CPU memory: the bytes that come back, in which order, or none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from kvconnect.engines.sglang.device_pools import device_pools, map_pool
from kvconnect.engines.sglang.linker import KVConnectLinker, restorable
from kvconnect.errors import ConfigError, Incompatible, Misuse
from tests.sglang.linker_bench import (
    DSA_PAGE,
    LAYERS,
    PAGES,
    WAIT_S,
    Bench,
    dsa_pool,
    mamba_pools,
    mha_pool,
    mla_pool,
    names,
    params_for,
    slots_of,
    swa_pool,
    transfers,
)

FULL_AND_SWA = (ComponentType.FULL, ComponentType.SWA)
KEYS = names(6)
HERE, THERE = range(1, 7), range(11, 17)  # pages they are computed in, and loaded into


@pytest.fixture(scope="module", autouse=True)
def published() -> Iterator[None]:
    reset_context()
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test")
    yield
    reset_context()


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    """Make benches that are closed, and whose books are proved, at the end."""
    made: list[Bench] = []

    def make_bench(kvcache: Any, *args: Any, **more: Any) -> Bench:
        made.append(Bench(kvcache, *args, **more))
        return made[-1]

    yield make_bench
    for bench in made:
        bench.close()
        bench.check()
        assert not any(tier.jobs.ledger.held for tier in bench.linker.tiers.values())


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make(mha_pool())


@pytest.mark.parametrize("pool", [mha_pool, mla_pool])
def test_pages_come_back_byte_for_byte(make: Callable[..., Bench], pool: Callable[[], Any]) -> None:
    bench = make(pool())
    wanted = bench.bytes_of(HERE)
    bench.store(KEYS, HERE)
    bench.wipe()
    assert bench.found([*KEYS, *names(1, start=99)]) == [1, 2, 3, 4, 5, 6]
    assert bench.load(KEYS, THERE)
    assert bench.bytes_of(THERE) == wanted
    untouched = set(range(PAGES)) - set(THERE)
    blank = bench.bytes_of([HERE[0]])[0]
    assert all(page == blank for page in bench.bytes_of(sorted(untouched)))


def test_pages_of_both_pools_come_back(make: Callable[..., Bench]) -> None:
    bench = make(swa_pool(), FULL_AND_SWA)
    wanted = bench.bytes_of(HERE), bench.bytes_of([21, 22], PoolName.SWA)
    bench.store(KEYS, HERE, swa=[21, 22])
    bench.wipe()
    assert bench.load(KEYS, THERE, swa=[23, 24])
    assert (bench.bytes_of(THERE), bench.bytes_of([23, 24], PoolName.SWA)) == wanted


def test_the_state_of_mamba_layers_comes_back_with_the_pages() -> None:
    kvcache, requests = mamba_pools()
    params = params_for(kvcache, (ComponentType.FULL, ComponentType.MAMBA))
    params.req_to_token_pool = requests
    linker = KVConnectLinker(
        None,
        params,
        components={ComponentType.FULL, ComponentType.MAMBA},
        extra_config={"host_bytes": "4MiB", "digest": "full"},
    )
    counter = linker.layer_done_counter
    assert requests.layer_transfer_counter is counter
    kvcache.register_layer_transfer_counter(counter)
    states = requests.mamba_pool.mamba_cache
    parts = [states.temporal, *states.conv]
    for number, part in enumerate([*parts, *kvcache.full_kv_pool.k_buffer]):
        part.copy_(torch.rand(part.shape, generator=torch.Generator().manual_seed(number)))
    wanted = [part[:, 3].clone() for part in parts]
    pages = kvcache.full_kv_pool.k_buffer[1][slots_of(HERE)].clone()

    def moved(page: range, state: int) -> list[PoolTransfer]:
        end = PoolTransfer(
            name=PoolName.MAMBA,
            keys=KEYS[-1:],
            device_indices=torch.tensor([state]),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        return [*transfers(KEYS, page), end]

    assert linker.offload(moved(HERE, 3))
    for tier in linker.tiers.values():
        tier.drain()
    assert linker.lookup("req", moved(HERE, 3)) == [6]  # the state is that of the end alone
    assert linker.load("req", moved(THERE, 5))
    index = linker.start_layer_wise_loading()
    counter.set_consumer(index)
    requests.mamba2_layer_cache(2)  # waits, as the layer does
    assert linker.finish_layer_wise_loading(index)
    assert all(torch.equal(part[:, 5], old) for part, old in zip(parts, wanted, strict=True))
    assert not torch.equal(parts[0][:, 4], wanted[0])  # the control: states differ
    assert torch.equal(kvcache.full_kv_pool.k_buffer[1][slots_of(THERE)], pages)
    linker.close()


def test_a_cache_that_sglang_puts_together_comes_back() -> None:
    """Latent rows of many tokens per page, and an index beside them with a row per page."""
    params = params_for(dsa_pool(), (ComponentType.FULL,))
    params.page_size = DSA_PAGE
    extra = {"host_bytes": "8MiB", "digest": "full"}
    linker = KVConnectLinker(None, params, components={ComponentType.FULL}, extra_config=extra)
    assert set(linker.pools) == {PoolName.KV, PoolName.INDEXER}
    buffers = [
        buffer.view(torch.uint8).view(-1, DSA_PAGE if name is PoolName.KV else 1, buffer[0].nbytes)
        for name, entry in linker.pools.items()
        for buffer in entry.kv_buffer
    ]
    for number, buffer in enumerate(buffers):
        buffer.random_(0, 256, generator=torch.Generator().manual_seed(number))
    wanted = [buffer[1:3].clone() for buffer in buffers]

    def moved(pages: tuple[int, int]) -> list[PoolTransfer]:
        tokens = torch.cat([torch.arange(DSA_PAGE) + page * DSA_PAGE for page in pages])
        return [PoolTransfer(name=PoolName.KV, keys=KEYS[:2], device_indices=tokens)]

    assert linker.offload(moved((1, 2)))
    for tier in linker.tiers.values():
        tier.drain()
    assert linker.lookup("req", moved((1, 2))) == [1, 2]
    assert linker.load("req", moved((5, 6)))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert all(torch.equal(b[5:7], old) for b, old in zip(buffers, wanted, strict=True))
    assert not any(torch.equal(b[4:6], old) for b, old in zip(buffers, wanted, strict=True))
    linker.close()


def test_swapped_copies_do_not_pass_for_the_right_ones(bench: Bench) -> None:
    wanted = bench.bytes_of(HERE)
    bench.store(KEYS, HERE)
    swapped = [KEYS[1], KEYS[0], *KEYS[2:]]
    assert bench.load(swapped, THERE)  # the control: these keys hold other bytes
    assert bench.bytes_of(THERE) != wanted


def test_a_layer_is_reported_when_it_is_there_and_not_before(bench: Bench) -> None:
    wanted = bench.bytes_of(HERE)
    bench.store(KEYS, HERE)
    bench.wipe()
    spy, counter = bench.spies[0], bench.linker.layer_done_counter
    spy.calls.clear()
    spy.gate = threading.Semaphore(0)
    assert bench.linker.load("req", transfers(KEYS, THERE))
    index = bench.linker.start_layer_wise_loading()
    counter.set_consumer(index)
    for layer in range(LAYERS):
        assert not counter.futures[index][layer].done()
        spy.gate.release()
        keys = bench.kvcache.get_key_buffer(layer)  # waits, as attention does
        assert counter.futures[index][layer].done()
        assert keys.data_ptr() == bench.kvcache.k_buffer[layer].data_ptr()
        assert (keys[slots_of(THERE)] != -1.0).all()
        later = bench.kvcache.k_buffer[layer + 1 :]
        assert all((buffer[slots_of(THERE)] == -1.0).all() for buffer in later)
    assert bench.linker.finish_layer_wise_loading(index)
    assert spy.calls == [("load", layer) for layer in range(LAYERS)]
    assert bench.bytes_of(THERE) == wanted
    assert bench.linker.stats.stats.data["histograms"]["load_exposed_seconds"]["host"][0] > 0


@pytest.mark.parametrize(
    ("layers", "heads", "sizes"),
    [
        (3, 2, [1, 1, 1]),  # 8 KiB a layer
        (40, 2, [3] * 13 + [1]),  # at most 16 stages
        (4, 1, [1, 1, 1, 1]),  # 4 KiB a layer, no padding
    ],
)
def test_a_stage_has_few_layers_and_little_padding(
    layers: int, heads: int, sizes: list[int]
) -> None:
    params = params_for(mha_pool(4, layers, heads), (ComponentType.FULL,))
    (entry,) = device_pools(params, {ComponentType.FULL}).entries
    pool = map_pool(entry)
    assert [len(stage) for stage in pool.stages] == sizes
    assert [layer for stage in pool.stages for layer in stage] == list(range(layers))


def test_layers_smaller_than_a_slot_share_one() -> None:
    kvcache = mha_pool(4, 4, 1, page=2)  # 512 bytes a layer
    params = params_for(kvcache, (ComponentType.FULL,))
    params.page_size = 2
    (entry,) = device_pools(params, {ComponentType.FULL}).entries
    pool = map_pool(entry)
    assert (pool.stages, pool.page_bytes) == (((0, 1, 2, 3),), 4096)


def test_a_damaged_copy_fails_its_load_and_is_never_found_again(bench: Bench) -> None:
    wanted = bench.bytes_of(HERE)
    bench.store(KEYS, HERE)
    bench.flip(KEYS[3])
    assert not bench.load(KEYS, THERE)
    assert bench.counted("failed_requests", "digest") == 1
    assert bench.counted("quarantined_blocks", "digest") == 1
    assert bench.found(KEYS) == [1, 2, 3]
    assert bench.load(KEYS[:3], THERE[:3])  # the rest is whole
    assert bench.bytes_of(THERE[:3]) == wanted[:3]
    bench.store(KEYS, HERE)  # offered again, it is stored anew
    assert bench.load(KEYS, THERE)
    assert bench.bytes_of(THERE) == wanted


def test_without_digests_damage_is_not_seen(make: Callable[..., Bench]) -> None:
    bench = make(mha_pool(), settings={"digest": "off"})
    wanted = bench.bytes_of(HERE)
    bench.store(KEYS, HERE)
    bench.flip(KEYS[3])
    assert bench.load(KEYS, THERE)  # the control: it is the digest that finds it
    assert bench.bytes_of(THERE) != wanted


def test_a_copy_that_raises_fails_its_load(bench: Bench) -> None:
    bench.store(KEYS, HERE)
    bench.spies[0].broken = "load"
    assert not bench.load(KEYS, THERE)
    assert bench.counted("failed_requests", "copy") == 1
    assert bench.found(KEYS) == []


def test_a_load_past_its_deadline_fails(make: Callable[..., Bench]) -> None:
    bench = make(mha_pool(), settings={"deadline_s": 1e-6})
    wanted = bench.bytes_of(HERE)
    assert bench.linker.offload(transfers(KEYS, HERE))
    assert bench.drain() == [False]
    assert bench.counted("expired_jobs", "GPU_to_CPU") == 1
    assert bench.found(KEYS) == []
    assert not bench.load(KEYS, THERE)
    assert bench.counted("expired_jobs", "CPU_to_GPU") == 1  # not one per stage
    assert bench.bytes_of(HERE) == wanted


def test_a_page_lost_between_lookup_and_load_fails_the_load(make: Callable[..., Bench]) -> None:
    bench = make(mha_pool(), pages=6)
    bench.store(KEYS, HERE)
    assert bench.found(KEYS)[-1] == 6
    bench.store(names(2, start=50), [25, 26])
    assert not bench.load(KEYS, THERE)
    assert bench.counted("failed_requests", "missing") == 1


def test_a_queued_load_can_be_cancelled_a_started_one_not(bench: Bench) -> None:
    bench.store(KEYS, HERE)
    assert bench.linker.load("req", transfers(KEYS, THERE))
    with pytest.raises(Misuse, match="second load"):
        bench.linker.load("req", transfers(KEYS, THERE))
    assert bench.tier.index.slots.busy == 6  # pinned from here on
    assert bench.linker.cancel_queued_load("req")
    assert not bench.linker.cancel_queued_load("req")
    assert bench.tier.index.slots.busy == 0
    assert bench.linker.start_layer_wise_loading() == -1
    assert bench.linker.finish_layer_wise_loading(-1)
    assert ("load", 0) not in bench.spies[0].calls


def test_pages_wanted_by_a_queued_load_are_not_evicted(make: Callable[..., Bench]) -> None:
    bench = make(mha_pool(), pages=6)
    wanted = bench.bytes_of(HERE)
    bench.store(KEYS, HERE)
    assert bench.linker.load("req", transfers(KEYS, THERE))
    assert bench.linker.offload(transfers(names(1, start=50), [25]))
    assert bench.drain() == [False]  # taken, but there is no room
    assert bench.counted("skipped_store_blocks", "no_space") == 1
    assert bench.linker.finish_layer_wise_loading(bench.linker.start_layer_wise_loading())
    assert bench.bytes_of(THERE) == wanted


def test_pages_that_are_there_are_not_stored_again(bench: Bench) -> None:
    bench.store(KEYS, HERE)
    bench.spies[0].calls.clear()
    bench.store(KEYS, THERE)
    assert bench.spies[0].calls == []
    bench.store([*KEYS, *names(1, start=50)], [*THERE, 25])
    assert {name for name, _ in bench.spies[0].calls} == {"store"}
    assert bench.tier.index.slots.used == 7


def test_pages_that_are_being_stored_are_not_stored_twice(bench: Bench) -> None:
    spy = bench.spies[0]
    spy.gate = threading.Semaphore(0)
    assert bench.linker.offload(transfers(KEYS, HERE))
    assert bench.linker.offload(transfers(KEYS, THERE))
    assert bench.found(KEYS) == []  # not before they are there
    assert bench.linker.num_completed_offloads() == 0  # the second waits for its turn
    spy.gate.release(100)
    assert bench.drain() == [True, True]
    assert len(spy.calls) == LAYERS
    assert bench.found(KEYS)[-1] == 6


def test_offloads_beyond_the_bound_are_taken_but_not_done(bench: Bench) -> None:
    spy = bench.spies[0]
    spy.gate = threading.Semaphore(0)
    assert bench.linker.offload(transfers(names(8), range(8)))  # a quarter of the device's pages
    assert bench.linker.offload(transfers(names(1, start=20), [20]))
    assert bench.tier.jobs.ledger.held == 8
    spy.gate.release(100)
    assert bench.drain() == [True, False]
    assert bench.counted("skipped_store_blocks", "busy") == 1
    assert bench.found(names(1, start=20)) == []
    bench.store(names(1, start=20), [20])  # offered again later
    assert bench.found(names(1, start=20)) == [1]


def test_a_prompt_larger_than_the_tier_evicts_nothing(make: Callable[..., Bench]) -> None:
    bench = make(mha_pool(), pages=6)
    bench.store(KEYS, HERE)
    bench.linker.offload(transfers(names(7, start=50), range(20, 27)))
    assert bench.drain() == [False]
    assert bench.found(KEYS)[-1] == 6


def test_a_failed_store_is_reported_and_not_found(bench: Bench) -> None:
    bench.spies[0].broken = "store"
    assert bench.linker.offload(transfers(KEYS, HERE))
    assert bench.drain() == [False]
    assert bench.found(KEYS) == []
    assert bench.counted("failed_blocks", "copy") == 6
    assert bench.tier.index.slots.used == 0


def test_no_pool_stores_what_another_has_no_room_for(make: Callable[..., Bench]) -> None:
    bench = make(swa_pool(), FULL_AND_SWA, pages=6)
    keys = names(7)
    assert bench.linker.offload(transfers(keys, range(1, 8), swa=[21]))
    assert bench.drain() == [False]
    assert [tier.index.slots.used for tier in bench.linker.tiers.values()] == [0, 0]


def test_what_is_not_whole_pages_is_neither_stored_nor_loaded(bench: Bench) -> None:
    crooked = PoolTransfer(name=PoolName.KV, keys=KEYS[:1], device_indices=slots_of([1]) + 1)
    assert bench.linker.offload([crooked])
    assert bench.drain() == [False]
    assert not bench.linker.load("req", [crooked])
    assert not bench.linker.offload([])


def test_nothing_is_found_after_a_reset(bench: Bench) -> None:
    spy = bench.spies[0]
    bench.store(KEYS[:2], HERE[:2])
    spy.gate = threading.Semaphore(0)
    assert bench.linker.load("req", transfers(KEYS[:2], THERE[:2]))
    assert bench.linker.offload(transfers(KEYS, HERE))  # its store is under way
    assert spy.entered.acquire(timeout=WAIT_S)
    threading.Timer(0.05, spy.gate.release, (100,)).start()
    bench.linker.reset()
    assert bench.found(KEYS) == []
    assert bench.linker.num_completed_offloads() == 0
    assert bench.linker.start_layer_wise_loading() == -1
    assert bench.tier.index.slots.used == 0
    bench.store(KEYS, HERE)
    assert bench.load(KEYS, THERE)


def test_transfers_are_measured(bench: Bench) -> None:
    bench.store(KEYS, HERE)
    assert bench.load(KEYS, THERE)
    bench.found(KEYS)
    bench.found(KEYS)  # asked again while it waits: counted once
    stats = bench.linker.stats.take()
    assert stats is not None
    flat = stats.reduce()
    moved = 6 * bench.page_bytes(PoolName.KV)
    assert flat["GPU_to_CPU_total_bytes"] == flat["CPU_to_GPU_total_bytes"] == moved
    assert flat["lookups"] == 1
    assert flat["hit_tokens_host"] == flat["query_tokens"] == 96
    seconds = stats.data["histograms"]
    for name in ("load_latency_seconds", "load_exposed_seconds"):
        assert sum(seconds[name]["host"][1:]) == 1  # the linker counts it, the job table does not
    assert flat["host_blocks_used"] == 6
    assert flat["ledger_held_blocks_load"] == flat["ledger_held_blocks_store"] == 0


def test_sglang_makes_it_from_its_own_flags() -> None:
    """And where its JSON says nothing, KVCONNECT_CONFIG counts."""
    config = {
        "linker": "KVConnectLinker",
        "linker_module_path": "kvconnect.engines.sglang.linker",
        "linker_extra_config": {"digest": "off"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCONNECT_CONFIG", json.dumps({"host_bytes": "1MiB", "digest": "full"}))
        linker = create_unified_cache_linker(
            None,
            params_for(mha_pool(), (ComponentType.FULL,)),
            backend="dynamic",
            config=config,
            components={ComponentType.FULL},
        )
    assert isinstance(linker, KVConnectLinker)
    store = linker.tiers[PoolName.KV].tier.store
    assert store.nbytes == (1 << 20) // 24576 * 24576
    assert not store.digests.begin(0)
    linker.close()
    linker.close()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"host_byte": 1}, "did you mean 'host_bytes'"),
        ({"host_bytes": 4096}, "a page takes 24576"),
        ({"host_bytes": "off"}, "host_bytes='off'"),
        ({"host_bytes": 1 << 50}, "use less"),
        ({"disk": {"path": "/x", "capacity": "1GiB"}}, "as HiCache's storage backend"),
        ({"remote": {"kind": "null"}}, "as HiCache's storage backend"),
        ({"cache_peers": {"ask": ["127.0.0.1:1"]}}, "as HiCache's storage backend"),
    ],
)
def test_settings_that_cannot_be_used(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bench(mha_pool(), settings=extra)


def test_a_cache_that_cannot_be_kept_is_refused() -> None:
    kvcache = mha_pool()
    kvcache.kv_cache_layout = "hnd"
    with pytest.raises(Incompatible, match=r"^kvconnect: this.*MHATokenToKVPool \(FULL\).*'hnd'"):
        Bench(kvcache)


Presence = st.lists(st.booleans(), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def windowed(published: None) -> Iterator[Bench]:
    bench = Bench(swa_pool(), FULL_AND_SWA)
    yield bench
    bench.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_lookup_finds_exactly_what_can_be_restored(windowed: Bench, data: st.DataObject) -> None:
    full = data.draw(Presence)
    swa = data.draw(st.lists(st.booleans(), min_size=len(full), max_size=len(full)))
    window = data.draw(st.integers(1, len(full)))
    keys = names(len(full))
    windowed.linker.reset()
    for name, there in ((PoolName.KV, full), (PoolName.SWA, swa)):
        index = windowed.linker.tiers[name].index
        present = [key.encode() for key, is_there in zip(keys, there, strict=True) if is_there]
        index.commit([index.reserve(0, key) for key in present])
    asked = [
        PoolTransfer(name=PoolName.KV, keys=keys),
        PoolTransfer(
            name=PoolName.SWA, keys=keys[-window:], hit_policy=PoolHitPolicy.TRAILING_PAGES
        ),
    ]
    expected = [
        length
        for length in range(1, len(keys) + 1)
        if all(full[:length]) and all(swa[max(0, length - window) : length])
    ]
    assert windowed.linker.lookup("req", asked) == expected
    assert restorable(windowed.linker.tiers, asked[:1]) == [
        length for length in range(1, len(keys) + 1) if all(full[:length])
    ]


def test_the_device_is_told_apart_by_buffers_not_by_luck(bench: Bench) -> None:
    """The control of the byte comparisons: no two pages of the bench hold the same bytes."""
    pages = bench.bytes_of(range(PAGES))
    assert len(set(pages)) == PAGES
    assert torch.isfinite(bench.kvcache.k_buffer[0]).all()
