"""Circuit breaker: stops calls to something that fails, and tries it again with back-off."""

from __future__ import annotations

import threading

_FIRST_S = 1.0


class CircuitBreaker:
    """Opens after ``failures`` failures in a row; then lets one trial through per pause.

    Pauses double from one second to ``longest_s``. The first success closes the breaker. Time is
    an argument: seconds of a clock that never jumps. Threads: any.

    Args:
        trial_factor: a trial that has not ended blocks other calls for this many pauses.
        since: failures of calls that began before this time are ignored.
    """

    def __init__(
        self, failures: int, longest_s: float = 60.0, trial_factor: int = 1, since: float = 0.0
    ) -> None:
        self._limit = failures
        self._longest_s = longest_s
        self._trial_factor = trial_factor
        self._since = since
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = _FIRST_S
        self._retry_at = 0.0  # the next trial, while the breaker is open

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"CircuitBreaker({state}, {self._failures} failures)"

    @property
    def closed(self) -> bool:
        """Whether all calls are let through. An open breaker closes with the first success."""
        return self._failures < self._limit

    def allows(self, now: float) -> bool:
        """Return whether a call would be let through."""
        with self._lock:
            return self._allows(now)

    def enter(self, now: float) -> bool:
        """Let a call through and return True, or return False. The caller reports the result."""
        with self._lock:
            allowed = self._allows(now)
            if allowed:
                self._begin(now)
            return allowed

    def begin(self, now: float) -> None:
        """Note a call that is made in any case. While the breaker is open, it is the trial."""
        with self._lock:
            self._begin(now)

    def succeeded(self) -> None:
        """Note a success."""
        with self._lock:
            self._failures, self._pause_s = 0, _FIRST_S

    def failed(self, now: float, began: float | None = None) -> None:
        """Note a failure. One of a call that ``began`` before the breaker last opened is ignored:
        all calls under way fail together, and that is one failure."""
        with self._lock:
            if began is not None and began < self._since:
                return
            self._failures += 1
            if self._failures > self._limit:
                self._pause_s = min(2 * self._pause_s, self._longest_s)
            if self._failures >= self._limit:
                self._since, self._retry_at = now, now + self._pause_s

    def _allows(self, now: float) -> bool:
        return self.closed or now >= self._retry_at

    def _begin(self, now: float) -> None:
        if self._failures >= self._limit:
            pause_s = min(self._trial_factor * self._pause_s, self._longest_s)
            self._retry_at = now + pause_s
