"""Memory limits, read from machines laid out in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect import memory

GIB = 2**30


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"


MACHINE = {"proc/meminfo": meminfo(64 * GIB, 48 * GIB)}


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    root = lay_out(tmp_path, MACHINE)
    assert memory.total_bytes(root) == 64 * GIB
    assert memory.available_bytes(root) == 48 * GIB
    assert memory.control_group(root) is None


V2 = {
    "proc/self/cgroup": "0::/pod/app\n",
    "sys/fs/cgroup/pod/app/memory.max": "max\n",
    "sys/fs/cgroup/pod/app/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 7\ninactive_file {2 * GIB}\n",
}
V1 = {
    "proc/self/cgroup": "8:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n",
    # The path above is the host's; inside the container the limit stands at the mount.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n",
}


@pytest.mark.parametrize("groups", [V2, V1], ids=["v2", "v1"])
def test_the_tightest_group_decides_and_page_cache_does_not_count(
    tmp_path: Path, groups: dict[str, str]
) -> None:
    root = lay_out(tmp_path, MACHINE | groups)
    assert memory.control_group(root) == memory.ControlGroup(8 * GIB, 3 * GIB)
    assert memory.total_bytes(root) == 8 * GIB
    assert memory.available_bytes(root) == 5 * GIB


def test_the_machine_decides_when_it_has_less_than_the_group(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 2 * GIB)} | V2)
    assert memory.available_bytes(root) == 2 * GIB


def test_v1_spells_unlimited_as_a_number(tmp_path: Path) -> None:
    limit = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    root = lay_out(tmp_path, MACHINE | V1 | limit)
    assert memory.control_group(root) is None
    assert memory.available_bytes(root) == 48 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    used = {"sys/fs/cgroup/pod/memory.current": f"{11 * GIB}\n"}
    root = lay_out(tmp_path, MACHINE | V2 | used)
    assert memory.available_bytes(root) == 0


@pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: many kB\n", "\x00\xff"])
def test_unreadable_machines_are_unknown_not_errors(tmp_path: Path, text: str) -> None:
    assert memory.available_bytes(tmp_path) is None
    root = lay_out(tmp_path, {"proc/meminfo": text, "proc/self/cgroup": "nonsense\n::\n"})
    assert memory.available_bytes(root) is None
    assert memory.total_bytes(root) is None
    assert memory.shared_memory_bytes(root) is None


def test_this_machine_answers() -> None:
    total, available = memory.total_bytes(), memory.available_bytes()
    if total is None or available is None:
        pytest.skip("this system does not say how much memory it has")
    assert 0 <= available <= total
    locked = memory.memlock_bytes()
    assert locked is None or locked >= 0
