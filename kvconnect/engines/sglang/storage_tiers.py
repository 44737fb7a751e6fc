"""Lower tiers of a page store: background write-backs, and loads into the store's slots."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from kvconnect.cache.keys import block_key
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.index import HostIndex
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers import SHARED
from kvconnect.tiers.backends import Store
from kvconnect.tiers.messages import SECONDARY_TIERS
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.tiers.tiered_store import BATCH_BYTES, BlockBatch, TieredStore
from kvconnect.tiers.writeback import WriteBacks
from kvconnect.types import FailureCause, Tier

GROUP = 0
"""The index's only group: a page's pool is part of its key."""

_SHARE = 0.25  # of the slots that write-backs may pin together, and one reader as well


class PageCache:
    """State that a page store and its tiers share. The lock protects all of it except ``memory``:
    bytes are copied without the lock, in slots that are reserved or pinned.

    ``peers``: other engines, which may read the pages; None if there are none.
    """

    def __init__(
        self, index: HostIndex, memory: HostArena, peers: PeerSource | None = None
    ) -> None:
        self.index = index
        self.memory = memory
        self.sizes = array("q", bytes(8 * memory.num_slots))  # of the page in each slot
        self.stats = OffloadingConnectorStats()
        self.lock = threading.Lock()
        self.peers = peers

    def offer(self, key: bytes, slot: int) -> None:
        """Let other engines read a page that is complete, if its size is the one they read."""
        name = block_key(SHARED, GROUP, key)
        if self.peers is not None and self.peers.block_bytes(name) == self.sizes[slot]:
            self.peers.served.offer([(name, slot)])

    def withdraw(self, slot: int) -> None:
        """Let nobody read a slot: its bytes will be overwritten, or are not right."""
        if self.peers is not None:
            self.peers.served.withdraw([slot])

    def withdraw_all(self) -> None:
        """Let nobody read any page."""
        if self.peers is not None:
            self.peers.served.clear()


@dataclass(eq=False)
class _Fetch:
    """A load of pages into reserved slots. The caller waits from ``began`` until ``deadline``, in
    monotonic seconds."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    nbytes: int
    began: float
    deadline: float
    awaited: bool = True
    over: threading.Event = field(default_factory=threading.Event)
    kept: dict[bytes, int] = field(default_factory=dict)  # loaded pages, pinned for the caller

    def hangs(self, now: float) -> bool:
        """Whether it has taken twice its caller's wait, so that others may load its pages."""
        return not self.over.is_set() and now >= self.deadline + (self.deadline - self.began)


@dataclass(eq=False)
class _PageWrite:
    """A write-back of pages, until all its calls have ended."""

    slots: Sequence[int]
    expires: float
    waiting: int  # calls that have not ended
    given_up: bool = False


class PageTiers:
    """Lower tiers of a page store, asked in order. They are closed with this object.

    A tier that raises, or takes longer than the caller waits, counts as having no page. Callers
    wait at most ``limits[0]`` seconds; a write-back may take ``limits[1]``. Thread-safe, but
    :meth:`close` must be the last call.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        pages: PageCache,
        limits: tuple[float, float] = (5.0, 30.0),
    ) -> None:
        wait_s, self._deadline_s = limits
        self._tiers = TieredStore(stores, pages.memory, wait_s, peers=pages.peers)
        self._pages = pages
        self.most = max(1, int(pages.memory.num_slots * _SHARE))
        self._batch = max(1, BATCH_BYTES // pages.memory.slot_bytes)  # pages
        self._write_backs = WriteBacks(pages.index, self.most, reused=False, stats=pages.stats)
        self._reading = 0  # lookups and fetches that have not ended
        self._hanging: list[_Fetch] = []  # fetches whose caller has left
        self._writing: set[_PageWrite] = set()
        self._writes = threading.Lock()  # its holder starts write-backs
        self._closed = False

    @property
    def jobs(self) -> int:
        """Lookups, prefetches and write-backs that have not ended."""
        return self._reading + len(self._writing)

    def lookup(self, keys: Sequence[bytes], nbytes: int, deadline: float) -> list[Tier | None]:
        """Return the tier that has each page of ``nbytes`` bytes, None for absent ones."""
        over = threading.Event()
        answers: list[bytes] = []

        def done(found: bytes) -> None:
            answers.append(found)
            self._read_ended()
            over.set()

        with self._pages.lock:
            self._pages.stats.count("tier_lookups")
            self._reading += 1
        self._tiers.drop_expired()
        self._tiers.lookup(BlockBatch(_names(keys), [nbytes] * len(keys), deadline, done))
        self._wait([over], deadline)
        return (
            [SECONDARY_TIERS[place] for place in answers[0]]
            if over.is_set()
            else [None] * len(keys)
        )

    def load(self, keys: Iterable[bytes], nbytes: int, deadline: float) -> dict[bytes, int]:
        """Load pages that are in no slot; return the pinned slots of those that arrived."""
        self._tiers.drop_expired()
        fetches = self._reserve(keys, nbytes, deadline) if time.monotonic() < deadline else []
        for fetch in fetches:
            names, sizes = _names(fetch.keys), [nbytes] * len(fetch.keys)
            done = partial(self._settle, fetch)
            self._tiers.prefetch(BlockBatch(names, sizes, deadline, done, fetch.slots))
        self._wait([fetch.over for fetch in fetches], deadline)
        found: dict[bytes, int] = {}
        with self._pages.lock:
            for fetch in fetches:
                fetch.awaited = False  # later arrivals are not pinned for this caller
                if not fetch.over.is_set():
                    cause = FailureCause.DEADLINE.value
                    self._pages.stats.count("failed_blocks", len(fetch.keys), label=cause)
                    self._hanging.append(fetch)
                found |= fetch.kept
        return found

    def stored(self, key: bytes) -> None:
        """Queue a stored page for :meth:`start_write_backs`, unless the queue is full. The caller
        holds the lock."""
        if self._tiers.writers:
            self._write_backs.stored(GROUP, key, block_key(SHARED, GROUP, key))

    def start_write_backs(self) -> None:
        """Start the queued write-backs. The caller does not hold the lock."""
        # One thread at a time: a write-back that no tier accepts ends at once and comes here again.
        while self._writes.acquire(blocking=False):
            try:
                while jobs := self._take():
                    for write, keys in jobs:
                        self._write(write, keys)
            finally:
                self._writes.release()
            with self._pages.lock:
                if self._closed or not self._write_backs.ready:
                    return

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the tiers recorded since the last call; one thread at a time may call."""
        self._tiers.drop_expired()
        return self._tiers.take_stats()

    def close(self) -> None:
        """Drop queued calls, wait for running calls that are not late, and close the tiers.
        Idempotent."""
        with self._pages.lock:
            self._closed = True
        self._tiers.close()

    def _wait(self, overs: Iterable[threading.Event], deadline: float) -> None:
        for over in overs:
            over.wait(max(0.0, deadline - time.monotonic()))
        self._tiers.drop_expired()  # ends calls that have not started

    def _read_ended(self) -> None:
        with self._pages.lock:
            self._reading -= 1

    def _reserve(self, keys: Iterable[bytes], nbytes: int, deadline: float) -> list[_Fetch]:
        """Reserve slots for pages, as far as there are any, and divide the pages into calls."""
        names, slots = [], []
        now, index = time.monotonic(), self._pages.index
        with self._pages.lock:
            for fetch in [fetch for fetch in self._hanging if fetch.hangs(now)]:
                index.abandon(fetch.slots, held=True)
                self._hanging.remove(fetch)
            for key in keys:
                if index.has(GROUP, key):
                    continue  # another thread has stored it, or is storing it
                slot = index.reserve(GROUP, key)
                if slot is None:
                    self._pages.stats.count("skipped_store_blocks", label="no_space")
                    continue
                self._pages.withdraw(slot)
                names.append(key)
                slots.append(slot)
            cuts = list(pairwise([*range(0, len(names), self._batch), len(names)]))
            self._reading += len(cuts)
        return [
            _Fetch(names[start:end], slots[start:end], nbytes, now, deadline) for start, end in cuts
        ]

    def _settle(self, fetch: _Fetch, found: bytes) -> None:
        """End a fetch: make the pages that came readable, and free the other slots."""
        pages = self._pages
        with pages.lock:
            held = not fetch.awaited and fetch not in self._hanging  # given up by _reserve
            came = zip(fetch.keys, fetch.slots, b"" if held else found, strict=False)
            kept = {key: slot for key, slot, tier in came if tier}
            good = list(kept.values())
            for slot in good:
                pages.sizes[slot] = fetch.nbytes
            pages.index.commit(good)
            for key, slot in kept.items():
                pages.offer(key, slot)
            pages.index.abandon(set(fetch.slots).difference(good))
            self._write_backs.promoted(good)
            if fetch.awaited:
                pages.index.pin(good)
                fetch.kept = kept
            elif not held:
                self._hanging.remove(fetch)
            self._reading -= 1
            fetch.over.set()

    def _take(self) -> list[tuple[_PageWrite, Sequence[bytes]]]:
        """Return the write-backs to start now. Those that take too long make room for others."""
        now = time.monotonic()
        jobs: list[tuple[_PageWrite, Sequence[bytes]]] = []
        with self._pages.lock:
            for write in self._writing:
                if now >= write.expires and not write.given_up:
                    write.given_up = True
                    self._write_backs.timed_out(write.slots)
            for keys, slots in self._write_backs.take_jobs() if not self._closed else ():
                calls = -(-len(keys) // self._batch)
                write = _PageWrite(slots, now + self._deadline_s, calls)
                self._writing.add(write)
                self._pages.stats.count("tier_written_blocks", len(keys))
                jobs.append((write, keys))
        return jobs

    def _write(self, write: _PageWrite, keys: Sequence[bytes]) -> None:
        sizes = [self._pages.sizes[slot] for slot in write.slots]  # do not change while pinned
        for start in range(0, len(keys), self._batch):
            part = slice(start, start + self._batch)
            done = partial(self._wrote, write)
            self._tiers.write_back(
                BlockBatch(keys[part], sizes[part], write.expires, done, write.slots[part])
            )

    def _wrote(self, write: _PageWrite, _: bytes) -> None:
        """End one call of a write-back, whether it succeeded or not."""
        with self._pages.lock:
            write.waiting -= 1
            if write.waiting:
                return
            self._writing.discard(write)
            self._write_backs.ended(write.slots, write.given_up)
        self.start_write_backs()


def _names(keys: Iterable[bytes]) -> list[bytes]:
    return [block_key(SHARED, GROUP, key) for key in keys]
