"""Linker of SGLang's unified cache: stores and reloads its pages in this process's host memory.

Chosen with ``--enable-unified-cache-external-linker``; see ``docs/sglang-offload.md``. SGLang looks
up which prefixes can be restored, and offloads pages as its tree grows. A forward runs while its
pages are loaded, and each layer waits only for its own.

SGLang does not compare every answer between ranks, yet ranks must answer alike. So a problem that
depends on timing or on one rank's memory (no room, a damaged copy) never refuses an operation. The
operation is accepted, and reported as failed where SGLang reduces results over ranks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvconnect.copy.driver import own_stream
from kvconnect.engines.sglang import memory_release
from kvconnect.engines.sglang.device_pools import device_pools, map_pool, window_ends
from kvconnect.engines.sglang.layerwise_loads import LayerCounter, LoadBatch
from kvconnect.engines.sglang.linker_host_tier import PoolLoad, PoolTier
from kvconnect.engines.sglang.runtime_context import own_settings, worker_share
from kvconnect.engines.sglang.stats import LinkerStats
from kvconnect.errors import ConfigError, Misuse, TransferFailed, refusing
from kvconnect.jobs import first_cause
from kvconnect.offload.messages import GroupBlocks
from kvconnect.offload.streams import Fence
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.types import FailureCause

logger = logging.getLogger(__name__)

Tiers = Mapping[PoolName, PoolTier]


@dataclass(eq=False)
class _Offload:
    """The stores of one tree node's pages, one per pool."""

    waiting: int = 0  # stores that have not ended
    good: bool = True

    def ended(self, cause: FailureCause | None) -> None:
        self.waiting -= 1
        self.good = self.good and cause is None


@dataclass(frozen=True)
class _LinkedRequest:
    """The loads of one request, by pool."""

    asked: float  # monotonic seconds
    loads: Mapping[PoolName, PoolLoad]


class KVConnectLinker(UnifiedCacheLinker):
    """A worker's share of the host tier. For the scheduler's thread.

    Raises:
        ConfigError: a setting cannot be used.
        Incompatible: the model's cache cannot be stored; raised before memory is allocated.
    """

    @refusing("this server")
    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Iterable[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        settings = own_settings(extra_config or {})
        _check_tiers(settings)
        memory_release.check(server_args)
        share = worker_share(settings)
        self._group = device_pools(params, components)
        self.pools: dict[PoolName, DevicePoolEntry] = self._group.entry_map
        self.forward_stream = forward_stream
        stats = OffloadingConnectorStats()
        self.tiers = _make_tiers(self.pools, share, settings, stats)
        streams = next(iter(self.tiers.values())).tier.executor.streams
        self.layer_done_counter = LayerCounter(self._group.num_layers, streams)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self.stats = LinkerStats(stats, tuple(self.tiers.values()), self._group.page_size)
        self._queued: dict[str, _LinkedRequest] = {}
        self._batches: dict[int, Sequence[_LinkedRequest]] = {}
        self._offloads: deque[_Offload] = deque()
        device = next(iter(self.tiers.values())).pool.area.device
        self._join = own_stream(device) if device.type == "cuda" else None
        memory_release.drain_first(self.drain)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the prefix lengths, in pages, that this rank can restore; ascending."""
        found = restorable(self.tiers, self._group.resolve_transfers(transfers))
        asked = max((len(transfer.keys or ()) for transfer in transfers), default=0)
        self.stats.looked_up(rid, asked, found[-1] if found else 0)
        return found

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load for the next forward; return False if there are no whole pages to load.
        Pages that the tier has lost since the lookup fail in :meth:`finish_layer_wise_loading`.

        Raises:
            Misuse: the request already has a queued load.
        """
        if rid in self._queued:
            raise Misuse(f"request {rid} queues a second load")
        found = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        pages = self._pages(found)
        if not found or pages is None:
            return False
        loads = {
            entry.name: self.tiers[entry.name].queue_load(_keys(entry), pages[entry.name])
            for entry in found
        }
        self._queued[rid] = _LinkedRequest(time.monotonic(), loads)
        return True

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads as one batch; return its index in the layer counter, or -1."""
        if not self._queued:
            return -1
        requests, self._queued = tuple(self._queued.values()), {}
        by_pool: dict[PoolName, list[PoolLoad]] = {}
        for request in requests:
            for name, load in request.loads.items():
                by_pool.setdefault(name, []).append(load)
        stages = {name: self.tiers[name].pool.stages for name in by_pool}
        arrivals = LoadBatch(self.layer_done_counter, stages)
        fence = self._fence()
        for name, loads in by_pool.items():
            self.tiers[name].load(loads, fence, arrivals)
        self._batches[arrivals.index] = requests
        return arrivals.index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Block until a batch writes no more; return whether all its pages were loaded."""
        landed: bool = self.layer_done_counter.finish(counter_index)
        self._poll()
        waited = self.layer_done_counter.take_waited(counter_index)
        requests = self._batches.pop(counter_index, ())
        if requests:
            self.stats.waited(waited)
        for request in requests:
            if landed:
                self.stats.loaded(time.monotonic() - request.asked)
                continue
            # SGLang aborts every request of the batch, even if its own pages were loaded.
            cause = first_cause(load.cause for load in request.loads.values() if load.cause)
            self.stats.load_failed(cause or FailureCause.SKIPPED)
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a queued load that was not started; return whether there was one."""
        request = self._queued.pop(rid, None)
        if request is None:
            return False
        for name, load in request.loads.items():
            self.tiers[name].cancel(load)
        return True

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:  # noqa: ARG002
        """Store those pages of a node that are not stored yet, in all pools or in none.

        Return False only if there is nothing to store. Without room, or while too many stores run,
        the offload is accepted and ends as failed; SGLang offers it again.
        """
        found = self._group.resolve_transfers(transfers, allow_partial=True)
        if not found:
            return False
        work = _Offload()
        self._offloads.append(work)
        missing = self._reserve(found)
        work.good = missing is not None
        if missing:
            fence = self._fence()
            for name, blocks in missing.items():
                work.waiting += 1
                self.tiers[name].store(blocks, fence, work.ended)
        return True

    def num_completed_offloads(self) -> int:
        """Return how many offloads have ended before the first that has not. SGLang calls this at
        every step, so statistics are published here."""
        self._poll()
        self.stats.publish()
        for number, work in enumerate(self._offloads):
            if work.waiting:
                return number
        return len(self._offloads)

    def pop_completed_offload(self) -> bool:
        """Remove the oldest offload; return whether it stored every page."""
        return self._offloads.popleft().good

    def reset(self) -> None:
        """End all transfers and forget every page.

        Raises:
            TransferFailed: a copy does not end.
        """
        for rid in tuple(self._queued):
            self.cancel_queued_load(rid)
        self.drain()
        for tier in self.tiers.values():
            tier.index.clear()
        self._batches.clear()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def drain(self) -> None:
        """Block until no copy runs: all end by their deadline.

        Raises:
            TransferFailed: a copy does not end.
        """
        for tier in self.tiers.values():
            tier.drain()

    def close(self) -> None:
        """End all transfers and free the memory. Idempotent."""
        memory_release.forget(self.drain)
        try:
            self.reset()
        except TransferFailed as error:
            logger.error("closed in the middle of a copy: %s", error)
        for tier in self.tiers.values():
            tier.close()

    def _poll(self) -> None:
        for tier in self.tiers.values():
            tier.poll()

    def _reserve(self, found: Sequence[PoolTransfer]) -> dict[PoolName, GroupBlocks] | None:
        """Reserve slots for missing pages, by pool; None if one pool cannot."""
        pages = self._pages(found)
        if pages is None:
            return None
        missing: dict[PoolName, GroupBlocks] = {}
        for transfer in found:
            name = transfer.name
            blocks = self.tiers[name].reserve(_keys(transfer), pages[name])
            if blocks is None:
                for other, taken in missing.items():
                    self.tiers[other].give_back(taken)
                return None
            if blocks.slots:
                missing[name] = blocks
        return missing

    def _pages(self, found: Iterable[PoolTransfer]) -> dict[PoolName, list[int]] | None:
        """Return each pool's device pages; None, with a log line, if a transfer is not whole pages:
        the request can still compute its prompt."""
        try:
            return {
                transfer.name: self.tiers[transfer.name].pool.pages(transfer) for transfer in found
            }
        except ValueError as error:
            logger.error("pages are neither stored nor loaded: %s", error)
            return None

    def _fence(self) -> Fence:
        """Return a fence after all work launched on this stream and the forward's. A running
        forward may still write pages to store, and pages to load that a request has freed."""
        tier = next(iter(self.tiers.values())).tier
        if self._join is None:
            return tier.executor.fence()
        events = self.record_offload_ready()
        with torch.cuda.stream(self._join):
            for event in events:
                self._join.wait_event(event)
            return tier.executor.fence()


def restorable(tiers: Tiers, transfers: Sequence[PoolTransfer]) -> list[int]:
    """Return the prefix lengths, in pages, at which every pool has what it needs; ascending.

    Most pools need all pages of the prefix. Pools with a window (sliding attention, Mamba's state)
    need only its last pages, and have them where a node of the tree ended.
    """
    lengths = range(1, 1)
    keys: list[bytes] = []
    for number, transfer in enumerate(t for t in transfers if _needs_all(t)):
        keys = _keys(transfer) if number == 0 else keys[: len(lengths)]
        lengths = range(1, 1 + len(tiers[transfer.name].index.ready_slots(0, keys)))
    found = list(lengths)
    for transfer in transfers:
        if found and not _needs_all(transfer):
            index = tiers[transfer.name].index
            there = (index.slot_of(0, key) is not None for key in keys[: found[-1]])
            ends = window_ends(there, len(transfer.keys or ()))
            found = [length for length in found if length in ends]
    return found


def _check_tiers(settings: Settings) -> None:
    """Refuse secondary tiers, whose lookups take time: SGLang needs the answer at once, in the step
    that admits the request, and does not ask earlier."""
    there = {"disk": settings.disk, "remote": settings.remote, "cache_peers": settings.cache_peers}
    for field, tier in there.items():
        if tier is not None:
            fix = "SGLang's linker cannot wait for it: use KVConnect as HiCache's storage backend"
            raise ConfigError(field, msgspec.to_builtins(tier), fix)


def _needs_all(transfer: PoolTransfer) -> bool:
    return transfer.hit_policy is PoolHitPolicy.ALL_PAGES


def _keys(transfer: PoolTransfer) -> list[bytes]:
    return [key.encode() for key in transfer.keys or ()]


def _make_tiers(
    entries: Mapping[PoolName, DevicePoolEntry],
    share: int,
    settings: Settings,
    stats: OffloadingConnectorStats,
) -> dict[PoolName, PoolTier]:
    """Make each pool's tier, with host memory in proportion to the pool's size on the device."""
    maps = {name: map_pool(entry) for name, entry in entries.items()}
    sizes = {name: pool.num_pages * pool.page_bytes for name, pool in maps.items()}
    whole = sum(sizes.values())
    tiers = {
        name: PoolTier(pool, share * sizes[name] // whole, settings, stats)
        for name, pool in maps.items()
    }
    for name, tier in tiers.items():
        logger.info(
            "KVConnect host tier of pool %s: %d pages of %d tokens (the device has %d), %.2f GiB, "
            "loaded in %d steps",
            name,
            len(tier.index.slots),
            entries[name].page_size,
            tier.pool.num_pages,
            tier.tier.store.nbytes / 2**30,
            len(tier.pool.stages),
        )
    return tiers
