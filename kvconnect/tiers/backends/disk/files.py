"""Folders, files of whole pages that bypass the page cache, and the buffers of a transfer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from types import TracebackType

from kvconnect.tiers.backends.base import PagePool
from kvconnect.tiers.backends.disk.record import PAGE, RecordHead, pack_record, unpack_record


class Directory:
    """An open folder. Its files are opened relative to its descriptor, so it cannot be exchanged
    for another folder; symbolic links are not followed. All calls raise :class:`OSError`.
    Thread-safe.

    ``within``: the parent folder to open it in, without following links.
    """

    def __init__(self, path: str, within: Directory | None = None) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if within is None:
            self.fd = os.open(path, flags)
        else:
            self.fd = os.open(os.path.basename(path), flags | os.O_NOFOLLOW, dir_fd=within.fd)
        self.user = os.fstat(self.fd).st_uid

    def folder(self, name: str, make: bool = False) -> Directory:
        """Open a folder in this one. With ``make``, create it for its owner alone if absent."""
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        return Directory(os.path.join(self.path, name), self)

    def open(self, name: str, flags: int) -> int:
        """Open a regular file that belongs to the folder's user and has no other hard link.

        Anything else raises EPERM: another user must not choose which file is read or written.
        """
        # Opening a pipe must not block.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(name, flags, 0o600, dir_fd=self.fd)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, handle)
            if flags & os.O_EXCL and os.geteuid() == 0 != self.user:
                os.fchown(handle, self.user, -1)  # root repairs another user's folder
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and found.st_uid == self.user:
                undo.pop_all()
                return handle
        raise OSError(errno.EPERM, f"{name} is not a regular file of the folder's owner")

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file's content, None if it is longer than ``most`` bytes."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            data = file.read(most + 1)
        return data if len(data) <= most else None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically: after a crash it is complete or absent."""
        spare = f"{name}.new"
        with contextlib.suppress(FileNotFoundError):
            self.unlink(spare)
        handle = self.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)
        self.rename(spare, name)

    def names(self) -> list[str]:
        """Return the names in the folder."""
        return os.listdir(self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file or a link, not the target of a link."""
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing the one with the new name."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def close(self) -> None:
        """Close the folder. Open files stay open. Idempotent."""
        if self.fd >= 0:
            close_handle(self.fd)
            self.fd = -1


class PageFile:
    """Reads and writes whole pages at page offsets. Thread-safe except for ``close``.

    Buffers must be page-aligned. All calls raise :class:`OSError`: ENOSPC for a short write, EIO
    for a short read.
    """

    def __init__(self, folder: Directory, name: str, flags: int) -> None:
        try:
            self.fd = folder.open(name, flags | os.O_DIRECT)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some kernels refuse O_DIRECT after they have created the file.
            self.fd = folder.open(name, flags & ~os.O_EXCL)
            self.direct = False

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill buffers with the bytes at an offset."""
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
        """Allocate ``nbytes`` bytes, so that later writes do not run out of space."""
        os.posix_fallocate(self.fd, 0, nbytes)

    def finish(self, nbytes: int) -> None:
        """Truncate the file to its used part and drop it from the page cache."""
        os.ftruncate(self.fd, nbytes)
        if not self.direct:
            os.fdatasync(self.fd)  # dirty pages cannot be dropped
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self) -> int:
        """Return the file's length in bytes."""
        return os.fstat(self.fd).st_size

    def next_data(self, offset: int) -> int:
        """Return the offset of the next page that is not in a hole, at most the file's end."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA) // PAGE * PAGE
        except OSError as error:
            if error.errno == errno.ENXIO:
                return self.size()
            if error.errno == errno.EINVAL:  # the file system does not know its holes
                return offset
            raise

    def close(self) -> None:
        """Close the file."""
        close_handle(self.fd)

    def _retried(self, transfer: Callable[[], int]) -> int:
        try:
            return transfer()
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        # The file system accepted O_DIRECT at opening but does not support it.
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        return transfer()


def close_handle(handle: int) -> None:
    """Close a file or folder descriptor. An EIO of a lost disk is ignored: Linux closes the
    descriptor anyway, and digests reveal bytes that were not written."""
    with contextlib.suppress(OSError):
        os.close(handle)


def starts_at_page(view: memoryview) -> bool:
    """Return whether a buffer is page-aligned; False for a read-only one, whose address Python
    does not give."""
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0


MAX_RECORDS = 128  # of one transfer; each has three buffers, and the system takes 1,024
MAX_BYTES = 8 << 20  # of one transfer; a larger one only delays others
MAX_PAYLOAD = 1 << 30  # of a record; the system moves less than 2 GiB at a time


class TransferBuffers:
    """Buffers of consecutive records for one read or write; uses the caller's memory if possible.

    Direct I/O needs whole pages. Heads, the last incomplete page of a payload, and payloads that
    are not page-aligned go through a pooled buffer, which is released at the end of the context.
    For one thread.
    """

    def __init__(self, pool: PagePool, buffers: Sequence[memoryview]) -> None:
        self._pool = pool
        self._buffers = buffers
        self._direct = [
            buffer.nbytes // PAGE * PAGE if starts_at_page(buffer) else 0 for buffer in buffers
        ]
        rests = [
            -(-(buffer.nbytes - direct) // PAGE) * PAGE
            for buffer, direct in zip(buffers, self._direct, strict=True)
        ]
        self._memory = pool.acquire(len(buffers) * PAGE + sum(rests))
        self._heads: list[memoryview] = []
        self._rests: list[memoryview] = []
        whole, at = memoryview(self._memory), 0
        for rest in rests:
            self._heads.append(whole[at : at + PAGE])
            self._rests.append(whole[at + PAGE : at + PAGE + rest])
            at += PAGE + rest

    def __enter__(self) -> TransferBuffers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.release(self._memory)

    def views(self) -> list[memoryview]:
        """Return the buffers to read or write, in the order of the disk."""
        found = []
        for number, buffer in enumerate(self._buffers):
            found.append(self._heads[number])
            if self._direct[number]:
                found.append(buffer[: self._direct[number]])
            if self._rests[number].nbytes:
                found.append(self._rests[number])
        return found

    def prepare_write(self, heads: Sequence[RecordHead], identity: bytes) -> None:
        """Fill the pooled buffer with heads and remainders of payloads."""
        for number, (head, buffer) in enumerate(zip(heads, self._buffers, strict=True)):
            # Bytes of earlier transfers in the pooled buffer must not reach the disk.
            self._heads[number][:] = bytes(PAGE)
            pack_record(head, identity, self._heads[number])
            rest, tail = self._rests[number], buffer[self._direct[number] :]
            rest[: tail.nbytes] = tail
            rest[tail.nbytes :] = bytes(rest.nbytes - tail.nbytes)

    def finish_read(self, number: int, identity: bytes) -> RecordHead | None:
        """After a read, copy the remainder of a payload from the pooled buffer; return the head."""
        tail = self._buffers[number][self._direct[number] :]
        tail[:] = self._rests[number][: tail.nbytes]
        return unpack_record(self._heads[number], identity)
