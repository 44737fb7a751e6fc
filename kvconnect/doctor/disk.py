"""``kvconnect doctor disk``: measures large writes and reads in a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnect.doctor import Finding, FindingsReport, rate

CHUNK_BYTES = 4 << 20
"""Size of one write or read."""

_GOOD = "the folder can hold KV blocks"
_BAD = "the folder cannot be used: see the fail lines"
_OTHER = "choose another folder, or mount a writable file system there"


def examine(folder: str, nbytes: int) -> FindingsReport:
    """Write and read a file of ``nbytes``, rounded up to whole chunks, in ``folder``.

    The file is unlinked at once, so nothing remains even if this process is killed.
    """
    chunks = -(-nbytes // CHUNK_BYTES)
    try:
        _check_room(folder, chunks * CHUNK_BYTES)
        return _measure(folder, chunks)
    except OSError as error:
        return FindingsReport((_refused(folder, error),), _GOOD, _BAD)


def _check_room(folder: str, nbytes: int) -> None:
    if not Path(folder).is_dir():
        code = errno.ENOTDIR if os.path.lexists(folder) else errno.ENOENT
        raise OSError(code, os.strerror(code))
    if _free_bytes(folder) < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refused(folder: str, error: OSError) -> Finding:
    """Return the finding for an unusable folder."""
    value = f"{folder}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            value += f", {_free_bytes(folder) / 2**20:.0f} MiB free"
        return Finding("disk", "fail", value, "free space there, or write less with --bytes")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Finding("disk", "fail", value, "name a folder that exists")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Finding("disk", "fail", value, _OTHER)
    return Finding("disk", "fail", value, "check the disk and the kernel's log (dmesg)")


def _measure(folder: str, chunks: int) -> FindingsReport:
    with _unlinked_file(folder) as (handle, direct):
        # Random bytes: compression or deduplication would falsify the speed.
        buffer = mmap.mmap(-1, CHUNK_BYTES)
        buffer[:] = random.Random(0).randbytes(CHUNK_BYTES)
        direct, write_s = _write(handle, buffer, chunks, direct)
        if not direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s, wrong = _read(handle, buffer, chunks)
    nbytes = chunks * CHUNK_BYTES
    kind, free = _file_system(folder), _free_bytes(folder)
    measured: dict[str, object] = {
        "write_bytes_per_s": nbytes / write_s,
        "read_bytes_per_s": nbytes / read_s,
        "direct": direct,
        "free_bytes": free,
        "file_system": kind,
    }
    speed = f"{rate(nbytes / write_s)} written, {rate(nbytes / read_s)} read"
    if wrong:
        value, fix = f"{wrong} of {chunks} chunks read back changed", "do not use this disk"
        finding = Finding("disk", "fail", value, fix)
    elif direct:
        finding = Finding("disk", "ok", f"{speed}, past the page cache")
    else:
        value = f"{speed}, with fsync: {kind} has no O_DIRECT, so the page cache may have helped"
        finding = Finding("disk", "warn", value, "use a file system with O_DIRECT (ext4, xfs)")
    space = Finding("space", "ok", f"{free / 2**30:.1f} GiB free, {kind}")
    return FindingsReport((finding, space), _GOOD, _BAD, measured)


@contextmanager
def _unlinked_file(folder: str) -> Iterator[tuple[int, bool]]:
    """Yield a new file's descriptor, and whether it bypasses the page cache."""
    path = os.path.join(folder, f".kvconnect-doctor-{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            handle, direct = os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some kernels refuse the flag after creating the file.
            handle, direct = os.open(path, flags & ~os.O_EXCL, 0o600), False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    try:
        yield handle, direct
    finally:
        os.close(handle)


def _write(handle: int, buffer: mmap.mmap, chunks: int, direct: bool) -> tuple[bool, float]:
    """Write all chunks; return whether O_DIRECT was used, and the seconds."""
    started = time.perf_counter()
    for number in range(chunks):
        _stamp(buffer, number)
        try:
            _require_chunk(os.pwrite(handle, buffer, number * CHUNK_BYTES))
        except OSError as error:
            if number or not direct or error.errno != errno.EINVAL:
                raise
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return _write(handle, buffer, chunks, direct=False)
    os.fsync(handle)
    return direct, time.perf_counter() - started


def _read(handle: int, expected: mmap.mmap, chunks: int) -> tuple[float, int]:
    """Read all chunks; return the seconds, and the number of wrong chunks."""
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    seconds, wrong = 0.0, 0
    for number in range(chunks):
        started = time.perf_counter()
        _require_chunk(os.preadv(handle, [buffer], number * CHUNK_BYTES))
        seconds += time.perf_counter() - started
        _stamp(expected, number)
        wrong += buffer[:] != expected[:]
    return seconds, wrong


def _stamp(buffer: mmap.mmap, number: int) -> None:
    buffer[:8] = number.to_bytes(8, "little")


def _require_chunk(count: int) -> None:
    if count != CHUNK_BYTES:  # the file system is full or at a limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _file_system(folder: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the type of a folder's file system, or ``unknown``."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open(mounts, encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if words[2] == number:
                return words[words.index("-") + 1]
    return "unknown"
