"""When to leave something alone that fails, and how much may be written. Time is an argument."""

from __future__ import annotations

import threading

_FIRST_S = 1.0
_LONGEST_S = 60.0


class Breaker:
    """Leaves a thing alone after ``patience`` failures in a row, and probes it with back-off.

    While it is left alone one call is let through per delay; delays double from a second to a
    minute. The first success ends that. Threads: any.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._failures = 0
        self._delay = _FIRST_S
        self._probe_at = 0.0  # while it is left alone

    def __repr__(self) -> str:
        state = "open" if self._failures >= self._patience else "closed"
        return f"Breaker({state}, {self._failures} failures)"

    def allows(self, now: float) -> bool:
        """Whether a call would be let through; ``now`` in seconds of a clock that never jumps."""
        with self._lock:
            return self._failures < self._patience or now >= self._probe_at

    def enter(self, now: float) -> bool:
        """Let a call through, or not. Whoever was let through reports how it went."""
        with self._lock:
            if self._failures < self._patience:
                return True
            if now < self._probe_at:
                return False
            self._probe_at = now + self._delay  # others wait for what this one finds
            return True

    def worked(self) -> None:
        """Note a success."""
        with self._lock:
            self._failures, self._delay = 0, _FIRST_S

    def failed(self, now: float) -> None:
        """Note a failure."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._patience:
                self._probe_at = now + self._delay
                self._delay = min(2 * self._delay, _LONGEST_S)


class Budget:
    """A bound on the bytes written per day; 0 is none. Threads: any.

    What is not used is saved up for an hour, so a day sees at most a twenty-fourth more. One
    batch may overdraw it; then nothing is written until that is made good.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._per_s = bytes_per_day / 86_400
        self._most = bytes_per_day / 24
        self._lock = threading.Lock()
        self._left = self._most
        self._at = now

    def spend(self, nbytes: int, now: float) -> bool:
        """Take bytes from the budget; False if it is used up."""
        if not self._most:
            return True
        with self._lock:
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left <= 0:
                return False
            self._left -= nbytes
            return True
