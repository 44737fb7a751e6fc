"""What a store records about itself, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvconnect.stats import OffloadingConnectorStats
from kvconnect.store.base import Outcome
from kvconnect.types import TransferType

_QUIET = {Outcome.OK, Outcome.ABSENT}  # a block that is not there is no failure


class Meter:
    """Statistics behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = OffloadingConnectorStats()

    def moved(self, kind: TransferType, nbytes: int, seconds: float) -> None:
        """Record one call that moved bytes of payload; none moved is no operation."""
        if nbytes:
            with self._lock:
                self._stats.record_transfer(kind, nbytes, seconds)

    def ended(self, outcomes: Iterable[Outcome]) -> None:
        """Count the blocks of a call that failed, by why."""
        failed = [found for found in outcomes if found not in _QUIET]
        if failed:
            with self._lock:
                for outcome in failed:
                    self._stats.count("store_failed_blocks", label=outcome)

    def evicted(self, blocks: int) -> None:
        """Count blocks dropped to make room, or because they were too old."""
        with self._lock:
            self._stats.count("store_evicted_blocks", blocks)

    def take(self) -> OffloadingConnectorStats | None:
        """Hand over what was recorded since the last time, None if nothing was."""
        with self._lock:
            return self._stats.take()
