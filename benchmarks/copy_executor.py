"""The part of ``copy_cuda.py`` for the copy executor: jobs over one large copy of the same bytes.

- ``executor_ratio_<digest>``: throughput of loads; ``executor_ratio_store_<digest>``: of stores.
  ``digest`` is ``off``, ``sampled`` or ``full``.
- ``executor_ratio_<digest>_<chunk>_<flights>``: loads with other settings of
  ``kvconnect/offload/copy_schedule.py``. ``chunk`` is ``8m`` or ``32m``, a fixed size, or ``time``;
  ``flights`` is how many are in flight.
- ``_hog`` behind a name: beside a thread that holds the GIL 1 ms at a time.

Each figure has its own executor. It takes turns with the large copy.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from benchmarks.common import interleave, medians, progress
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.copy.base import Copier
from kvconnect.offload import copy_schedule
from kvconnect.offload.copy_executor import CopyExecutor, FinishedCopy
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.messages import GroupBlocks, LoadBlocks, StoreBlocks
from kvconnect.offload.slot_digests import SlotDigests
from kvconnect.settings import DigestMode
from kvconnect.types import JobId

if TYPE_CHECKING:
    from benchmarks.copy_cuda import CudaBench

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
JOB_BYTES = 2048 * MIB
DIGESTS: tuple[DigestMode, ...] = ("off", "sampled", "full")
CHUNKS = {"8m": 8 * MIB, "32m": 32 * MIB, "time": 0}  # 0: as the executor chooses
FLIGHTS = (2, 4, 8)
HOG_US = 1000
_JOB_S = 120.0


@contextmanager
def settings(chunk_bytes: int, flights: int) -> Iterator[None]:
    """Let schedules use other constants; they have no settings, because nobody should need any."""
    changed: dict[str, float] = {"MAX_IN_FLIGHT": flights}
    if chunk_bytes:
        changed |= {"CHUNK_BYTES": chunk_bytes, "CHUNK_S": 0.0, "_PER_LAUNCH": 0.0}
    before = {name: getattr(copy_schedule, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(copy_schedule, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(copy_schedule, name, value)


class GilHog:
    """A thread that holds the GIL 1 ms at a time while :meth:`beside` runs some work."""

    def __init__(self) -> None:
        self._usleep = ctypes.PyDLL(None).usleep
        self._wanted = threading.Event()
        self._closed = False
        threading.Thread(target=self._loop, daemon=True).start()

    def beside(self, work: Callable[[], None]) -> None:
        self._wanted.set()
        try:
            work()
        finally:
            self._wanted.clear()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _loop(self) -> None:
        while self._wanted.wait() and not self._closed:
            self._usleep(HOG_US)


class ExecutorJobs:
    """One executor, and jobs that copy the same scattered blocks again and again."""

    def __init__(self, bench: CudaBench, store: HostArena, geometry: Geometry, copier: Copier):
        self._executor = CopyExecutor(copier, store, geometry, bench.streams)
        numbers = range(store.num_slots)
        blocks, slots = (array("q", bench.random.sample(numbers, len(numbers))) for _ in range(2))
        self._parts = (GroupBlocks(0, blocks, slots),)
        self._ended: SimpleQueue[FinishedCopy] = SimpleQueue()

    def store(self) -> None:
        self._run(StoreBlocks(JobId(1), self._parts, _JOB_S))

    def load(self) -> None:
        self._run(LoadBlocks(JobId(1), "benchmark", self._parts, _JOB_S, False))

    def close(self) -> None:
        self._executor.close()

    def _run(self, job: StoreBlocks | LoadBlocks) -> None:
        self._executor.submit(job, self._executor.fence(), self._ended.put)
        done = self._ended.get(timeout=_JOB_S)
        self._executor.poll()
        if done.report.failures:
            raise SystemExit(f"a copy failed: {done.report.failures[0]}")


def sweep(
    bench: CudaBench, make: Callable[[HostArena, Geometry], Copier], rounds: int
) -> dict[str, float]:
    """Return every figure of the executor; ends the process if a copy fails."""
    count = JOB_BYTES // BLOCK_BYTES
    geometry = Geometry((GroupGeometry((ByteRun(0, BLOCK_BYTES, BLOCK_BYTES),), count),))
    figures: dict[str, float] = {}
    shipped = "time", copy_schedule.MAX_IN_FLIGHT
    with closing(bench.make_arena(count, BLOCK_BYTES)) as store, closing(GilHog()) as hog:
        copier = make(store, geometry)
        for digest, chunk, flights in itertools.product(DIGESTS, CHUNKS, FLIGHTS):
            progress(f"executor: {digest} digests, chunks {chunk}, {flights} in flight")
            store.digests = SlotDigests(count, digest)
            name = digest if (chunk, flights) == shipped else f"{digest}_{chunk}_{flights}"
            with (
                settings(CHUNKS[chunk], flights),
                closing(ExecutorJobs(bench, store, geometry, copier)) as jobs,
            ):
                jobs.store()  # which records the digests that loads are checked against
                figures |= _ratios(bench, hog, "load", jobs.load, name, rounds)
                if name == digest:
                    figures |= _ratios(bench, hog, "store", jobs.store, f"store_{name}", rounds)
    return figures


def _ratios(
    bench: CudaBench,
    hog: GilHog,
    direction: str,
    job: Callable[[], None],
    name: str,
    rounds: int,
) -> dict[str, float]:
    large = partial(bench.run, direction, bench.large(JOB_BYTES))
    variants = {"large": large, "": job, "_hog": partial(hog.beside, job)}
    seconds = medians(interleave(variants, rounds))
    limit = seconds.pop("large")
    return {f"executor_ratio_{name}{key}": limit / taken for key, taken in seconds.items()}
