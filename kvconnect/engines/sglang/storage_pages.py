"""Pages by key in host memory and lower tiers, for blocking calls from several threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kvconnect.engines.sglang.storage_tiers import GROUP, PageCache, PageTiers
from kvconnect.errors import Corrupt
from kvconnect.offload.eviction import make_policy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.index import HostIndex
from kvconnect.offload.planner import count_lookup, hits_by_tier
from kvconnect.settings import Settings
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends import Store
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.types import FailureCause, Tier


class PageStore:
    """Pages in the slots of ``memory``. A full store evicts pages; damaged pages are dropped.

    Pages are written back to the lower tiers ``stores`` in the background, and a read loads them
    from these and from ``peers`` into slots. Peers may read pages. The memory, the stores and the
    peers are closed with this object. A key has 1 to 64 bytes: a digest of all that a page's bytes
    depend on.

    Thread-safe. A lock protects the index; bytes are copied without it, into reserved slots and out
    of pinned ones.
    """

    def __init__(
        self,
        memory: HostArena,
        settings: Settings,
        stores: Mapping[Tier, Store] | None = None,
        peers: PeerSource | None = None,
    ) -> None:
        slots = memory.num_slots
        self.index = HostIndex(slots, 1, make_policy(settings.policy, slots))
        self.memory = memory
        self._pages = PageCache(self.index, memory, peers)
        limits = (settings.wait_s, settings.deadline_s)
        below = bool(stores or peers)
        self.tiers = PageTiers(stores or {}, self._pages, limits) if below else None
        self._wait_s = settings.wait_s

    @property
    def most(self) -> int:
        """Pages that one :meth:`reading` should ask for at most; they are pinned meanwhile."""
        return self.tiers.most if self.tiers else 1

    def deadline(self) -> float:
        """Return until when, in monotonic seconds, a call started now waits for lower tiers."""
        return time.monotonic() + self._wait_s

    def where(self, keys: Sequence[bytes], nbytes: int, deadline: float) -> list[Tier | None]:
        """Return the tier that has each page of ``nbytes`` bytes, None for absent ones. Waits for
        lower tiers until ``deadline``, in monotonic seconds; they are not asked if it is over."""
        with self._pages.lock:
            slots = [self.index.slot_of(GROUP, key) for key in keys]
        found = [None if slot is None else Tier.HOST for slot in slots]
        left = [place for place, tier in enumerate(found) if tier is None]
        if self.tiers and left and time.monotonic() < deadline:
            tiers = self.tiers.lookup([keys[place] for place in left], nbytes, deadline)
            for place, tier in zip(left, tiers, strict=True):
                found[place] = tier
        return found

    def looked_up(self, asked: int, found: Sequence[Tier | None], tokens: int) -> None:
        """Count a request's lookup: ``asked`` pages of ``tokens`` tokens, and the tiers of those
        found."""
        below: dict[Tier, int] = {}
        for tier in found:
            if tier is not None and tier is not Tier.HOST:
                below[tier] = below.get(tier, 0) + tokens
        with self._pages.lock:
            hits = hits_by_tier(len(found) * tokens, below)
            count_lookup(self._pages.stats, asked * tokens, hits)

    def put(self, key: bytes, page: torch.Tensor) -> bool:
        """Store a page; return whether it is stored now, or being stored by another thread."""
        content = page.contiguous().view(torch.uint8).flatten()
        fits = content.nbytes <= self.memory.slot_bytes
        with self._pages.lock:
            if self.index.has(GROUP, key):
                self.index.policy.touch(self.index.ready_slots(GROUP, [key]))
                return True
            slot = self.index.reserve(GROUP, key) if fits else None
            if slot is None:
                self._pages.stats.count("skipped_store_blocks", label="no_space")
                return False
            self._pages.withdraw(slot)
        stored = False
        try:
            self._slot(slot, content.nbytes).copy_(content)
            self.memory.seal(slot, content.nbytes)
            stored = True
        finally:
            with self._pages.lock:
                if not stored:
                    self.index.abandon([slot])
                else:
                    self._pages.sizes[slot] = content.nbytes
                    self.index.commit([slot])
                    self._pages.offer(key, slot)
                    if self.tiers:
                        self.tiers.stored(key)
        if self.tiers:
            self.tiers.start_write_backs()
        return True

    @contextmanager
    def reading(
        self, keys: Sequence[bytes], nbytes: int, deadline: float
    ) -> Iterator[list[torch.Tensor | None]]:
        """Yield pages of ``nbytes`` bytes as uint8, valid inside the context. None for a page that
        is absent, or damaged and then dropped from host memory. Waits for lower tiers until
        ``deadline``, in monotonic seconds."""
        slots: dict[bytes, int] = {}
        with self._pages.lock:
            for key in dict.fromkeys(keys):
                slot = self.index.slot_of(GROUP, key)
                if slot is not None:
                    slots[key] = slot
            self.index.pin(slots.values())
            self.index.policy.touch(list(slots.values()))
        try:
            missing = [key for key in keys if key not in slots]
            if self.tiers and missing:
                slots |= self.tiers.load(missing, nbytes, deadline)
            yield [self._verified(slots[key]) if key in slots else None for key in keys]
        finally:
            with self._pages.lock:
                self.index.unpin(slots.values())

    def clear(self) -> None:
        """Forget every page in host memory."""
        with self._pages.lock:
            self.index.clear()
            self._pages.withdraw_all()

    def close(self) -> None:
        """Free the memory and close the tiers. No read or store may run. Idempotent."""
        if self.tiers:
            self.tiers.close()
        self.memory.close()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call; one thread at a time may call."""
        theirs = self.tiers.take_stats() if self.tiers else None
        with self._pages.lock:
            stats = self._pages.stats
            self.index.take_removed(stats)  # nobody needs the list
            for name, value, label in self.index.slots.gauges(self.memory.slot_bytes):
                stats.gauge(name, value, label)
            if self.tiers:
                stats.gauge("tier_jobs_in_flight", self.tiers.jobs)
            if theirs:
                stats.aggregate(theirs)
            return stats.take()

    def _verified(self, slot: int) -> torch.Tensor | None:
        """Return the bytes of a pinned slot; quarantine damaged ones and return None."""
        nbytes = self._pages.sizes[slot]
        try:
            self.memory.verify(slot, nbytes)
        except Corrupt:
            with self._pages.lock:
                cause, stats = FailureCause.DIGEST, self._pages.stats
                stats.count("failed_blocks", label=cause.value)
                self._pages.withdraw(slot)
                self.index.quarantine(slot, cause, stats)
            return None
        return self._slot(slot, nbytes)

    def _slot(self, slot: int, nbytes: int) -> torch.Tensor:
        start = slot * self.memory.slot_bytes
        return self.memory.tensor()[start : start + nbytes]
