"""Pages by key in host memory, for callers on several threads that copy by themselves."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvconnect.config import Config
from kvconnect.errors import Corrupt
from kvconnect.plan.index import HostIndex
from kvconnect.plan.policy import make_policy
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.store.host import HostStore
from kvconnect.types import FailureCause, Tier

_GROUP = 0


class PageStore:
    """``num_slots`` pages of at most ``slot_bytes``; a full store evicts, a damaged page is gone.

    Thread-safe: the index is under a lock; bytes are copied outside of it, into slots that are
    reserved and out of slots that are pinned.
    """

    def __init__(self, num_slots: int, slot_bytes: int, config: Config) -> None:
        self.index = HostIndex(num_slots, 1, make_policy(config.policy, num_slots))
        self.memory = HostStore(num_slots, slot_bytes, config.digest)
        self._bytes = array("q", bytes(8 * num_slots))  # of the page in each slot
        self._lock = threading.Lock()
        self._stats = OffloadingConnectorStats()
        self._evictions_counted = 0

    def has(self, key: bytes) -> bool:
        """Whether a page can be read."""
        with self._lock:
            return self.index.slot_of(_GROUP, key) is not None

    def put(self, key: bytes, page: torch.Tensor) -> bool:
        """Store a page; return whether it is there now, or will be: another thread stores it."""
        content = page.contiguous().view(torch.uint8).flatten()
        fits = content.nbytes <= self.memory.slot_bytes
        with self._lock:
            if self.index.has(_GROUP, key):
                self.index.policy.touch(self.index.ready_slots(_GROUP, [key]))
                return True
            slot = self.index.reserve(_GROUP, key) if fits else None
            if slot is None:
                self._stats.count("skipped_store_blocks", label="no_space")
                return False
        stored = False
        try:
            self._slot(slot, content.nbytes).copy_(content)
            self.memory.seal(slot, content.nbytes)
            self._bytes[slot] = content.nbytes
            stored = True
        finally:
            with self._lock:
                if stored:
                    self.index.commit([slot])
                else:
                    self.index.abandon([slot])
        return True

    @contextmanager
    def reading(self, key: bytes) -> Iterator[torch.Tensor | None]:
        """Give a page's bytes, uint8, for as long as the block lasts; None if it is not there, or
        is not what was stored, after which it will not be found again."""
        with self._lock:
            slot = self.index.slot_of(_GROUP, key)
            if slot is not None:
                self.index.pin([slot])
                self.index.policy.touch([slot])
        if slot is None:
            yield None
            return
        try:
            yield self._verified(slot)
        finally:
            with self._lock:
                self.index.unpin([slot])

    def clear(self) -> None:
        """Forget every page."""
        with self._lock:
            self.index.clear()

    def close(self) -> None:
        """Give the memory back, when nothing is read or stored any more. Idempotent."""
        self.memory.close()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call."""
        with self._lock:
            fresh = self.index.evictions - self._evictions_counted
            self._evictions_counted = self.index.evictions
            self._stats.count("evicted_blocks", fresh, label=Tier.HOST.value)
            self.index.removed.clear()  # nobody is told
            slots, page_bytes = self.index.slots, self.memory.slot_bytes
            self._stats.gauge("host_blocks_used", slots.used)
            self._stats.gauge("host_blocks_capacity", len(slots))
            self._stats.gauge("host_blocks_pinned", slots.busy)
            self._stats.gauge("host_bytes_used", slots.used * page_bytes)
            self._stats.gauge("host_bytes_capacity", len(slots) * page_bytes)
            return self._stats.take()

    def _verified(self, slot: int) -> torch.Tensor | None:
        """Return the bytes of a pinned slot, None for those that are quarantined now."""
        nbytes = self._bytes[slot]
        try:
            self.memory.verify(slot, nbytes)
        except Corrupt:
            with self._lock:
                cause = FailureCause.DIGEST.value
                self._stats.count("failed_blocks", label=cause)
                if self.index.discard(slot):
                    self._stats.count("quarantined_blocks", label=cause)
            return None
        return self._slot(slot, nbytes)

    def _slot(self, slot: int, nbytes: int) -> torch.Tensor:
        start = slot * self.memory.slot_bytes
        return self.memory.tensor()[start : start + nbytes]
