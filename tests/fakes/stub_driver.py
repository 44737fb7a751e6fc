"""A driver for machines without a device: ``stub/libcuda.c``, compiled and loaded in its place."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kvconnect import cuda
from tests.kernels import host_library

SOURCE = Path(__file__).parent / "libcuda.c"

BATCHES = {
    None: ("-DWITHOUT_BATCH",),
    "cuMemcpyBatchAsync": (),
    "cuMemcpyBatchAsync_v2": ("-DWITH_SECOND_BATCH",),
}
"""The newest form of the batched copy that a driver has."""

_FOLDER = tempfile.TemporaryDirectory(prefix="kvconnect-stub-")
_LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)


@cache
def compiled(batch: str | None) -> str:
    """Return the path of the library; skip the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = Path(_FOLDER.name, str(batch))
    folder.mkdir()
    target = str(folder / "libcuda.so.1")
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, *BATCHES[batch], "-o", target, str(SOURCE)], check=True)
    return target


class StubDriver:
    """The stub, fresh, in the place of the driver for as long as ``monkeypatch`` says.

    Kernels that are launched run on the CPU; ``kernels`` has their handles by name.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, batch: str | None = "cuMemcpyBatchAsync_v2"
    ) -> None:
        path = compiled(batch)
        monkeypatch.setattr(cuda, "LIBRARY", path)
        self.library = ctypes.CDLL(path)
        self.library.stub_locked.restype = ctypes.c_size_t
        self.library.stub_most_copies.restype = ctypes.c_size_t
        self.library.stub_reset()
        self.kernels: dict[str, int] = {}
        self.launches: list[str] = []
        self._kept: list[object] = []

    def add_device_memory(self, address: int, nbytes: int) -> None:
        """Let copies reach some memory of this process."""
        self.library.stub_device_memory(ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def reach_everything(self) -> None:
        """Let copies reach all memory of this process."""
        self.library.stub_reach_everything()

    def limit_locked(self, nbytes: int) -> None:
        """Refuse to page-lock more than so many bytes."""
        self.library.stub_limit_locked(ctypes.c_size_t(nbytes))

    def limit_range(self, nbytes: int) -> None:
        """Refuse to page-lock more than so many bytes at a time."""
        self.library.stub_limit_range(ctypes.c_size_t(nbytes))

    def use_other_addresses(self) -> None:
        """Reach page-locked memory at other addresses than the host does."""
        self.library.stub_other_addresses()

    def lose_device(self, status: int) -> None:
        """Answer every call so from now on; 0: find it again."""
        self.library.stub_lose_device(status)

    def refuse(self, name: str, status: int) -> None:
        """Answer the next call of this name so."""
        kept = ctypes.c_char_p(name.encode())
        self._kept.append(kept)
        self.library.stub_refuse(kept, status)

    def calls(self, name: str) -> int:
        """How often something was called."""
        return int(self.library.stub_calls(name.encode()))

    def held(self, name: str) -> int:
        """How many of these calls came from a thread that held the GIL."""
        return int(self.library.stub_held(name.encode()))

    def most_copies(self, held: bool) -> int:
        """The most copies of one batch, from threads that held the GIL, or that did not."""
        return int(self.library.stub_most_copies(held))

    @property
    def locked(self) -> int:
        """Bytes that are page-locked now."""
        return int(self.library.stub_locked())

    def run_kernels(self, names: list[str]) -> None:
        """Give kernels handles, and run them on the CPU when they are launched."""
        self.kernels = {name: number for number, name in enumerate(names, start=1)}
        for name, number in self.kernels.items():
            kept_name = ctypes.c_char_p(name.encode())
            self._kept.append(kept_name)
            self.library.stub_kernel(number, kept_name)
        by_handle = {number: name for name, number in self.kernels.items()}
        library, one_at_a_time = host_library(), threading.Lock()  # threads share its fibers

        def run(handle: int, grid: int, threads: int, arguments: object) -> int:
            name = by_handle[handle]
            self.launches.append(name)
            with one_at_a_time:
                return int(
                    library.run(name.encode(), min(grid, 2), min(threads, 128), 0, arguments)
                )

        kept: Callable[..., int] = _LAUNCHED(run)
        self._kept.append(kept)
        self.library.stub_launched(kept)
