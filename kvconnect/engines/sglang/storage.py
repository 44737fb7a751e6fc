"""Storage backend of SGLang's HiCache: host memory, a disk, other engines and a shared server.

For ``--hicache-storage-backend dynamic``; see ``docs/sglang-offload.md``. HiCache has a host tier
of its own and writes pages through to this backend. HiCache's threads call it, do the copies and
wait for the disk and the server.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import (
    MHATokenToKOnlyPoolHost,
    MHATokenToKVPoolHost,
)

from kvconnect import memory
from kvconnect.cache.layout import SLOT_ALIGNMENT
from kvconnect.engines.sglang import weights
from kvconnect.engines.sglang.device_pools import window_ends
from kvconnect.engines.sglang.runtime_context import own_settings, worker_share
from kvconnect.engines.sglang.settings_flags import storage_settings
from kvconnect.engines.sglang.stats import publish_regularly
from kvconnect.engines.sglang.storage_backends import Records, make_stores, records_for_all
from kvconnect.engines.sglang.storage_pages import PageStore
from kvconnect.errors import ConfigError, Incompatible, Misuse, refusing
from kvconnect.offload.host_arena import HostArena
from kvconnect.settings.host_memory import check_fits
from kvconnect.types import Tier

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
        deadline = self.pages.store.deadline()
        for part in self.pages.parts(len(keys)):
            with self.pages.reading(PoolName.KV, keys[part], deadline) as pages:
                found += map(_copied, pages, targets[part])
        return found


class KVConnectStorage(_Copying):
    """HiCache's pages in a :class:`PageStore`; a slot fits the largest pool's page. Thread-safe.

    Raises:
        ConfigError: a setting cannot be used.
        Incompatible: latent attention on several ranks without a remote tier. Only the first rank
            writes, and the others could not read its memory or its disk.
    """

    @refusing("this server")
    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        self._settings = own_settings(storage_settings(storage_config.extra_config or {}))
        self._share = worker_share(self._settings)
        alone = not self._settings.remote
        if alone and storage_config.is_mla_model and storage_config.tp_size > 1:
            raise Incompatible(
                f"latent attention on {storage_config.tp_size} ranks: HiCache has one of them "
                "write for all, who cannot see its memory; use the linker instead, or a remote tier"
            )
        self._ranks = storage_config
        self.registered_pools: dict[PoolName, Any] = {}
        self._stop = threading.Event()

    @refusing("this server")
    def on_host_pools_registered(self) -> None:
        """Allocate the store, once HiCache's pools are known.

        Raises:
            ConfigError: this worker's share is less than a page or more than is free, or a lower
                tier cannot be used as it is set.
            Incompatible: the first pool has no pages of its own.
        """
        if self.mem_pool_host.kv_buffer is None:
            raise Incompatible(f"{type(self.mem_pool_host).__name__} has no pages of its own")
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
        return self.pages.read(PoolTransfer(PoolName.KV, host_indices, keys=list(keys)))

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """Return how many leading pages of the first pool can be read."""
        found = list(takewhile(bool, self.pages.where(PoolName.KV, keys)))
        self.pages.store.looked_up(len(keys), found, self.mem_pool_host.page_size)
        return len(found)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: Any = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """Return the prefix lengths, in pages, at which every pool has what it needs."""
        found = list(range(1, 1 + self.batch_exists(keys)))
        hits: dict[str, int] = {PoolName.KV: len(found)} if found else {}
        for transfer in pool_transfers or ():
            tiers = self.pages.where(transfer.name, keys[: max(found, default=0)])
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
        return {transfer.name: self.pages.read(transfer) for transfer in transfers}

    def clear(self) -> None:
        """Forget every page. Lower tiers keep theirs for servers that start later."""
        self.pages.forget()

    def close(self) -> None:
        """Free the memory and close the lower tiers. Idempotent."""
        self._stop.set()
        if self._pages is not None:
            self._pages.store.close()

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
            if self._settings.has_tiers:
                weights.follow()
            store = PageStore(arena, self._settings, stores, peers)
            undo.pop_all()
        return store


def _copied(page: torch.Tensor | None, target: torch.Tensor | None) -> torch.Tensor | None:
    """Copy a page for the caller; None if it is absent or the target has another size."""
    if page is None or target is None:
        return None if page is None else page.clone()
    if page.nbytes != target.nbytes:
        return None
    return target.copy_(page.view(target.shape))


# Names of HiCache's pages, and copies between its host pools and the store.


class _Form(NamedTuple):
    """Format of a pool's pages; ``text`` distinguishes it from the formats of other pools."""

    nbytes: int
    dtype: torch.dtype
    text: str


class HostPages:
    """Copies pages between HiCache's host pools and a store. Thread-safe.

    A page's name covers its pool, the pool's layout and the rank whose part it is. The format of
    the store's tiers covers what else its bytes depend on. ``by_tokens``: there is one pool, its
    pages have HiCache's own names, which any engine knows, and the format covers all the rest.
    """

    def __init__(
        self,
        store: PageStore,
        pools: Mapping[PoolName, Any],
        ranks: HiCacheStorageConfig,
        by_tokens: bool = False,
    ) -> None:
        self.store = store
        self._by_tokens = by_tokens
        self._pools = pools  # HiCache may add pools later
        self._ranks = ranks
        self._forms: dict[PoolName, _Form] = {}
        self._generation = b""

    def where(self, name: PoolName, keys: Sequence[str]) -> list[Tier | None]:
        """Return the tier that has each page, None for absent ones."""
        return self.store.where(self._names(name, keys), self._form(name).nbytes)

    def put(self, name: PoolName, key: str, page: torch.Tensor) -> bool:
        """Store a page; return whether it is stored now."""
        return self.store.put(self._names(name, [key])[0], page)

    def parts(self, count: int) -> Iterator[slice]:
        """Divide ``count`` pages into slices that one :meth:`reading` should ask for."""
        for start in range(0, count, self.store.most):
            yield slice(start, min(count, start + self.store.most))

    @contextmanager
    def reading(
        self, name: PoolName, keys: Sequence[str], deadline: float | None = None
    ) -> Iterator[list[torch.Tensor | None]]:
        """Yield flat pages, valid inside the context; None for a page that is absent, damaged, or
        not read by the ``deadline`` of :meth:`PageStore.deadline`."""
        form = self._form(name)
        until = self.store.deadline() if deadline is None else deadline
        with self.store.reading(self._names(name, keys), form.nbytes, until) as contents:
            yield [None if content is None else content.view(form.dtype) for content in contents]

    def write(self, transfer: PoolTransfer) -> list[bool]:
        """Store the pages of a transfer; return which are stored now."""
        pool = self._pools[transfer.name]
        return [
            start is not None and self.put(transfer.name, key, pool.get_data_page(start, flat=True))
            for key, start in self._starts(transfer)
        ]

    def read(self, transfer: PoolTransfer) -> list[bool]:
        """Read the pages of a transfer; return which were read."""
        pool, right = self._pools[transfer.name], []
        starts, deadline = self._starts(transfer), self.store.deadline()
        for part in self.parts(len(starts)):
            keys = [key for key, _ in starts[part]]
            with self.reading(transfer.name, keys, deadline) as pages:
                for page, (_, start) in zip(pages, starts[part], strict=True):
                    there = page is not None and start is not None
                    if there:
                        pool.set_from_flat_data_page(start, page)
                    right.append(there)
        return right

    def forget(self) -> None:
        """Forget every stored page. Lower tiers keep theirs under names that this process does not
        use any more."""
        self._generation = os.urandom(16)
        self.store.clear()

    def _starts(self, transfer: PoolTransfer) -> list[tuple[str, int | None]]:
        """Return each key with the first token of its page in the host pool; None, with a log line,
        if the tokens are not whole pages."""
        keys, tokens = transfer.keys or [], self._pools[transfer.name].page_size or 1
        indices = [] if transfer.host_indices is None else transfer.host_indices.tolist()
        if len(indices) == len(keys) * tokens:
            return list(zip(keys, indices[::tokens], strict=True))
        logger.error("%d tokens of pool %s for %d pages", len(indices), transfer.name, len(keys))
        return [(key, None) for key in keys]

    def _names(self, name: PoolName, keys: Sequence[str]) -> list[bytes]:
        generations = weights.generation() + self._generation
        if self._by_tokens and name is PoolName.KV and not generations:
            return [bytes.fromhex(key) for key in keys]
        text = f"{generations.hex()}|{self._form(name).text}|"
        return [blake2b((text + key).encode(), digest_size=32).digest() for key in keys]

    def _form(self, name: PoolName) -> _Form:
        form = self._forms.get(name)
        if form is None:
            pool = self._pools[name]
            page = pool.get_data_page(0, flat=True)
            layers = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
            shape = pool.dtype, pool.layout, pool.page_size, pool.storage_format_tag, page.nbytes
            part = f"{type(pool).__name__}|{shape}|{layers}|{self._share(name, pool)}"
            form = self._forms[name] = _Form(page.nbytes, page.dtype, f"{name}|{part}")
        return form

    def _share(self, name: PoolName, pool: Any) -> str:
        """Return which rank's part a pool has. Latent attention is the same on all ranks, and one
        of them writes it; pools beside it are divided."""
        divided = name is PoolName.MAMBA or isinstance(
            pool, MHATokenToKVPoolHost | MHATokenToKOnlyPoolHost
        )
        if self._ranks.is_mla_model and not divided:
            return "all"
        return f"{self._ranks.tp_rank} of {self._ranks.tp_size}"
