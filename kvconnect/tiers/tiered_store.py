"""The tiers below host memory one under another: blocks between host slots and stores.

Stores block the threads that call them, so each has threads of its own, for what requests wait for
and for what is written down: a tier that hangs holds up no other, and nobody waits for it twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.errors import Corrupt
from kvconnect.offload.host_arena import HostStore
from kvconnect.offload.messages import BELOW
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends import BlockOutcome, Store, Usage
from kvconnect.tiers.store_threads import Call, StoreThreads
from kvconnect.types import Tier

logger = logging.getLogger(__name__)

READERS, WRITERS = 4, 2
"""Threads of a tier for what a request waits for, and for what is written down."""

BATCH_BYTES = 8 << 20
"""Of one call to a store: large enough for its rate, small beside a job."""

_SOONEST_LATE_S = 1.0  # however little requests wait, a call may take so long

Done = Callable[[bytes], None]
"""Is told a byte per block: the tier, as a place in :data:`BELOW`, that has the block or gave or
took it, 0 for none. Called once, on any thread, when no store has to do with the slots any more."""


@dataclass(eq=False)
class Blocks:
    """Blocks by their keys, with their bytes and, but for a lookup, where they lie in host memory.
    No call about them is begun after ``expires``."""

    keys: Sequence[bytes]
    sizes: Sequence[int]
    expires: float
    done: Done
    slots: Sequence[int] = ()
    found: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.found = bytearray(len(self.keys))

    def left(self) -> list[int]:
        """Return the places of blocks that no tier was found for."""
        return [place for place, there in enumerate(self.found) if not there]


class TieredStore:
    """``stores`` are asked in order, the fastest first; they are closed with this object. A store
    that raises or is left alone has nothing. A call is late after ``wait_s``.

    :meth:`seek`, :meth:`fetch` and :meth:`spill` return at once; until ``done`` is called, nobody
    else may use the slots. The worker of an engine that ``speaks`` says for all how its tiers are.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        host: HostStore,
        wait_s: float,
        speaks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stores = dict(stores)
        self.host = host
        self.clock = clock
        self._speaks = speaks
        self._told: dict[Tier, Usage] = {}
        late_s = max(wait_s, _SOONEST_LATE_S)
        self.readers = {t: StoreThreads(f"fetch-{t.value}", READERS, late_s, clock) for t in stores}
        self.writers = {t: StoreThreads(f"spill-{t.value}", WRITERS, late_s, clock) for t in stores}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Stack {self.stores}>"

    def seek(self, blocks: Blocks) -> None:
        """Look blocks up; one of another size is not there."""
        _Search(self, blocks, _look_up).ended()

    def fetch(self, blocks: Blocks) -> None:
        """Read blocks into slots, and seal these. What is in a slot without a block is unknown."""
        _Search(self, blocks, _read).ended()

    def spill(self, blocks: Blocks) -> None:
        """Write the blocks of slots down, to every tier that lacks them."""
        _WriteBack(self, blocks).start()

    def sweep(self) -> None:
        """Have what expired, or waits for a tier that hangs, come to its end. To be called from
        time to time."""
        for lane in (*self.readers.values(), *self.writers.values()):
            lane.sweep()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the stores recorded since the last call, and how they are if that is new.
        One thread at a time may call."""
        taken = OffloadingConnectorStats()
        for tier, store in self.stores.items():
            theirs = store.take_stats()
            if theirs is not None:
                taken.aggregate(theirs)
            late = self.readers[tier].take_late_blocks() + self.writers[tier].take_late_blocks()
            if late:
                taken.count("store_failed_blocks", late, label=BlockOutcome.LATE)
            usage = store.usage()
            usage = usage._replace(available=usage.available and self.readers[tier].available())
            if self._speaks and usage != self._told.get(tier):
                self._told[tier] = usage
                taken.gauge("tier_available", usage.available, label=tier.value)
                taken.gauge("tier_bytes_used", usage.nbytes, label=tier.value)
                taken.gauge("tier_bytes_capacity", usage.capacity_bytes, label=tier.value)
        return taken.take()

    def close(self) -> None:
        """Drop what is queued, wait for calls under way that are not late, close the stores whose
        calls have all ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for lane in (*self.readers.values(), *self.writers.values()):
            lane.close()
        with contextlib.ExitStack() as closing:  # one that raises keeps no other open
            for tier, store in self.stores.items():
                if all([self.readers[tier].join(), self.writers[tier].join()]):
                    closing.callback(store.close)
                else:  # it holds what it has until this process ends
                    logger.warning("tier %s: a call does not end; it is not closed", tier.value)


class _Search(Call):
    """Blocks that one tier after the other is asked for, until all are found."""

    def __init__(
        self, stack: TieredStore, blocks: Blocks, ask: Callable[[_Search, Tier, Store], None]
    ) -> None:
        self.stack = stack
        self.wanted = blocks
        self.blocks = len(blocks.keys)
        self._ask = ask
        self._tiers = list(stack.stores)
        self._tier: Tier | None = None

    def expired(self, now: float) -> bool:
        return now >= self.wanted.expires

    def run(self) -> None:
        assert self._tier is not None
        self._ask(self, self._tier, self.stack.stores[self._tier])

    def ended(self) -> None:
        """Go on with the next tier that takes calls."""
        while self._tiers and 0 in self.wanted.found and not self.expired(self.stack.clock()):
            self._tier = self._tiers.pop(0)
            if self.stack.readers[self._tier].submit(self):
                return
        self.wanted.done(bytes(self.wanted.found))


def _look_up(search: _Search, tier: Tier, store: Store) -> None:
    wanted, left = search.wanted, search.wanted.left()
    lengths = store.exists([wanted.keys[place] for place in left])
    for place, length in zip(left, lengths, strict=True):
        if length == wanted.sizes[place]:
            wanted.found[place] = BELOW.index(tier)


def _read(search: _Search, tier: Tier, store: Store) -> None:
    wanted, left, host = search.wanted, search.wanted.left(), search.stack.host
    names = [wanted.keys[place] for place in left]
    views = [host.view(wanted.slots[place], wanted.sizes[place]) for place in left]
    for place, outcome in zip(left, store.get(names, views), strict=True):
        if outcome is BlockOutcome.OK:
            host.seal(wanted.slots[place], wanted.sizes[place])
            wanted.found[place] = BELOW.index(tier)


class _WriteBack:
    """Blocks on their way down to all tiers at once."""

    def __init__(self, stack: TieredStore, blocks: Blocks) -> None:
        self.stack = stack
        self.wanted = blocks
        self._lock = threading.Lock()
        self._waiting = len(stack.stores)  # tiers that have not ended
        self._verifying = threading.Lock()
        self._good: list[int] | None = None

    def start(self) -> None:
        for tier, lane in self.stack.writers.items():
            call = _TierWrite(self, tier)
            if not lane.submit(call):
                call.ended()

    def good(self) -> list[int]:
        """Return the places of blocks that are what was stored: a tier would sign what it is
        given."""
        with self._verifying:
            if self._good is None:
                self._good = [n for n in range(len(self.wanted.keys)) if self._intact(n)]
            return self._good

    def ended(self, tier: Tier, took: Sequence[int]) -> None:
        """A tier has these blocks now, or those that it had before."""
        number = BELOW.index(tier)
        with self._lock:
            for place in took:
                before = self.wanted.found[place]
                self.wanted.found[place] = min(before, number) if before else number
            self._waiting -= 1
            last = not self._waiting
        if last:
            self.wanted.done(bytes(self.wanted.found))

    def _intact(self, place: int) -> bool:
        try:
            self.stack.host.verify(self.wanted.slots[place], self.wanted.sizes[place])
        except Corrupt as error:
            logger.error("%s; the block is not written down", error)
            return False
        return True


class _TierWrite(Call):
    """The part of a spill that one tier takes."""

    def __init__(self, spill: _WriteBack, tier: Tier) -> None:
        self.blocks = len(spill.wanted.keys)
        self._spill = spill
        self._tier = tier
        self._took: list[int] = []

    def expired(self, now: float) -> bool:
        return now >= self._spill.wanted.expires

    def run(self) -> None:
        stack, wanted, places = self._spill.stack, self._spill.wanted, self._spill.good()
        store = stack.stores[self._tier]
        if self._tier is Tier.REMOTE and places:  # another engine may have written it
            lengths = store.exists([wanted.keys[place] for place in places])
            places = [
                n for n, length in zip(places, lengths, strict=True) if length != wanted.sizes[n]
            ]
        if not places:
            return
        views = [stack.host.view(wanted.slots[place], wanted.sizes[place]) for place in places]
        outcomes = store.put([wanted.keys[place] for place in places], views)
        pairs = zip(places, outcomes, strict=True)
        self._took = [place for place, outcome in pairs if outcome is BlockOutcome.OK]

    def ended(self) -> None:
        self._spill.ended(self._tier, self._took)
