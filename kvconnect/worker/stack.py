"""The tiers below host memory one under another: calls that move blocks from and to host slots.

Calls block as their stores do, so they belong on threads of their own: :class:`LowerTiers` has some
for an engine that polls, and engines with storage threads bring theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvconnect.errors import Corrupt
from kvconnect.plan.instructions import BELOW
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.store import Outcome, Store, Usage
from kvconnect.store.host import HostStore
from kvconnect.types import Tier

logger = logging.getLogger(__name__)

READERS, WRITERS = 4, 2
"""Threads for what a request waits for, and for what is written down."""

BATCH_BYTES = 8 << 20
"""Of one call to a store: large enough for its rate, small beside a job."""


class Stack:
    """``stores`` are asked in order, the fastest first; they are closed with this object.

    Blocks are named by their keys; ``sizes`` are their bytes, ``slots`` where they lie in ``host``.
    A result has a byte per key: the tier, as a place in :data:`BELOW`, that has the block or gave
    or took it, 0 for none. Any thread may call :meth:`seek`, :meth:`fetch` and :meth:`spill`, which
    raise what a store raises; nobody else may use the slots meanwhile. The worker of an engine that
    ``speaks`` says for all how its tiers are.
    """

    def __init__(self, stores: Mapping[Tier, Store], host: HostStore, speaks: bool = True) -> None:
        self.stores = dict(stores)
        self._host = host
        self._speaks = speaks
        self._told: dict[Tier, Usage] = {}

    def __repr__(self) -> str:
        return f"<Stack {self.stores}>"

    def seek(self, keys: Sequence[bytes], sizes: Sequence[int]) -> bytes:
        """Look blocks up; one of another size is not there."""
        found = bytearray(len(keys))
        for tier, store in self.stores.items():
            left = [place for place, there in enumerate(found) if not there]
            lengths = store.exists([keys[place] for place in left]) if left else ()
            for place, length in zip(left, lengths, strict=True):
                if length == sizes[place]:
                    found[place] = BELOW.index(tier)
        return bytes(found)

    def fetch(self, keys: Sequence[bytes], slots: Sequence[int], sizes: Sequence[int]) -> bytes:
        """Read blocks into slots, and seal these. What is in a slot without a block is unknown."""
        found = bytearray(len(keys))
        for tier, store in self.stores.items():
            left = [place for place, there in enumerate(found) if not there]
            if not left:
                break
            names = [keys[place] for place in left]
            views = [self._host.view(slots[place], sizes[place]) for place in left]
            for place, outcome in zip(left, store.get(names, views), strict=True):
                if outcome is Outcome.OK:
                    found[place] = BELOW.index(tier)
                    self._host.seal(slots[place], sizes[place])
        return bytes(found)

    def spill(self, keys: Sequence[bytes], slots: Sequence[int], sizes: Sequence[int]) -> bytes:
        """Write the blocks of slots down, to every tier that lacks them."""
        found = bytearray(len(keys))
        good = [place for place in range(len(keys)) if self._intact(slots[place], sizes[place])]
        for tier, store in self.stores.items():
            left = good
            if tier is Tier.REMOTE:  # another engine may have written it
                lengths = store.exists([keys[place] for place in good]) if good else ()
                left = [place for place, n in zip(good, lengths, strict=True) if not n]
            if not left:
                continue
            views = [self._host.view(slots[place], sizes[place]) for place in left]
            outcomes = store.put([keys[place] for place in left], views)
            for place, outcome in zip(left, outcomes, strict=True):
                if outcome is Outcome.OK and not found[place]:
                    found[place] = BELOW.index(tier)
        return bytes(found)

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the stores recorded since the last call, and how they are if that is new.
        One thread at a time may call."""
        taken = OffloadingConnectorStats()
        for tier, store in self.stores.items():
            theirs = store.take_stats()
            if theirs is not None:
                taken.aggregate(theirs)
            usage = store.usage()
            if self._speaks and usage != self._told.get(tier):
                self._told[tier] = usage
                taken.gauge("below_available", usage.available, label=tier.value)
                taken.gauge("below_bytes_used", usage.nbytes, label=tier.value)
                taken.gauge("below_bytes_capacity", usage.capacity_bytes, label=tier.value)
        return taken.take()

    def close(self) -> None:
        """Close the stores. Idempotent."""
        for store in self.stores.values():
            store.close()

    def _intact(self, slot: int, size: int) -> bool:
        """Whether a slot still has what was stored: a tier would sign what it is given."""
        try:
            self._host.verify(slot, size)
        except Corrupt as error:
            logger.error("%s; the block is not written down", error)
            return False
        return True
