"""Host memory, a disk and a shared server as a storage backend of SGLang's HiCache.

For ``--hicache-storage-backend dynamic``; see ``docs/sglang-offload.md``. HiCache keeps a host tier
of its own and writes pages through to this one. Its threads call what is here, copy in their own
time, and wait for what a disk or a server has.
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
from kvconnect.config import check_fits
from kvconnect.engines.sglang import plugin
from kvconnect.engines.sglang.page_store import PageStore
from kvconnect.engines.sglang.pools import window_ends
from kvconnect.engines.sglang.runtime_context import own_config, worker_share
from kvconnect.engines.sglang.stats import publish_regularly
from kvconnect.engines.sglang.tier_stores import Records, make_stores, records_for_all
from kvconnect.errors import ConfigError, Incompatible, Misuse, refusing
from kvconnect.types import Tier

logger = logging.getLogger(__name__)

_FRAMEWORK = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys of the same JSON object that are SGLang's."""


class _Copying(HiCacheStorage):
    """The part of HiCache's interface that knows one pool, and whose callers copy its pages."""

    _pages: HostPages | None = None

    @property
    def pages(self) -> HostPages:
        """Pages and pools; there once the pools are registered."""
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
        return self.batch_get([key], None if target_location is None else [target_location])[0]

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
        found: list[torch.Tensor | None] = []
        targets = target_locations or [None] * len(keys)
        deadline = self.pages.store.deadline()
        for part in self.pages.parts(len(keys)):
            with self.pages.reading(PoolName.KV, keys[part], deadline) as pages:
                found += map(_copied, pages, targets[part])
        return found


class KVConnectStorage(_Copying):
    """HiCache's pages by key in a :class:`PageStore`, in slots that hold the largest pool's page.

    Any thread may call.

    Raises :class:`ConfigError` for a setting that cannot be used, :class:`Incompatible` for latent
    attention on several ranks without a remote tier: only the first one writes, and no other could
    read its memory or its disk.
    """

    @refusing("this server")
    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        extra = storage_config.extra_config or {}
        self._config = own_config({k: v for k, v in extra.items() if k not in _FRAMEWORK})
        self._share = worker_share(self._config)
        alone = not self._config.tiers.remote
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
        """Allocate the store, now that HiCache has said what pools there are.

        Raises:
            ConfigError: this worker's share holds no page, or is more than is free, or a tier below
                it cannot be used as it is set.
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
            raise ConfigError("host_bytes", self._config.offload.host_bytes or "auto", fix)
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
        """Return the lengths of a prefix, in pages, at which every pool has what it needs."""
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
        """Forget every page. Tiers below host memory keep theirs for servers that start later."""
        self.pages.forget()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._stop.set()
        if self._pages is not None:
            self._pages.store.close()

    def _records(self) -> Records | None:
        """Return as which any engine can read the pages of the remote tier, None if none can."""
        if not self._config.tiers.remote:
            return None
        try:
            return records_for_all(self.registered_pools, self._ranks)
        except Incompatible as error:
            logger.info("vLLM cannot use what is stored here: %s", error)
            return None

    def _make_store(self, slots: int, slot_bytes: int, records: Records | None) -> PageStore:
        with ExitStack() as undo:
            tiers = make_stores(self._config, self._ranks, records)
            for tier in tiers.values():
                undo.callback(tier.close)
            if tiers:
                plugin.check_watched()
            store = PageStore(slots, slot_bytes, self._config, tiers)
            undo.pop_all()
        return store


def _copied(page: torch.Tensor | None, target: torch.Tensor | None) -> torch.Tensor | None:
    """Return a page in memory of the caller's, None if it is not there or too large or small."""
    if page is None or target is None:
        return None if page is None else page.clone()
    if page.nbytes != target.nbytes:
        return None
    return target.copy_(page.view(target.shape))


# Pages of HiCache's host pools by name: what their bytes depend on, and moving them.


class _Form(NamedTuple):
    """What a pool's pages are like; ``text`` is all that tells them from those of other pools."""

    nbytes: int
    dtype: torch.dtype
    text: str


class HostPages:
    """Moves pages between HiCache's host pools and a store. Any thread may call.

    A page's name stands for its pool, how that arranges it, and the rank whose part it is; what
    else its bytes depend on is the format of the store's tiers. ``by_tokens``: pages of the only
    pool go by HiCache's own names, which any engine knows, and all else is in the format.
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
        self._pools = pools  # HiCache may add to it
        self._ranks = ranks
        self._forms: dict[PoolName, _Form] = {}
        self._generation = b""

    def where(self, name: PoolName, keys: Sequence[str]) -> list[Tier | None]:
        """Return which tier, if any, has each page."""
        return self.store.where(self._names(name, keys), self._form(name).nbytes)

    def put(self, name: PoolName, key: str, page: torch.Tensor) -> bool:
        """Store a page; return whether it is there now."""
        return self.store.put(self._names(name, [key])[0], page)

    def parts(self, count: int) -> Iterator[slice]:
        """Cut so many pages into what :meth:`reading` should be asked for at a time."""
        for start in range(0, count, self.store.most):
            yield slice(start, min(count, start + self.store.most))

    @contextmanager
    def reading(
        self, name: PoolName, keys: Sequence[str], deadline: float | None = None
    ) -> Iterator[list[torch.Tensor | None]]:
        """Give pages, flat, for as long as the block lasts; None for one that is not there, broken,
        or has not come up by the ``deadline`` of :meth:`PageStore.deadline`."""
        form = self._form(name)
        until = self.store.deadline() if deadline is None else deadline
        with self.store.reading(self._names(name, keys), form.nbytes, until) as contents:
            yield [None if content is None else content.view(form.dtype) for content in contents]

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
        """Find nothing that was stored so far. Tiers below keep it, under names that this process
        uses no more."""
        self._generation = os.urandom(16)
        self.store.clear()

    def _starts(self, transfer: PoolTransfer) -> list[tuple[str, int | None]]:
        """Return each key with the first token of its page in the host pool; None, said in the
        log, if the tokens are not those of whole pages."""
        keys, tokens = transfer.keys or [], self._pools[transfer.name].page_size or 1
        indices = [] if transfer.host_indices is None else transfer.host_indices.tolist()
        if len(indices) == len(keys) * tokens:
            return list(zip(keys, indices[::tokens], strict=True))
        logger.error("%d tokens of pool %s for %d pages", len(indices), transfer.name, len(keys))
        return [(key, None) for key in keys]

    def _names(self, name: PoolName, keys: Sequence[str]) -> list[bytes]:
        generations = plugin.generation() + self._generation
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
        """Return which rank's part a pool has. Of latent attention all ranks have the same, which
        one of them writes, but not of other pools beside it."""
        divided = name is PoolName.MAMBA or isinstance(
            pool, MHATokenToKVPoolHost | MHATokenToKOnlyPoolHost
        )
        if self._ranks.is_mla_model and not divided:
            return "all"
        return f"{self._ranks.tp_rank} of {self._ranks.tp_size}"
