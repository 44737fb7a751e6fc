"""A CUDA device in host memory, so that the bodies of ``tests/gpu`` run on machines without one.

    python -m pytest -p tests.fakes.pretended_cuda tests/gpu

torch's tensors say that they lie on the device where they were asked to (``device_tensors``), and
page-locks are noted. The driver is the stub (``stub_driver``), kernels are their own sources on the
CPU. Work waits in the queues of streams (``deferred_device``). With ``--device-fault`` the device
does something wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect import cuda
from kvconnect.copy import kernel_loading, kernels
from kvconnect.transport.nixl.agent import NixlAgent
from tests.fakes import torch_streams
from tests.fakes.deferred_device import DeferredDevice, Fault, Mark
from tests.fakes.device_tensors import DEVICE, forget_tensors, pretend_tensors
from tests.fakes.pretended_cupy import pretend_cupy
from tests.fakes.stub_driver import StubDriver

CHILDREN = "KVCONNECT_TESTS_PRETEND"
"""The variable of the environment that tells processes of tests to pretend, too."""

_pools: dict[int, deque[int]] = {}  # by priority: torch hands out the same 32 in turns


def _of_pool(priority: int) -> int:
    context = cuda.CudaContext(0)
    if priority not in _pools:
        _pools[priority] = deque(context.stream(bool(priority)) for _ in range(32))
    _pools[priority].rotate(-1)
    return _pools[priority][-1]


class _Current(threading.local):
    """The device, and the current stream of each thread; handle 0 is the null stream."""

    def __init__(self) -> None:
        self.stream: Stream = ExternalStream(0)


class Stream:
    """``torch.cuda.Stream``."""

    device = DEVICE
    device_index, device_type = 0, 1

    def __init__(self, _device: Any = None, priority: int = 0, handle: int | None = None) -> None:
        self.stream_id = self
        self.cuda_stream = _of_pool(priority) if handle is None else handle

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        _torch.device.follow(self.cuda_stream, _torch.device.record(stream.cuda_stream))

    def synchronize(self) -> None:
        _torch.device.wait_for_stream(self.cuda_stream)

    def query(self) -> bool:
        return _torch.device.is_idle(self.cuda_stream)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class ExternalStream(Stream):
    """A stream that the driver has made."""

    def __init__(self, handle: int, device: Any = None) -> None:
        super().__init__(device, handle=handle)


class Event:
    """``torch.cuda.Event``."""

    device = DEVICE

    def __init__(self, **_: object) -> None:
        self._mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _torch.device.record((stream or _current.stream).cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:
            _torch.device.follow((stream or _current.stream).cuda_stream, self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            _torch.device.wait([self._mark])

    def query(self) -> bool:
        return self._mark is None or _torch.device.has_passed(self._mark)


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def replay(self) -> None:
        _torch.device.replay(_current.stream.cuda_stream, self.notes)


@contextlib.contextmanager
def _graph(graph: CUDAGraph) -> Iterator[None]:
    """Stand in for ``torch.cuda.graph``."""
    device, stream = _torch.device, Stream()
    device.wait_for_all()
    graph.notes = device.capture(stream.cuda_stream)
    try:
        with _on_stream(stream):
            yield
    finally:
        device.end_capture(stream.cuda_stream)


class _Torch:
    """What torch has one of: the device, and the driver below it."""

    device: DeferredDevice
    stub: StubDriver

    def put(self, work: Callable[[], object]) -> None:
        """Launch work on the current stream, and take an error of the runtime for its own."""
        status = self.stub.library.cudaGetLastError()
        if status:
            raise RuntimeError(f"CUDA error {status}")

        def done() -> int:
            work()
            return 0

        self.device.submit(_current.stream.cuda_stream, done)

    def wait(self) -> None:
        """Wait for the current stream."""
        self.device.wait_for_stream(_current.stream.cuda_stream)


_current = _Current()
_torch = _Torch()


def _register(address: int, nbytes: int, flags: int) -> int:
    """Stand in for the runtime's ``cudaHostRegister``."""
    register = _torch.stub.library.cudaHostRegister
    return int(register(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags))


def _change(stream: Stream) -> None:
    _current.stream = stream


@contextlib.contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    before = _current.stream
    _change(stream)
    try:
        yield
    finally:
        _change(before)


def _patch_torch(patch: pytest.MonkeyPatch) -> None:
    """Replace what tests and product use of torch."""
    # A torch for the CUDA version of the NIXL that is installed.
    patch.setattr(torch.version, "cuda", "12.8" if find_spec("nixl_cu12") else "13.0")
    properties = SimpleNamespace(
        name="pretended", pci_domain_id=0, pci_bus_id=1, pci_device_id=0, multi_processor_count=132
    )
    for name, stands_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda *_: _torch.device.wait_for_all(),
        "_sleep": lambda _: _torch.device.sleep(_current.stream.cuda_stream),
        "get_device_properties": lambda _: properties,
        "get_device_name": lambda *_: properties.name,
        "stream": _on_stream,
        "graph": _graph,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register),
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
    }.items():
        patch.setattr(torch.cuda, name, stands_in)
    torch_streams.stand_in(patch, lambda: _current.stream, _change)


def pytest_addoption(parser: pytest.Parser) -> None:
    faults = [fault.value for fault in Fault]
    parser.addoption("--device-fault", choices=faults, help="what the pretended device does wrong")


def pytest_configure(config: pytest.Config) -> None:
    """Pretend until pytest ends."""
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    fault = config.getoption("--device-fault")
    pretend(patch, Fault(fault) if fault else None)
    patch.setenv(CHILDREN, "1")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let no test find work that one before has left in a queue, nor its memory."""
    _torch.device.clear()
    forget_tensors()


def pretend_as_told() -> None:
    """Pretend until the process ends, if the one that started it does."""
    if CHILDREN in os.environ:
        pretend(pytest.MonkeyPatch())


def _load_kernels_from(patch: pytest.MonkeyPatch, stub: StubDriver) -> None:
    """Let kernels load from a checkout whose fat binaries nobody has built."""
    checkout, load = kernels.folder(), kernel_loading._from_binary

    def found(context: cuda.CudaContext, family: str) -> Callable[[str], int] | None:
        is_test = kernels.folder() != checkout
        return load(context, family) if is_test else stub.kernels.__getitem__

    patch.setattr(kernel_loading, "_from_binary", found)


def pretend(patch: pytest.MonkeyPatch, fault: Fault | None = None) -> None:
    """Pretend for as long as ``patch`` says."""
    device = DeferredDevice(fault)
    stub = StubDriver(patch, device=device)
    stub.reach_everything()
    stub.run_kernels(list(kernels.KERNELS))
    _torch.device, _torch.stub = device, stub
    _load_kernels_from(patch, stub)
    pretend_cupy(patch, stub.kernels)
    # Its memory is the host's, for NIXL too.
    patch.setattr(NixlAgent, "_kind", lambda self, _: (self._nixl.DRAM_SEG, 0))
    locked: dict[int, int] = {}  # page-locked ranges: address -> bytes
    pretend_tensors(
        patch, _torch, lambda at: any(start <= at < start + n for start, n in locked.items())
    )
    _patch_torch(patch)
    cuda.CudaContext(0).enter()  # as torch does in the thread that uses it first
    lock, unlock = cuda.CudaContext.lock, cuda.CudaContext.unlock

    def noting(self: cuda.CudaContext, address: int, nbytes: int) -> None:
        lock(self, address, nbytes)
        locked[address] = nbytes

    def forgetting(self: cuda.CudaContext, address: int) -> None:
        unlock(self, address)
        del locked[address]

    patch.setattr(cuda.CudaContext, "lock", noting)
    patch.setattr(cuda.CudaContext, "unlock", forgetting)
