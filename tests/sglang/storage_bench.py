"""The storage backend over HiCache's real host pools, made as SGLang makes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import reset_context
from sglang.srt.server_args import ServerArgs
from sglang.test.parallel_groups import publish

from kvconnect.engines.sglang import storage as storage_module
from kvconnect.engines.sglang.storage import KVConnectStorage
from tests.sglang.linker_bench import PAGE, mha_pool

PAGE_BYTES = 3 * 2 * 4096  # of the pool that mha_pool makes
SELF = {
    "backend_name": "kvconnect",
    "module_path": "kvconnect.engines.sglang.storage",
    "class_name": "KVConnectStorage",
}
RANKS = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=False,
    model_name="model",
)

Make = Callable[..., KVConnectStorage]
T = TypeVar("T")


@contextmanager
def serving(model: str = "dummy", **settings: Any) -> Iterator[None]:
    """Be a process of a server of this model."""
    reset_context()
    publish(ServerArgs(model_path=model, device="cpu", **settings), role="test")
    yield
    reset_context()


def host_pool(monkeypatch: pytest.MonkeyPatch, layout: str = "page_first") -> MHATokenToKVPoolHost:
    """Return a host pool with other bytes in each page."""
    monkeypatch.setattr(base, "host_memory_budget_bytes", lambda nbytes: nbytes)  # keeps 10 GiB
    device = mha_pool()
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=2,
    )
    pool.kv_buffer.copy_(
        torch.rand(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(5))
    )
    return pool


@contextmanager
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make storages with room for eight pages; what they count is left for the test to take."""
    made: list[KVConnectStorage] = []
    monkeypatch.setattr(storage_module, "publish_regularly", lambda _: threading.Event())

    def make_storage(pool: Any, ranks: HiCacheStorageConfig = RANKS, **extra: Any) -> Any:
        settings = {"host_bytes": 8 * PAGE_BYTES, "digest": "full", **SELF, **extra}
        config = replace(ranks, extra_config=settings)
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        storage.register_mem_pool_host(pool)
        storage.on_host_pools_registered()
        made.append(storage)
        return storage

    yield make_storage
    for storage in made:
        storage.pages.store.index.check()
        storage.close()
        storage.close()


def elsewhere(call: Callable[..., T], *args: Any) -> T:
    """Call what HiCache calls on a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *args).result()


def pages_of(pool: Any, numbers: range) -> list[bytes]:
    flat = (pool.get_data_page(number * PAGE, flat=True) for number in numbers)
    return [page.clone().view(torch.uint8).numpy().tobytes() for page in flat]


def name_of(storage: KVConnectStorage, key: str) -> bytes:
    """Return what a page of the first pool goes by in the store."""
    return storage.pages._names(PoolName.KV, [key])[0]
