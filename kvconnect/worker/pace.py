"""A bound on the bytes per second of stores, where they would take bandwidth that others need."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Says when the next bytes may go. ``rate`` in bytes per second; 0: always. For one thread.

    What was not used is not saved up: after a pause there is no burst over the rate.
    """

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._free_at = 0.0

    def delay(self) -> float:
        """Return the seconds until bytes may go, 0 if they may now."""
        return max(0.0, self._free_at - self._clock()) if self._rate else 0.0

    def spend(self, nbytes: int) -> None:
        """Note that ``nbytes`` go now."""
        if self._rate:
            self._free_at = max(self._free_at, self._clock()) + nbytes / self._rate
