"""The CUDA kernels' own sources, compiled for the CPU: index arithmetic and digests as they are.

``cuda_on_host.h`` stands for CUDA: each thread of a grid is a fiber. What it cannot show is speed,
and what only concurrency breaks.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from kvconnect.copy import kernels

HERE = Path(__file__).parent / "fakes" / "kernels"
SOURCES = kernels.folder()

Argument = ctypes.c_void_p | ctypes.c_longlong


@cache
def host_library() -> ctypes.CDLL:
    """Return the kernels compiled for the CPU; skip the test where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "host_kernels.so")
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        # A device does not forgive an address that is not aligned to its word, so this traps.
        flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        command = [compiler, *flags, "-shared", "-fPIC", f"-I{SOURCES}"]
        subprocess.run([*command, str(HERE / "host_kernels.cpp"), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def launch_on_host(
    name: str, grid: int, threads: int, arguments: Sequence[Argument], seed: int = 0
) -> None:
    """Run a kernel on host memory; ``seed`` shuffles the order of the threads of a block."""
    pointers = [ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in arguments]
    packed = (ctypes.c_void_p * len(pointers))(*pointers)
    assert host_library().run(name.encode(), grid, threads, seed, packed) == 0, name


def address(memory: bytearray | array[int]) -> ctypes.c_void_p:
    """Return where a buffer lies."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
