"""Copies blocks on a thread of its own, loads before stores, and reports what became of them.

The engine's thread submits jobs and polls for results; it never waits for a store. Jobs are cut
into chunks, so that a load waits for at most one chunk of a store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvconnect.copy.base import Copier
from kvconnect.errors import Corrupt, TransferFailed
from kvconnect.geometry import Geometry
from kvconnect.plan.instructions import Failure, Load, Part, Report, Store
from kvconnect.store.host import HostStore
from kvconnect.types import FailureCause, JobId, TransferType
from kvconnect.worker.streams import Fence, Streams

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20  # a few milliseconds: what a load may wait for a store
_JOIN_TIMEOUT_S = 5.0
_STUCK_S = 120.0  # no memory copy of one step takes this long on a device that is alive


@dataclass(frozen=True)
class Done:
    """A job that ended, and what it moved in ``seconds`` of copying (waits left out)."""

    job: Store | Load
    report: Report
    kind: TransferType
    nbytes: int
    seconds: float


@dataclass
class _Task:
    job: Store | Load
    fence: Fence
    expires: float
    chunks: Iterator[Part]
    finished: threading.Event = field(default_factory=threading.Event)
    failures: list[Failure] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def kind(self) -> TransferType:
        is_load = isinstance(self.job, Load)
        return TransferType.CPU_TO_GPU if is_load else TransferType.GPU_TO_CPU


class CopyExecutor:
    """Runs store and load jobs of one worker.

    ``submit``, ``poll``, ``wait`` and ``close`` are for the engine's thread; the copy thread is
    started here and ended by ``close``. A copy that raises ends as a failed job, never as a dead
    thread. Past a job's deadline no further chunk of it is copied, and what is left has failed.
    """

    def __init__(
        self,
        copier: Copier,
        store: HostStore,
        geometry: Geometry,
        streams: Streams,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copier = copier
        self._store = store
        self._geometry = geometry
        self._streams = streams
        self._clock = clock
        self._wake = threading.Condition()
        self._loads: deque[_Task] = deque()
        self._stores: deque[_Task] = deque()
        self._done: deque[Done] = deque()
        self._waited: dict[JobId, threading.Event] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="kvconnect-copy", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CopyExecutor {len(self._loads)} loads, {len(self._stores)} stores queued>"

    def fence(self) -> Fence:
        """Mark the device's work so far, for jobs submitted with it."""
        return self._streams.fence()

    def submit(self, job: Store | Load, fence: Fence) -> None:
        """Queue a job that must come after ``fence``; does not block."""
        chunks = self._chunks(job.parts)
        task = _Task(job, fence, self._clock() + job.deadline_s, chunks)
        with self._wake:
            if isinstance(job, Load):
                self._loads.append(task)
                if job.sync:
                    self._waited[job.job] = task.finished
            else:
                self._stores.append(task)
            self._wake.notify()

    def wait_sync_loads(self) -> float:
        """Block until the synchronous loads submitted so far have ended; return the seconds.

        Raises:
            TransferFailed: the copy thread is stuck in one. Its bytes may still land, so the
                step that needs them cannot go on.
        """
        if not self._waited:
            return 0.0
        started = time.perf_counter()
        for job, finished in self._waited.items():
            if not finished.wait(_STUCK_S):
                raise TransferFailed(f"synchronous load {job} did not end within {_STUCK_S:.0f} s")
        self._waited.clear()
        return time.perf_counter() - started

    def poll(self) -> list[Done]:
        """Return jobs that ended since the last call; each exactly once."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Stop after the chunk in progress; jobs still queued are dropped. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._loads or self._stores or self._closed)
                if self._closed:
                    return
                queue = self._loads or self._stores
                task = queue[0]
            if not self._step(task):
                with self._wake:
                    queue.popleft()
                report = Report(task.job.job, tuple(task.failures))
                self._done.append(Done(task.job, report, task.kind, task.nbytes, task.seconds))
                task.finished.set()

    def _step(self, task: _Task) -> bool:
        """Copy one chunk; return whether the job has more."""
        part = next(task.chunks, None)
        if part is None:
            return False
        expired = self._clock() >= task.expires
        good, cause = (0, FailureCause.DEADLINE) if expired else self._copy(task, part)
        task.nbytes += good * self._geometry.groups[part.group].block_bytes
        if cause is None:
            return True
        # A broken copy leaves its whole chunk unknown; other causes name one block.
        known = len(part.slots) if cause is FailureCause.COPY else good + 1
        task.failures.extend(_failures(part, good, known, cause))
        task.failures.extend(_failures(part, known, len(part.slots), FailureCause.SKIPPED))
        for rest in task.chunks:
            task.failures.extend(_failures(rest, 0, len(rest.slots), FailureCause.SKIPPED))
        return False

    def _copy(self, task: _Task, part: Part) -> tuple[int, FailureCause | None]:
        """Copy a chunk's leading good blocks; return how many, and what stopped it."""
        is_load = isinstance(task.job, Load)
        move = self._copier.load if is_load else self._copier.store
        try:
            good, cause = self._loadable(part) if is_load else (len(part.slots), None)
            blocks, slots = part.block_ids[:good], part.slots[:good]
            task.seconds += self._streams.run(
                task.kind, task.fence, lambda: move(part.group, blocks, slots)
            )
            if not is_load:
                self._seal(part)
        except Exception:  # boundary: whatever a copy raises is a failed job
            logger.exception("copy of job %d failed; its blocks are recomputed", task.job.job)
            return 0, FailureCause.COPY
        return good, cause

    def _loadable(self, part: Part) -> tuple[int, FailureCause | None]:
        """Return how many leading slots hold what was stored, and what is wrong with the next."""
        nbytes = self._geometry.groups[part.group].block_bytes
        for number, slot in enumerate(part.slots):
            if slot < 0:
                return number, FailureCause.MISSING
            try:
                self._store.verify(slot, nbytes)
            except Corrupt as error:
                logger.error("%s; the block is recomputed", error)
                return number, FailureCause.DIGEST
        return len(part.slots), None

    def _seal(self, part: Part) -> None:
        nbytes = self._geometry.groups[part.group].block_bytes
        for slot in part.slots:
            self._store.seal(slot, nbytes)

    def _chunks(self, parts: tuple[Part, ...]) -> Iterator[Part]:
        for part in parts:
            size = max(1, CHUNK_BYTES // self._geometry.groups[part.group].block_bytes)
            for start in range(0, len(part.slots), size):
                end = start + size
                yield Part(part.group, part.block_ids[start:end], part.slots[start:end])


def _failures(part: Part, start: int, end: int, cause: FailureCause) -> Iterator[Failure]:
    for number in range(start, end):
        yield Failure(part.group, part.block_ids[number], part.slots[number], cause)
