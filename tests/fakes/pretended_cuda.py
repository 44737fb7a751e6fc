"""A CUDA device in host memory, so that the bodies of ``tests/gpu`` run on machines without one.

    python -m pytest -p tests.fakes.pretended_cuda tests/gpu

torch's tensors say that they lie on the device where they were asked to, and page-locks are noted.
The driver is the stub (``stub_driver``), kernels are their own sources on the CPU. All work is done
when it is submitted: nothing here waits for a stream, and no time passes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect import cuda
from kvconnect.copy import kernel_loading, kernels
from tests.fakes import torch_streams
from tests.fakes.stub_driver import StubDriver

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "randint", "randn", "tensor", "arange", "as_tensor"),
    *("empty_like", "zeros_like", "full_like", "randperm"),
)
_DERIVING = ("clone", "contiguous", "index_select", "__or__", "eq", "roll", "add", "__getitem__")

_base: Any = torch._C.TensorBase
_kept: list[torch.Tensor] = []  # so that no other tensor takes their addresses
_on_device: set[int] = set()
_pinned: set[int] = set()
_locked: dict[int, int] = {}  # page-locked ranges: address -> bytes


def _address(tensor: torch.Tensor) -> int:
    return int(_base.untyped_storage(tensor).data_ptr())


def _is_here(tensor: torch.Tensor) -> bool:
    return _address(tensor) in _on_device


def _noted(tensor: torch.Tensor, places: set[int]) -> torch.Tensor:
    places.add(_address(tensor))
    _kept.append(tensor)
    return tensor


def _asks(device: Any) -> bool:
    """Return whether a tensor is asked for on the device."""
    if device is None or isinstance(device, int):
        return device is not None
    return torch.device(device).type == "cuda"


def _is_pinned(tensor: torch.Tensor, *_: object) -> bool:
    at = _address(tensor)
    return at in _pinned or any(start <= at < start + n for start, n in _locked.items())


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> Any:
        tensor = make(*arguments, **more)
        if _asks(device):
            tensor = _noted(_base.clone(tensor), _on_device)
        return _noted(tensor, _pinned) if pin_memory else tensor

    return made


def _deriving(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def derived(self: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        found = method(self, *arguments, **more)
        sources = [self, *(one for one in arguments if isinstance(one, torch.Tensor))]
        if isinstance(found, torch.Tensor) and any(map(_is_here, sources)):
            _noted(found, _on_device)
        return found

    return derived


def _moved(self: torch.Tensor, *arguments: Any, device: Any = None, **more: Any) -> Any:
    """Stand in for ``Tensor.to``."""
    more.pop("non_blocking", None)
    if arguments and isinstance(arguments[0], torch.device | str):
        device, *rest = arguments
        arguments = tuple(rest)
    found = _to(self, *arguments, **more) if arguments or more else self
    if _asks(device) and not _is_here(found):
        return _noted(_base.clone(found), _on_device)
    return found


_to = torch.Tensor.to


_pools: dict[int, deque[int]] = {}  # by priority: torch hands out the same 32 in turns


def _of_pool(priority: int) -> int:
    context = cuda.CudaContext(0)
    if priority not in _pools:
        _pools[priority] = deque(context.stream(bool(priority)) for _ in range(32))
    _pools[priority].rotate(-1)
    return _pools[priority][-1]


class Stream:
    """A stream whose work is over when it is submitted."""

    device = DEVICE
    device_index, device_type = 0, 1

    def __init__(self, _device: Any = None, priority: int = 0, handle: int | None = None) -> None:
        self.stream_id = self
        self.cuda_stream = _of_pool(priority) if handle is None else handle

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class ExternalStream(Stream):
    """A stream that the driver has made."""

    def __init__(self, handle: int, device: Any = None) -> None:
        super().__init__(device, handle=handle)


class Event:
    """An event that the device has passed."""

    device = DEVICE

    def __init__(self, **_: object) -> None: ...
    def record(self, _stream: Any = None) -> None: ...
    def wait(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Event) -> float:
        return 2.0


class _Current(threading.local):
    """The current stream of each thread; handle 0 is the null stream."""

    stream: Stream = ExternalStream(0)


_current = _Current()


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
    patch.setattr(torch.Tensor, "device", property(lambda t: DEVICE if _is_here(t) else HOST))
    patch.setattr(torch.Tensor, "is_cuda", property(_is_here))
    for name in _FACTORIES:
        patch.setattr(torch, name, _factory(getattr(torch, name)))
    for name in _DERIVING:
        patch.setattr(torch.Tensor, name, _deriving(getattr(torch.Tensor, name)))
    patch.setattr(torch.Tensor, "to", _moved)
    patch.setattr(torch.Tensor, "cpu", lambda self: _base.clone(self))
    patch.setattr(torch.Tensor, "pin_memory", lambda self: _noted(_base.clone(self), _pinned))
    patch.setattr(torch.Tensor, "is_pinned", _is_pinned)
    patch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(
        name="pretended", pci_domain_id=0, pci_bus_id=1, pci_device_id=0, multi_processor_count=132
    )
    for name, stands_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "_sleep": lambda _: None,
        "get_device_properties": lambda _: properties,
        "get_device_name": lambda *_: properties.name,
        "stream": _on_stream,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
    }.items():
        patch.setattr(torch.cuda, name, stands_in)
    torch_streams.stand_in(patch, lambda: _current.stream, _change)


def pytest_configure(config: pytest.Config) -> None:
    """Pretend until pytest ends."""
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    pretend(patch)


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Pretend for as long as ``patch`` says."""
    stub = StubDriver(patch)
    stub.reach_everything()
    stub.run_kernels(list(kernels.KERNELS))
    patch.setattr(kernel_loading, "_from_binary", lambda *_: stub.kernels.__getitem__)
    _patch_torch(patch)
    cuda.CudaContext(0).enter()  # as torch does in the thread that uses it first
    lock, unlock = cuda.CudaContext.lock, cuda.CudaContext.unlock

    def noting(self: cuda.CudaContext, address: int, nbytes: int) -> None:
        lock(self, address, nbytes)
        _locked[address] = nbytes

    def forgetting(self: cuda.CudaContext, address: int) -> None:
        unlock(self, address)
        del _locked[address]

    patch.setattr(cuda.CudaContext, "lock", noting)
    patch.setattr(cuda.CudaContext, "unlock", forgetting)
