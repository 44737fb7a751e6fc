"""Storage backend of SGLang's HiCache: host memory, a disk, other engines and a shared server.

For ``--hicache-storage-backend dynamic``; see ``docs/sglang-offload.md``. HiCache has a host tier
of its own and writes pages through to this backend. HiCache's threads call it, do the copies and
wait for the disk and the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
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
from kvconnect.cache.layout import SLOT_ALIGNMENT
from kvconnect.engines.sglang import weights
from kvconnect.engines.sglang.device_pools import window_ends
from kvconnect.engines.sglang.host_pages import MOST_WAIT_S, HostPages, has_heads
from kvconnect.engines.sglang.metrics_publisher import publish_regularly
from kvconnect.engines.sglang.rank_agreement import on_all_or_none
from kvconnect.engines.sglang.runtime_context import own_settings, worker_share
from kvconnect.engines.sglang.settings_flags import storage_settings
from kvconnect.engines.sglang.shared_records import Records, records_for_all
from kvconnect.engines.sglang.storage_backends import check_one_pool, make_stores
from kvconnect.engines.sglang.storage_pages import PageStore
from kvconnect.errors import ConfigError, Incompatible, Misuse, refusing
from kvconnect.offload.host_arena import HostArena
from kvconnect.settings.host_memory import check_fits

logger = logging.getLogger(__name__)


class _Copying(HiCacheStorage):
    """HiCache's methods for the first pool only, which exchange pages as tensors."""

    _pages: HostPages | None = None

    @property
    def pages(self) -> HostPages:
        """The host pools' pages. Raises :class:`Misuse` until HiCache has registered its pools."""
        if self._pages is None:
            raise Misuse("HiCache has not registered its pools")
        return self._pages

    def exists(self, key: str) -> bool:
        """Whether a page of the first pool can be read."""
        return self.pages.where(PoolName.KV, [key]) != [None]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store a page of the first pool; return whether it is stored now."""
        return value is not None and self.pages.put(PoolName.KV, key, value)

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return a page of the first pool, in ``target_location`` if given; None if absent."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store pages of the first pool; return whether all are stored now."""
        return values is not None and all(map(self.set, keys, values))

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Return each page of the first pool, None if absent."""
        found: list[torch.Tensor | None] = []
        targets = target_locations or [None] * len(keys)
        deadline = self.pages.deadline()
        for part in self.pages.parts(len(keys)):
            with self.pages.reading(PoolName.KV, keys[part], deadline) as pages:
                found += map(_copied, pages, targets[part])
        return found


class KVConnectStorage(_Copying):
    """HiCache's pages in a :class:`PageStore`. Thread-safe.

    A slot fits the largest page of the pools that are known when HiCache attaches this backend.
    Larger pages of a pool that is registered later are not stored.
    ``refused``: HiCache has attached this backend, and a rank cannot use it. Then it is to be
    detached on all ranks, or they would wait for each other.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        self._ranks = storage_config
        self._scheduler = threading.get_ident()
        self.registered_pools: dict[PoolName, Any] = {}
        self._stop = threading.Event()
        self._listening = ExitStack()  # to updates of weights
        self.refused = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Check all that can be checked before HiCache attaches this backend.

        Raises:
            ConfigError: a setting cannot be used.
            Incompatible: latent attention on several ranks without a remote tier. Only the first
                rank writes, and the others could not read its memory or its disk. Or the pool has
                no pages of its own, or another rank has an error.
        """
        super().register_mem_pool_host(mem_pool_host)
        with on_all_or_none(), refusing("this server"):
            ranks = self._ranks
            self._settings = own_settings(storage_settings(ranks.extra_config or {}))
            self._share = worker_share(self._settings)
            if not self._settings.remote and ranks.is_mla_model and ranks.tp_size > 1:
                raise Incompatible(
                    f"latent attention on {ranks.tp_size} ranks: HiCache has one of them write for "
                    "all, who cannot see its memory; use the linker instead, or a remote tier"
                )
            if mem_pool_host.kv_buffer is None:
                raise Incompatible(f"{type(mem_pool_host).__name__} has no pages of its own")

    def on_host_pools_registered(self) -> None:
        """Allocate the store, once HiCache's pools are known.

        Raises:
            ConfigError: this worker's share is less than a page or more than is free, or a lower
                tier cannot be used as it is set.
            Incompatible: another rank has an error.
        """
        self.refused = True
        with on_all_or_none(), refusing("this server"):
            self._allocate()
        self.refused = False
        self._listening.callback(self.pages.agree())

    def _allocate(self) -> None:
        pools = (self.mem_pool_host, *self.registered_pools.values())
        largest = max(pool.get_data_page(0, flat=True).nbytes for pool in pools)
        slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        slots = self._share // slot_bytes
        if slots < 1:
            fix = f"a page takes {slot_bytes} bytes, this worker's share is {self._share}; use more"
            raise ConfigError("host_bytes", self._settings.host_bytes, fix)
        check_fits(
            slots * slot_bytes,
            memory_bytes=memory.available_bytes(),
            what="available now for this worker's share",
        )
        self.registered_pools.setdefault(PoolName.KV, self.mem_pool_host)
        records = self._records()
        store = self._make_store(slots, slot_bytes, records)
        by_tokens = records is not None
        self._pages = HostPages(store, self.registered_pools, self._ranks, by_tokens)
        self._stop = publish_regularly(store.take_stats)
        logger.info("KVConnect storage: %d pages of %d bytes", slots, slot_bytes)
        if self._settings.has_tiers and self._settings.wait_s > MOST_WAIT_S:
            text = "wait_s=%g: HiCache's threads wait %g s at most, since a flush joins them"
            logger.warning(text, self._settings.wait_s, MOST_WAIT_S)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Serve another pool, also later, as SGLang registers those of a draft model.

        Warns if its pages cannot be stored, or HiCache would not store what all ranks need.

        Raises:
            ConfigError: peers were to read pages, and cannot read those of several pools.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._pages is not None:
            self._check_late(self._pages, host_pool, host_pool_name)
        ranks = self._ranks
        lost = host_pool_name != PoolName.MAMBA and has_heads(host_pool)
        if lost and ranks.is_mla_model and ranks.tp_size > 1 and ranks.tp_rank == 0:
            logger.warning(
                "pool %s is divided among %d ranks, and HiCache stores the first rank's part alone "
                "beside latent attention: nothing that is stored will be found; use a draft model "
                "with latent attention, or the linker",
                host_pool_name,
                ranks.tp_size,
            )

    def _check_late(self, pages: HostPages, host_pool: Any, name: PoolName) -> None:
        if self._settings.cache_peers is not None:
            check_one_pool(self._settings.cache_peers, self.registered_pools)
        nbytes = host_pool.get_data_page(0, flat=True).nbytes
        if nbytes > pages.store.memory.slot_bytes:
            text = "pages of pool %s have %d bytes and do not fit slots of %d: they are not stored"
            logger.warning(text, name, nbytes, pages.store.memory.slot_bytes)

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Store pages directly from the first pool; return which are stored now."""
        return self.pages.write(PoolTransfer(PoolName.KV, host_indices, keys=list(keys)))

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Read pages directly into the first pool; return which were read."""
        transfer = PoolTransfer(PoolName.KV, host_indices, keys=list(keys))
        return self.pages.read(transfer, self.pages.deadline())

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """Return how many leading pages of the first pool can be read; on SGLang's own thread, how
        many of these are in host memory."""
        return self._found(keys, self._lookup_deadline())

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: Any = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """Return the prefix lengths, in pages, at which every pool has what it needs."""
        deadline = self._lookup_deadline()
        found = list(range(1, 1 + self._found(keys, deadline)))
        hits: dict[str, int] = {PoolName.KV: len(found)} if found else {}
        for transfer in pool_transfers or ():
            tiers = self.pages.where(transfer.name, keys[: max(found, default=0)], deadline)
            there = [tier is not None for tier in tiers]
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
        """Store pages directly from several pools; return which are stored now."""
        return {transfer.name: self.pages.write(transfer) for transfer in transfers}

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Read pages directly into several pools; return which were read."""
        deadline = self.pages.deadline()
        return {transfer.name: self.pages.read(transfer, deadline) for transfer in transfers}

    def clear(self) -> None:
        """Forget every page. Lower tiers keep theirs for servers that start later."""
        self.pages.forget()

    def close(self) -> None:
        """Free the memory and close the lower tiers. Idempotent."""
        self._stop.set()
        self._listening.close()
        if self._pages is not None:
            self._pages.store.close()

    def _lookup_deadline(self) -> float:
        """Return until when a lookup may wait. SGLang's own thread must not wait: a decode server
        asks there at each step how much it may promise to the prefill server, which is less then.
        """
        return 0.0 if threading.get_ident() == self._scheduler else self.pages.deadline()

    def _found(self, keys: Sequence[str], deadline: float) -> int:
        found = list(takewhile(bool, self.pages.where(PoolName.KV, keys, deadline)))
        if deadline:  # not a question that is asked again and again
            self.pages.store.looked_up(len(keys), found, self.mem_pool_host.page_size)
        return len(found)

    def _records(self) -> Records | None:
        """Return the records in which vLLM can read the shared tiers, None if it cannot."""
        if not (self._settings.remote or self._settings.cache_peers):
            return None
        try:
            return records_for_all(self.registered_pools, self._ranks)
        except Incompatible as error:
            logger.info("vLLM cannot use what is stored here: %s", error)
            return None

    def _make_store(self, slots: int, slot_bytes: int, records: Records | None) -> PageStore:
        with ExitStack() as undo:
            arena = HostArena(slots, slot_bytes, self._settings.digest)
            undo.callback(arena.close)
            stores, peers = make_stores(
                self._settings, self._ranks, records, arena, self.registered_pools
            )
            for source in (*stores.values(), *([peers] if peers else [])):
                undo.callback(source.close)
            weights.follow()  # host memory outlives an update as well: SGLang does not clear it
            store = PageStore(arena, self._settings, stores, peers)
            undo.pop_all()
        if peers is not None:
            tell = peers.set_identity
            self._listening.callback(weights.listen(lambda: tell(weights.identity())))
        return store


def _copied(page: torch.Tensor | None, target: torch.Tensor | None) -> torch.Tensor | None:
    """Copy a page for the caller; None if it is absent or the target has another size."""
    if page is None or target is None:
        return None if page is None else page.clone()
    if page.nbytes != target.nbytes:
        return None
    return target.copy_(page.view(target.shape))
