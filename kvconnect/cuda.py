"""The CUDA driver through ctypes: contexts of threads, streams, page-locking.

torch does none of these as they are needed here. A thread that only other libraries use gets no
context from it, its streams come from a pool that the engine draws from too, and a page-lock that
it is refused leaves an error pending, which the next launch of anybody raises.

Whatever the driver answers is raised as :class:`TransferFailed`, with its number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from kvconnect.errors import Incompatible, TransferFailed

LIBRARY = "libcuda.so.1"

_NON_BLOCKING = 1  # nothing waits for the null stream, or it for us
_PORTABLE, _MAPPED = 1, 2  # as the runtime locks memory: for every context, at the same address


class CudaContext:
    """The primary context of a device, which torch works in; kept until this process ends.

    Any thread may call any method, and only :meth:`enter` changes which context it has. Raises
    :class:`Incompatible` in the constructor where there is no driver.
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
        """The CUDA version of the driver, such as 13000."""
        version = ctypes.c_int(0)
        check(self.library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        return version.value

    def enter(self) -> None:
        """Make it the calling thread's own. A new thread has none."""
        check(self.library.cuCtxSetCurrent(self._handle), "cuCtxSetCurrent")

    def stream(self, urgent: bool = False) -> int:
        """Return the handle of a new stream. An ``urgent`` one goes before all others, another one
        behind those of higher priority."""
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
        """Page-lock host memory, for every context and at the same address on the device."""
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
        """Have the context for a moment, and then what the thread had before."""
        check(self.library.cuCtxPushCurrent_v2(self._handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            before = ctypes.c_void_p()
            check(self.library.cuCtxPopCurrent_v2(ctypes.byref(before)), "cuCtxPopCurrent")


def has_context() -> bool:
    """Whether the calling thread has a context, of any device."""
    found = ctypes.c_void_p()
    status = load_driver().cuCtxGetCurrent(ctypes.byref(found))  # an error before the first use
    return status == 0 and bool(found.value)


def load_driver() -> ctypes.CDLL:
    """Return the driver's library; raise :class:`Incompatible` where there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise Incompatible(f"the CUDA driver does not load: {error}") from error


def check(status: int, what: str) -> None:
    """Raise :class:`TransferFailed` for a status that is not success."""
    if status:
        raise TransferFailed(f"{what} failed with CUDA error {status}")
