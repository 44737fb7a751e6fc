"""Wheels for the GPU machine: where they come from and what is in them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PYTHON = "3.12"
GLIBC = 35
"""The GPU machine has glibc 2.35 (Ubuntu 22.04) or newer."""

PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(GLIBC, 4, -1)), "manylinux2014")


def download(wanted: list[str], folder: Path, alone: bool = False) -> None:
    """Fetch wheels for the GPU machine, whatever this one is; with what they need, or ``alone``."""
    more = ["--no-deps"] if alone else []
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    subprocess.run([*command, *target, *platforms, f"--dest={folder}", *more, *wanted], check=True)


def members(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel that belong beside other packages; scripts and data do not."""
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if name.endswith("/"):  # a folder, which some wheels list
                continue
            top, *rest = PurePosixPath(name).parts
            if top.endswith(".data"):
                if rest[0] not in ("purelib", "platlib"):
                    continue
                path = str(PurePosixPath(*rest[1:]))
            else:
                path = name
            yield path, content.read(name)
