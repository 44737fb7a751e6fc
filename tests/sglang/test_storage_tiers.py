"""Secondary tiers of the storage backend: what outlives it, and what goes wrong there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvconnect.engines.sglang import weights
from kvconnect.engines.sglang.storage import KVConnectStorage
from kvconnect.errors import ConfigError
from kvconnect.tiers.backends import memory
from kvconnect.types import Tier
from tests.sglang.linker_bench import PAGE, mla_pool, slots_of
from tests.sglang.storage_bench import (
    PAGE_BYTES,
    RANKS,
    Make,
    elsewhere,
    host_pool,
    pages_of,
    serving,
    storages,
)
from tests.sglang.tiered_storage import (
    KEYS,
    REMOTE,
    WAIT_S,
    Shared,
    counted,
    fill,
    on_disk,
    settle,
    where,
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    shared = Shared()
    monkeypatch.setattr(memory, "MemoryStore", lambda _: shared)
    yield shared
    shared.gate.set()


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights, "_state", weights._RankWeights())
    with serving():
        yield


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with storages(monkeypatch) as make_storage:
        yield make_storage


def test_a_restart_finds_pages_on_disk(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    pool = host_pool(monkeypatch)
    wanted = pages_of(pool, range(12))
    first = make(pool, **on_disk(tmp_path))
    fill(first)
    seen = counted(first)
    assert seen["CPU_to_DISK_total_bytes"] == 12 * PAGE_BYTES
    assert (seen["tier_written_blocks"], seen["tier_available_disk"]) == (12, 1)
    assert where(first) == [Tier.DISK] * 4 + [Tier.HOST] * 8
    first.close()

    second = make(pool, **on_disk(tmp_path))
    assert elsewhere(second.batch_exists, [*KEYS, "other"]) == 12
    pool.kv_buffer.fill_(-1)
    assert second.batch_get_v1([*KEYS, "other"], slots_of(range(13, 26))) == [True] * 12 + [False]
    assert pages_of(pool, range(13, 25)) == wanted
    assert where(second)[-2:] == [Tier.HOST] * 2  # what was read last is in memory
    settle(second)
    seen = counted(second)
    assert seen["DISK_to_CPU_total_bytes"] == 12 * PAGE_BYTES
    assert (seen["hit_tokens_disk"], seen["miss_tokens"]) == (12 * PAGE, PAGE)
    assert "CPU_to_DISK_total_bytes" not in seen  # it is there
    second.batch_get_v1(KEYS[-2:], slots_of([1, 2]))
    assert "DISK_to_CPU_total_bytes" not in counted(second)
    assert second.pages.store.index.slots.busy == 0
    assert where(make(pool)) == [None] * 12  # the control: without a disk


def test_the_copying_interface_and_side_pools_are_on_disk_too(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    pool = host_pool(monkeypatch)
    state = PoolTransfer(
        PoolName.SWA, slots_of([5]), keys=[KEYS[1]], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    for turn in range(2):
        storage = make(pool, **on_disk(tmp_path))
        storage.register_mem_host_pool_v2(pool, PoolName.SWA)
        if not turn:
            assert storage.batch_set(KEYS[:2], [pool.get_data_page(n * PAGE) for n in (1, 2)])
            settle(storage)
            assert storage.batch_set_v2([state]) == {PoolName.SWA: [True]}
            settle(storage)
            storage.close()
    assert elsewhere(storage.batch_exists_v2, KEYS, [state]).restorable_prefix_pages == [2]
    read = replace(state, host_indices=slots_of([6]))
    assert storage.batch_get_v2([read]) == {PoolName.SWA: [True]}
    assert pages_of(pool, range(6, 7)) == pages_of(pool, range(5, 6))
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    found = storage.batch_get(KEYS[:3], targets)
    assert [page is None for page in found] == [False, False, True]
    assert [page.numpy().tobytes() for page in targets[:2]] == pages_of(pool, range(1, 3))


def test_other_weights_do_not_find_them(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    shape = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    models = [tmp_path / owner / "model" for owner in "ab"]
    for number, folder in enumerate(models):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes([number]) * 100)
        (folder / "config.json").write_text(shape)
    pool, disk = host_pool(monkeypatch), tmp_path / "disk"

    def found(model: Path, **settings: Any) -> list[Tier | None]:
        with serving(str(model), **settings):
            storage = make(pool, **on_disk(disk))
            there = where(storage, KEYS[:2])
            fill(storage, 2)
            storage.close()
        return there

    assert found(models[0]) == [None] * 2
    assert found(models[0]) == [Tier.DISK] * 2  # the control
    assert found(models[1]) == [None] * 2
    assert found(models[0], quantization="fp8") == [None] * 2
    (models[0] / "config.json").write_text(shape + " ")
    assert found(models[0]) == [None] * 2
    (models[0] / "config.json").write_text(shape)
    assert found(models[0].rename(tmp_path / "model")) == [Tier.DISK] * 2


def test_a_flipped_byte_is_a_miss_and_counted(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    pool = host_pool(monkeypatch)
    first = make(pool, **on_disk(tmp_path))
    fill(first, 4)
    first.close()
    (content,) = pages_of(pool, range(1, 2))
    segments = [path for path in tmp_path.glob("*/*.seg") if content in path.read_bytes()]
    assert segments
    for segment in segments:
        data = bytearray(segment.read_bytes())
        data[data.index(content) + 77] ^= 0x40
        segment.write_bytes(data)
    second = make(pool, **on_disk(tmp_path))
    untouched = pages_of(pool, range(12, 13))
    assert second.batch_get_v1(KEYS[:4], slots_of(range(11, 15))) == [True, False, True, True]
    assert pages_of(pool, range(12, 13)) == untouched
    assert counted(second)["store_failed_blocks_corrupt"] == 1
    assert elsewhere(second.batch_exists, KEYS[:4]) == 1


def test_a_tier_that_raises_has_nothing_until_it_works_again(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Shared
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, **REMOTE)
    fill(storage)
    server.broken = True
    keys = [*KEYS[:4], KEYS[-1]]
    assert where(storage, keys) == [None] * 4 + [Tier.HOST]
    assert storage.batch_get_v1(keys, slots_of(range(11, 16))) == [False] * 4 + [True]
    assert storage.batch_set_v1(["other"], slots_of([1])) == [True]
    settle(storage)
    server.broken = False
    assert where(storage, keys) == [Tier.REMOTE] * 4 + [Tier.HOST]
    assert storage.batch_get_v1(keys, slots_of(range(11, 16))) == [True] * 5
    assert storage.pages.store.index.slots.busy == 0


def test_pages_that_come_too_late_are_misses_and_there_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Shared
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, wait_s=0.2, **REMOTE)
    fill(storage)
    server.gate.clear()
    assert storage.batch_get_v1(KEYS[:4], slots_of(range(11, 15))) == [False] * 4
    server.gate.set()
    settle(storage)
    assert counted(storage)["failed_blocks_deadline"] == 2  # the others were not asked for
    assert where(storage, KEYS[:4]) == [Tier.HOST] * 2 + [Tier.REMOTE] * 2
    assert storage.pages.store.index.slots.busy == 0


def test_a_tier_that_is_behind_takes_no_more_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Shared
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, **REMOTE)
    server.gate.clear()
    assert storage.batch_set_v1(KEYS[:8], slots_of(range(8))) == [True] * 8
    seen = counted(storage)
    # A quarter of the slots is written at a time, and as many wait for that.
    assert (seen["tier_jobs_in_flight"], seen["tier_skipped_blocks"]) == (2, 4)
    assert storage.pages.store.index.slots.busy == 2
    server.gate.set()
    settle(storage)
    assert counted(storage)["tier_written_blocks"] == 2
    assert [bool(n) for n in server.exists(_names(storage, KEYS[:8]))] == [True] * 4 + [False] * 4


def _names(storage: KVConnectStorage, keys: Sequence[str]) -> list[bytes]:
    return [bytes(17) + name for name in storage.pages._names(PoolName.KV, keys)]


def test_cleared_pages_are_not_found_but_by_a_new_process(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    pool = host_pool(monkeypatch)
    storage = make(pool, **on_disk(tmp_path))
    fill(storage, 2)
    storage.clear()
    assert where(storage, KEYS[:3]) == [None] * 3
    assert storage.batch_get_v1(KEYS[:2], slots_of([1, 2])) == [False] * 2
    storage.close()
    assert where(make(pool, **on_disk(tmp_path)), KEYS[:3]) == [Tier.DISK] * 2 + [None]


def test_what_is_under_way_when_all_is_forgotten_is_not_found_later(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Shared
) -> None:
    storage = make(host_pool(monkeypatch), **REMOTE)
    fill(storage)
    server.gate.clear()
    reader = threading.Thread(target=storage.batch_get_v1, args=(KEYS[:2], slots_of([1, 2])))
    reader.start()
    tiers, deadline = storage.pages.store.tiers, time.monotonic() + WAIT_S
    while tiers is None or not tiers.jobs:
        assert time.monotonic() < deadline, "nothing is asked for"
        time.sleep(0.002)
    storage.clear()
    server.gate.set()
    reader.join()
    settle(storage)
    assert where(storage) == [None] * 12
    assert storage.pages.store.index.slots.busy == 0


def test_ranks_with_the_same_latents_read_what_one_wrote(
    monkeypatch: pytest.MonkeyPatch, make: Make, server: Shared
) -> None:
    latent, heads = latent_pool(monkeypatch), host_pool(monkeypatch)
    ranks = [replace(RANKS, is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    writer, reader = [make(latent, rank, **REMOTE) for rank in ranks]
    for storage in (writer, reader):
        storage.register_mem_host_pool_v2(latent, PoolName.MAMBA)
        storage.register_mem_host_pool_v2(heads, PoolName.DRAFT)
    fill(writer, 2)
    state = PoolTransfer(PoolName.MAMBA, slots_of([5]), keys=KEYS[:1])
    assert writer.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
    settle(writer)
    assert where(reader, KEYS[:3]) == [Tier.REMOTE] * 2 + [None]
    assert reader.batch_get_v1(KEYS[:2], slots_of([11, 12])) == [True] * 2
    assert pages_of(latent, range(11, 13)) == pages_of(latent, range(2))
    assert reader.pages.where(PoolName.MAMBA, KEYS[:1]) == [None]  # each rank has its own
    assert writer.pages.where(PoolName.MAMBA, KEYS[:1]) == [Tier.HOST]
    draft = [storage.pages._names(PoolName.DRAFT, KEYS[:1]) for storage in (writer, reader)]
    assert draft[0] != draft[1]


@pytest.mark.parametrize(
    ("ranks", "name", "warned"),
    [
        ({}, PoolName.DRAFT, True),
        ({"tp_rank": 1}, PoolName.DRAFT, False),  # one line is enough
        ({"tp_size": 1}, PoolName.DRAFT, False),
        ({"is_mla_model": False}, PoolName.DRAFT, False),
        ({}, PoolName.MAMBA, False),  # which all ranks store
    ],
    ids=str,
)
def test_a_draft_model_that_keeps_latents_from_being_found_is_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Make,
    server: Shared,
    ranks: dict[str, Any],
    name: PoolName,
    warned: bool,
) -> None:
    pools = latent_pool(monkeypatch), host_pool(monkeypatch)
    config = replace(RANKS, **{"is_mla_model": True, "tp_size": 2, **ranks})
    storage = make(pools[0], config, **REMOTE)
    with caplog.at_level("WARNING", "kvconnect"):
        storage.register_mem_host_pool_v2(latent_pool(monkeypatch), PoolName.INDEXER)
        storage.register_mem_host_pool_v2(pools[1], name)
    said = [record.message for record in caplog.records if "nothing that is" in record.message]
    assert len(said) == warned
    if warned:
        assert said[0].startswith("pool draft is divided among 2 ranks")
    assert storage.registered_pools[name] is pools[1]


def test_a_pool_whose_pages_do_not_fit_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    small, large = latent_pool(monkeypatch), host_pool(monkeypatch)
    with caplog.at_level("WARNING", "kvconnect"):
        make(large).register_mem_host_pool_v2(small, PoolName.DRAFT)
        assert "are not stored" not in caplog.text
        storage = make(small)
        storage.register_mem_host_pool_v2(large, PoolName.DRAFT)
    assert "pages of pool draft have" in caplog.text and "are not stored" in caplog.text
    page = PoolTransfer(PoolName.DRAFT, slots_of([5]), keys=KEYS[:1])
    assert storage.batch_set_v2([page]) == {PoolName.DRAFT: [False]}


def latent_pool(monkeypatch: pytest.MonkeyPatch) -> MLATokenToKVPoolHost:
    monkeypatch.setattr(base, "host_memory_budget_bytes", lambda nbytes: nbytes)
    device = mla_pool()
    pool = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout="page_first",
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=2,
        target_layer_num=3,
    )
    for page in range(pool.page_num):
        pool.kv_buffer[page * PAGE : (page + 1) * PAGE].fill_(page)
    return pool


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"disk": {"path": "/x", "capacity": "1MiB"}}, r"disk\.capacity='1MiB' is not usable"),
        (
            {"disk": {"path": "/x", "capacity": "1GiB", "owner": "a"}},
            r"disk\.owner='a' is not usable: unknown setting",
        ),
        ({"remote": {"kind": "valky"}}, "remote.kind='valky' is not usable"),
        ({**REMOTE, "spill": "reused"}, "spill='reused' is not usable"),
    ],
)
def test_settings_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, make: Make, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(host_pool(monkeypatch), **settings)


def test_a_second_tier_that_cannot_be_used_leaves_the_first_one_free(
    monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    pool = host_pool(monkeypatch)
    with pytest.raises(ConfigError):
        make(
            pool,
            **on_disk(tmp_path),
            remote={"kind": "valkey", "address": "a:1", "tls_dir": "/none"},
        )
    with pytest.raises(ConfigError):
        make(pool, **on_disk(tmp_path), policy="lruu")
    make(pool, **on_disk(tmp_path))
    with pytest.raises(ConfigError):  # the control: the folder has an owner now
        make(pool, **on_disk(tmp_path))
