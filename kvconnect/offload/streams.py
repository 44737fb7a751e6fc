"""Ordering copies against the model's own work on the device, and timing them.

A *fence* is taken on the engine's thread at the point a copy must come after; the copy thread
waits for it on its own stream. Nothing here synchronises the device or the compute stream. A
*flight* is a copy that was launched; several of one direction may be on their way.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from kvconnect.copy.driver import own_stream
from kvconnect.errors import Incompatible, TransferFailed
from kvconnect.types import TransferType

Fence = object


def use_device(device: torch.device) -> None:
    """Make a CUDA device the calling thread's own; other devices need nothing.

    A new thread is on device 0. Left there, it would switch to and fro at each call, and make a
    context on the GPU of rank 0, of hundreds of MB, for every other rank.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class DeviceFence:
    """A point in the device's work; the event has been recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block the calling thread, and nothing else, until the device has passed it."""
        use_device(self._event.device)
        self._event.synchronize()


class Flight(ABC):
    """One copy on its way. For the thread that launched it.

    Both calls raise :class:`TransferFailed` if the device could not do it.
    """

    @abstractmethod
    def poll(self) -> float | None:
        """Return the seconds it took, None while it is on its way; does not block."""

    @abstractmethod
    def wait(self) -> float:
        """Block the calling thread, and nothing else, until it is there; return its seconds."""


class CompletedFlight(Flight):
    """A copy that was done when it was launched."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def poll(self) -> float:
        return self._seconds

    def wait(self) -> float:
        return self._seconds


class Streams(ABC):
    """Where copies run. ``launch`` belongs to the copy thread, the rest to the engine's thread."""

    @abstractmethod
    def fence(self) -> Fence:
        """Mark what the calling thread's current stream was given so far; does not block. May also
        be called in a ``copy`` of :meth:`launch`."""

    @abstractmethod
    def follow(self, fence: Fence) -> None:
        """Have the device do what the current stream is given next after ``fence``; does not
        block."""

    @abstractmethod
    def mark(self) -> DeviceFence | None:
        """Return a fence that any thread can wait for; None if there is nothing to wait for."""

    @abstractmethod
    def launch(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> Flight:
        """Start ``copy`` after ``fence``, where it runs in order with others of its kind.

        What ``copy`` raises is raised here; :class:`TransferFailed` if the device refuses. Nothing
        of a copy that failed is still on its way then.
        """

    def run(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> float:
        """Run ``copy`` after ``fence``; block until its bytes are there; return its seconds."""
        return self.launch(kind, fence, copy).wait()


class HostStreams(Streams):
    """For a KV cache in host memory: the model's step has ended when a hook is called."""

    def fence(self) -> Fence:
        return None

    def follow(self, fence: Fence) -> None: ...

    def mark(self) -> DeviceFence | None:
        return None

    def launch(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> Flight:  # noqa: ARG002
        started = time.perf_counter()
        copy()
        return CompletedFlight(time.perf_counter() - started)


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class EventPool:
    """Pairs of timing events: making one costs more than a launch. For one thread."""

    def __init__(self) -> None:
        self._free: list[_Pair] = []

    def take(self) -> _Pair:
        if self._free:
            return self._free.pop()
        # Blocking: whoever waits must not spin on a core.
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        return start, end

    def give(self, pair: _Pair) -> None:
        """Take back a pair that the device has passed."""
        self._free.append(pair)


class CudaFlight(Flight):
    """A copy between two events, which go back to ``pool`` when it has landed.

    Events of a copy that failed do not: what they say is unknown.
    """

    def __init__(self, pair: _Pair, pool: EventPool) -> None:
        self._pair = pair
        self._pool = pool
        self._seconds: float | None = None

    def poll(self) -> float | None:
        try:
            if self._seconds is None and self._pair[1].query():
                self._land()
        except RuntimeError as error:
            raise TransferFailed("the device failed during a copy") from error
        return self._seconds

    def wait(self) -> float:
        try:
            if self._seconds is None:
                self._pair[1].synchronize()  # blocks this thread only
            return self._land() if self._seconds is None else self._seconds
        except RuntimeError as error:
            raise TransferFailed("the device failed during a copy") from error

    def _land(self) -> float:
        start, end = self._pair
        self._seconds = float(start.elapsed_time(end)) / 1e3
        self._pool.give(self._pair)
        return self._seconds


@contextmanager
def draining(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch on ``stream``; where that breaks off, wait for what was launched, then raise.

    Its bytes would otherwise land in blocks and slots that were given up, and perhaps belong to
    somebody else by then.
    """
    whole = False
    with torch.cuda.stream(stream):
        try:
            yield
            whole = True
        finally:
            if not whole:
                with suppress(RuntimeError):  # a lost device writes nothing any more
                    stream.synchronize()  # blocks this thread only


class CudaStreams(Streams):
    """One stream for loads, which requests wait for, and one of lower priority for stores."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._streams = {
            TransferType.CPU_TO_GPU: own_stream(self._device, urgent=True),
            TransferType.GPU_TO_CPU: own_stream(self._device),
        }
        self._pool = EventPool()

    def fence(self) -> Fence:
        event = torch.cuda.Event()
        event.record()
        return event

    def follow(self, fence: Fence) -> None:
        torch.cuda.current_stream(self._device).wait_event(fence)

    def mark(self) -> DeviceFence | None:
        event = torch.cuda.Event(blocking=True)  # whoever waits must not spin on a core
        event.record()
        return DeviceFence(event)

    def launch(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> Flight:
        use_device(self._device)
        stream = self._streams[kind]
        try:
            pair = self._pool.take()
            with draining(stream):
                stream.wait_event(fence)
                pair[0].record()
                copy()
                pair[1].record()
        except RuntimeError as error:
            raise TransferFailed("a copy could not be launched") from error
        return CudaFlight(pair, self._pool)


def check_device(kind: str) -> None:
    """Refuse a kind of device that nothing here was written for.

    Raises:
        Incompatible: neither CPUs nor NVIDIA's GPUs. Its copies would not be ordered against what
            it computes.
    """
    name = "rocm" if kind == "cuda" and torch.version.hip else kind
    if name not in ("cpu", "cuda"):
        raise Incompatible(f"device {name!r}", "use a CPU or an NVIDIA GPU")


def make_streams(device: torch.device) -> Streams:
    """Return the streams for a KV cache on ``device``.

    Raises:
        Incompatible: see :func:`check_device`.
    """
    check_device(device.type)
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
