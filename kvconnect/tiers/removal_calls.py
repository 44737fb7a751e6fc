"""Removes blocks from all stores of a worker's secondary tiers at the same time."""

from __future__ import annotations

import threading

from kvconnect.tiers.backends import BlockOutcome
from kvconnect.tiers.messages import ABSENT, NOT_REMOVED, REMOVED
from kvconnect.tiers.store_threads import StoreCall
from kvconnect.tiers.tiered_store import BlockBatch, TieredStore
from kvconnect.types import Tier

_MEANING = {BlockOutcome.OK: REMOVED, BlockOutcome.ABSENT: ABSENT}


def remove_blocks(tiers: TieredStore, batch: BlockBatch) -> None:
    """Remove blocks from every tier that is written to, on the threads that write there. Returns at
    once; ``batch.done`` is given ABSENT, REMOVED or NOT_REMOVED of each block."""
    removal = _Removal(tiers, batch)
    for tier, threads in tiers.writers.items():
        call = _TierRemoval(removal, tier)
        if not threads.submit(call):
            call.ended()


class _Removal:
    """The outcomes of all tiers. Thread-safe."""

    def __init__(self, tiers: TieredStore, batch: BlockBatch) -> None:
        self.tiers = tiers
        self.batch = batch
        self._lock = threading.Lock()
        self._pending = len(tiers.writers)  # tiers that have not ended

    def ended(self, outcomes: bytes) -> None:
        """Note the outcomes of one tier."""
        found = self.batch.found
        with self._lock:
            found[:] = bytes(map(max, found, outcomes))
            self._pending -= 1
            last = not self._pending
        if last:
            self.batch.done(bytes(found))


class _TierRemoval(StoreCall):
    """The call to one tier."""

    def __init__(self, whole: _Removal, tier: Tier) -> None:
        self.blocks = len(whole.batch.keys)
        self._whole = whole
        self._tier = tier
        self._outcomes = bytes([NOT_REMOVED]) * self.blocks

    def expired(self, now: float) -> bool:
        return now >= self._whole.batch.expires

    def run(self) -> None:
        store, batch = self._whole.tiers.stores[self._tier], self._whole.batch
        outcomes = store.remove(batch.keys)
        self._outcomes = bytes(_MEANING.get(outcome, NOT_REMOVED) for outcome in outcomes)

    def ended(self) -> None:
        self._whole.ended(self._outcomes)
