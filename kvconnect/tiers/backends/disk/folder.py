"""A worker's folder: its settings, its lock, its segments, and descriptions of block formats."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time

from kvconnect.errors import ConfigError
from kvconnect.tiers.backends.disk.files import Directory, close_handle
from kvconnect.tiers.backends.disk.segment import INDEX, SEGMENT, SegmentPath

logger = logging.getLogger(__name__)

LOCK = "LOCK"
_LOCK_WAIT_S = 1.0
_FILE = re.compile(rf"(\d{{8}})(?:\{SEGMENT}|\{INDEX}|\{INDEX}\.new)")


class Folder:
    """The folder ``path/owner``, created if needed and locked for this process until ``close``.

    Raises:
        ConfigError: another process has locked it, it holds other files, it cannot be written, or
            any user can write to it and so decide what this process reads and writes.
    """

    def __init__(self, path: str, owner: str) -> None:
        self.path = os.path.join(path, owner)
        self._handle = -1
        with contextlib.ExitStack() as undo:
            try:
                os.makedirs(path, mode=0o700, exist_ok=True)
                with contextlib.closing(Directory(path)) as top:
                    self.files = top.folder(owner, make=True)
                undo.callback(self.close)
                self._check(path)
                self._handle = _lock_soon(self.files)
                if self._handle < 0:
                    user = lock_holder(self.files)
                    fix = f"it is in use by {user}: end that, or name another folder"
                    raise ConfigError("path", self.path, fix)
                _locked.add(self)
                remove_leftovers(self.files)
                self._next = 1 + max(numbers_in(self.files), default=0)
            except OSError as error:
                fix = f"{error.strerror}: name a folder that can be written to"
                raise ConfigError("path", path, fix) from error
            undo.pop_all()

    def _check(self, path: str) -> None:
        """Raise :class:`ConfigError` if other users can write to the folder, or it is not a
        folder of the disk tier."""
        mode, user = os.fstat(self.files.fd).st_mode, os.geteuid()
        if self.files.user != user:
            fix = f"{self.path} belongs to user {self.files.user}: name a folder of user {user}"
            raise ConfigError("path", path, fix)
        if mode & stat.S_IWOTH:
            fix = f"anybody can write to {self.path}: name a new folder, or run chmod o-w"
            raise ConfigError("path", path, fix)
        if mode & stat.S_IWGRP:  # as Kubernetes sets it for the volume's group
            logger.warning("disk tier: removed the group's write permission of %s", self.path)
            os.fchmod(self.files.fd, stat.S_IMODE(mode) & ~stat.S_IWGRP)
        others = set(self.files.names()) - {LOCK}
        if others and LOCK not in self.files.names():
            fix = f"{self.path} holds other files: name an empty folder or a new one"
            raise ConfigError("path", path, fix)

    def path_of(self, number: int) -> SegmentPath:
        """Return the path of a segment."""
        return segment_path(self.files, number)

    def new_path(self) -> SegmentPath:
        """Return the path of a new segment."""
        self._next += 1
        return self.path_of(self._next - 1)

    def free_bytes(self) -> int:
        """Return the free bytes of the file system. Raises :class:`OSError`."""
        found = os.fstatvfs(self.files.fd)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Unlock and close the folder, even if a child process still has it open. Idempotent."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):  # of a lost disk; closing unlocks as well
                fcntl.flock(self._handle, fcntl.LOCK_UN)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the folder without unlocking it for the parent process. Idempotent."""
        _locked.discard(self)
        if self._handle >= 0:
            close_handle(self._handle)
            self._handle = -1
        self.files.close()


_locked: set[Folder] = set()


def _forked() -> None:
    """Close the folders in a forked child, which would hold the lock while it lives."""
    for folder in list(_locked):
        folder.close_in_child()


os.register_at_fork(after_in_child=_forked)


def segment_path(folder: Directory, number: int) -> SegmentPath:
    """Return the path of a segment."""
    return SegmentPath(folder, f"{number:08d}")


def numbers_in(folder: Directory) -> list[int]:
    """Return the numbers of the segments in a folder, oldest first; raise :class:`OSError`."""
    found = map(_FILE.fullmatch, folder.names())
    return sorted(int(match[1]) for match in found if match and match[0].endswith(SEGMENT))


def remove_leftovers(folder: Directory) -> None:
    """Delete files of a process that was killed: indexes without a segment or half written.

    Raises :class:`OSError`.
    """
    existing = set(numbers_in(folder))
    for name in folder.names():
        match = _FILE.fullmatch(name)
        if match and (int(match[1]) not in existing or name.endswith(".new")):
            with contextlib.suppress(OSError):
                folder.unlink(name)


def lock_folder(folder: Directory, make: bool = False) -> int:
    """Lock a worker's folder. Return the open handle, -1 if another process has locked it.

    Raises :class:`OSError`.
    """
    handle = folder.open(LOCK, os.O_RDWR | (os.O_CREAT if make else 0))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return -1
        raise
    with contextlib.suppress(OSError):  # in place: a full disk has no room for more
        os.pwrite(handle, b"%-15d\n" % os.getpid(), 0)  # for who finds it locked
    return handle


def _lock_soon(folder: Directory) -> int:
    """As :func:`lock_folder`, but not put off by who only looks, or is about to end."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        handle = lock_folder(folder, make=True)
        if handle >= 0 or time.monotonic() >= deadline:
            return handle
        time.sleep(_LOCK_WAIT_S / 20)


def lock_holder(folder: Directory) -> str:
    """Return the process that has locked a folder, as text."""
    try:
        found = folder.read(LOCK, 32)
        return f"process {int(found or b'')}"
    except (OSError, ValueError):
        return "another process"
