"""Model of the copy executor on a GPU's link: what part of the link's rate do copies reach?

    python -m benchmarks.copy_model

:class:`~kvconnect.offload.copy_schedule.CopySchedule` decides, as in the executor; this module
plays the copy thread, the threads that wait, the link and the digest kernel, in simulated time. It
shows what the decisions cost. It does not show what a GPU does: the costs below are assumptions.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass

from benchmarks.common import emit
from kvconnect.offload.copy_schedule import Chunks, CopySchedule
from kvconnect.offload.messages import GroupBlocks
from kvconnect.types import TransferType

BLOCK_BYTES = 2 << 20
JOB_BYTES = 1 << 30
WARM_BYTES, MEASURED_BYTES = 8 << 30, 64 << 30
DIGEST_RATE = 800e9  # bytes per second of the digest kernel
COPY_LAUNCH_S, DIGEST_LAUNCH_S = 100e-6, 60e-6
LAND_S, BLOCK_S = 20e-6, 1e-6  # to take a result, and per block of it
DROPS = 0  # calls of a launch by DMA that give up the GIL
HOG_S = 0.001  # for which another thread holds the GIL each time


@dataclass(frozen=True)
class Case:
    """``gbps``: the link's rate, 1e9 bytes per second. ``digests``: the share of blocks that are
    hashed. ``hog``: another thread takes the GIL whenever it is given up. ``own_stream``: digests
    delay no copy."""

    gbps: float
    digests: float = 1.0
    hog: bool = False
    own_stream: bool = True


@dataclass(eq=False)
class _Job:
    kind: TransferType
    chunks: Chunks


@dataclass
class _Flight:
    nbytes: int
    seconds: float
    noticed: float  # the copy thread can take the result


class Model:
    """Loads without end in simulated time."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self._case = case
        self._random = random.Random(seed)
        self._schedule: CopySchedule[_Job] = CopySchedule([BLOCK_BYTES])
        self._job: _Job | None = None
        self._flights: deque[_Flight] = deque()
        self._now = self._link_free = self._digests_free = 0.0

    def run(self, nbytes: int) -> float:
        """Copy ``nbytes``; return the seconds from the end of the last run to the end of this."""
        began, left = self._link_free, nbytes
        while left > 0:
            self._take_landed()
            if self._job is None:
                self._job = _loads()
                self._schedule.add(self._job)
            if self._schedule.next(self._now) is None:
                self._now = max(self._now, self._flights[0].noticed)
                continue
            left -= self._launch(self._job)
            if not self._job.chunks:
                self._schedule.remove(self._job)
                self._job = None
        return self._link_free - began

    def _launch(self, job: _Job) -> int:
        part = self._schedule.cut(job)
        nbytes = len(part.slots) * BLOCK_BYTES
        hashed = nbytes * self._case.digests
        seconds = COPY_LAUNCH_S + self._hogged(DROPS)
        if hashed:
            seconds += DIGEST_LAUNCH_S
        self._now += seconds
        self._schedule.launched(job.kind, nbytes, self._now)
        self._schedule.sizes[job.kind].launched(seconds)
        start = max(self._now, self._link_free)
        taken = nbytes / (self._case.gbps * 1e9)
        end = start + taken
        digested = max(end, self._digests_free) + hashed / DIGEST_RATE
        self._digests_free = digested
        self._link_free = end if self._case.own_stream else digested
        noticed = max(end, digested) + self._hogged(2)  # a waiter's thread, then the copy thread
        self._flights.append(_Flight(nbytes, taken, noticed))
        return nbytes

    def _take_landed(self) -> None:
        while self._flights and self._flights[0].noticed <= self._now:
            flight = self._flights.popleft()
            self._now += LAND_S + BLOCK_S * flight.nbytes / BLOCK_BYTES * self._case.digests
            self._schedule.ended(TransferType.CPU_TO_GPU)
            self._schedule.sizes[TransferType.CPU_TO_GPU].copied(flight.nbytes, flight.seconds)

    def _hogged(self, drops: int) -> float:
        return sum(self._random.uniform(0, HOG_S) for _ in range(drops)) if self._case.hog else 0.0


def _loads() -> _Job:
    numbers = array("q", range(JOB_BYTES // BLOCK_BYTES))
    return _Job(TransferType.CPU_TO_GPU, Chunks([GroupBlocks(0, numbers, numbers)]))


def link_ratio(case: Case) -> float:
    """Return the part of the link's rate that copies reach once the schedule knows the link."""
    model = Model(case)
    model.run(WARM_BYTES)
    return MEASURED_BYTES / (case.gbps * 1e9) / model.run(MEASURED_BYTES)


def main() -> None:
    figures = {
        "model_ratio_25_full": link_ratio(Case(25)),
        "model_ratio_55_full": link_ratio(Case(55)),
        "model_ratio_55_full_hog": link_ratio(Case(55, hog=True)),
        "model_ratio_400_full": link_ratio(Case(400)),
        "model_ratio_400_sampled": link_ratio(Case(400, digests=1 / 16)),
        "model_ratio_400_full_hog": link_ratio(Case(400, hog=True)),
    }
    emit("copy_model", dict(figures))


if __name__ == "__main__":
    main()
