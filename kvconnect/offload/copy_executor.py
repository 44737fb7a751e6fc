"""Copies blocks on a thread of its own, loads before stores, and reports what became of them.

The engine's thread submits jobs and polls for results; it never waits for a store. Jobs are cut
into chunks, so that a load waits for at most one chunk of a store. On a device several chunks of
each direction are on their way at a time, and each is taken in when it lands, in any order.
Synchronous loads are not cut by blocks, but come layer by layer (``layers``).
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
from kvconnect.offload.chunk_copy import ChunkCopier, ChunkResult, Move
from kvconnect.offload.host_arena import HostStore
from kvconnect.offload.layer_loads import SyncLoad, SyncLoads
from kvconnect.offload.messages import FailedBlock, GroupBlocks, JobReport, LoadBlocks, StoreBlocks
from kvconnect.offload.streams import Fence, Streams
from kvconnect.types import FailureCause, TransferType

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20  # a few milliseconds: what a load may wait for a store
FLIGHTS = 4
"""Chunks of one direction on their way at a time, so that the next is there when one ends."""

_POLL_S = 0.0005  # shorter than the chunks on their way take, long enough to leave the GIL alone
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class FinishedCopy:
    """A job that ended, and what it moved in ``seconds`` of copying (waits left out)."""

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
    sync: SyncLoad | None  # the engine's thread follows it
    failures: list[FailedBlock] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    queued: bool = True
    flying: int = 0  # chunks on their way
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
    Stores move at most ``store_rate`` bytes per second; 0: as many as they can.
    """

    def __init__(
        self,
        copier: Copier,
        store: HostStore,
        geometry: Geometry,
        streams: Streams,
        clock: Callable[[], float] = time.monotonic,
        store_rate: int = 0,
    ) -> None:
        self.sync = SyncLoads(streams)
        self._mover = ChunkCopier(copier, store, geometry, streams)
        self._geometry = geometry
        self._clock = clock
        self._pace = RateLimiter(store_rate, clock)
        self._wake = threading.Condition()
        self._loads: deque[_Task] = deque()
        self._stores: deque[_Task] = deque()
        self._flying: list[tuple[_Task, Move]] = []
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
        """Mark the device's work so far, for jobs submitted with it."""
        return self._mover.fence()

    def submit(
        self,
        job: StoreBlocks | LoadBlocks,
        fence: Fence,
        ended: Callable[[FinishedCopy], None] | None = None,
    ) -> None:
        """Queue a job that must come after ``fence``; does not block.

        ``ended`` is called by the copy thread as soon as the job can be polled, for those who
        cannot wait until they poll next. It must be quick and not raise.
        """
        sync = self._followed(job)
        chunks = deque(part for part in job.parts if part.slots)
        if sync is None:
            chunks = deque(_chunks(job.parts, self._mover))
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

    def _followed(self, job: StoreBlocks | LoadBlocks) -> SyncLoad | None:
        """Return what the engine's thread follows of a synchronous load, None for other jobs."""
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
            self._take_in()
            self._advance()
        for _, move in self._flying:  # the memory must outlast them
            with suppress(TransferFailed):
                move.flight.wait()

    def _await_work(self) -> bool:
        """Block until a chunk can be launched or may have landed; return False once closed."""
        with self._wake:
            patience = _POLL_S if self._flying else self._pace.delay() if self._stores else None
            self._wake.wait_for(lambda: self._closed or self._next() is not None, patience)
            return not self._closed

    def _next(self) -> deque[_Task] | None:
        """Return the queue whose first job may launch a chunk now, if any."""
        loads = sum(isinstance(task.job, LoadBlocks) for task, _ in self._flying)
        if self._loads and loads < FLIGHTS:
            return self._loads
        if self._stores and len(self._flying) - loads < FLIGHTS and not self._pace.delay():
            return self._stores
        return None

    def _advance(self) -> None:
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
        self._settle(task)

    def _launch(self, task: _Task, part: GroupBlocks) -> None:
        move = None
        with contained(partial(_log_error, task)):
            move = self._mover.start(task.kind, task.fence, part, task.sync)
        if move is None:
            _fail(task, part, 0, FailureCause.COPY)
            return
        task.flying += 1
        self._flying.append((task, move))
        if task.kind is TransferType.GPU_TO_CPU:
            self._pace.spend(len(part.slots) * self._mover.block_bytes(part))

    def _take_in(self) -> None:
        """Note what became of the chunks that have landed, in whatever order they did."""
        for entry in tuple(self._flying):
            task, move = entry
            landed = self._landing(task, move)
            if landed is None:
                continue
            self._flying.remove(entry)
            task.flying -= 1
            task.seconds += landed.seconds
            task.nbytes += landed.good * self._mover.block_bytes(move.part)
            if landed.cause is not None:
                _fail(task, move.part, landed.good, landed.cause)
            self._settle(task)

    def _landing(self, task: _Task, move: Move) -> ChunkResult | None:
        with contained(partial(_log_error, task)):
            return self._mover.land(move)
        return ChunkResult(0, FailureCause.COPY, 0.0)

    def _settle(self, task: _Task) -> None:
        """Take a job without more chunks from its queue; report it when none is on its way."""
        if task.queued and not task.chunks:
            with self._wake:
                (self._loads if isinstance(task.job, LoadBlocks) else self._stores).remove(task)
            task.queued = False
        if task.queued or task.flying:
            return
        report = JobReport(task.job.job, tuple(task.failures), seconds=task.seconds)
        done = FinishedCopy(task.job, report, task.kind, task.nbytes, task.seconds)
        self._done.append(done)
        if task.sync is not None:
            task.sync.end()
        if task.ended is not None:
            task.ended(done)


def _chunks(parts: tuple[GroupBlocks, ...], mover: ChunkCopier) -> Iterator[GroupBlocks]:
    for part in parts:
        size = max(1, CHUNK_BYTES // mover.block_bytes(part))
        for start in range(0, len(part.slots), size):
            end = start + size
            yield GroupBlocks(part.group, part.block_ids[start:end], part.slots[start:end])


def _log_error(task: _Task, error: Exception) -> None:
    text = "copy of job %d failed; its blocks are recomputed"
    logger.error(text, task.job.job, exc_info=error)


def _fail(task: _Task, part: GroupBlocks, good: int, cause: FailureCause) -> None:
    """Note that a chunk stopped behind its ``good`` first blocks, and launch no more of its job."""
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


# A bound on the bytes per second of stores, where they would take bandwidth that others need.


class RateLimiter:
    """Says when the next bytes may go. ``rate`` in bytes per second; 0: always. For one thread.

    What was not used is not saved up: after a pause there is no burst over the rate.
    """

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._free_at = 0.0

    def delay(self) -> float:
        """Return the seconds until bytes may go, 0 if they may now."""
        return max(0.0, self._free_at - self._clock()) if self._rate else 0.0

    def spend(self, nbytes: int) -> None:
        """Note that ``nbytes`` go now."""
        if self._rate:
            self._free_at = max(self._free_at, self._clock()) + nbytes / self._rate
