"""Files that are read again when they change: keys, tokens and certificates."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

LOOK_S = 1.0
"""Shortest time between two checks for changed files, in seconds."""


class Changes:
    """Detects changes of files. For one thread at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._looked = time.monotonic()
        self._seen = [_stamp(path) for path in self._paths]

    def found(self) -> bool:
        """Return whether a file changed since the last check; at most one check per ``LOOK_S``."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        before, self._seen = self._seen, [_stamp(path) for path in self._paths]
        return self._seen != before


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size, found.st_mode
