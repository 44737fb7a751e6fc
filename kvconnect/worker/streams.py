"""Ordering copies against the model's own work on the device, and timing them.

A *fence* is taken on the engine's thread at the point a copy must come after; the copy thread
waits for it on its own stream. Nothing here synchronises the device or the compute stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from kvconnect.types import TransferType

Fence = object


class DeviceFence:
    """A point in the device's work."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block the calling thread, and nothing else, until the device has passed it."""
        self._event.synchronize()


class Streams(ABC):
    """Where copies run. ``fence`` belongs to the engine's thread, ``run`` to the copy thread."""

    @abstractmethod
    def fence(self) -> Fence:
        """Mark everything launched on the device so far; does not block."""

    @abstractmethod
    def mark(self) -> DeviceFence | None:
        """Return a fence that any thread can wait for; None if there is nothing to wait for."""

    @abstractmethod
    def run(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> float:
        """Run ``copy`` after ``fence``; block until its bytes are there; return its seconds."""


class HostStreams(Streams):
    """For a KV cache in host memory: the model's step has ended when a hook is called."""

    def fence(self) -> Fence:
        return None

    def mark(self) -> DeviceFence | None:
        return None

    def run(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> float:  # noqa: ARG002
        started = time.perf_counter()
        copy()
        return time.perf_counter() - started


class CudaStreams(Streams):
    """One stream for loads, which requests wait for, and one of lower priority for stores."""

    def __init__(self, device: torch.device) -> None:
        least, greatest = torch.cuda.Stream.priority_range()
        self._streams = {
            TransferType.CPU_TO_GPU: torch.cuda.Stream(device, priority=greatest),
            TransferType.GPU_TO_CPU: torch.cuda.Stream(device, priority=least),
        }

    def fence(self) -> Fence:
        event = torch.cuda.Event()
        event.record()
        return event

    def mark(self) -> DeviceFence | None:
        event = torch.cuda.Event(blocking=True)  # whoever waits must not spin on a core
        event.record()
        return DeviceFence(event)

    def run(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> float:
        stream = self._streams[kind]
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            stream.wait_event(fence)
            start.record()
            copy()
            end.record()
        end.synchronize()  # blocks this thread only
        seconds: float = start.elapsed_time(end) / 1e3
        return seconds


def make_streams(device: torch.device) -> Streams:
    """Return the streams for a KV cache on ``device``."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
