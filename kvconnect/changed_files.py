"""Files that are read again when they change: keys, tokens and certificates."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvconnect.errors import ConfigError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

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


class Reread(Generic[_T]):
    """What ``read`` makes of files, made again when they change. If they are of no use then, it
    stays as it was, and that is logged once. Thread-safe.

    Args:
        paths: of the files; without any, nothing is made again.
        read: raises :class:`ConfigError` or :class:`OSError` if they are of no use.
        stays: what the log says then.
        again: what the log says when it was made again; "" for nothing.

    Raises:
        ConfigError, OSError: as ``read``.
    """

    def __init__(
        self, paths: Sequence[str], read: Callable[[], _T], stays: str, again: str = ""
    ) -> None:
        self._lock = threading.Lock()
        self._changes = Changes(paths)  # first: a change while they are read is seen
        self._read, self._stays, self._again = read, stays, again
        self._value = read()

    def current(self) -> _T:
        """Return it; look for changes before."""
        with self._lock:
            if self._changes.found():
                try:
                    self._value = self._read()
                except (ConfigError, OSError) as error:
                    logger.error("%s: %s", self._stays, error)
                else:
                    if self._again:
                        logger.info(self._again)
            return self._value


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size, found.st_mode
