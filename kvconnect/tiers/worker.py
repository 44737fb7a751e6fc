"""A worker's tiers below host memory: blocks between host slots, a disk and a remote store.

The engine's thread submits jobs and polls for answers; it never waits for a disk or a server. Jobs
are cut into batches, each of which goes through the tiers by itself (:class:`TieredStore`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from kvconnect.cache.keys import group_of
from kvconnect.cache.layout import Geometry
from kvconnect.offload.host_arena import HostStore
from kvconnect.offload.messages import LookupBlocks, PrefetchBlocks, TierAnswer, WriteBackBlocks
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends import Store
from kvconnect.tiers.tiered_store import BATCH_BYTES, BlockBatch, TieredStore
from kvconnect.types import Tier

Task = LookupBlocks | PrefetchBlocks | WriteBackBlocks


@dataclass(eq=False)
class _Running:
    task: Task
    found: bytearray
    batches: int  # that have not ended
    lock: threading.Lock = field(default_factory=threading.Lock)


class TierWorker:
    """Owned by the worker's main thread. ``stores`` are asked in order, the fastest first; they
    are closed with this object. A call that raises finds nothing; the worker lives. A lookup is
    answered after ``wait_s``, which is how long a request waits for it, and a tier whose call takes
    so long is left alone. The worker of an engine that ``speaks`` says for all how its tiers are.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        host: HostStore,
        geometry: Geometry,
        speaks: bool = True,
        wait_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = TieredStore(stores, host, wait_s, speaks, clock)
        self._geometry = geometry
        largest = max(group.block_bytes for group in geometry.groups)
        self._batch = max(1, BATCH_BYTES // largest)  # blocks
        self._wait_s = wait_s
        self._clock = clock
        self._answers: deque[TierAnswer] = deque()
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<LowerTiers {self._tiers}>"

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue jobs; does not block."""
        for task in tasks:
            batches = list(_batches(task, self._batch))
            deadline_s = self._wait_s if isinstance(task, LookupBlocks) else task.deadline_s
            expires = self._clock() + deadline_s
            running = _Running(task, bytearray(len(task.keys)), len(batches))
            for start, end in batches:
                keys = task.keys[start:end]
                sizes = [self._block_bytes(key) for key in keys]
                done = partial(self._end, running, start)
                if isinstance(task, LookupBlocks):
                    self._tiers.lookup(BlockBatch(keys, sizes, expires, done))
                    continue
                prefetches = isinstance(task, PrefetchBlocks)
                start_batch = self._tiers.prefetch if prefetches else self._tiers.write_back
                start_batch(BlockBatch(keys, sizes, expires, done, task.slots[start:end]))

    def poll(self) -> list[TierAnswer]:
        """Return answers since the last call; each exactly once."""
        self._tiers.drop_expired()
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
        return self._tiers.take_stats()

    def close(self) -> None:
        """Drop what is queued, wait for the calls under way unless they are late, close the
        stores. Idempotent."""
        self._tiers.close()

    def _end(self, running: _Running, start: int, found: bytes) -> None:
        """A batch of a job ended; answer if it was the last."""
        with running.lock:
            running.found[start : start + len(found)] = found
            running.batches -= 1
            last = not running.batches
        if last:
            self._answers.append(TierAnswer(running.task.job, bytes(running.found)))
            self._ended.set()

    def _block_bytes(self, key: bytes) -> int:
        return self._geometry.groups[group_of(key)].block_bytes


def _batches(task: Task, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of what each call to a store is about: at most so many blocks, but
    all of a lookup."""
    step = len(task.keys) if isinstance(task, LookupBlocks) else blocks
    yield from pairwise([*range(0, len(task.keys), step), len(task.keys)])
