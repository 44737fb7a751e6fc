"""Orders copies against the model's work on the device, and times them.

The engine's thread takes a *fence* where a copy may start; the copy thread's stream waits for it.
Nothing here synchronises the device or the compute stream. Several copies of one direction may be
in flight.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, cast

import torch

from kvconnect.copy.current_stream import current_stream, use_stream
from kvconnect.copy.driver import OwnEvent, own_stream
from kvconnect.cuda import CudaContext
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

    def __init__(self, event: OwnEvent | torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block only the calling thread until the device has passed the event."""
        use_device(self._event.device)
        self._event.synchronize()


class InFlightCopy(ABC):
    """One launched copy, for any one thread.

    ``is_done``: the launch completed the copy, and ``wait`` returns at once.
    """

    is_done = False

    @abstractmethod
    def wait(self) -> float:
        """Block only the calling thread until the copy has ended; return its seconds.

        Raises:
            TransferFailed: the device failed.
        """


class CompletedCopy(InFlightCopy):
    """A copy that its launch completed."""

    is_done = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> float:
        return self._seconds


class Ahead(NamedTuple):
    """Work of a copy on a stream of its own, which the copy waits for. Works with the same number
    of a ``lane`` share a stream."""

    lane: int
    work: Callable[[], None]


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
    def has_passed(self, fence: Fence) -> bool:
        """Return whether the device has passed ``fence``; does not block. For any thread."""

    @abstractmethod
    def wait(self, fence: Fence) -> None:
        """Block only the calling thread until the device has passed ``fence``. For any thread.

        Raises:
            TransferFailed: the device failed.
        """

    @abstractmethod
    def current(self) -> int:
        """Return the number of the calling thread's current stream."""

    @abstractmethod
    def mark(self) -> DeviceFence | None:
        """Return a fence that any thread can wait for; None if there is nothing to wait for."""

    @abstractmethod
    def launch(
        self,
        kind: TransferType,
        fence: Fence | None,
        copy: Callable[[], None],
        digest: Callable[[], None] | None = None,
        ahead: Ahead | None = None,
    ) -> InFlightCopy:
        """Start ``copy`` after ``fence``, in order with other copies of its kind; None: at once.

        ``ahead`` comes after ``fence`` and before ``copy``, beside earlier copies of its kind.
        ``digest`` reads the blocks of the KV cache: those to be stored, or those that were loaded.
        It delays no later copy. The copy ends when both have ended.

        Raises what ``copy`` and ``digest`` raise; :class:`TransferFailed` if the device refuses.
        After an error, nothing of the copy is in flight.
        """

    def run(self, kind: TransferType, fence: Fence | None, copy: Callable[[], None]) -> float:
        """Run ``copy`` after ``fence``; block until it is done; return its seconds."""
        return self.launch(kind, fence, copy).wait()


class HostStreams(Streams):
    """For a KV cache in host memory: the model's step has ended when a hook is called."""

    def fence(self) -> Fence:
        return None

    def follow(self, fence: Fence) -> None: ...

    def has_passed(self, fence: Fence) -> bool:  # noqa: ARG002
        return True

    def wait(self, fence: Fence) -> None: ...

    def current(self) -> int:
        return 0

    def mark(self) -> DeviceFence | None:
        return None

    def launch(
        self,
        kind: TransferType,  # noqa: ARG002
        fence: Fence | None,  # noqa: ARG002
        copy: Callable[[], None],
        digest: Callable[[], None] | None = None,
        ahead: Ahead | None = None,
    ) -> InFlightCopy:
        started = time.perf_counter()
        if ahead is not None:
            ahead.work()
        copy()
        seconds = time.perf_counter() - started
        if digest is not None:
            digest()
        return CompletedCopy(seconds)


class CopyEvents(NamedTuple):
    """Points in the device's work around one copy. ``digested`` is recorded only with a digest,
    ``arrived`` only behind work ahead of the copy."""

    start: OwnEvent
    end: OwnEvent
    digested: OwnEvent
    arrived: OwnEvent


class EventPool:
    """Events for reuse: making one costs more than a launch. Any thread may call. ``make`` makes
    one, for timing or not."""

    def __init__(self, make: Callable[[bool], OwnEvent]) -> None:
        self._make = make
        self._free: deque[CopyEvents] = deque()

    def take(self) -> CopyEvents:
        with suppress(IndexError):
            return self._free.pop()
        make = self._make
        return CopyEvents(make(True), make(True), make(False), make(False))

    def give(self, events: CopyEvents) -> None:
        """Take back events that the device has passed."""
        self._free.append(events)


class CudaInFlightCopy(InFlightCopy):
    """A copy between events, which go back to ``pool`` when it has ended.

    The events of a failed copy do not go back: their state is unknown.
    """

    def __init__(
        self, device: torch.device, events: CopyEvents, has_digest: bool, pool: EventPool
    ) -> None:
        self._device = device
        self._events = events
        self._has_digest = has_digest
        self._pool = pool
        self._seconds: float | None = None

    def wait(self) -> float:
        if self._seconds is None:
            start, end, digested, _ = self._events
            try:
                use_device(self._device)
                end.synchronize()  # blocks this thread only
                if self._has_digest:
                    digested.synchronize()
                self._seconds = start.seconds_to(end)
            except TransferFailed as error:
                raise TransferFailed("the device failed during a copy") from error
            self._pool.give(self._events)
        return self._seconds


@contextmanager
def draining(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch on ``stream``; on an error, wait for what was launched, then raise.

    Otherwise its bytes could still be written to blocks and slots that have a new owner.
    """
    whole = False
    with use_stream(stream):
        try:
            yield
            whole = True
        finally:
            if not whole:
                with suppress(RuntimeError):  # a lost device writes nothing any more
                    stream.synchronize()  # blocks this thread only


class CudaStreams(Streams):
    """Streams of a CUDA device: per direction, one for copies, one for their digests, and those of
    the work ahead of copies.

    Requests wait for loads, so the streams of stores have a lower priority.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._context = CudaContext(index)
        self._copies, self._digests = (
            {
                TransferType.CPU_TO_GPU: own_stream(self._device, urgent=True),
                TransferType.GPU_TO_CPU: own_stream(self._device),
            }
            for _ in range(2)
        )
        self._lanes: dict[tuple[TransferType, int], torch.cuda.Stream] = {}
        self._pool = EventPool(self._event)

    def fence(self) -> Fence:
        event = self._event()
        event.record()
        return event

    def follow(self, fence: Fence) -> None:
        torch.cuda.current_stream(self._device).wait_event(fence)

    def has_passed(self, fence: Fence) -> bool:
        event = cast(OwnEvent, fence)
        return event.query()

    def wait(self, fence: Fence) -> None:
        event = cast(OwnEvent, fence)
        event.synchronize()

    def current(self) -> int:
        return current_stream(self._device.index)

    def mark(self) -> DeviceFence | None:
        event = self._event()
        event.record()
        return DeviceFence(event)

    def launch(
        self,
        kind: TransferType,
        fence: Fence | None,
        copy: Callable[[], None],
        digest: Callable[[], None] | None = None,
        ahead: Ahead | None = None,
    ) -> InFlightCopy:
        use_device(self._device)
        stream = self._copies[kind]
        try:
            events = self._pool.take()
            with draining(stream):
                if fence is not None:
                    stream.wait_event(fence)
                events.start.record()
                if ahead is not None:
                    self._launch_ahead(kind, fence, ahead, events.arrived)
                    stream.wait_event(events.arrived)
                copy()
                events.end.record()
                if digest is not None:
                    read = events.end if kind is TransferType.CPU_TO_GPU else fence
                    self._launch_digest(kind, read, digest, events.digested)
        except RuntimeError as error:
            raise TransferFailed("a copy could not be launched") from error
        return CudaInFlightCopy(self._device, events, digest is not None, self._pool)

    def _event(self, timing: bool = False) -> OwnEvent:
        return OwnEvent(self._device, self._context, timing)

    def _launch_ahead(
        self, kind: TransferType, fence: Fence | None, ahead: Ahead, end: OwnEvent
    ) -> None:
        key = kind, ahead.lane
        if key not in self._lanes:
            urgent = kind is TransferType.CPU_TO_GPU
            self._lanes[key] = own_stream(self._device, urgent=urgent)
        stream = self._lanes[key]
        with draining(stream):
            if fence is not None:
                stream.wait_event(fence)
            ahead.work()
            end.record()

    def _launch_digest(
        self, kind: TransferType, fence: Fence | None, digest: Callable[[], None], end: OwnEvent
    ) -> None:
        stream = self._digests[kind]
        with draining(stream):
            if fence is not None:
                stream.wait_event(fence)
            digest()
            end.record()


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
