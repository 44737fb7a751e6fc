"""What copies on a device need of CUDA: few calls, so that a test can stand in for all of them.

Addresses and stream handles are plain ints. Whatever goes wrong inside is raised as
:class:`TransferFailed`; a device that was lost fails every later call in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

import torch

from kvconnect.cuda import CudaContext


class Driver(ABC):
    """One device. Calls may come from any thread and do not wait for the device unless they say so.

    Work goes to the calling thread's current stream, in order.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The device, driver and machine, for a file of measurements that fit only these."""

    @property
    @abstractmethod
    def has_batch(self) -> bool:
        """Whether :meth:`copy_batch` is one call to the driver."""

    @abstractmethod
    def launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[int]) -> None:
        """Launch a kernel of :mod:`kvconnect.copy.kernels`; every argument is 64 bits wide."""

    @abstractmethod
    def copy_batch(
        self, targets: array[int], sources: array[int], sizes: array[int], early: bool
    ) -> None:
        """Copy ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]``, in any order.

        ``early``: the sources are complete already, the driver need not wait for the stream to
        read them. The arrays may be reused when this returns.
        """

    @abstractmethod
    def upload(self, numbers: array[int]) -> torch.Tensor:
        """Return device memory that will hold ``numbers`` for whatever is launched after this.

        It may be dropped when its last reader has been launched on the same stream.
        """

    @abstractmethod
    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate on the device: uint8 ``[nbytes]``."""

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory, which has one address for host and device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread, and nothing else, until the current stream is done."""

    @abstractmethod
    def seconds(self, work: Callable[[], None]) -> float:
        """Run ``work`` on a stream of its own, wait for it, and return the device's seconds."""


# Streams that nobody else in the process has.


def own_stream(device: torch.device, urgent: bool = False) -> torch.cuda.Stream:
    """Return a new stream of a CUDA device; ``urgent``: work on it goes before the model's.

    torch gives its 32 streams per priority out in turns, so any of them may be the engine's too:
    a copy would then stand in line with the model. This one lives until the process ends, because
    torch's allocators remember streams by their handles.

    Raises:
        Incompatible: there is no CUDA driver.
        TransferFailed: the driver refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = CudaContext(index).stream(urgent)
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))
