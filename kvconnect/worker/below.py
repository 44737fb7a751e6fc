"""A worker's tiers below host memory: blocks between host slots, a disk and a remote store.

The engine's thread submits jobs and polls for answers; it never waits for a disk or a server.
Stores block the thread that calls them, so jobs run on threads of their own, cut into batches;
what requests wait for has threads that what is written down cannot take.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from kvconnect.geometry import Geometry
from kvconnect.plan.instructions import Answer, Fetch, Seek, Spill
from kvconnect.plan.keys import group_of
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.store import Store
from kvconnect.store.host import HostStore
from kvconnect.types import Tier
from kvconnect.worker.stack import BATCH_BYTES, READERS, WRITERS, Stack

logger = logging.getLogger(__name__)

Task = Seek | Fetch | Spill


@dataclass(eq=False)
class _Running:
    task: Task
    expires: float
    found: bytearray
    batches: int  # that have not ended
    lock: threading.Lock = field(default_factory=threading.Lock)


class LowerTiers:
    """Owned by the worker's main thread. ``stores`` are asked in order, the fastest first; they
    are closed with this object. A call that raises finds nothing; the worker lives. The worker of
    an engine that ``speaks`` says for all how its tiers are.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        host: HostStore,
        geometry: Geometry,
        speaks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = Stack(stores, host, speaks)
        self._geometry = geometry
        largest = max(group.block_bytes for group in geometry.groups)
        self._batch = max(1, BATCH_BYTES // largest)  # blocks
        self._clock = clock
        self._readers = ThreadPoolExecutor(READERS, "kvconnect-fetch")
        self._writers = ThreadPoolExecutor(WRITERS, "kvconnect-spill")
        self._answers: deque[Answer] = deque()
        self._ended = threading.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<LowerTiers {self._stack}>"

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue jobs; does not block."""
        for task in tasks:
            pool = self._writers if isinstance(task, Spill) else self._readers
            batches = list(_batches(task, self._batch))
            deadline = 0.0 if isinstance(task, Seek) else task.deadline_s
            expires = self._clock() + deadline
            running = _Running(task, expires, bytearray(len(task.keys)), len(batches))
            for batch in batches:
                future = pool.submit(self._do, running, batch)
                future.add_done_callback(partial(self._end, running, batch))

    def poll(self) -> list[Answer]:
        """Return answers since the last call; each exactly once."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def wait(self, timeout_s: float) -> None:
        """Block until there is an answer to poll, ``timeout_s`` at most."""
        if not self._answers:
            self._ended.wait(timeout_s)
        self._ended.clear()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the stores recorded since the last call, and how they are if that is new."""
        return self._stack.take_stats()

    def close(self) -> None:
        """Drop what is queued, wait for the calls under way, close the stores. Idempotent."""
        self._closed = True
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()

    def _end(self, running: _Running, batch: tuple[int, int], future: Future[bytes]) -> None:
        """A batch of a job ended; answer if it was the last."""
        if future.cancelled():
            return
        start, end = batch
        error = future.exception()
        if error is not None:  # whatever a store raises is a miss
            what = "a tier below host memory failed; its blocks are recomputed"
            logger.error(what, exc_info=error)
        with running.lock:
            running.found[start:end] = bytes(end - start) if error else future.result()
            running.batches -= 1
            last = not running.batches
        if last:
            self._answers.append(Answer(running.task.job, bytes(running.found)))
            self._ended.set()

    def _do(self, running: _Running, batch: tuple[int, int]) -> bytes:
        start, end = batch
        task, keys = running.task, running.task.keys[start:end]
        sizes = [self._block_bytes(key) for key in keys]
        if isinstance(task, Seek):
            return self._stack.seek(keys, sizes)
        if self._closed or self._clock() >= running.expires:
            return bytes(len(keys))
        work = self._stack.fetch if isinstance(task, Fetch) else self._stack.spill
        return work(keys, task.slots[start:end], sizes)

    def _block_bytes(self, key: bytes) -> int:
        return self._geometry.groups[group_of(key)].block_bytes


def _batches(task: Task, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of what each call to a store is about: at most so many blocks, but
    all of a lookup."""
    step = len(task.keys) if isinstance(task, Seek) else blocks
    yield from pairwise([*range(0, len(task.keys), step), len(task.keys)])
