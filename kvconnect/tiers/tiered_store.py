"""Blocks between host slots and the tiers below them.

Every tier has its own threads (``store_threads.py``), some for reads and some for write-backs, so a
tier that hangs delays no other tier, and write-backs never delay reads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.addresses import Addresses
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends import BlockOutcome, BlockSource, Store, Usage
from kvconnect.tiers.messages import SECONDARY_TIERS
from kvconnect.tiers.store_threads import StoreCall, StoreThreads
from kvconnect.types import Tier

logger = logging.getLogger(__name__)

READERS, WRITERS = 4, 2
"""Threads of a tier for reads, which requests wait for, and for write-backs."""
BATCH_BYTES = 8 << 20
"""Bytes of one call to a store: large enough for full bandwidth, small beside a job."""
_LEAST_LATE_S = 1.0  # no call is late before, however little requests wait
_PEERS_LATE = 2  # times as long: a late read from one engine ends by itself, others are there

Done = Callable[[bytes], None]
"""Is given one byte per block: the index in :data:`SECONDARY_TIERS` of the tier that has the block,
0 for none. Called once, on any thread, when no store uses the slots any more."""


@dataclass(eq=False)
class BlockBatch:
    """Blocks of one call: keys, bytes of each and, except for a lookup, their host slots. No store
    is called for them after ``expires``. ``source``: see :class:`LookupBlocks`."""

    keys: Sequence[bytes]
    sizes: Sequence[int]
    expires: float
    done: Done
    slots: Sequence[int] = ()
    source: Addresses = ()
    found: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.found = bytearray(len(self.keys))


class TieredStore:
    """Stores and other engines, which are closed with this object. Reads ask the fastest first,
    writes go to all stores. A source that raises or is not available has nothing. A call is late
    after ``wait_s``, one to other engines after twice that.

    :meth:`lookup`, :meth:`prefetch` and :meth:`write_back` return at once; until ``done`` is
    called, nobody else may use the slots. ``reports_usage``: whether :meth:`take_stats` has the
    gauges of the stores; one worker per engine reports them.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        host: HostArena,
        wait_s: float,
        reports_usage: bool = True,
        clock: Callable[[], float] = time.monotonic,
        peers: BlockSource | None = None,
    ) -> None:
        self.stores = stores
        every = {**stores, **({} if peers is None else {Tier.PEER: peers})}
        self.sources = {tier: every[tier] for tier in SECONDARY_TIERS if tier in every}
        self.host = host
        self.clock = clock
        self._reports_usage = reports_usage
        self._reported: dict[Tier, Usage] = {}
        late_s = max(wait_s, _LEAST_LATE_S)
        limits = {t: late_s * (_PEERS_LATE if t is Tier.PEER else 1) for t in every}
        self.readers = {
            t: StoreThreads(f"read-{t.value}", READERS, limit_s, clock)
            for t, limit_s in limits.items()
        }
        self.writers = {t: StoreThreads(f"write-{t.value}", WRITERS, late_s, clock) for t in stores}
        self._closed = False

    def __repr__(self) -> str:
        return f"<TieredStore {self.sources}>"

    def lookup(self, batch: BlockBatch) -> None:
        """Find which tier has each block; a block of another size is absent."""
        _Read(self, batch, load=False).ended()

    def prefetch(self, batch: BlockBatch) -> None:
        """Read blocks into slots and seal them. The content of other slots is unknown."""
        _Read(self, batch, load=True).ended()

    def write_back(self, batch: BlockBatch) -> None:
        """Write the blocks of slots to every tier that lacks them."""
        _WriteBack(self, batch).start()

    def drop_expired(self) -> None:
        """End what has expired or waits for a tier that hangs. Call this periodically."""
        for threads in (*self.readers.values(), *self.writers.values()):
            threads.drop_expired()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the tiers recorded since the last call, and changes of their usage. One
        thread at a time may call this."""
        taken = OffloadingConnectorStats()
        for tier, source in self.sources.items():
            recorded = source.take_stats()
            if recorded is not None:
                taken.aggregate(recorded)
            if late := sum(threads.take_late_blocks() for threads in self._threads(tier)):
                taken.count("store_failed_blocks", late, label=BlockOutcome.LATE)
            usage = source.usage()
            usage = usage._replace(available=usage.available and self.readers[tier].available())
            if self._reports_usage and usage != self._reported.get(tier):
                self._reported[tier] = usage
                taken.gauge("tier_available", usage.available, label=tier.value)
                taken.gauge("tier_bytes_used", usage.nbytes, label=tier.value)
                taken.gauge("tier_bytes_capacity", usage.capacity_bytes, label=tier.value)
        return taken.take()

    def close(self) -> None:
        """Drop queued calls, wait for running calls that are not late, and close the sources that
        have no running call. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for threads in (*self.readers.values(), *self.writers.values()):
            threads.close()
        with contextlib.ExitStack() as closing:  # closes the others if one raises
            for tier, source in self.sources.items():
                if all(list(map(StoreThreads.join, self._threads(tier)))):
                    closing.callback(source.close)
                else:  # its resources stay in use until this process ends
                    logger.warning("tier %s: a call does not end; not closed", tier.value)

    def _threads(self, tier: Tier) -> list[StoreThreads]:
        return [threads[tier] for threads in (self.readers, self.writers) if tier in threads]


class _Read(StoreCall):
    """A lookup or, with ``load``, a prefetch: asks one tier after the other for the missing."""

    def __init__(self, tiers: TieredStore, batch: BlockBatch, load: bool) -> None:
        self.blocks = len(batch.keys)
        self._tiers = tiers
        self._batch = batch
        self._load = load
        self._remaining = list(tiers.sources)
        self._tier: Tier | None = None

    def expired(self, now: float) -> bool:
        return now >= self._batch.expires

    def run(self) -> None:
        assert self._tier is not None
        batch, host, source = self._batch, self._tiers.host, self._tiers.sources[self._tier]
        missing = [n for n, tier in enumerate(batch.found) if not tier]
        keys = [batch.keys[n] for n in missing]
        if self._load:
            views = [host.view(batch.slots[n], batch.sizes[n]) for n in missing]
            outcomes = zip(missing, source.get(keys, views), strict=True)
            found = [n for n, outcome in outcomes if outcome is BlockOutcome.OK]
        else:
            lengths = zip(missing, source.exists_at(keys, batch.source), strict=True)
            found = [n for n, length in lengths if length == batch.sizes[n]]
        for n in found:
            if self._load:
                host.seal(batch.slots[n], batch.sizes[n])
            batch.found[n] = SECONDARY_TIERS.index(self._tier)

    def ended(self) -> None:
        """Continue with the next tier that accepts calls."""
        while self._remaining and 0 in self._batch.found and not self.expired(self._tiers.clock()):
            self._tier = self._remaining.pop(0)
            if self._tiers.readers[self._tier].submit(self):
                return
        self._batch.done(bytes(self._batch.found))


class _WriteBack:
    """Writes a batch to all tiers at the same time."""

    def __init__(self, tiers: TieredStore, batch: BlockBatch) -> None:
        self.tiers = tiers
        self.batch = batch
        self._lock = threading.Lock()
        self._pending = len(tiers.writers)  # tiers that have not ended
        self._verifying = threading.Lock()
        self._intact: list[int] | None = None

    def start(self) -> None:
        for tier, threads in self.tiers.writers.items():
            call = _TierWrite(self, tier)
            if not threads.submit(call):
                call.ended()

    def intact(self) -> list[int]:
        """Return the indexes of blocks whose host copy matches its digest. A tier computes its own
        digest of the bytes it is given, so damaged bytes must not reach it."""
        with self._verifying:
            if self._intact is None:
                self._intact = [n for n in range(len(self.batch.keys)) if self._is_intact(n)]
            return self._intact

    def ended(self, tier: Tier, written: Sequence[int]) -> None:
        """Note that a tier is done and has these blocks now."""
        number, found = SECONDARY_TIERS.index(tier), self.batch.found
        with self._lock:
            for n in written:
                found[n] = min(found[n], number) if found[n] else number
            self._pending -= 1
            last = not self._pending
        if last:
            self.batch.done(bytes(found))

    def _is_intact(self, n: int) -> bool:
        try:
            self.tiers.host.verify(self.batch.slots[n], self.batch.sizes[n])
        except Corrupt as error:
            logger.error("%s; the block is not written back", error)
            return False
        return True


class _TierWrite(StoreCall):
    """The call of a write-back to one tier."""

    def __init__(self, whole: _WriteBack, tier: Tier) -> None:
        self.blocks = len(whole.batch.keys)
        self._whole = whole
        self._tier = tier
        self._written: list[int] = []

    def expired(self, now: float) -> bool:
        return now >= self._whole.batch.expires

    def run(self) -> None:
        host, batch, blocks = self._whole.tiers.host, self._whole.batch, self._whole.intact()
        if not blocks:
            return
        store = self._whole.tiers.stores[self._tier]
        # Another engine may have written them, or this one, before they left host memory.
        lengths = zip(blocks, store.exists_whole([batch.keys[n] for n in blocks]), strict=True)
        self._written = [n for n, length in lengths if length == batch.sizes[n]]
        blocks = sorted(set(blocks).difference(self._written))
        if not blocks:
            return
        views = [host.view(batch.slots[n], batch.sizes[n]) for n in blocks]
        outcomes = zip(blocks, store.put([batch.keys[n] for n in blocks], views), strict=True)
        self._written += [n for n, outcome in outcomes if outcome is BlockOutcome.OK]

    def ended(self) -> None:
        self._whole.ended(self._tier, self._written)
