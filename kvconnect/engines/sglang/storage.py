"""Host memory of this process as a storage backend of SGLang's HiCache.

For ``--hicache-storage-backend dynamic``; see ``docs/sglang-offload.md``. HiCache keeps a host tier
of its own and writes pages through to this one, which today is host memory, too. Its threads call
what is here, and copy in their own time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvconnect import memory
from kvconnect.config import check_fits
from kvconnect.engines.sglang.hits import window_ends
from kvconnect.engines.sglang.page_store import PageStore
from kvconnect.engines.sglang.reporting import publish_regularly
from kvconnect.engines.sglang.settings import own_config, worker_share
from kvconnect.errors import ConfigError, Incompatible, Misuse
from kvconnect.geometry import SLOT_ALIGNMENT

logger = logging.getLogger(__name__)

_FRAMEWORK = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys of the same JSON object that are SGLang's."""


class KVConnectStorage(HiCacheStorage):
    """HiCache's pages by key in a :class:`PageStore`, in slots that hold the largest pool's page.

    Any thread may call. Keys carry all that a page's bytes depend on (model, rank, pool, type,
    layout), so that a tier which outlives the process may take the store's place.

    Raises :class:`ConfigError` for a setting that cannot be used, :class:`Incompatible` for latent
    attention on several ranks: only the first one writes, and no other could read its memory.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        extra = storage_config.extra_config or {}
        self._config = own_config({k: v for k, v in extra.items() if k not in _FRAMEWORK})
        self._share = worker_share(self._config)
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise Incompatible(
                f"latent attention on {storage_config.tp_size} ranks: HiCache has one of them "
                "write for all, who cannot see its memory; use the linker instead"
            )
        self._ranks = storage_config
        self.registered_pools: dict[PoolName, Any] = {}
        self._pages: HostPages | None = None
        self._stop = threading.Event()

    def on_host_pools_registered(self) -> None:
        """Allocate the store, now that HiCache has said what pools there are.

        Raises:
            ConfigError: this worker's share holds no page, or is more than is free.
            Incompatible: the cache has no pages of one kind that all prefixes need.
        """
        if self.mem_pool_host.kv_buffer is None:
            raise Incompatible(f"{type(self.mem_pool_host).__name__} has no pages of its own")
        pools = (self.mem_pool_host, *self.registered_pools.values())
        largest = max(pool.get_data_page(0, flat=True).nbytes for pool in pools)
        slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        slots = self._share // slot_bytes
        if slots < 1:
            fix = f"a page takes {slot_bytes} bytes, this worker's share is {self._share}; use more"
            raise ConfigError("host_bytes", self._config.host_bytes or "auto", fix)
        check_fits(
            slots * slot_bytes,
            memory_bytes=memory.available_bytes(),
            what="available now for this worker's share",
        )
        store = PageStore(slots, slot_bytes, self._config)
        self.registered_pools.setdefault(PoolName.KV, self.mem_pool_host)
        self._pages = HostPages(store, self.registered_pools, _identity(self._ranks))
        self._stop = publish_regularly(store.take_stats)
        logger.info("KVConnect storage: %d pages of %d bytes", slots, slot_bytes)

    @property
    def pages(self) -> HostPages:
        """Pages and pools; there once the pools are registered."""
        if self._pages is None:
            raise Misuse("HiCache has not registered its pools")
        return self._pages

    def exists(self, key: str) -> bool:
        """Whether a page of the first pool can be read."""
        return self.pages.has(PoolName.KV, key)

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store a page of the first pool; return whether it is there now."""
        return value is not None and self.pages.put(PoolName.KV, key, value)

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return a page of the first pool, in ``target_location`` if that is given; None if it is
        not there."""
        with self.pages.reading(PoolName.KV, key) as page:
            if page is None or target_location is None:
                return None if page is None else page.clone()
            if page.nbytes != target_location.nbytes:
                return None
            return target_location.copy_(page.view(target_location.shape))

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store pages of the first pool; return whether all are there now."""
        return values is not None and all(map(self.set, keys, values))

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Return each page of the first pool, or None."""
        return list(map(self.get, keys, target_locations or [None] * len(keys)))

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Store pages straight from the first pool; return which are there now."""
        return self.pages.write(PoolTransfer(PoolName.KV, host_indices, keys=list(keys)))

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Read pages straight into the first pool; return which are right."""
        return self.pages.read(PoolTransfer(PoolName.KV, host_indices, keys=list(keys)))

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: Any = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """Return the lengths of a prefix, in pages, at which every pool has what it needs."""
        found = list(range(1, 1 + self.batch_exists(list(keys))))
        hits: dict[str, int] = {PoolName.KV: len(found)} if found else {}
        for transfer in pool_transfers or ():
            there = [self.pages.has(transfer.name, key) for key in keys[: max(found, default=0)]]
            whole = transfer.hit_policy is PoolHitPolicy.ALL_PAGES
            window = len(there) if whole else max(1, len(transfer.keys or ()))
            ends = window_ends(there, window)
            found = [length for length in found if length in ends]
            if ends:
                hits[transfer.name] = max(ends)
        return PoolTransferResult(max(found, default=0), hits, found)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Store pages straight from several pools; return which are there now."""
        return {transfer.name: self.pages.write(transfer) for transfer in transfers}

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Read pages straight into several pools; return which are right."""
        return {transfer.name: self.pages.read(transfer) for transfer in transfers}

    def clear(self) -> None:
        """Forget every page."""
        self.pages.store.clear()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._stop.set()
        if self._pages is not None:
            self._pages.store.close()


class HostPages:
    """Moves pages between HiCache's host pools and a store. Any thread may call.

    ``identity`` says what the bytes of this worker's pages depend on beside their pool.
    """

    def __init__(self, store: PageStore, pools: Mapping[PoolName, Any], identity: str) -> None:
        self.store = store
        self._pools = pools  # HiCache may add to it
        self._identity = identity

    def has(self, name: PoolName, key: str) -> bool:
        """Whether a page can be read."""
        return self.store.has(self._key(name, key))

    def put(self, name: PoolName, key: str, page: torch.Tensor) -> bool:
        """Store a page; return whether it is there now."""
        return self.store.put(self._key(name, key), page)

    @contextmanager
    def reading(self, name: PoolName, key: str) -> Iterator[torch.Tensor | None]:
        """Give a page, flat, for as long as the block lasts; None if it is not there or broken."""
        with self.store.reading(self._key(name, key)) as content:
            dtype = self._pools[name].get_data_page(0, flat=True).dtype
            yield None if content is None else content.view(dtype)

    def write(self, transfer: PoolTransfer) -> list[bool]:
        """Store the pages of a transfer; return which are there now."""
        pool = self._pools[transfer.name]
        return [
            start is not None and self.put(transfer.name, key, pool.get_data_page(start, flat=True))
            for key, start in self._starts(transfer)
        ]

    def read(self, transfer: PoolTransfer) -> list[bool]:
        """Read the pages of a transfer; return which are right."""
        pool, right = self._pools[transfer.name], []
        for key, start in self._starts(transfer):
            with self.reading(transfer.name, key) as page:
                there = page is not None and start is not None
                if there:
                    pool.set_from_flat_data_page(start, page)
                right.append(there)
        return right

    def _starts(self, transfer: PoolTransfer) -> list[tuple[str, int | None]]:
        """Return each key with the first token of its page in the host pool; None, said in the
        log, if the tokens are not those of whole pages."""
        keys, tokens = transfer.keys or [], self._pools[transfer.name].page_size or 1
        indices = [] if transfer.host_indices is None else transfer.host_indices.tolist()
        if len(indices) == len(keys) * tokens:
            return list(zip(keys, indices[::tokens], strict=True))
        logger.error("%d tokens of pool %s for %d pages", len(indices), transfer.name, len(keys))
        return [(key, None) for key in keys]

    def _key(self, name: PoolName, key: str) -> bytes:
        pool = self._pools[name]
        form = pool.dtype, pool.layout, pool.page_size, pool.storage_format_tag
        return f"{self._identity}|{name}|{form}|{key}".encode()


def _identity(ranks: HiCacheStorageConfig) -> str:
    """Return what tells this worker's pages from those of others with the same keys."""
    parts = {
        "model": ranks.model_name,
        "tp": (ranks.tp_rank, ranks.tp_size),
        "pp": (ranks.pp_rank, ranks.pp_size),
        "cp": (ranks.attn_cp_rank, ranks.attn_cp_size),
        "dcp": (ranks.dcp_rank, ranks.dcp_size),
    }
    return "|".join(f"{name}={value}" for name, value in parts.items())
