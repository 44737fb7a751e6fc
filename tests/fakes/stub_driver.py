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
from typing import Any

import pytest

from kvconnect import cuda
from tests.fakes.deferred_device import DeferredDevice, DeviceError, Mark, Work
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
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
)
_NUMBERS = ctypes.POINTER(ctypes.c_uint64)
_STATUS_OF_TWO = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_STATUS_OF_ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_ANY_ORDER = 3
_NOT_READY = 600


class _Queues(ctypes.Structure):
    """``Queues`` of the library."""

    _fields_ = (
        (
            "copy",
            ctypes.CFUNCTYPE(
                *(ctypes.c_int, ctypes.c_void_p, _NUMBERS, _NUMBERS, _NUMBERS),
                *(ctypes.c_size_t, ctypes.c_int),
            ),
        ),
        ("record", _STATUS_OF_TWO),
        ("follow", _STATUS_OF_TWO),
        ("wait", _STATUS_OF_ONE),
        ("query", _STATUS_OF_ONE),
        ("seconds", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p)),
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

    Kernels that are launched run on the CPU; ``kernels`` has their handles by name. Work is done at
    once, or by ``device``.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        batch: str | None = "cuMemcpyBatchAsync_v2",
        device: DeferredDevice | None = None,
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
        self._device = device
        self._marks: dict[int, Mark] = {}  # the last record of each event
        if device is not None:
            self._queue_work(device)

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
        by_handle = dict(enumerate(names, start=1))
        library, one_at_a_time = host_library(), threading.Lock()  # threads share its fibers

        def run(handle: int, grid: int, threads: int, stream: int | None, arguments: Any) -> int:
            name = by_handle[handle]
            self.launches.append(name)
            count = library.count_arguments(name.encode())
            values = (ctypes.c_int64 * count)(
                *(ctypes.c_int64.from_address(arguments[i]).value for i in range(count))
            )
            start = ctypes.addressof(values)
            pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))

            def work(_held: object = values) -> int:
                shape = min(grid, 2), min(threads, 128)
                with one_at_a_time:
                    status = int(library.run_on_device(name.encode(), *shape, pointers))
                if status:
                    self.lose_device(status)
                return status

            return self._submit(stream, work)

        kept: Callable[..., int] = _LAUNCHED(run)
        self._kept.append(kept)
        self.library.stub_launched(kept)

    def _submit(self, stream: int | None, work: Work) -> int:
        device = self._device
        if device is None:
            return work()
        return _status(lambda: device.submit(stream or 0, work))

    def _queue_work(self, device: DeferredDevice) -> None:
        """Let the device do what is launched, when its queues come to it."""

        def copy(
            stream: int | None, targets: Any, sources: Any, sizes: Any, count: int, order: int
        ) -> int:
            triples = list(zip(targets[:count], sources[:count], sizes[:count], strict=True))
            # Complete sources may be read before the stream's earlier work has ended.
            early = order == _ANY_ORDER
            read = [ctypes.string_at(source, n) for _, source, n in triples] if early else None

            def work() -> int:
                for i, (target, source, nbytes) in enumerate(triples):
                    ctypes.memmove(target, source if read is None else read[i], nbytes)
                return 0

            return self._submit(stream, work)

        def record(stream: int | None, event: int) -> int:
            def recorded() -> None:
                self._marks[event] = device.record(stream or 0)

            return _status(recorded)

        def follow(stream: int | None, event: int) -> int:
            mark = self._marks.get(event)
            return 0 if mark is None else _status(lambda: device.follow(stream or 0, mark))

        def wait(event: int) -> int:
            mark = self._marks.get(event)
            return 0 if mark is None else _status(lambda: device.wait([mark]))

        def query(event: int) -> int:
            mark = self._marks.get(event)
            return 0 if mark is None or device.has_passed(mark) else _NOT_READY

        def seconds(start: int, end: int) -> float:
            times = [self._marks[event].passed_at for event in (start, end)]
            first, last = times
            return -1.0 if first is None or last is None else last - first

        calls = copy, record, follow, wait, query, seconds
        fields = zip(_Queues._fields_, calls, strict=True)
        queues = _Queues(*(kind(call) for (_, kind), call in fields))
        self._kept.append(queues)
        self.library.stub_queues(ctypes.byref(queues))


def _status(call: Callable[[], None]) -> int:
    """Return the status of a call that a device may refuse."""
    try:
        call()
    except DeviceError as error:
        return error.status
    return 0
