"""The part of ``copy_cuda.py`` for the copy executor: jobs over one large copy of the same bytes.

- ``executor_ratio_<digest>``: throughput of loads; ``executor_ratio_store_<digest>``: of stores.
  ``digest`` is ``off``, ``sampled`` or ``full``.
- ``executor_ratio_<digest>_<chunk>_<flights>``: loads with other settings of
  ``kvconnect/offload/copy_schedule.py``. ``chunk`` is ``8m`` or ``32m``, a fixed size, or ``time``;
  ``flights`` is how many are in flight.
- ``_hog`` behind the first two: beside a thread that holds the GIL 1 ms at a time.

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
from typing import TYPE_CHECKING

from benchmarks.common import interleave, medians, progress
from benchmarks.copy_jobs import BlockCopy, CopyJobs
from kvconnect.cache.layout import ByteRun, Geometry, GroupGeometry
from kvconnect.offload import copy_schedule
from kvconnect.offload.host_arena import HostArena
from kvconnect.offload.slot_digests import SlotDigests
from kvconnect.settings import DigestMode

if TYPE_CHECKING:
    from benchmarks.copy_cuda import CudaBench

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
JOB_BYTES = 2048 * MIB
DIGESTS: tuple[DigestMode, ...] = ("off", "sampled", "full")
CHUNKS = {"8m": 8 * MIB, "32m": 32 * MIB, "time": 0}  # 0: as the executor chooses
FLIGHTS = (2, 4, 8)
HOG_US = 1000


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


def sweep(
    bench: CudaBench, make: Callable[[HostArena, Geometry], CopyJobs], rounds: int
) -> dict[str, float]:
    """Return every figure of the executor; ends the process if a copy fails."""
    count = JOB_BYTES // BLOCK_BYTES
    geometry = Geometry((GroupGeometry((ByteRun(0, BLOCK_BYTES, BLOCK_BYTES),), count),))
    figures: dict[str, float] = {}
    shipped = "time", copy_schedule.MAX_IN_FLIGHT
    with closing(bench.make_arena(count, BLOCK_BYTES)) as store, closing(GilHog()) as hog:
        for digest, chunk, flights in itertools.product(DIGESTS, CHUNKS, FLIGHTS):
            progress(f"executor: {digest} digests, chunks {chunk}, {flights} in flight")
            blocks, slots = (array("q", bench.random.sample(range(count), count)) for _ in range(2))
            store.digests = SlotDigests(count, digest)
            name = digest if (chunk, flights) == shipped else f"{digest}_{chunk}_{flights}"
            with settings(CHUNKS[chunk], flights), closing(make(store, geometry)) as jobs:
                jobs.run([BlockCopy("store", blocks, slots)])  # records the digests of loads
                for direction in ("load", "store") if name == digest else ("load",):
                    job = partial(jobs.run, [BlockCopy(direction, blocks, slots)])
                    variants = {"": job}
                    if name == digest:
                        variants["_hog"] = partial(hog.beside, job)
                    key = f"store_{name}" if direction == "store" else name
                    figures |= _ratios(bench, direction, key, variants, rounds)
    return figures


def _ratios(
    bench: CudaBench,
    direction: str,
    name: str,
    jobs: dict[str, Callable[[], None]],
    rounds: int,
) -> dict[str, float]:
    variants = {"large": partial(bench.run, direction, bench.large(JOB_BYTES)), **jobs}
    seconds = medians(interleave(variants, rounds))
    limit = seconds.pop("large")
    return {f"executor_ratio_{name}{key}": limit / taken for key, taken in seconds.items()}
