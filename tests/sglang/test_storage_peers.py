"""Pages of the storage backend in the host memory of other servers, over real connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvconnect.cache.keys import block_key
from kvconnect.engines.sglang import weights
from kvconnect.engines.sglang.storage import KVConnectStorage
from kvconnect.engines.sglang.storage_tiers import GROUP
from kvconnect.errors import ConfigError
from kvconnect.tiers import SHARED
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.types import Tier
from tests.servers import free_port
from tests.sglang.linker_bench import PAGE, names
from tests.sglang.storage_bench import Make, host_pool, name_of, pages_of, serving, storages

KEYS = names(6)
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights, "_state", weights._RankWeights())
    with serving():
        yield


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with storages(monkeypatch) as make_storage:
        yield make_storage


def peers(listen: int, *ask: int) -> dict[str, Any]:
    addresses = [f"127.0.0.1:{port}" for port in ask]
    return {"cache_peers": {"listen": f"127.0.0.1:{listen}", "ask": addresses, "ask_s": 5.0}}


def pair(monkeypatch: pytest.MonkeyPatch, make: Make, **reader: Any) -> list[KVConnectStorage]:
    """Return a storage with pages, and one that reads from it."""
    first, second = free_port(), free_port()
    source = make(host_pool(monkeypatch), **peers(first))
    source.batch_set_v1(KEYS, indices(len(KEYS)))
    asking = make(host_pool(monkeypatch), **{**peers(second, first), **reader})
    asking.mem_pool_host.kv_buffer.zero_()
    return [source, asking]


def indices(pages: int) -> torch.Tensor:
    return torch.arange(pages * PAGE)


def peers_of(storage: KVConnectStorage) -> PeerSource:
    peers = storage.pages.store._pages.peers
    assert peers is not None
    return peers


def connected(storage: KVConnectStorage) -> None:
    deadline = time.monotonic() + WAIT_S
    while not peers_of(storage).usage().available:
        assert time.monotonic() < deadline, "no peer answered"
        time.sleep(0.01)


def offered(storage: KVConnectStorage, key: str) -> bool:
    name = block_key(SHARED, GROUP, name_of(storage, key))
    return peers_of(storage).served.find(name) is not None


def test_pages_come_from_another_server(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    source, reader = pair(monkeypatch, make)
    connected(reader)
    assert reader.pages.where(PoolName.KV, KEYS) == [Tier.PEER] * len(KEYS)
    assert reader.batch_get_v1(KEYS, indices(len(KEYS))) == [True] * len(KEYS)
    every = range(len(KEYS))
    assert pages_of(reader.mem_pool_host, every) == pages_of(source.mem_pool_host, every)
    assert reader.pages.where(PoolName.KV, KEYS) == [Tier.HOST] * len(KEYS)
    assert all(offered(reader, key) for key in KEYS)  # whoever asks this one gets them, too
    assert reader.pages.store.tiers is not None
    assert not reader.pages.store.tiers.jobs  # nothing is written back to peers
    stats = reader.pages.store.take_stats()
    assert stats is not None and "tier_written_blocks" not in str(stats)


def test_pages_of_other_weights_do_not_come(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    source, reader = pair(monkeypatch, make)
    connected(reader)
    monkeypatch.setattr(weights, "generation", lambda: b"an update of this server's weights")
    assert reader.pages.where(PoolName.KV, KEYS) == [None] * len(KEYS)
    monkeypatch.setattr(weights, "generation", lambda: b"")
    assert reader.pages.where(PoolName.KV, KEYS)[0] is Tier.PEER  # the control
    source.clear()
    reader.clear()
    assert not peers_of(source).served.find(block_key(SHARED, GROUP, name_of(source, KEYS[0])))
    assert len(peers_of(source).served) == 0


def offered_when_sealed(monkeypatch: pytest.MonkeyPatch, storage: KVConnectStorage) -> list[bool]:
    """Return a list that gets, for each page written from now on, whether its slot is offered
    before the page is complete."""
    served, during = peers_of(storage).served, []
    own = storage.pages.store.memory.seal

    def seal(slot: int, nbytes: int) -> None:
        during.append(any(slot == place for place, _ in served._places.values()))
        own(slot, nbytes)

    monkeypatch.setattr(storage.pages.store.memory, "seal", seal)
    return during


def test_a_slot_is_not_offered_while_it_is_written(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    storage = make(host_pool(monkeypatch), **peers(free_port()))
    storage.batch_set_v1(KEYS, indices(len(KEYS)))
    assert all(offered(storage, key) for key in KEYS)
    during = offered_when_sealed(monkeypatch, storage)
    more = names(len(KEYS), start=100)  # evicts pages: there are eight slots
    storage.batch_set_v1(more, indices(len(more)))
    assert during == [False] * len(more)
    assert all(offered(storage, key) for key in more)
    assert sum(offered(storage, key) for key in KEYS) == 2


def test_a_slot_is_not_offered_while_a_page_is_read_into_it(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    _, reader = pair(monkeypatch, make)
    own = names(8, start=100)
    reader.batch_set_v1(own, indices(len(own)))
    assert all(offered(reader, key) for key in own)
    connected(reader)
    during = offered_when_sealed(monkeypatch, reader)
    assert reader.batch_get_v1(KEYS, indices(len(KEYS))) == [True] * len(KEYS)
    assert during == [False] * len(KEYS)
    assert all(offered(reader, key) for key in KEYS)
    assert sum(offered(reader, key) for key in own) == 2


def test_a_damaged_page_is_not_offered(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    storage = make(host_pool(monkeypatch), **peers(free_port()))
    storage.batch_set_v1(KEYS, indices(len(KEYS)))
    store = storage.pages.store
    slot = store.index.slot_of(GROUP, name_of(storage, KEYS[0]))
    assert slot is not None
    store.memory.view(slot)[0] ^= 1
    assert storage.batch_get_v1(KEYS, indices(len(KEYS))) == [False] + [True] * (len(KEYS) - 1)
    assert [offered(storage, key) for key in KEYS] == [False] + [True] * (len(KEYS) - 1)


def test_several_pools_are_refused(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    pool = host_pool(monkeypatch)
    own = KVConnectStorage.on_host_pools_registered

    def with_another_pool(storage: KVConnectStorage) -> None:
        storage.registered_pools[PoolName.MAMBA] = pool
        own(storage)

    monkeypatch.setattr(KVConnectStorage, "on_host_pools_registered", with_another_pool)
    with pytest.raises(ConfigError, match="model with several pools"):
        make(pool, **peers(free_port()))


def test_a_pool_of_a_draft_model_is_refused(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """SGLang registers it once the storage is attached."""
    alone = make(host_pool(monkeypatch))
    alone.register_mem_host_pool_v2(host_pool(monkeypatch), PoolName.DRAFT)  # control: no peers
    storage = make(host_pool(monkeypatch), **peers(free_port()))
    with pytest.raises(ConfigError, match=r"cache_peers=.*model with several pools"):
        storage.register_mem_host_pool_v2(host_pool(monkeypatch), PoolName.DRAFT)
