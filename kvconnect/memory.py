"""How much host memory this process may still use, and the limits that bound it.

Linux only, read from ``/proc``, ``/sys/fs/cgroup`` and ``/dev/shm``. Every function returns None
where the system does not say, and never raises: the caller decides what an unknown limit means.
``root`` stands for ``/`` and lets a test lay out a machine of its own.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED_V1 = 1 << 60  # cgroup v1 spells "no limit" as the largest page-aligned 63-bit number


@dataclass(frozen=True)
class ControlGroup:
    """The control group that leaves the least room: a container's memory limit.

    Attributes:
        limit_bytes: most it may use.
        used_bytes: in use now, without the page cache that the kernel drops on demand.
    """

    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        """Bytes left under the limit, at least 0."""
        return max(0, self.limit_bytes - self.used_bytes)


def total_bytes(root: Path = _ROOT) -> int | None:
    """Memory of the machine, or of the container if that is limited to less."""
    group = control_group(root)
    return _least(_meminfo(root, "MemTotal"), group.limit_bytes if group else None)


def available_bytes(root: Path = _ROOT) -> int | None:
    """Bytes that can be allocated now without swapping or being killed.

    The smaller of the kernel's ``MemAvailable`` and the room left in the control group.
    """
    group = control_group(root)
    return _least(_meminfo(root, "MemAvailable"), group.room_bytes if group else None)


def control_group(root: Path = _ROOT) -> ControlGroup | None:
    """The tightest memory limit on this process from cgroup v1 or v2; None when unlimited.

    Limits of every ancestor apply, so all of them are looked at.
    """
    groups = [group for folder in _group_folders(root) if (group := _read_group(folder))]
    return min(groups, key=lambda group: group.room_bytes, default=None)


def shared_memory_bytes(root: Path = _ROOT) -> int | None:
    """Free bytes in ``/dev/shm``; engines pass messages between their processes through it."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def memlock_bytes() -> int | None:
    """How much memory this process may lock (its soft ``RLIMIT_MEMLOCK``); None = unlimited."""
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
    """Folders of this process's memory control group and of all its ancestors."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be the host's, which does not exist here; the limit then
        # stands at the mount itself, which is the last of the ancestors.
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
