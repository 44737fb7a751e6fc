"""Free host memory and its limits, on Linux, from ``/proc``, ``/sys/fs/cgroup`` and ``/dev/shm``.

No function raises. Each returns None for what the system does not say; the caller decides what
that means. ``root`` replaces ``/`` in tests.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED_V1 = 1 << 60  # "no limit" in cgroup v1 is the largest page-aligned 63-bit number


@dataclass(frozen=True)
class ControlGroup:
    """Memory limit and use of a control group.

    Attributes:
        limit_bytes: most that the group may use.
        used_bytes: in use now, without the page cache that the kernel drops on demand.
    """

    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        """Bytes left under the limit, at least 0."""
        return max(0, self.limit_bytes - self.used_bytes)


def total_bytes(root: Path = _ROOT) -> int | None:
    """Return the memory of the machine in bytes, or the container's limit if that is less."""
    group = control_group(root)
    return _least(_meminfo(root, "MemTotal"), group.limit_bytes if group else None)


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that can be allocated now without swapping or being killed.

    That is the smaller of the kernel's ``MemAvailable`` and the room in the control group.
    """
    group = control_group(root)
    return _least(_meminfo(root, "MemAvailable"), group.room_bytes if group else None)


def control_group(root: Path = _ROOT) -> ControlGroup | None:
    """Return the control group (v1 or v2) with the least room; None if memory is unlimited.

    The limits of all ancestors apply, so all of them are read.
    """
    groups = [group for folder in _group_folders(root) if (group := _read_group(folder))]
    return min(groups, key=lambda group: group.room_bytes, default=None)


def shared_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the free bytes of ``/dev/shm``, which engines use for messages between processes."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def memlock_bytes() -> int | None:
    """Return the bytes this process may lock (soft ``RLIMIT_MEMLOCK``); None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _meminfo(root: Path, key: str) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == key and rest.split()[:1] and rest.split()[0].isdigit():
            return int(rest.split()[0]) * 1024
    return None


def _group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory control group and of all its ancestors."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be the host's, which does not exist here. The limit is then
        # at the mount itself, which is the last ancestor.
        folder = mount / path.lstrip("/")
        yield folder
        if folder != mount:
            yield from (up for up in folder.parents if up == mount or mount in up.parents)


def _read_group(folder: Path) -> ControlGroup | None:
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None and limit < _UNLIMITED_V1:
            cache = _stat(folder / "memory.stat", cache_key)
            return ControlGroup(limit, max(0, used - cache))
    return None


def _stat(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max" means no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
