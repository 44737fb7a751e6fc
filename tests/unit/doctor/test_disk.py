"""``kvconnect doctor disk``: real files, and folders that cannot be used."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvconnect.doctor import disk

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    report = disk.examine(str(tmp_path), 5 * MIB)
    assert report.ok
    speed, space = report.findings
    assert speed.status == ("ok" if report.measured["direct"] else "warn")
    assert " written, " in speed.value
    assert str(report.measured["file_system"]) in space.value
    for figure in ("write_bytes_per_s", "read_bytes_per_s", "free_bytes"):
        assert float(str(report.measured[figure])) > 0
    assert os.listdir(tmp_path) == []


def test_without_o_direct_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *mode))  # what some kernels leave behind
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(disk.os, "open", no_direct)
    report = disk.examine(str(tmp_path), MIB)
    finding = report.findings[0]
    assert (report.ok, finding.status, report.measured["direct"]) == (True, "warn", False)
    assert "has no O_DIRECT" in finding.value
    assert os.listdir(tmp_path) == []


def test_o_direct_that_fails_at_the_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = disk.examine(str(tmp_path), MIB).measured["direct"]
    real, calls = os.pwrite, []

    def refuse_once(handle: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, data, offset)

    monkeypatch.setattr(disk.os, "pwrite", refuse_once)
    report = disk.examine(str(tmp_path), MIB)
    # On a file system without O_DIRECT there is nothing to fall back to.
    assert report.ok is direct
    assert calls == ([0, 0] if direct else [0])
    assert not report.measured.get("direct")


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.EROFS, "choose another folder"),
        (errno.EACCES, "choose another folder"),
        (errno.ENOSPC, "free space there"),
        (errno.EIO, "check the disk"),
    ],
)
def test_what_the_system_refuses_is_one_clear_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, fix: str
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk.os, "pwrite", refuse)
    report = disk.examine(str(tmp_path), MIB)
    (finding,) = report.findings
    assert finding.status == "fail"
    assert finding.value.startswith(f"{tmp_path}: {os.strerror(code)}")
    assert fix in finding.fix
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_missing_or_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, text in (("none", "No such file"), ("file", "Not a directory")):
        (finding,) = disk.examine(str(tmp_path / name), MIB).findings
        assert (finding.status, finding.fix) == ("fail", "name a folder that exists")
        assert text in finding.value


def test_a_full_folder(small: Path) -> None:
    (finding,) = disk.examine(str(small), 8 * MIB).findings
    assert finding.status == "fail"
    assert "6 MiB free" in finding.value
    assert "--bytes" in finding.fix
    assert disk.examine(str(small), 4 * MIB).ok


def test_a_folder_that_cannot_be_written_to(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    (finding,) = disk.examine(str(small), MIB).findings
    assert finding.status == "fail"
    assert "Read-only file system" in finding.value


def test_bytes_that_come_back_changed_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def flip(handle: int, buffers: list[bytearray], offset: int) -> int:
        count = real(handle, buffers, offset)
        buffers[0][100] ^= 1
        return count

    monkeypatch.setattr(disk.os, "preadv", flip)
    report = disk.examine(str(tmp_path), 5 * MIB)
    assert not report.ok
    assert report.findings[0].value == "2 of 2 chunks read back changed"


def test_a_file_system_that_nobody_names(tmp_path: Path) -> None:
    empty = tmp_path / "mounts"
    empty.write_text("")
    assert disk._file_system(str(tmp_path), str(empty)) == "unknown"
    assert disk._file_system(str(tmp_path), str(tmp_path / "none")) == "unknown"
