"""Which frames of a process are sent first: those of hand-offs."""

from __future__ import annotations

import threading

LONGEST_WAIT_S = 0.05
"""Seconds for which a frame of shared blocks waits for hand-offs: they go first, but never stop the
sharing."""


class FramePriority:
    """Frames of hand-offs that are being sent or can be, for the frames that wait for them.
    Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames = 0

    def add(self, frames: int) -> None:
        """As many more frames of hand-offs are there; negative: they were sent or dropped."""
        with self._changed:
            self._frames += frames
            if not self._frames:
                self._changed.notify_all()

    def wait(self) -> None:
        """Block until no frame of a hand-off is there, ``LONGEST_WAIT_S`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._frames, LONGEST_WAIT_S)
