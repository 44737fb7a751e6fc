"""torch's tensors on a device that is pretended: their memory is the host's, and what is done to
them waits in the queue of the calling thread's current stream.

Operations that write into a tensor, and copies, are queued. Those that only say where it lies are
not. All others wait for the stream and are done at once, as those that give numbers to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pytest
import torch

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "randint", "randn", "tensor", "arange", "as_tensor"),
    *("empty_like", "zeros_like", "full_like", "randperm"),
)
_PLACES = frozenset(
    (
        *("__get__", "__getitem__", "__len__", "data_ptr", "dim", "size", "stride", "numel"),
        *("element_size", "is_contiguous", "storage_offset", "untyped_storage", "view", "chunk"),
        *("narrow", "select", "split", "transpose", "unsqueeze", "squeeze", "expand", "permute"),
        *("detach", "unbind", "empty_like", "zeros_like", "full_like", "is_pinned", "as_subclass"),
    )
)
"""Operations that neither read nor write the content of a tensor that is there."""
_WRITING = frozenset(f"__{name}__" for name in ("setitem", "iadd", "isub", "iand", "ior", "ixor"))


class Queue(Protocol):
    """The calling thread's current stream. Both raise RuntimeError if the device refuses."""

    def put(self, work: Callable[[], object]) -> None:
        """Do work behind the stream's."""

    def wait(self) -> None:
        """Wait for the stream's work."""


class _Place:
    """Where tensors of the process lie, and the queue of their work."""

    queue: Queue
    locked: Callable[[int], bool]
    """Whether an address is page-locked."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []  # so that nothing else takes their addresses
        self.pinned: set[int] = set()  # addresses of storages


_place = _Place()


class DeviceTensor(torch.Tensor):
    """A tensor on the device."""

    device = DEVICE
    is_cuda = True

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        by_numbers = name == "__getitem__" and next(_tensors(args[1:]), None) is not None
        if name in _PLACES and not by_numbers:
            return _on_device(_plainly(function, args, kwargs))
        if name == "clone":
            target = _allocated(_plainly(torch.empty_like, args, {}))
            return cls.__torch_function__(torch.Tensor.copy_, types, (target, *args))
        is_inplace = name.endswith("_") and not name.startswith("__")
        if is_inplace or name in _WRITING:
            _write(function, args, kwargs)
            return args[0]
        _place.queue.wait()
        return _on_device(_plainly(function, args, kwargs))


def _plainly(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _on_device(found: Any) -> Any:
    """Return a result whose tensors lie on the device."""
    if isinstance(found, torch.Tensor):
        return _plainly(torch.Tensor.as_subclass, (found, DeviceTensor), {})
    if isinstance(found, tuple | list):
        return type(found)(map(_on_device, found))
    return found


def _allocated(tensor: torch.Tensor) -> torch.Tensor:
    """Return new memory of the device, which is there until :func:`forget_tensors`: launches know
    it by address only."""
    _place.kept.append(tensor)
    return _on_device(tensor)  # type: ignore[no-any-return]


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(argument)


def _write(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Queue an operation that writes into its first argument. Between host and device, the calling
    thread waits for it unless it asks not to, and the host's memory is page-locked."""
    in_host = [each for each in _tensors(args) if not isinstance(each, DeviceTensor)]
    in_host = [each for each in in_host if each.dim() or each is args[0]]  # not a number
    _place.queue.put(lambda: _plainly(function, args, kwargs))
    if in_host and not (kwargs.get("non_blocking") and all(map(_is_pinned, in_host))):
        _place.queue.wait()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _is_pinned(tensor: torch.Tensor, *_: object) -> bool:
    at = _storage(tensor)
    return at in _place.pinned or _place.locked(at)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    _place.pinned.add(_storage(tensor))
    _place.kept.append(tensor)
    return tensor


def _asks(device: Any) -> bool:
    """Return whether a tensor is asked for on the device."""
    if device is None or isinstance(device, int):
        return device is not None
    return torch.device(device).type == "cuda"


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> Any:
        tensor = make(*arguments, **more)
        if _asks(device):
            return _allocated(_plainly(torch.Tensor.clone, (tensor,), {}))
        return _pinned(tensor) if pin_memory else tensor

    return made


def _moved(self: torch.Tensor, *arguments: Any, device: Any = None, **more: Any) -> Any:
    """Stand in for ``Tensor.to``."""
    non_blocking = more.pop("non_blocking", False)
    if arguments and isinstance(arguments[0], torch.device | str):
        device, *rest = arguments
        arguments = tuple(rest)
    found = _to(self, *arguments, **more) if arguments or more else self
    if device is None or _asks(device) == isinstance(found, DeviceTensor):
        return found
    if not _asks(device):
        return found.cpu()
    target = _allocated(torch.empty_like(found))
    return target.copy_(found, non_blocking=non_blocking)


_to = torch.Tensor.to


def _to_host(self: torch.Tensor) -> torch.Tensor:
    """Stand in for ``Tensor.cpu``."""
    if isinstance(self, DeviceTensor):
        _place.queue.wait()
    return _plainly(torch.Tensor.clone, (self,), {}).as_subclass(torch.Tensor)  # type: ignore[no-any-return]


def _pin(self: torch.Tensor) -> torch.Tensor:
    """Stand in for ``Tensor.pin_memory``."""
    return _pinned(self.clone())


def pretend_tensors(patch: pytest.MonkeyPatch, queue: Queue, locked: Callable[[int], bool]) -> None:
    """Let tensors that are asked for on the device lie there. ``locked``: whether an address is
    page-locked."""
    _place.queue, _place.locked = queue, locked
    for name in _FACTORIES:
        patch.setattr(torch, name, _factory(getattr(torch, name)))
    patch.setattr(torch.Tensor, "to", _moved)
    patch.setattr(torch.Tensor, "cpu", _to_host)
    patch.setattr(torch.Tensor, "pin_memory", _pin)
    patch.setattr(torch.Tensor, "is_pinned", _is_pinned)


def forget_tensors() -> None:
    """Free the memory that nobody holds, once no work is left in a queue."""
    _place.kept.clear()
    _place.pinned.clear()
