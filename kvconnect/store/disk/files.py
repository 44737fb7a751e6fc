"""One open file of whole pages, past the page cache where the file system allows it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

from kvconnect.store.disk.record import PAGE


class PageFile:
    """Reads and writes whole pages at page offsets. Threads: any, but for ``close``.

    Buffers must start at pages of memory. All calls raise :class:`OSError`; a transfer that ends
    early is ENOSPC for a write and EIO for a read.
    """

    def __init__(self, path: str, flags: int) -> None:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some kernels refuse the flag after they have made the file.
            self.fd = os.open(path, flags & ~os.O_EXCL, 0o600)
            self.direct = False

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill buffers from an offset on."""
        count = self._retried(lambda: os.preadv(self.fd, views, offset))
        if count != sum(view.nbytes for view in views):
            raise OSError(errno.EIO, "the file ends early")
        if not self.direct:
            os.posix_fadvise(self.fd, offset, count, os.POSIX_FADV_DONTNEED)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write buffers at an offset."""
        count = self._retried(lambda: os.pwritev(self.fd, views, offset))
        if count != sum(view.nbytes for view in views):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_page(self, data: bytes | bytearray, offset: int) -> None:
        """Write one page from memory of any kind."""
        with mmap.mmap(-1, PAGE) as memory:
            memory[:] = data
            with memoryview(memory) as view:
                self.write([view], offset)

    def allocate(self, nbytes: int) -> None:
        """Have room for so many bytes, so that later writes neither grow the file nor run out."""
        os.posix_fallocate(self.fd, 0, nbytes)

    def finish(self, nbytes: int) -> None:
        """Cut the file to what is used of it, and drop what the page cache has."""
        os.ftruncate(self.fd, nbytes)
        if not self.direct:
            os.fdatasync(self.fd)  # dirty pages cannot be dropped
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self) -> int:
        """Return the file's length in bytes."""
        return os.fstat(self.fd).st_size

    def next_data(self, offset: int) -> int:
        """Return the page from this offset on that may not be empty; the file's end at most."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA) // PAGE * PAGE
        except OSError as error:
            if error.errno == errno.ENXIO:
                return self.size()
            if error.errno == errno.EINVAL:  # a file system that does not tell
                return offset
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def _retried(self, transfer: Callable[[], int]) -> int:
        try:
            return transfer()
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        # It took the flag at opening and cannot keep to it.
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        return transfer()


def starts_at_page(view: memoryview) -> bool:
    """Whether a buffer starts at a page of memory; a read-only one counts as if it did not."""
    if view.readonly:
        return False  # Python gives no address of those
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0


def put_file(path: str, data: bytes) -> None:
    """Write a small file in one piece: after a crash it is there as a whole or not at all.

    Raises :class:`OSError`.
    """
    spare = f"{path}.new"
    handle = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(handle)
    os.rename(spare, path)
