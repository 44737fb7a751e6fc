"""Orders copies against the model's work on the device, and times them.

The engine's thread takes a *fence* where a copy may start; the copy thread's stream waits for it.
Nothing here synchronises the device or the compute stream. Several copies of one direction may be
in flight.
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
    """Set the calling thread's current CUDA device; other devices need nothing.

    A new thread is on device 0. There it would switch devices at each call, and every rank would
    make a context of hundreds of MB on the GPU of rank 0.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class DeviceFence:
    """A point in the device's work, as a recorded event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block only the calling thread until the device has passed the event."""
        use_device(self._event.device)
        self._event.synchronize()


class InFlightCopy(ABC):
    """One launched copy. For the thread that launched it.

    Both calls raise :class:`TransferFailed` if the device failed.
    """

    @abstractmethod
    def poll(self) -> float | None:
        """Return the seconds the copy took, None while it is in flight; does not block."""

    @abstractmethod
    def wait(self) -> float:
        """Block only the calling thread until the copy is done; return its seconds."""


class CompletedCopy(InFlightCopy):
    """A copy that its launch completed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def poll(self) -> float:
        return self._seconds

    def wait(self) -> float:
        return self._seconds


class Streams(ABC):
    """Runs copies. ``launch`` is for the copy thread, the rest for the engine's thread."""

    @abstractmethod
    def fence(self) -> Fence:
        """Return a fence behind the work of the calling thread's current stream; does not block.
        A ``copy`` of :meth:`launch` may call it too."""

    @abstractmethod
    def follow(self, fence: Fence) -> None:
        """Make later work of the current stream wait for ``fence``; does not block."""

    @abstractmethod
    def mark(self) -> DeviceFence | None:
        """Return a fence that any thread can wait for; None if there is nothing to wait for."""

    @abstractmethod
    def launch(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> InFlightCopy:
        """Start ``copy`` after ``fence``, in order with other copies of its kind.

        Raises what ``copy`` raises; :class:`TransferFailed` if the device refuses. After an error,
        nothing of the copy is in flight.
        """

    def run(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> float:
        """Run ``copy`` after ``fence``; block until it is done; return its seconds."""
        return self.launch(kind, fence, copy).wait()


class HostStreams(Streams):
    """For a KV cache in host memory: the model's step has ended when a hook is called."""

    def fence(self) -> Fence:
        return None

    def follow(self, fence: Fence) -> None: ...

    def mark(self) -> DeviceFence | None:
        return None

    def launch(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> InFlightCopy:  # noqa: ARG002
        started = time.perf_counter()
        copy()
        return CompletedCopy(time.perf_counter() - started)


_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class EventPool:
    """Pairs of timing events for reuse: making one costs more than a launch. For one thread."""

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


class CudaInFlightCopy(InFlightCopy):
    """A copy between two events, which go back to ``pool`` when it is done.

    The events of a failed copy do not go back: their state is unknown.
    """

    def __init__(self, pair: _Pair, pool: EventPool) -> None:
        self._pair = pair
        self._pool = pool
        self._seconds: float | None = None

    def poll(self) -> float | None:
        try:
            if self._seconds is None and self._pair[1].query():
                self._finish()
        except RuntimeError as error:
            raise TransferFailed("the device failed during a copy") from error
        return self._seconds

    def wait(self) -> float:
        try:
            if self._seconds is None:
                self._pair[1].synchronize()  # blocks this thread only
            return self._finish() if self._seconds is None else self._seconds
        except RuntimeError as error:
            raise TransferFailed("the device failed during a copy") from error

    def _finish(self) -> float:
        start, end = self._pair
        self._seconds = float(start.elapsed_time(end)) / 1e3
        self._pool.give(self._pair)
        return self._seconds


@contextmanager
def draining(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch on ``stream``; on an error, wait for what was launched, then raise.

    Otherwise its bytes could still be written to blocks and slots that have a new owner.
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

    def launch(self, kind: TransferType, fence: Fence, copy: Callable[[], None]) -> InFlightCopy:
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
        return CudaInFlightCopy(pair, self._pool)


def check_device(kind: str) -> None:
    """Check that copies can be ordered against a device's work.

    Raises:
        Incompatible: neither a CPU nor an NVIDIA GPU.
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
