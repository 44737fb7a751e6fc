"""CUDA calls of the copies: :class:`Driver` is the contract, :class:`CudaDriver` implements it.

The contract has few calls, so that a test can replace all of them. Addresses and stream handles are
plain ints. Every failure is raised as :class:`TransferFailed`. After the loss of a device, every
call fails.

:class:`CudaDriver` uses torch for streams and memory, and libcuda through ctypes for kernels and
DMA. Without kernels (:mod:`kvconnect.copy.kernel_loading`) DMA copies everything.
:mod:`kvconnect.cuda` says which calls keep the GIL. cuda-bindings takes a batch as three Python
lists with one object per address. To build these takes longer than a launch may (30 us per 1,000
pages), so arrays are passed by address.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from kvconnect.copy.base import MAX_DESCRIPTORS, MAX_IN_FLIGHT
from kvconnect.copy.current_stream import current_stream, use_stream
from kvconnect.copy.kernel_loading import load_kernels, source_digest
from kvconnect.cuda import CudaContext, check
from kvconnect.errors import Incompatible, TransferFailed

SHORT_CALL = 64
"""Copies in a call that keeps the GIL: more would hold it longer than it takes to get it back."""

_ORDER_STREAM, _ORDER_ANY = 1, 3
_OVERLAP_WITH_COMPUTE = 1
_NO_HINT = 0

_LEAST_LENT = 4096
"""Numbers that lent memory has room for at least: the blocks and slots of most chunks."""


class Taken(NamedTuple):
    """Seconds of the host's clock that it takes to submit some work, and until the device has ended
    it, from the first call on."""

    submit_s: float
    total_s: float


class Driver(ABC):
    """Calls for one device, from any thread. Work runs in order on the thread's current stream.

    Only ``synchronize`` and ``seconds`` wait for the device.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of machine, device, driver and kernels; measurements hold for these only."""

    @property
    @abstractmethod
    def kernels_unavailable_reason(self) -> str | None:
        """Why :meth:`launch` cannot be used; None if it can."""

    @property
    @abstractmethod
    def has_batch(self) -> bool:
        """Whether :meth:`copy_batch` is one call to the driver."""

    @abstractmethod
    def launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[int]) -> None:
        """Launch a kernel of :mod:`kvconnect.copy.kernels`. All arguments are 64-bit integers."""

    @abstractmethod
    def copy_batch(
        self, targets: array[int], sources: array[int], sizes: array[int], early: bool
    ) -> None:
        """Copy ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]``, in any order.

        ``early``: the sources are complete, so the driver may read them before the stream's
        earlier work has ended. The caller may reuse the arrays when this returns.
        """

    @abstractmethod
    def upload(self, numbers: array[int]) -> torch.Tensor:
        """Return device memory that holds ``numbers`` for all work launched later on this stream.

        The caller may drop the memory when its last reader is launched on the same stream.
        """

    @contextmanager
    def lend(self, numbers: array[int]) -> Iterator[int]:
        """Give the address of device memory that holds ``numbers`` for what the block launches on
        this stream."""
        held = self.upload(numbers)
        yield held.data_ptr()

    @abstractmethod
    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory: uint8 ``[nbytes]``."""

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory, uint8 ``[nbytes]``. Host and device use one address."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the current stream has ended its work. Blocks only the calling thread."""

    @abstractmethod
    def seconds(self, pieces: Sequence[Callable[[], None]]) -> Taken:
        """Run pieces of work, at most ``MAX_IN_FLIGHT``, each on an idle stream of its own, and
        wait for them."""


def own_stream(device: torch.device, urgent: bool = False) -> torch.cuda.Stream:
    """Return a new stream of a CUDA device. An ``urgent`` one runs before the model's streams.

    torch hands out its 32 streams per priority in turns, so the engine may use any of them, and a
    copy would queue behind the model. The new stream lives until the process ends, because torch's
    allocators keep stream handles.

    Raises:
        Incompatible: there is no CUDA driver.
        TransferFailed: the driver refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = CudaContext(index).stream(urgent)
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))


class OwnEvent:
    """A CUDA event like torch's, but its ``record`` and ``wait`` keep the GIL: they return within
    microseconds, and another thread may take it for a millisecond or more.

    Raises :class:`TransferFailed` if the driver refuses, or the device failed.
    """

    def __init__(self, device: torch.device, context: CudaContext, timing: bool = False) -> None:
        self.device = device
        self._context = context
        self._handle = context.event(timing)

    def __del__(self, quietly: type[suppress] = suppress) -> None:
        # Bound as a default, because the names of this module may be cleared before this event.
        with quietly(Exception):  # a lost device, or the end of the process
            self._context.destroy_event(self._handle)

    def record(self) -> None:
        """Record the event behind the work of the calling thread's current stream."""
        self._context.record(self._handle, current_stream(self.device.index))

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make later work of ``stream`` wait; torch's ``wait_event`` calls this."""
        self._context.follow(stream.cuda_stream, self._handle)

    def synchronize(self) -> None:
        """Block only the calling thread until the device has passed the event."""
        self._context.await_event(self._handle)

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        return self._context.has_passed(self._handle)

    def seconds_to(self, end: OwnEvent) -> float:
        """Return the seconds to another event. Both were made with ``timing`` and have passed."""
        return self._context.seconds(self._handle, end._handle)


class _Loan:
    """Memory for numbers of one launch; free again once the device has passed ``used``."""

    def __init__(self, driver: Driver, used: OwnEvent, capacity: int) -> None:
        self.used = used
        self.capacity = capacity
        self._device = driver.device_memory(8 * capacity)
        self._host = driver.host_memory(8 * capacity)
        self.address = self._device.data_ptr()

    def upload(self, driver: Driver, numbers: array[int]) -> None:
        ctypes.memmove(self._host.data_ptr(), numbers.buffer_info()[0], 8 * len(numbers))
        target, source = (array("q", [m.data_ptr()]) for m in (self._device, self._host))
        driver.copy_batch(target, source, array("q", [8 * len(numbers)]), early=True)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise errors of torch (RuntimeError) as :class:`TransferFailed`."""
    try:
        yield
    except RuntimeError as error:
        raise TransferFailed(f"{what} failed on the device") from error


class CudaDriver(Driver):
    """Calls through torch and libcuda. Raises :class:`Incompatible` without libcuda."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._context = CudaContext(index)
        self._kernels: dict[str, int] = {}
        self._kernels_unavailable_reason: str | None = None
        try:
            self._kernels = load_kernels(index)
        except Incompatible as error:
            self._kernels_unavailable_reason = str(error)
        self._cuda = _typed(self._context.short_calls)
        self._short_batch, self._has_index = _find_batch(self._cuda)
        self._long_batch, _ = _find_batch(self._context.library)
        self._loans: deque[_Loan] = deque()
        properties = torch.cuda.get_device_properties(device)
        copied_by = source_digest("pages") if self._kernels else "DMA"
        # GPUs of one model may have links of different widths.
        domain = getattr(properties, "pci_domain_id", 0)
        bus = getattr(properties, "pci_bus_id", index)
        where = f"{platform.node()} {properties.name} {domain:04x}:{bus:02x}"
        self._name = f"{where} {self._context.version} {copied_by}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def kernels_unavailable_reason(self) -> str | None:
        return self._kernels_unavailable_reason

    @property
    def has_batch(self) -> bool:
        return self._short_batch is not None

    def launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[int]) -> None:
        count = len(arguments)
        values = (ctypes.c_int64 * count)(*arguments)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        self._context.enter()  # libcuda needs a current context, unlike torch
        status = self._cuda.cuLaunchKernel(
            self._kernels[kernel],
            grid,
            1,
            1,
            threads,
            1,
            1,
            0,
            self._stream(),
            pointers,
            None,
        )
        check(status, kernel)

    def copy_batch(
        self, targets: array[int], sources: array[int], sizes: array[int], early: bool
    ) -> None:
        handle = self._stream()
        stream = ctypes.c_void_p(handle)
        self._context.enter()  # libcuda needs a current context, unlike torch
        short, long = self._short_batch, self._long_batch
        # The default stream takes no batches, and a batch of one costs five times a copy.
        if short is None or long is None or not handle or len(sizes) == 1:
            copy = self._cuda.cuMemcpyAsync
            for target, source, size in zip(targets, sources, sizes, strict=True):
                check(copy(target, source, size, stream), "cuMemcpyAsync")
            return
        order = _ORDER_ANY if early else _ORDER_STREAM
        hint = (ctypes.c_int * 2)(_NO_HINT, 0)
        attributes = _CopyAttributes(order, hint, hint, _OVERLAP_WITH_COMPUTE)
        first, index = ctypes.c_size_t(0), ctypes.c_size_t(0)
        addresses = [numbers.buffer_info()[0] for numbers in (targets, sources, sizes)]
        for start in range(0, len(sizes), MAX_DESCRIPTORS):
            count = min(MAX_DESCRIPTORS, len(sizes) - start)
            batch = short if count <= SHORT_CALL else long
            arguments: list[Any] = [
                *(address + 8 * start for address in addresses),
                *(count, ctypes.byref(attributes), ctypes.byref(first), 1),
                *((ctypes.byref(index),) if self._has_index else ()),
                stream,
            ]
            check(batch(*arguments), "cuMemcpyBatchAsync")

    def upload(self, numbers: array[int]) -> torch.Tensor:
        with _translated("upload of a table"):
            # torch reuses the memory of both only after the stream has passed this copy.
            host = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
            ctypes.memmove(host.data_ptr(), numbers.buffer_info()[0], host.nbytes)
            return host.to(self._device, non_blocking=True)

    @contextmanager
    def lend(self, numbers: array[int]) -> Iterator[int]:
        loan = self._take(len(numbers))
        try:
            loan.upload(self, numbers)
            yield loan.address
        finally:
            loan.used.record()
            self._loans.append(loan)

    def _take(self, count: int) -> _Loan:
        """Return memory that nothing uses: torch's allocators give the GIL up, and may stop the
        device to make more."""
        with suppress(IndexError):  # another thread may take the last one
            for _ in range(len(self._loans)):
                loan = self._loans.popleft()
                if loan.capacity >= count and loan.used.query():
                    return loan
                self._loans.append(loan)
        capacity = max(_LEAST_LENT, 1 << (count - 1).bit_length())
        return _Loan(self, OwnEvent(self._device, self._context), capacity)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        with _translated(f"allocation of {nbytes} bytes"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        with _translated(f"allocation of {nbytes} page-locked bytes"):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        with _translated("copy"):
            done = torch.cuda.Event(blocking=True)  # a waiting thread must not use its core
            done.record(torch.cuda.current_stream(self._device))
            done.synchronize()

    def seconds(self, pieces: Sequence[Callable[[], None]]) -> Taken:
        with _translated("measurement"):
            streams = self._timed_streams[: len(pieces)]
            began = time.perf_counter()
            for stream, work in zip(streams, pieces, strict=True):
                with use_stream(stream):
                    work()
            submitted = time.perf_counter()
            for stream in streams:
                stream.synchronize()
            return Taken(submitted - began, time.perf_counter() - began)

    @functools.cached_property
    def _timed_streams(self) -> list[torch.cuda.Stream]:
        return [own_stream(self._device) for _ in range(MAX_IN_FLIGHT)]

    def _stream(self) -> int:
        return current_stream(self._device.index)


def _typed(library: ctypes.PyDLL) -> ctypes.PyDLL:
    """Declare the argument types of calls that take plain ints."""
    address, size, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint
    library.cuMemcpyAsync.argtypes = (address, address, size, ctypes.c_void_p)
    library.cuLaunchKernel.argtypes = (
        *(ctypes.c_void_p, *(number,) * 6, number),
        *(ctypes.c_void_p,) * 3,
    )
    return library


def _find_batch(library: ctypes.CDLL) -> tuple[Callable[..., int] | None, bool]:
    """Return cuMemcpyBatchAsync (None before CUDA 12.8), and whether it takes a failure index.

    Only the first version takes the index. CUDA 13 drivers have both; the second is preferred.
    """
    numbers = (ctypes.c_void_p,) * 3
    head = (*numbers, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    for name, more in (("cuMemcpyBatchAsync_v2", 1), ("cuMemcpyBatchAsync", 2)):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = head + (ctypes.c_void_p,) * more
            return function, more == 2
    return None, False
