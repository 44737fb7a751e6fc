"""Whether an engine that answers to probes also serves. Pure: time is an argument.

Some engines are well but for what matters: their health is green while every request fails. After
a few failures in a row such an engine is only tried now and then, by one request at a time, less
and less often but never seldom; one success and it is as good as any.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 3  # in a row
PAUSE_FIRST_S = 1.0  # doubles
PAUSE_MOST_S = 30.0


@dataclass
class Breaker:
    """Of one engine. Not thread-safe.

    Attributes:
        since: when what is known of the engine last changed. Requests that began before and fail
            now, as all do that are open when it crashes, tell nothing new.
        failures: of later requests, in a row.
    """

    since: float = 0.0
    failures: int = 0
    _closed_at: float = 0.0  # when it may be tried again
    _pause: float = PAUSE_FIRST_S

    def trusted(self, now: float) -> bool:
        """Whether requests should go there; if nothing better is left they may all the same."""
        return self.failures < FAILURES or now >= self._closed_at

    def began(self, now: float) -> None:
        """A request goes there. If that is a trial, no other follows until it has ended or the
        pause is over."""
        if self.failures >= FAILURES:
            self._closed_at = now + self._pause

    def succeeded(self) -> None:
        """A request was served, or turned away for its own fault."""
        self.failures, self._pause = 0, PAUSE_FIRST_S

    def failed(self, began: float, now: float) -> None:
        """A request that began at ``began`` failed, for what is the engine's fault."""
        if began < self.since:
            return
        self.failures += 1
        if self.failures > FAILURES:
            self._pause = min(2 * self._pause, PAUSE_MOST_S)
        if self.failures >= FAILURES:
            self.since, self._closed_at = now, now + self._pause
