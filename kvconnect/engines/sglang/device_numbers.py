"""Page and slot numbers that SGLang keeps on the device, brought to the host without a wait."""

from __future__ import annotations

import torch


class DeviceNumbers:
    """Numbers on their way to the host.

    Reading a device tensor at once would block its reader until the current stream has reached it.
    Where SGLang holds the whole forward back from that stream (``Scheduler._apply_war_barrier``),
    that is the end of the forward that runs. Numbers of a tensor in host memory are here at once.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = numbers.to("cpu", non_blocking=True)  # page-locked if it is copied
        self._end: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._end = torch.cuda.Event(blocking=True)  # waiters must not spin
            self._end.record()

    def are_here(self) -> bool:
        """Return whether the numbers have arrived; does not block."""
        return self._end is None or self._end.query()

    def wait(self) -> None:
        """Block until the numbers have arrived."""
        if self._end is not None:
            self._end.synchronize()

    def read(self) -> list[int]:
        """Return the numbers, which must have arrived."""
        numbers: list[int] = self._host.reshape(-1).tolist()
        return numbers
