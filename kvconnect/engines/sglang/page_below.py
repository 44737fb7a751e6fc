"""What a page store has below its slots: pages are written down behind it and brought up for it."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from kvconnect.plan.below import SHARED
from kvconnect.plan.below.spills import Spills
from kvconnect.plan.index import HostIndex
from kvconnect.plan.instructions import BELOW
from kvconnect.plan.keys import block_key
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.store import Store
from kvconnect.store.host import HostStore
from kvconnect.types import FailureCause, Tier
from kvconnect.worker.stack import BATCH_BYTES, READERS, WRITERS, Stack

logger = logging.getLogger(__name__)

T = TypeVar("T")

GROUP = 0
"""The index has one: a page's pool is part of its key."""

_SHARE = 0.25  # of the slots may be kept from eviction for what is written, and by one reader


class Pages:
    """What a page store and its tiers share. The lock is held while anything else but ``memory``
    is used; bytes are moved without it, in slots that are reserved or pinned."""

    def __init__(self, index: HostIndex, memory: HostStore) -> None:
        self.index = index
        self.memory = memory
        self.sizes = array("q", bytes(8 * memory.num_slots))  # of the page in each slot
        self.stats = OffloadingConnectorStats()
        self.lock = threading.Lock()


@dataclass(eq=False)
class _Fetch:
    """Pages on their way up, into slots that nobody else has."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    nbytes: int
    awaited: bool = True
    ended: bool = False
    kept: dict[bytes, int] = field(default_factory=dict)  # what came, pinned for the caller


class Below:
    """Tiers under a page store, asked in their order; they are closed with this object.

    A tier that raises has nothing, nor has one that takes longer than a caller waits. Threads: any;
    but :meth:`close` comes when nobody calls any more.
    """

    def __init__(self, stores: Mapping[Tier, Store], pages: Pages) -> None:
        self._stack = Stack(stores, pages.memory)
        self._pages = pages
        self.most = max(1, int(pages.memory.num_slots * _SHARE))
        self._batch = max(1, BATCH_BYTES // pages.memory.slot_bytes)  # pages
        self._spills = Spills(pages.index, self.most, reused=False, stats=pages.stats)
        self._readers = ThreadPoolExecutor(READERS, "kvconnect-fetch")
        self._writers = ThreadPoolExecutor(WRITERS, "kvconnect-spill")
        self._reading = self._writing = 0  # calls that have not ended
        self._closed = False

    @property
    def jobs(self) -> int:
        """Lookups, fetches and spills that have not ended."""
        return self._reading + self._writing

    def seek(self, keys: Sequence[bytes], nbytes: int, deadline: float) -> list[Tier | None]:
        """Return which tier has each page, of so many bytes."""
        with self._pages.lock:
            self._pages.stats.count("below_lookups")
        future = self._read(self._stack.seek, _names(keys), [nbytes] * len(keys))
        _wait([future], deadline)
        future.cancel()
        good = future.done() and not future.cancelled() and future.exception() is None
        return [BELOW[place] for place in future.result()] if good else [None] * len(keys)

    def bring(self, keys: Iterable[bytes], nbytes: int, deadline: float) -> dict[bytes, int]:
        """Read pages that are in no slot into some; return the slots of those that came, pinned."""
        fetches = self._reserve(keys, nbytes) if time.monotonic() < deadline else []
        futures = [self._read(self._fetch, fetch) for fetch in fetches]
        _wait(futures, deadline)
        found: dict[bytes, int] = {}
        for fetch, future in zip(fetches, futures, strict=True):
            with self._pages.lock:
                fetch.awaited = False  # what comes from now on is for the next one who asks
                if not fetch.ended:
                    cause = FailureCause.DEADLINE.value
                    self._pages.stats.count("failed_blocks", len(fetch.keys), label=cause)
                found |= fetch.kept
            if future.cancel():
                self._settle(fetch, b"")
        return found

    def stored(self, key: bytes) -> None:
        """A page came to a slot from the engine: write it down, unless too many wait for that. The
        caller holds the lock."""
        self._spills.stored(GROUP, key, block_key(SHARED, GROUP, key))
        self._launch()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the tiers recorded since the last call. One thread at a time may call."""
        return self._stack.take_stats()

    def close(self) -> None:
        """Drop what is queued, wait for the calls under way, close the tiers. Idempotent."""
        with self._pages.lock:
            self._closed = True
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()

    def _read(self, work: Callable[..., T], *args: Any) -> Future[T]:
        with self._pages.lock:
            self._reading += 1
        future = self._readers.submit(work, *args)
        future.add_done_callback(self._read_ended)
        return future

    def _read_ended(self, future: Future[Any]) -> None:
        with self._pages.lock:
            self._reading -= 1
        _log(future)

    def _reserve(self, keys: Iterable[bytes], nbytes: int) -> list[_Fetch]:
        """Take slots for pages, as far as there are any, and cut the work into calls."""
        names, slots = [], []
        with self._pages.lock:
            for key in keys:
                if self._pages.index.has(GROUP, key):
                    continue  # another thread has just stored it, or is about to
                slot = self._pages.index.reserve(GROUP, key)
                if slot is None:
                    self._pages.stats.count("skipped_store_blocks", label="no_space")
                    continue
                names.append(key)
                slots.append(slot)
        cuts = pairwise([*range(0, len(names), self._batch), len(names)])
        return [_Fetch(names[start:end], slots[start:end], nbytes) for start, end in cuts]

    def _fetch(self, fetch: _Fetch) -> None:
        found = b""
        try:
            sizes = [fetch.nbytes] * len(fetch.keys)
            found = self._stack.fetch(_names(fetch.keys), fetch.slots, sizes)
        finally:
            self._settle(fetch, found)

    def _settle(self, fetch: _Fetch, found: bytes) -> None:
        """A fetch ended: pages that came can be read, the other slots are free again."""
        came = zip(fetch.keys, fetch.slots, found, strict=False)
        kept = {key: slot for key, slot, tier in came if tier}
        good = list(kept.values())
        pages = self._pages
        with pages.lock:
            for slot in good:
                pages.sizes[slot] = fetch.nbytes
            pages.index.commit(good)
            pages.index.abandon(set(fetch.slots).difference(good))
            self._spills.brought(good)
            if fetch.awaited:
                pages.index.pin(good)
                fetch.kept = kept
            fetch.ended = True

    def _launch(self) -> None:
        """Start writing what is queued. The caller holds the lock."""
        while self._writing < WRITERS and not self._closed:
            job = next(self._spills.take(), None)
            if job is None:
                return
            self._writing += 1
            self._pages.stats.count("below_spilled_blocks", len(job[0]))
            self._writers.submit(self._write, *job).add_done_callback(_log)

    def _write(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        try:
            sizes = [self._pages.sizes[slot] for slot in slots]  # pinned: they do not change
            for start in range(0, len(keys), self._batch):
                if self._closed:
                    break
                part = slice(start, start + self._batch)
                self._stack.spill(keys[part], slots[part], sizes[part])
        finally:
            with self._pages.lock:
                self._writing -= 1
                self._spills.ended(slots)
                self._launch()


def _names(keys: Iterable[bytes]) -> list[bytes]:
    return [block_key(SHARED, GROUP, key) for key in keys]


def _wait(futures: Iterable[Future[Any]], deadline: float) -> None:
    wait(futures, max(0.0, deadline - time.monotonic()))


def _log(future: Future[Any]) -> None:
    """Whatever a tier raises is a miss."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logger.error("a tier below host memory failed; its pages are recomputed", exc_info=error)
