"""A file system that hangs: python -m tests.fakes.hanging_disk BELOW MOUNT SIGNS

It shows the folder BELOW at MOUNT. While the folder SIGNS has a file ``hang``, no call is answered;
each leaves a file of its thread's number there meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mfusepy

_STAT = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size")
_SPACE = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_namemax")


class HangingDisk(mfusepy.Operations):
    """Passes everything on to the folder below, once it may answer."""

    use_ns = True  # of the times of files

    def __init__(self, below: str, signs: str) -> None:
        self._below, self._signs = below, Path(signs)

    def _wait(self) -> None:
        waits = self._signs / str(threading.get_ident())
        while (self._signs / "hang").exists():
            waits.touch()
            time.sleep(0.005)
        waits.unlink(missing_ok=True)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._wait()
        found = os.lstat(self._below + path)
        return {name: getattr(found, name) for name in _STAT}

    def statfs(self, path: str) -> dict[str, int]:
        self._wait()
        found = os.statvfs(self._below + path)
        return {name: getattr(found, name) for name in _SPACE}

    def readdir(self, path: str, fh: int) -> list[str]:
        self._wait()
        return [".", "..", *os.listdir(self._below + path)]

    def mkdir(self, path: str, mode: int) -> None:
        self._wait()
        os.mkdir(self._below + path, mode)

    def unlink(self, path: str) -> None:
        self._wait()
        os.unlink(self._below + path)

    def rename(self, old: str, new: str) -> None:
        self._wait()
        os.rename(self._below + old, self._below + new)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        self._wait()
        return os.open(self._below + path, os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        self._wait()
        return os.open(self._below + path, os.O_RDWR)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._wait()
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._wait()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._wait()
        os.truncate(self._below + path, length)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> None:
        self._wait()
        os.posix_fallocate(fh, offset, size)

    def release(self, path: str, fh: int) -> None:
        self._wait()
        os.close(fh)


if __name__ == "__main__":
    mfusepy.FUSE(HangingDisk(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True)
