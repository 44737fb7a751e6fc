"""Runs a worker's jobs of the secondary tiers.

The engine's thread submits jobs and polls for answers; it never waits for a disk or a server. Jobs
are cut into batches, and each batch goes through a :class:`TieredStore` on its own.
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
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.identity import Identity
from kvconnect.stats import OffloadingConnectorStats
from kvconnect.tiers.backends import Store
from kvconnect.tiers.messages import (
    LookupBlocks,
    PrefetchBlocks,
    RemovalAnswer,
    RemoveBlocks,
    TierAnswer,
    TierInstructions,
    WriteBackBlocks,
)
from kvconnect.tiers.peers.peer_source import PeerSource
from kvconnect.tiers.removal_calls import remove_blocks
from kvconnect.tiers.tiered_store import BATCH_BYTES, BlockBatch, TieredStore
from kvconnect.types import Tier

Job = LookupBlocks | PrefetchBlocks | WriteBackBlocks | RemoveBlocks

_REMOVED_BLOCKS = 256  # of one call to a store, which may write for each


@dataclass(eq=False)
class _RunningJob:
    job: Job
    found: bytearray
    batches: int  # that have not ended
    lock: threading.Lock = field(default_factory=threading.Lock)


class TierWorker:
    """Owned by the worker's main thread.

    ``stores`` and ``peers`` are closed with this object. One that raises has nothing. A lookup is
    answered after ``wait_s`` seconds, the time that a request waits for it; a tier that takes
    longer is not used until its call ends. ``reports_usage``: see :class:`TieredStore`. ``news`` is
    set when :meth:`poll` has an answer. The owner clears it before it polls, and may put another
    event in its place.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        host: HostArena,
        geometry: Geometry,
        reports_usage: bool = True,
        wait_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        peers: PeerSource | None = None,
    ) -> None:
        self.news = threading.Event()
        self._peers = peers
        self._served = peers.served if peers else None
        self._tiers = TieredStore(stores, host, wait_s, reports_usage, clock, peers)
        self._geometry = geometry
        largest = max(group.block_bytes for group in geometry.groups)
        self._batch_blocks = max(1, BATCH_BYTES // largest)
        self._wait_s = wait_s
        self._clock = clock
        self._answers: deque[TierAnswer] = deque()

    def __repr__(self) -> str:
        return f"<TierWorker {self._tiers}>"

    def set_identity(self, identity: Identity) -> None:
        """The worker has these weights from now on; peers are told."""
        if self._peers is not None:
            self._peers.set_identity(identity)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where other engines read blocks from this worker; None if it serves none."""
        return self._peers.address if self._peers else None

    def serve(self, work: TierInstructions, overwritten: Iterable[int]) -> None:
        """Let other engines read the blocks that a step names, and no longer those in slots that
        the step's stores will overwrite. Call this before these stores and :meth:`submit`."""
        if self._served is not None and self._peers is not None:
            if work.withdraw:
                self._served.clear()
            self._peers.page_keys.learn(work.pages)
            pages_of = self._peers.page_keys.of
            self._served.drop(page for key in work.dropped for page in pages_of(key))
            self._served.offer_pages((pages_of(key), slot) for key, slot in work.served)
            self._served.withdraw(overwritten)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs without blocking."""
        for job in jobs:
            if self._served is not None and isinstance(job, PrefetchBlocks):
                self._served.withdraw(job.slots)
            batches = list(_batches(job, self._batch_blocks))
            deadline_s = self._wait_s if isinstance(job, LookupBlocks) else job.deadline_s
            expires = self._clock() + deadline_s
            running = _RunningJob(job, bytearray(len(job.keys)), len(batches))
            for start, end in batches:
                keys = job.keys[start:end]
                sizes = [self._block_bytes(key) for key in keys]
                done = partial(self._end_batch, running, start)
                if isinstance(job, LookupBlocks):
                    batch = BlockBatch(keys, sizes, expires, done, source=job.source)
                    self._tiers.lookup(batch)
                    continue
                if isinstance(job, RemoveBlocks):
                    remove_blocks(self._tiers, BlockBatch(keys, sizes, expires, done))
                    continue
                batch = BlockBatch(keys, sizes, expires, done, job.slots[start:end])
                if isinstance(job, PrefetchBlocks):
                    self._tiers.prefetch(batch)
                else:
                    self._tiers.write_back(batch)

    def poll(self) -> list[TierAnswer]:
        """Return the answers since the last call, each once."""
        self._tiers.drop_expired()
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return what the stores recorded since the last call, and changes of their usage."""
        return self._tiers.take_stats()

    def close(self) -> None:
        """Drop queued calls, wait for running calls that are not late, close the stores.
        Idempotent."""
        self._tiers.close()

    def _end_batch(self, running: _RunningJob, start: int, found: bytes) -> None:
        """End a batch of a job. The last one answers the job."""
        with running.lock:
            running.found[start : start + len(found)] = found
            running.batches -= 1
            last = not running.batches
        if last:
            answer = RemovalAnswer if isinstance(running.job, RemoveBlocks) else TierAnswer
            self._answers.append(answer(running.job.job, bytes(running.found)))
            self.news.set()

    def _block_bytes(self, key: bytes) -> int:
        return self._geometry.groups[group_of(key)].block_bytes


def _batches(job: Job, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each call to a store: ``blocks`` at most, but a whole lookup."""
    blocks = _REMOVED_BLOCKS if isinstance(job, RemoveBlocks) else blocks
    step = len(job.keys) if isinstance(job, LookupBlocks) else blocks
    yield from pairwise([*range(0, len(job.keys), step), len(job.keys)])
