"""CUDA driver calls through ctypes: contexts of threads, streams, events, page-locking.

torch cannot be used for these. It sets no context in a thread that only other libraries use. Its
streams come from a pool that the engine uses too. A page-lock that it is refused leaves an error
pending, which the next launch in the process raises.

An error of the driver is raised as :class:`TransferFailed`, with its number.

The library is loaded twice. Calls through :func:`load_driver` release the GIL, because they may
block. Calls through :func:`load_short_calls` keep it, because they return within microseconds. To
get the GIL back can take 5 ms (Python's switch interval) while another thread computes:

- ``cuCtxSetCurrent``, ``cuCtxPushCurrent`` and ``cuCtxPopCurrent`` write a variable of the thread.
- ``cuLaunchKernel``, ``cuMemcpyAsync``, ``cuEventRecord`` and ``cuStreamWaitEvent`` write commands
  into a queue. They block only while the queue is full, and copies bound what they have in flight.
- ``cuMemcpyBatchAsync`` takes about 0.5 us for each of its copies, so only short batches keep the
  GIL (:mod:`kvconnect.copy.driver`).
- ``cuEventCreate`` and ``cuEventDestroy`` take a slot of a pool. Every fence of a step has one.
- ``cuEventQuery`` reads a word that the device writes.

All other calls may block: page-locking takes seconds, a first context loads the driver's code, and
a new stream may wait for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvconnect.errors import Incompatible, TransferFailed

Library = TypeVar("Library", bound=ctypes.CDLL)

LIBRARY = "libcuda.so.1"

_NON_BLOCKING = 1  # the stream and the null stream do not wait for each other
_BLOCKING_WAIT, _NO_TIMING = 1, 2
_PORTABLE, _MAPPED = 1, 2  # like the CUDA runtime: for every context, at the same address
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HOST_POINTERS_OF_REGISTERED = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class CudaContext:
    """The primary context of a device, which torch uses too; kept until the process ends.

    Any thread may call any method. Only :meth:`enter` changes the calling thread's context. The
    constructor raises :class:`Incompatible` if there is no driver.
    """

    def __init__(self, index: int) -> None:
        self.library, self.short_calls = load_driver(), load_short_calls()
        device, self._handle = ctypes.c_int(0), ctypes.c_void_p()
        check(self.library.cuInit(0), "cuInit")
        check(self.library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        status = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(self._handle), device)
        check(status, "cuDevicePrimaryCtxRetain")
        self._device = device

    @property
    def version(self) -> int:
        """CUDA version of the driver, such as 13000."""
        version = ctypes.c_int(0)
        check(self.library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value

    @property
    def reaches_host_addresses(self) -> bool:
        """Whether the device reaches page-locked memory at the host's addresses. Where it does not,
        a copy to them loses the device."""
        found = ctypes.c_int(0)
        status = self.library.cuDeviceGetAttribute(
            ctypes.byref(found), _HOST_POINTERS_OF_REGISTERED, self._device
        )
        check(status, "cuDeviceGetAttribute")
        return bool(found.value)

    def enter(self) -> None:
        """Make this the calling thread's context. A new thread has none."""
        check(self.short_calls.cuCtxSetCurrent(self._handle), "cuCtxSetCurrent")

    def stream(self, urgent: bool = False) -> int:
        """Return the handle of a new stream, of the highest priority if ``urgent``, else of the
        lowest."""
        least, greatest = ctypes.c_int(0), ctypes.c_int(0)
        stream = ctypes.c_void_p()
        with self._here():
            status = self.library.cuCtxGetStreamPriorityRange(
                ctypes.byref(least), ctypes.byref(greatest)
            )
            check(status, "cuCtxGetStreamPriorityRange")
            priority = greatest if urgent else least
            status = self.library.cuStreamCreateWithPriority(
                ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), priority
            )
            check(status, "cuStreamCreateWithPriority")
        return stream.value or 0

    def load_module(self, image: bytes) -> int:
        """Return the handle of a module: machine code or PTX, as nvcc writes it. It lives until the
        process ends."""
        module = ctypes.c_void_p()
        with self._here():
            status = self.library.cuModuleLoadData(ctypes.byref(module), image)
            check(status, "cuModuleLoadData")
        return module.value or 0

    def kernel(self, module: int, name: str) -> int:
        """Return the handle of a module's kernel, for a launch."""
        kernel = ctypes.c_void_p()
        with self._here():
            status = self.library.cuModuleGetFunction(
                ctypes.byref(kernel), ctypes.c_void_p(module), name.encode()
            )
            check(status, "cuModuleGetFunction")
        return kernel.value or 0

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for every context, with the same address on the device."""
        with self._here():
            status = self.library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE | _MAPPED
            )
            check(status, "cuMemHostRegister")

    def unlock(self, address: int) -> None:
        """Undo :meth:`lock`."""
        with self._here():
            status = self.library.cuMemHostUnregister(ctypes.c_void_p(address))
            check(status, "cuMemHostUnregister")

    def event(self, timing: bool) -> int:
        """Return the handle of a new event; threads wait for it without spinning."""
        event = ctypes.c_void_p()
        flags = ctypes.c_uint(_BLOCKING_WAIT | (0 if timing else _NO_TIMING))
        with self._here():
            check(self.short_calls.cuEventCreate(ctypes.byref(event), flags), "cuEventCreate")
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Free an event. Streams that wait for it still do."""
        with self._here():
            status = self.short_calls.cuEventDestroy_v2(ctypes.c_void_p(event))
            check(status, "cuEventDestroy")

    def record(self, event: int, stream: int) -> None:
        """Record an event behind a stream's work so far."""
        with self._here():
            status = self.short_calls.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream))
            check(status, "cuEventRecord")

    def follow(self, stream: int, event: int) -> None:
        """Make later work of a stream wait for an event."""
        with self._here():
            status = self.short_calls.cuStreamWaitEvent(
                ctypes.c_void_p(stream), ctypes.c_void_p(event), 0
            )
            check(status, "cuStreamWaitEvent")

    def await_event(self, event: int) -> None:
        """Block only the calling thread until the device has passed an event."""
        with self._here():
            check(self.library.cuEventSynchronize(ctypes.c_void_p(event)), "cuEventSynchronize")

    def has_passed(self, event: int) -> bool:
        """Return whether the device has passed an event's last record; does not wait."""
        with self._here():
            status = int(self.short_calls.cuEventQuery(ctypes.c_void_p(event)))
            if status != _NOT_READY:
                check(status, "cuEventQuery")
        return status != _NOT_READY

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds between two timing events that the device has passed."""
        taken = ctypes.c_float(0.0)
        with self._here():
            status = self.library.cuEventElapsedTime(
                ctypes.byref(taken), ctypes.c_void_p(start), ctypes.c_void_p(end)
            )
            check(status, "cuEventElapsedTime")
        return taken.value / 1e3

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Use this context inside the block, then restore the thread's previous one."""
        check(self.short_calls.cuCtxPushCurrent_v2(self._handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            before = ctypes.c_void_p()
            check(self.short_calls.cuCtxPopCurrent_v2(ctypes.byref(before)), "cuCtxPopCurrent")


def has_context() -> bool:
    """Return whether the calling thread has a context of any device."""
    found = ctypes.c_void_p()
    status = load_driver().cuCtxGetCurrent(ctypes.byref(found))  # fails before the first cuInit
    return status == 0 and bool(found.value)


def load_driver() -> ctypes.CDLL:
    """Return the driver's library, for calls that may block.

    Raises :class:`Incompatible` if it does not load.
    """
    return _load(ctypes.CDLL)


def load_short_calls() -> ctypes.PyDLL:
    """Return the driver's library, for calls that return within microseconds; see
    :func:`load_driver`."""
    return _load(ctypes.PyDLL)


def _load(kind: Callable[[str], Library]) -> Library:
    try:
        return kind(LIBRARY)
    except OSError as error:
        raise Incompatible(f"the CUDA driver does not load: {error}") from error


def check(status: int, what: str) -> None:
    """Raise :class:`TransferFailed` if a call's status is not success."""
    if status:
        raise TransferFailed(f"{what} failed with CUDA error {status}")
