"""CUDA driver calls through ctypes: contexts of threads, streams, page-locking.

torch cannot be used for these. It sets no context in a thread that only other libraries use. Its
streams come from a pool that the engine uses too. A page-lock that it is refused leaves an error
pending, which the next launch in the process raises.

An error of the driver is raised as :class:`TransferFailed`, with its number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from kvconnect.errors import Incompatible, TransferFailed

LIBRARY = "libcuda.so.1"

_NON_BLOCKING = 1  # the stream and the null stream do not wait for each other
_PORTABLE, _MAPPED = 1, 2  # like the CUDA runtime: for every context, at the same address


class CudaContext:
    """The primary context of a device, which torch uses too; kept until the process ends.

    Any thread may call any method. Only :meth:`enter` changes the calling thread's context. The
    constructor raises :class:`Incompatible` if there is no driver.
    """

    def __init__(self, index: int) -> None:
        self.library = load_driver()
        device, self._handle = ctypes.c_int(0), ctypes.c_void_p()
        check(self.library.cuInit(0), "cuInit")
        check(self.library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        status = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(self._handle), device)
        check(status, "cuDevicePrimaryCtxRetain")

    @property
    def version(self) -> int:
        """CUDA version of the driver, such as 13000."""
        version = ctypes.c_int(0)
        check(self.library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value

    def enter(self) -> None:
        """Make this the calling thread's context. A new thread has none."""
        check(self.library.cuCtxSetCurrent(self._handle), "cuCtxSetCurrent")

    def stream(self, urgent: bool = False) -> int:
        """Return the handle of a new stream, of the highest priority if ``urgent``, else of the
        lowest."""
        least, greatest = ctypes.c_int(0), ctypes.c_int(0)
        stream = ctypes.c_void_p()
        with self._here():
            limits = ctypes.byref(least), ctypes.byref(greatest)
            check(self.library.cuCtxGetStreamPriorityRange(*limits), "cuCtxGetStreamPriorityRange")
            priority = greatest if urgent else least
            status = self.library.cuStreamCreateWithPriority(
                ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), priority
            )
            check(status, "cuStreamCreateWithPriority")
        return stream.value or 0

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

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Use this context inside the block, then restore the thread's previous one."""
        check(self.library.cuCtxPushCurrent_v2(self._handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            before = ctypes.c_void_p()
            check(self.library.cuCtxPopCurrent_v2(ctypes.byref(before)), "cuCtxPopCurrent")


def has_context() -> bool:
    """Return whether the calling thread has a context of any device."""
    found = ctypes.c_void_p()
    status = load_driver().cuCtxGetCurrent(ctypes.byref(found))  # fails before the first cuInit
    return status == 0 and bool(found.value)


def load_driver() -> ctypes.CDLL:
    """Return the driver's library. Raises :class:`Incompatible` if it does not load."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Incompatible(f"the CUDA driver does not load: {error}") from error


def check(status: int, what: str) -> None:
    """Raise :class:`TransferFailed` if a call's status is not success."""
    if status:
        raise TransferFailed(f"{what} failed with CUDA error {status}")
