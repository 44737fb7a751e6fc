"""Copies blocks on a thread of its own, loads before stores, and reports the results.

The engine's thread submits jobs and polls for results; it never waits for a store. The executor
cuts jobs into chunks, so that a load waits for at most one chunk of a store. On a device, several
chunks of each direction are in flight at a time and may end in any order. Synchronous loads are
copied layer by layer instead (``layer_loads``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvconnect import threads
from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier
from kvconnect.errors import TransferFailed, contained
from kvconnect.offload.chunk_copy import ChunkCopier, ChunkCopy, ChunkResult
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.layer_loads import SyncLoad, SyncLoads
from kvconnect.offload.messages import FailedBlock, GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.offload.streams import Fence, Streams
from kvconnect.types import FailureCause, TransferType

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20  # takes a few milliseconds: the longest a load waits for a store
MAX_IN_FLIGHT = 4
"""Chunks of one direction in flight at a time: the next one is queued before one ends."""

_POLL_S = 0.0005  # shorter than a chunk takes, long enough to spare the GIL
_JOIN_TIMEOUT_S = 5.0


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
    fence: Fence
    expires: float
    chunks: deque[GroupBlocks]  # not launched yet
    sync: SyncLoad | None  # progress that the engine's thread follows
    failures: list[FailedBlock] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    queued: bool = True
    in_flight: int = 0
    ended: Callable[[FinishedCopy], None] | None = None

    @property
    def kind(self) -> TransferType:
        is_load = isinstance(self.job, LoadBlocks)
        return TransferType.CPU_TO_GPU if is_load else TransferType.GPU_TO_CPU


class CopyExecutor:
    """Runs store and load jobs of one worker.

    ``submit``, ``poll``, ``close`` and ``sync`` are for the engine's thread; the copy thread is
    started here and ended by ``close``. A copy that raises ends as a failed job, never as a dead
    thread. Past a job's deadline no further chunk of it is copied, and what is left has failed.
    Stores chunk at most ``store_rate`` bytes per second; 0: as many as they can.
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
        self.sync = SyncLoads(streams)
        self._copier = ChunkCopier(copier, store, geometry, streams)
        self._geometry = geometry
        self._clock = clock
        self._rate_limiter = RateLimiter(store_rate, clock)
        self._wake = threading.Condition()
        self._loads: deque[_Task] = deque()
        self._stores: deque[_Task] = deque()
        self._in_flight: list[tuple[_Task, ChunkCopy]] = []
        self._done: deque[FinishedCopy] = deque()
        self._closed = False
        kind = threads.ThreadKind.COPY
        self._thread = threads.make(
            kind, "kvconnect-copy", self._loop, again=True, stopped=lambda: self._closed
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CopyExecutor {len(self._loads)} loads, {len(self._stores)} stores queued>"

    def fence(self) -> Fence:
        """Return a fence behind the device's work so far, for jobs to be submitted."""
        return self._copier.fence()

    def submit(
        self,
        job: StoreBlocks | LoadBlocks,
        fence: Fence,
        ended: Callable[[FinishedCopy], None] | None = None,
    ) -> None:
        """Queue a job that must come after ``fence``; does not block.

        The copy thread calls ``ended`` as soon as the job can be polled, for callers that
        cannot wait until their next poll. It must be quick and not raise.
        """
        sync = self._sync_load(job)
        chunks = deque(part for part in job.parts if part.slots)
        if sync is None:
            chunks = deque(_chunks(job.parts, self._copier))
        task = _Task(job, fence, self._clock() + job.deadline_s, chunks, sync, ended=ended)
        with self._wake:
            (self._loads if isinstance(job, LoadBlocks) else self._stores).append(task)
            self._wake.notify()

    def poll(self) -> list[FinishedCopy]:
        """Return jobs that ended since the last call; each exactly once."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def _sync_load(self, job: StoreBlocks | LoadBlocks) -> SyncLoad | None:
        """Return the progress of a synchronous load, None for other jobs."""
        if not isinstance(job, LoadBlocks) or not job.sync:
            return None
        groups = self._geometry.groups
        runs = {p.group: len(groups[p.group].segments) for p in job.parts if p.slots}
        sync = SyncLoad(job.job, runs)
        self.sync.add(sync)
        return sync

    def close(self) -> None:
        """Stop after the chunks in progress; jobs still queued are dropped. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _loop(self) -> None:
        while self._await_work():
            self._collect()
            self._launch_next()
        for _, chunk in self._in_flight:  # the memory must outlast them
            with suppress(TransferFailed):
                chunk.in_flight.wait()

    def _await_work(self) -> bool:
        """Block until a chunk can be launched or may have ended; return False once closed."""
        with self._wake:
            patience = (
                _POLL_S if self._in_flight else self._rate_limiter.delay() if self._stores else None
            )
            self._wake.wait_for(lambda: self._closed or self._next() is not None, patience)
            return not self._closed

    def _next(self) -> deque[_Task] | None:
        """Return the queue whose first job may launch a chunk now, if any."""
        loads = sum(isinstance(task.job, LoadBlocks) for task, _ in self._in_flight)
        if self._loads and loads < MAX_IN_FLIGHT:
            return self._loads
        if (
            self._stores
            and len(self._in_flight) - loads < MAX_IN_FLIGHT
            and not self._rate_limiter.delay()
        ):
            return self._stores
        return None

    def _launch_next(self) -> None:
        """Launch the next chunk."""
        queue = self._next()
        if queue is None:
            return
        task = queue[0]
        if task.chunks:
            part = task.chunks.popleft()
            if self._clock() >= task.expires:
                _fail(task, part, 0, FailureCause.DEADLINE)
            else:
                self._launch(task, part)
        self._finish_if_done(task)

    def _launch(self, task: _Task, part: GroupBlocks) -> None:
        chunk = None
        with contained(partial(_log_error, task)):
            chunk = self._copier.start(task.kind, task.fence, part, task.sync)
        if chunk is None:
            _fail(task, part, 0, FailureCause.COPY)
            return
        task.in_flight += 1
        self._in_flight.append((task, chunk))
        if task.kind is TransferType.GPU_TO_CPU:
            self._rate_limiter.consume(len(part.slots) * self._copier.block_bytes(part))

    def _collect(self) -> None:
        """Take the results of the chunks that have ended."""
        for entry in tuple(self._in_flight):
            task, chunk = entry
            result = self._poll_chunk(task, chunk)
            if result is None:
                continue
            self._in_flight.remove(entry)
            task.in_flight -= 1
            task.seconds += result.seconds
            task.nbytes += result.good * self._copier.block_bytes(chunk.part)
            if result.cause is not None:
                _fail(task, chunk.part, result.good, result.cause)
            self._finish_if_done(task)

    def _poll_chunk(self, task: _Task, chunk: ChunkCopy) -> ChunkResult | None:
        with contained(partial(_log_error, task)):
            return self._copier.poll(chunk)
        return ChunkResult(0, FailureCause.COPY, 0.0)

    def _finish_if_done(self, task: _Task) -> None:
        """Take a job without more chunks from its queue; report it when none is in flight."""
        if task.queued and not task.chunks:
            with self._wake:
                (self._loads if isinstance(task.job, LoadBlocks) else self._stores).remove(task)
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


def _chunks(parts: tuple[GroupBlocks, ...], copier: ChunkCopier) -> Iterator[GroupBlocks]:
    for part in parts:
        size = max(1, CHUNK_BYTES // copier.block_bytes(part))
        for start in range(0, len(part.slots), size):
            end = start + size
            yield GroupBlocks(part.group, part.block_ids[start:end], part.slots[start:end])


def _log_error(task: _Task, error: Exception) -> None:
    text = "copy of job %d failed; its blocks are recomputed"
    logger.error(text, task.job.job, exc_info=error)


def _fail(task: _Task, part: GroupBlocks, good: int, cause: FailureCause) -> None:
    """Record that a chunk failed after its ``good`` first blocks; drop the rest of its job."""
    # A broken copy leaves its whole chunk unknown; other causes name one block.
    known = len(part.slots) if cause is FailureCause.COPY else good + 1
    task.failures.extend(_failures(part, good, known, cause))
    task.failures.extend(_failures(part, known, len(part.slots), FailureCause.SKIPPED))
    while task.chunks:
        rest = task.chunks.popleft()
        task.failures.extend(_failures(rest, 0, len(rest.slots), FailureCause.SKIPPED))


def _failures(
    part: GroupBlocks, start: int, end: int, cause: FailureCause
) -> Iterator[FailedBlock]:
    for number in range(start, end):
        yield FailedBlock(part.group, part.block_ids[number], part.slots[number], cause)


class RateLimiter:
    """Limits stores to ``rate`` bytes per second; 0: no limit. For one thread.

    Unused bytes are not saved up: after a pause there is no burst over the rate.
    """

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._free_at = 0.0

    def delay(self) -> float:
        """Return the seconds until the next copy may start."""
        return max(0.0, self._free_at - self._clock()) if self._rate else 0.0

    def consume(self, nbytes: int) -> None:
        """Record a copy of ``nbytes`` that starts now."""
        if self._rate:
            self._free_at = max(self._free_at, self._clock()) + nbytes / self._rate
