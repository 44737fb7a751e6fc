"""Jobs of the copy executor, for the benchmarks of copies on a GPU."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

from kvconnect.cache.layout import Geometry
from kvconnect.copy.base import Copier
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks
from kvconnect.offload.streams import Fence, Streams
from kvconnect.types import JobId

JOB_S = 120.0
_AT_ONCE = 4
"""Jobs that are queued or copied while others work: the executor always has a next one."""


class BlockCopy(NamedTuple):
    """Blocks to be stored in slots, or loaded from them."""

    direction: str
    blocks: array[int]
    slots: array[int]


class CopyJobs:
    """An executor, and the jobs that it is given. A copy that fails ends the process."""

    def __init__(
        self, copier: Copier, store: HostArena, geometry: Geometry, streams: Streams
    ) -> None:
        self._executor = CopyExecutor(copier, store, geometry, streams)
        self._block_bytes = geometry.groups[0].block_bytes
        self._ended: SimpleQueue[FinishedCopy] = SimpleQueue()

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """Copy all of them, each as one job, and wait until they have ended."""
        fence = self._executor.fence()
        for copy in copies:
            self._submit(copy, fence, self._ended.put)
        for _ in copies:
            self._take()

    @contextmanager
    def endless(self, copy: BlockCopy) -> Iterator[Callable[[], int]]:
        """Repeat a copy until the block ends; yield what says how many bytes were copied.

        None of them waits for what the device is given within the block."""
        ended, stopped, fence = [0], threading.Event(), self._executor.fence()

        def again(done: FinishedCopy) -> None:  # on the copy thread
            ended[0] += 1
            if stopped.is_set() or done.report.failures:
                self._ended.put(done)
            else:
                self._submit(copy, fence, again)

        for _ in range(_AT_ONCE):
            self._submit(copy, fence, again)
        try:
            yield lambda: ended[0] * len(copy.blocks) * self._block_bytes
        finally:
            stopped.set()
            for _ in range(_AT_ONCE):
                self._take()

    def close(self) -> None:
        self._executor.close()

    def _submit(self, copy: BlockCopy, fence: Fence, ended: Callable[[FinishedCopy], None]) -> None:
        parts = (GroupBlocks(0, copy.blocks, copy.slots),)
        job: StoreBlocks | LoadBlocks
        if copy.direction == "store":
            job = StoreBlocks(JobId(1), parts, JOB_S)
        else:
            job = LoadBlocks(JobId(1), "benchmark", parts, JOB_S, False)
        self._executor.submit(job, fence, ended)

    def _take(self) -> None:
        done = self._ended.get(timeout=JOB_S)
        self._executor.poll()
        if done.report.failures:
            raise SystemExit(f"a copy failed: {done.report.failures[0]}")
