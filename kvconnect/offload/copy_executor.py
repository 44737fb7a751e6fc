"""Copies blocks on a thread of its own, loads before stores, and reports the results.

The engine's thread submits jobs and polls for results; it never waits for a store. The executor
copies jobs in chunks, which ``copy_schedule`` chooses. On a device, several chunks of each
direction are in flight at a time. A second thread per direction waits for them, because only a
thread that does nothing else can wait for the device without polling it. Synchronous loads are
copied layer by layer instead (``layer_loads``).

A store is launched only when the device has passed its fence. A driver's queue is bounded, and what
waits in it behind a forward would block the copy thread, and with it the loads that come next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from kvconnect import threads
from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier
from kvconnect.errors import TransferFailed, contained
from kvconnect.offload.chunk_copy import DIRECTIONS, ChunkCopier, ChunkCopy
from kvconnect.offload.copy_schedule import Chunks, CopySchedule
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.layer_loads import SyncLoad, SyncLoads
from kvconnect.offload.messages import FailedBlock, GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.offload.streams import Fence, Streams
from kvconnect.types import FailureCause, TransferType

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0
_CHECK_S = 1.0  # between looks whether the copy thread lives, which may end by an error


@dataclass(frozen=True)
class FinishedCopy:
    """A finished job with the bytes it copied. ``seconds``: time of copying, without waits."""

    job: StoreBlocks | LoadBlocks
    report: JobReport
    kind: TransferType
    nbytes: int
    seconds: float


@dataclass(eq=False)
class _Task:
    job: StoreBlocks | LoadBlocks
    fence: Fence | None  # None: nothing to wait for
    expires: float
    chunks: Chunks
    sync: SyncLoad | None  # progress that the engine's thread follows
    failures: list[FailedBlock] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    queued: bool = True
    in_flight: int = 0
    awaits_fence: bool = False
    fence_failed: bool = False  # the device follows it then, or refuses
    ended: Callable[[FinishedCopy], None] | None = None
    launched: Callable[[Fence], None] | None = None

    @property
    def kind(self) -> TransferType:
        is_load = isinstance(self.job, LoadBlocks)
        return TransferType.CPU_TO_GPU if is_load else TransferType.GPU_TO_CPU


_Launched = tuple[_Task, ChunkCopy]


class _State(Enum):
    RUNNING = auto()
    PAUSING = auto()  # chunks are in flight, but no more are launched
    PAUSED = auto()
    CLOSED = auto()


class CopyExecutor:
    """Runs store and load jobs of one worker.

    All methods and ``sync`` are for the engine's thread; the copy thread is
    started here and ended by ``close``. A copy that raises ends as a failed job, never as a dead
    thread. Past a job's deadline no further chunk of it is copied, and what is left has failed.
    Stores copy at most ``store_rate`` bytes per second; 0: as many as they can.
    """

    def __init__(
        self,
        copier: Copier,
        store: HostArena,
        geometry: Geometry,
        streams: Streams,
        clock: Callable[[], float] = time.monotonic,
        store_rate: int = 0,
    ) -> None:
        self.streams = streams
        self.sync = SyncLoads(streams)
        self._copier = ChunkCopier(copier, store, geometry, streams)
        self._clock = clock
        self._wake = threading.Condition()
        block_bytes = [group.block_bytes for group in geometry.groups]
        groups = range(len(block_bytes))
        descriptors, most_blocks = (
            {kind: [of(DIRECTIONS[kind], group) for group in groups] for kind in DIRECTIONS}
            for of in (copier.descriptors, copier.most_blocks)
        )
        self._schedule: CopySchedule[_Task] = CopySchedule(
            block_bytes, store_rate, descriptors, most_blocks
        )
        self._waiters: dict[TransferType, _Waiter] = {}
        self._in_flight: list[_Launched] = []
        self._landed: deque[_Launched] = deque()  # in flight until the copy thread takes them
        self._done: deque[FinishedCopy] = deque()
        self._state = _State.RUNNING
        kind, stopped = threads.ThreadKind.COPY, lambda: self._state is _State.CLOSED
        self._thread = threads.make(kind, "kvconnect-copy", self._loop, again=True, stopped=stopped)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CopyExecutor {self._schedule!r}, {len(self._in_flight)} chunks in flight>"

    def fence(self) -> Fence:
        """Return a fence behind the device's work so far, for jobs to be submitted."""
        return self.streams.fence()

    def submit(
        self,
        job: StoreBlocks | LoadBlocks,
        fence: Fence,
        ended: Callable[[FinishedCopy], None] | None = None,
        launched: Callable[[Fence], None] | None = None,
    ) -> None:
        """Queue a job that must come after ``fence``; does not block.

        The copy thread calls ``ended`` as soon as the job can be polled, for callers that
        cannot wait until their next poll, and ``launched`` with a fence behind a load once all of
        it is launched, unless a part has failed before. Both must be quick and not raise.
        """
        sync = _sync_load(job, self._copier.geometry)
        if sync is not None:
            self.sync.add(sync)
        chunks = Chunks(job.parts, whole=sync is not None)
        task = _Task(job, fence, self._clock() + job.deadline_s, chunks, sync)
        task.ended, task.launched = ended, launched
        with self._wake:
            self._schedule.add(task)
            self._wake.notify_all()

    def poll(self) -> list[FinishedCopy]:
        """Return jobs that ended since the last call; each exactly once."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def pause(self) -> None:
        """Wait until no chunk is in flight, and launch none until :meth:`resume`. Idempotent."""
        with self._wake:
            if self._state is _State.RUNNING:
                self._state = _State.PAUSING
            self._wake.notify_all()
            while self._state is _State.PAUSING and self._thread.is_alive():
                self._wake.wait(_CHECK_S)

    def resume(self) -> None:
        """Go on with the jobs that are queued. Idempotent."""
        with self._wake:
            if self._state is not _State.CLOSED:
                self._state = _State.RUNNING
            self._wake.notify_all()

    def close(self) -> None:
        """Stop after the chunks in progress; jobs still queued are dropped. Idempotent."""
        with self._wake:
            self._state = _State.CLOSED
            self._wake.notify_all()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _loop(self) -> None:
        while self._await_work():
            while self._landed:
                task, chunk = self._landed.popleft()
                self._land(task, chunk)
                self._finish_if_done(task)
            while self._launch_next():
                pass
        for _, chunk in self._in_flight:  # the memory must outlast them
            with suppress(TransferFailed):
                chunk.in_flight.wait()
        for waiter in self._waiters.values():
            waiter.close()

    def _await_work(self) -> bool:
        """Block until a chunk can be launched or has ended; return False once closed."""

        def is_work() -> bool:
            if self._state is _State.PAUSING and not self._in_flight:
                self._state = _State.PAUSED
                self._wake.notify_all()
            if self._state is _State.RUNNING:
                return bool(self._landed or self._schedule.next(self._clock()))
            return bool(self._landed) or self._state is _State.CLOSED

        def is_limited() -> bool:
            return self._state is _State.RUNNING and self._schedule.delay(self._clock()) is not None

        with self._wake:
            # The limit may begin to count while this waits: a store is queued within it.
            self._wake.wait_for(lambda: is_work() or is_limited())
            self._wake.wait_for(is_work, self._schedule.delay(self._clock()))
            return self._state is not _State.CLOSED

    def _launch_next(self) -> bool:
        """Launch the next chunk; return whether there was one."""
        with self._wake:
            runs = self._state is _State.RUNNING
            task = self._schedule.next(self._clock()) if runs else None
        if task is None:
            return False
        if self._await_fence(task):
            return True
        if task.chunks:
            part = self._schedule.cut(task)
            if self._clock() >= task.expires:
                _fail(task, part, 0, FailureCause.DEADLINE)
            else:
                self._launch(task, part)
        self._finish_if_done(task)
        return True

    def _await_fence(self, task: _Task) -> bool:
        """Return whether a store must wait for its fence; a waiter's thread then does."""
        is_store = task.kind is TransferType.GPU_TO_CPU
        if not is_store or task.fence is None or task.fence_failed:
            return False
        with suppress(TransferFailed):  # the waiter sees the same
            if self.streams.has_passed(task.fence):
                task.fence = None
                return False
        task.awaits_fence = True
        self._later(task.kind, partial(self._wait_for_fence, task, task.fence))
        return True

    def _wait_for_fence(self, task: _Task, fence: Fence) -> None:
        """Wait for a store's fence, on a waiter's thread."""
        task.fence_failed = True
        with contained(partial(_log_error, task)):  # the launch will fail, too
            self.streams.wait(fence)
            task.fence, task.fence_failed = None, False
        with self._wake:
            task.awaits_fence = False
            self._wake.notify_all()

    def _later(self, kind: TransferType, wait: Callable[[], None]) -> None:
        """Have a waiter's thread call ``wait``; call it here if the system has no more threads."""
        if kind not in self._waiters:
            try:
                self._waiters[kind] = _Waiter(kind)
            except RuntimeError as error:
                logger.warning("%s: copies wait for one another", error)
                wait()
                return
        self._waiters[kind].add(wait)

    def _launch(self, task: _Task, part: GroupBlocks) -> None:
        chunk, started = None, time.perf_counter()
        with contained(partial(_log_error, task)):
            launched = None if task.chunks else task.launched
            chunk = self._copier.start(task.kind, task.fence, part, task.sync, launched)
        if chunk is None:
            _fail(task, part, 0, FailureCause.COPY)
            return
        nbytes = len(part.slots) * self._copier.block_bytes(part)
        self._schedule.launched(task.kind, nbytes, self._clock())
        task.in_flight += 1
        self._in_flight.append((task, chunk))
        if chunk.in_flight.is_done:
            self._land(task, chunk)
            return
        self._schedule.submitted(task.kind, part, time.perf_counter() - started)
        self._later(task.kind, partial(self._wait, (task, chunk)))

    def _wait(self, launched: _Launched) -> None:
        """Wait for a chunk, on a waiter's thread."""
        with contained(lambda _: None):  # raised again in _land
            launched[1].in_flight.wait()
        with self._wake:
            self._landed.append(launched)
            self._wake.notify_all()  # pause() may wait, too

    def _land(self, task: _Task, chunk: ChunkCopy) -> None:
        """Take the result of a chunk that has ended."""
        good, seconds = 0, 0.0
        cause: FailureCause | None = FailureCause.COPY
        with contained(partial(_log_error, task)):
            good, cause = self._copier.finish(chunk)
            seconds = chunk.in_flight.wait()
        self._in_flight.remove((task, chunk))
        self._schedule.ended(task.kind)
        task.in_flight -= 1
        task.seconds += seconds
        nbytes = good * self._copier.block_bytes(chunk.part)
        task.nbytes += nbytes
        self._schedule.sizes[task.kind].copied(nbytes, seconds)
        if cause is not None:
            _fail(task, chunk.part, good, cause)

    def _finish_if_done(self, task: _Task) -> None:
        """Take a job without more chunks from its queue; report it when none is in flight."""
        if task.queued and not task.chunks:
            with self._wake:
                self._schedule.remove(task)
            task.queued = False
        if task.queued or task.in_flight:
            return
        report = JobReport(task.job.job, tuple(task.failures), seconds=task.seconds)
        done = FinishedCopy(task.job, report, task.kind, task.nbytes, task.seconds)
        self._done.append(done)
        if task.sync is not None:
            task.sync.end()
        if task.ended is not None:
            task.ended(done)


class _Waiter:
    """A thread that waits for the chunks of one direction, and for the fences of those to come, in
    the order of the device's work."""

    def __init__(self, kind: TransferType) -> None:
        self._waits: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        name = f"kvconnect-await-{kind.value.replace('_', '-').lower()}"
        threads.make(threads.ThreadKind.COPY, name, self._loop).start()

    def add(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` after those before it."""
        with self._changed:
            self._waits.append(wait)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the waits that it was given."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waits)
                if not self._waits:
                    return
                wait = self._waits.popleft()
            wait()


def _sync_load(job: StoreBlocks | LoadBlocks, geometry: Geometry) -> SyncLoad | None:
    """Return the progress of a synchronous load, None for other jobs."""
    if not isinstance(job, LoadBlocks) or not job.sync:
        return None
    runs = {p.group: len(geometry.groups[p.group].segments) for p in job.parts if p.slots}
    return SyncLoad(job.job, runs)


def _log_error(task: _Task, error: Exception) -> None:
    text = "copy of job %d failed; its blocks are recomputed"
    logger.error(text, task.job.job, exc_info=error)


def _fail(task: _Task, part: GroupBlocks, good: int, cause: FailureCause) -> None:
    """Record that a chunk failed after its ``good`` first blocks; drop the rest of its job."""
    # A broken copy leaves its whole chunk unknown; other causes name one block.
    known = len(part.slots) if cause is FailureCause.COPY else good + 1
    task.failures.extend(_failures(part, good, known, cause))
    task.failures.extend(_failures(part, known, len(part.slots), FailureCause.SKIPPED))
    for rest in task.chunks.rest():
        task.failures.extend(_failures(rest, 0, len(rest.slots), FailureCause.SKIPPED))


def _failures(
    part: GroupBlocks, start: int, end: int, cause: FailureCause
) -> Iterator[FailedBlock]:
    for number in range(start, end):
        yield FailedBlock(part.group, part.block_ids[number], part.slots[number], cause)
