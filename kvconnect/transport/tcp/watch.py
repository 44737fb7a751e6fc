"""How long single frames may take, whatever keeps trickling in or out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MIN_BYTES_PER_S = 1_000_000
"""Slower links are given up: a frame keeps blocks on both sides from being used otherwise."""


@dataclass(eq=False)
class _Frame:
    want: int
    due: float


class Watch:
    """The frames that one peer's data connections move at this moment. Thread-safe.

    Each has ``stall_s`` and the time its bytes take at ``MIN_BYTES_PER_S``. ``now`` is a clock in
    seconds that stands still while this process is held up.
    """

    def __init__(self, stall_s: float, now: Callable[[], float]) -> None:
        self._stall_s = stall_s
        self._now = now
        self._lock = threading.Lock()
        self._frames: set[_Frame] = set()

    @contextmanager
    def over(self, want: int, nbytes: int) -> Iterator[None]:
        """Move one frame. What it waits for on this side comes before or after, not inside."""
        frame = _Frame(want, self._now() + self._stall_s + nbytes / MIN_BYTES_PER_S)
        with self._lock:
            self._frames.add(frame)
        try:
            yield
        finally:
            with self._lock:
                self._frames.discard(frame)

    def hurry(self, want: int) -> None:
        """What still moves of a want is of no use any more: give it ``stall_s`` to end."""
        due = self._now() + self._stall_s
        with self._lock:
            for frame in self._frames:
                if frame.want == want:
                    frame.due = min(frame.due, due)

    def overdue(self, now: float) -> bool:
        """Say whether a frame should have ended."""
        with self._lock:
            return any(now > frame.due for frame in self._frames)
