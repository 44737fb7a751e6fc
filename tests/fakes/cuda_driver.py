"""A CUDA driver over host memory: the kernels' own sources run on the CPU, and calls can fail."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch

from kvconnect.copy.driver import Driver, Taken
from kvconnect.errors import TransferFailed
from tests.kernels import launch_on_host


class FakeDriver(Driver):
    """``calls`` notes what was called; call number ``fail_at`` (from 0) and, if ``lost``, all after
    it raise. ``speed`` says how many seconds :meth:`seconds` answers for a piece of work. A driver
    without kernels says why in ``kernels_unavailable_reason``."""

    kernels_unavailable_reason: str | None = None

    def __init__(self, fail_at: int | None = None, lost: bool = False) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at
        self.lost = lost
        self.speed: Callable[[list[str]], float] = len
        self.batches: list[bool] = []  # ``early`` of each
        self.machine = "fake"

    def note(self, call: str) -> None:
        number = len(self.calls)
        self.calls.append(call)
        if self.fail_at is None or number < self.fail_at:
            return
        if number == self.fail_at or self.lost:
            raise TransferFailed(f"call {number} ({call}) failed")

    @property
    def name(self) -> str:
        return self.machine

    @property
    def has_batch(self) -> bool:
        return True

    def launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[int]) -> None:
        self.note(kernel)
        assert self.kernels_unavailable_reason is None
        # Few threads: each is a fiber, and the results do not depend on how many there are.
        values = [ctypes.c_longlong(argument) for argument in arguments]
        launch_on_host(kernel, min(grid, 2), min(threads, 64), values)

    def copy_batch(
        self, targets: array[int], sources: array[int], sizes: array[int], early: bool
    ) -> None:
        self.note("copy_batch")
        self.batches.append(early)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)

    def upload(self, numbers: array[int]) -> torch.Tensor:
        self.note("upload")
        return torch.tensor(numbers, dtype=torch.int64)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        self.note("device_memory")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.note("host_memory")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.note("synchronize")

    def seconds(self, pieces: Sequence[Callable[[], None]]) -> Taken:
        self.note("seconds")
        before = len(self.calls)
        for work in pieces:
            work()
        return Taken(0.0, self.speed(self.calls[before:]))
