"""Deadlines of single frames, also of those that make slow progress."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MIN_BYTES_PER_S = 1_000_000
"""Minimum rate: a slower frame would hold blocks on both sides for too long."""


@dataclass(eq=False)
class MovingFrame:
    """A frame under way, and when it must have ended."""

    read_id: int
    due: float
    ends_by: float = math.inf  # by `monotonic`, once its read is cancelled


class StallWatchdog:
    """Deadlines of the frames that one peer's connections move. Thread-safe.

    A frame may take ``stall_s`` plus the time of its bytes at ``MIN_BYTES_PER_S``. ``now`` is a
    clock in seconds that stands still while this process is held up. Frames of a cancelled read
    have ``stall_s`` by ``monotonic``, which goes on: engines reuse pages by that clock.
    """

    def __init__(
        self,
        stall_s: float,
        now: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stall_s = stall_s
        self._now = now
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._frames: set[MovingFrame] = set()

    @contextmanager
    def over(self, read_id: int, nbytes: int) -> Iterator[MovingFrame]:
        """Bound the ``with`` block, which moves one frame. Where it waits for this side, the frame
        must be ``paused``."""
        frame = MovingFrame(read_id, self._now() + self._stall_s + nbytes / MIN_BYTES_PER_S)
        with self._lock:
            self._frames.add(frame)
        try:
            yield frame
        finally:
            with self._lock:
                self._frames.discard(frame)

    @contextmanager
    def paused(self, frame: MovingFrame) -> Iterator[None]:
        """Inside the ``with``, the frame waits for this side: the time that it has left stays."""
        left = frame.due - self._now()
        frame.due = math.inf
        try:
            yield
        finally:
            frame.due = self._now() + left

    def shorten(self, read_id: int) -> None:
        """Give the frames of a cancelled read at most ``stall_s`` to end."""
        ends_by = self._monotonic() + self._stall_s
        with self._lock:
            for frame in self._frames:
                if frame.read_id == read_id:
                    frame.ends_by = min(frame.ends_by, ends_by)

    def overdue(self, now: float) -> bool:
        """Return whether a frame is late."""
        with self._lock:
            ended = self._monotonic()
            return any(now > frame.due or ended > frame.ends_by for frame in self._frames)
