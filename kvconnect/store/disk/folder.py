"""A worker's folder: who owns it, and which segments are in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time

from kvconnect.errors import ConfigError
from kvconnect.store.disk.segment import INDEX, SEGMENT

LOCK = "LOCK"
_PATIENCE_S = 1.0
_FILE = re.compile(rf"(\d{{8}})(?:\{SEGMENT}|\{INDEX}|\{INDEX}\.new)")


class Folder:
    """``path/owner``, made if needed and locked for this process until ``close``.

    Raises:
        ConfigError: another process has it, it holds other files, or it cannot be written.
    """

    def __init__(self, path: str, owner: str) -> None:
        self.path = os.path.join(path, owner)
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            others = set(os.listdir(self.path)) - {LOCK}
            if others and not os.path.exists(os.path.join(self.path, LOCK)):
                fix = f"{self.path} holds other files: name an empty folder or a new one"
                raise ConfigError("path", path, fix)
            self._handle = _lock_soon(self.path)
            if self._handle < 0:
                user = holder(self.path)
                fix = f"it is in use by {user}: end that, or give every worker its own owner"
                raise ConfigError("owner", owner, fix)
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, b"%d\n" % os.getpid(), 0)
            sweep(self.path)
            self._next = 1 + max(numbers_in(self.path), default=0)
        except OSError as error:
            fix = f"{error.strerror}: name a folder that can be written to"
            raise ConfigError("path", path, fix) from error

    def stem(self, number: int) -> str:
        """Return a segment's path without the ending."""
        return os.path.join(self.path, f"{number:08d}")

    def new_stem(self) -> str:
        """Return the path of a segment that never was."""
        self._next += 1
        return self.stem(self._next - 1)

    def free_bytes(self) -> int:
        """Return what the file system has left; raise :class:`OSError`."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Let others have the folder. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def numbers_in(path: str) -> list[int]:
    """Return the numbers of the segments in a folder, oldest first; raise :class:`OSError`."""
    found = map(_FILE.fullmatch, os.listdir(path))
    return sorted(int(match[1]) for match in found if match and match[0].endswith(SEGMENT))


def sweep(path: str) -> None:
    """Remove what a process left that was killed: indexes without a segment, or half written.

    Raises :class:`OSError`.
    """
    whole = set(numbers_in(path))
    for name in os.listdir(path):
        match = _FILE.fullmatch(name)
        if match and (int(match[1]) not in whole or name.endswith(".new")):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))


def lock(path: str) -> int:
    """Lock a worker's folder; return the open handle, -1 if another has it.

    Raises :class:`OSError` if there is no way to know.
    """
    handle = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return -1
        raise
    return handle


def _lock_soon(path: str) -> int:
    """As :func:`lock`, but not put off by who only looks, or is about to end."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        handle = lock(path)
        if handle >= 0 or time.monotonic() >= deadline:
            return handle
        time.sleep(_PATIENCE_S / 20)


def holder(path: str) -> str:
    """Return who has a folder, in words."""
    try:
        with open(os.path.join(path, LOCK), encoding="ascii", errors="replace") as file:
            return f"process {int(file.read(32))}"
    except (OSError, ValueError):
        return "another process"
