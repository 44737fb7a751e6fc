"""CUDA as torch shows it, over queues: what is launched happens later, in any order that the
streams and events allow.

Every wait and every record of an event has a *site*: the functions of the package that led to it.
A site that is ``disabled`` does nothing, as if the line were not there; that is how a test proves
that it would notice.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvconnect
from kvconnect import threads
from kvconnect.copy.driver import Driver, Taken
from kvconnect.errors import TransferFailed
from tests.emulated.world import World
from tests.fakes import torch_streams
from tests.kernels import launch_on_host

CUDA = torch.device("cuda:0")
PACKAGE = str(Path(kvconnect.__file__).parent)
SITE_DEPTH = 4

Site = tuple[str, ...]
"""What is done, and the lines of the package that led to it, the innermost first."""


class Mark:
    """One record of an event: done when its stream has passed it."""

    def __init__(self) -> None:
        self.done = False


class EmulatedStream:
    """A queue of work. ``device`` as torch has it."""

    device = CUDA
    device_index, device_type = 0, 1

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self.stream_id = self
        self._queue: deque[list[Callable[[], None]] | Mark] = deque()
        self._waits: dict[int, Mark] = {}  # by id of the entry that must come after it
        self.cuda_stream = len(emulator.world.machines) + 1
        emulator.world.machines.append(self)

    def put(self, parts: list[Callable[[], None]]) -> None:
        """Launch work whose parts happen in any order."""
        self._queue.append(parts)
        self._emulator.world.pause()

    def ready(self) -> bool:
        return bool(self._queue) and self._passed(self._queue[0])

    def step(self) -> None:
        head = self._queue[0]
        if isinstance(head, Mark):
            self._queue.popleft()
            self._waits.pop(id(head), None)
            head.done = True
        elif head:
            head.pop(self._emulator.world.random.randrange(len(head)))()
        else:
            self._queue.popleft()

    def record(self) -> Mark:
        mark = Mark()
        self._queue.append(mark)
        return mark

    def wait_event(self, event: EmulatedEvent) -> None:
        self._emulator.world.pause()
        mark = event.mark
        if mark is not None and not self._emulator.is_off("wait_event"):
            gate = self.record()  # one of our own, which may pass when the other is done
            self._waits[id(gate)] = mark

    def wait_stream(self, other: EmulatedStream) -> None:
        if self._emulator.is_off("wait_stream"):
            return
        gate, mark = self.record(), other.record()
        self._waits[id(gate)] = mark

    def synchronize(self) -> None:
        if not self._emulator.is_off("synchronize stream"):
            mark = self.record()
            self._emulator.world.block(lambda: mark.done)

    def query(self) -> bool:
        """Whether nothing is on its way."""
        return not self._queue

    def _passed(self, head: object) -> bool:
        waited = self._waits.get(id(head))
        return waited is None or waited.done


class EmulatedEvent:
    """``torch.cuda.Event``, and KVConnect's own."""

    device = CUDA

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self.mark: Mark | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._emulator.world.pause()
        self.mark = None
        if not self._emulator.is_off("record"):
            self.mark = (stream or self._emulator.current_stream()).record()

    def query(self) -> bool:
        self._emulator.world.pause()
        return self.mark is None or self.mark.done or self._emulator.is_off("query")

    def synchronize(self) -> None:
        mark = self.mark
        if mark is not None and not self._emulator.is_off("synchronize"):
            self._emulator.world.block(lambda: mark.done)

    def seconds_to(self, end: EmulatedEvent) -> float:
        return 0.001


class Emulator:
    """One process with a device. ``disabled``: the sites that do nothing; ``sites``: all that were
    passed."""

    def __init__(self, world: World, disabled: frozenset[Site] = frozenset()) -> None:
        self.world = world
        self.disabled = disabled
        self.sites: set[Site] = set()
        self.streams: list[EmulatedStream] = []
        self.default = self.stream()

    def stream(self, *_: object, **__: object) -> EmulatedStream:
        """Make a stream."""
        self.streams.append(EmulatedStream(self))
        return self.streams[-1]

    def event(self, *_: object, **__: object) -> EmulatedEvent:
        """Make an event."""
        return EmulatedEvent(self)

    def current_stream(self) -> EmulatedStream:
        """Return the calling thread's."""
        task = self.world.current
        found = task.local.get("stream") if task else None
        return found or self.default

    @contextmanager
    def on(self, stream: EmulatedStream) -> Iterator[None]:
        """Make a stream the calling thread's within the block."""
        before = self.current_stream()
        self.change(stream)
        try:
            yield
        finally:
            self.change(before)

    def change(self, stream: EmulatedStream) -> None:
        """Make a stream the calling thread's, from now on."""
        task = self.world.current
        assert task is not None
        task.local["stream"] = stream

    def launch(self, *parts: Callable[[], None]) -> None:
        """Put work on the current stream."""
        self.current_stream().put(list(parts))

    def is_off(self, what: str) -> bool:
        """Note a site; say whether it is to do nothing."""
        site = (what, *_callers())
        if len(site) == 1:
            return False  # a test's own
        self.sites.add(site)
        return site in self.disabled

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the places of torch, and of what makes streams and threads."""
        # Records take time. Not logging.disable: loggers remember it beyond the test.
        monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda *_: False)
        monkeypatch.setattr(threads, "threading", self.world.threading)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr("kvconnect.offload.streams.OwnEvent", self.event)
        monkeypatch.setattr("kvconnect.offload.streams.CudaContext", lambda _: None)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        torch_streams.stand_in(monkeypatch, self.current_stream, self.change)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        for module in ("offload.streams", "disaggregation.staging", "engines.sglang.layerwise"):
            monkeypatch.setattr(f"kvconnect.{module}.own_stream", self.stream)


def _callers() -> list[str]:
    """Return the nearest functions of the package, the innermost first."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < SITE_DEPTH:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from 3.11 on
            found.append(f"{path[len(PACKAGE) + 1 :]}:{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return found


class EmulatedDriver(Driver):
    """Copies and kernels on the emulated streams, in the host's memory. This share of the batches,
    ``breaks``, breaks off half-way."""

    name = "emulated"
    kernels_unavailable_reason = None
    has_batch = True

    def __init__(self, emulator: Emulator, breaks: float = 0.0) -> None:
        self._emulator = emulator
        self._breaks = breaks
        self._kept: list[object] = []  # what is launched refers to it by address

    def launch(self, kernel: str, grid: int, threads: int, arguments: Sequence[int]) -> None:
        values = [ctypes.c_longlong(argument) for argument in arguments]
        self._emulator.launch(lambda: launch_on_host(kernel, 1, min(threads, 32), values))

    def copy_batch(
        self, targets: array[int], sources: array[int], sizes: array[int], early: bool
    ) -> None:
        triples = zip(targets, sources, sizes, strict=True)
        parts = [self._part(*triple, early) for triple in triples]
        if self._emulator.world.random.random() >= self._breaks:
            self._emulator.launch(*parts)
            return
        self._emulator.launch(*parts[: 1 + len(parts) // 2])
        raise TransferFailed("a batch broke off")

    def _part(self, target: int, source: int, size: int, early: bool) -> Callable[[], None]:
        if early and self._emulator.world.random.random() < 0.5:
            content = ctypes.string_at(source, size)
            return lambda: ctypes.memmove(target, content, size)  # type: ignore[return-value]
        return lambda: ctypes.memmove(target, source, size)  # type: ignore[return-value]

    def upload(self, numbers: array[int]) -> torch.Tensor:
        target = torch.zeros(len(numbers), dtype=torch.int64)
        content = torch.tensor(numbers, dtype=torch.int64)
        self._kept.append(target)
        self._emulator.launch(lambda: target.copy_(content))  # type: ignore[arg-type,return-value]
        return target

    def device_memory(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._kept.append(memory)
        return memory

    host_memory = device_memory

    def synchronize(self) -> None:
        done = self._emulator.event()
        done.record()
        done.synchronize()

    def seconds(self, pieces: Sequence[Callable[[], None]]) -> Taken:
        raise NotImplementedError


class OnDevice:
    """A CPU tensor that says it lies on a CUDA device."""

    device = CUDA
    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)
