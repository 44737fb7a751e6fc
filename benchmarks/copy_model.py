"""Model of the copy executor on a GPU's link: what part of the link's rate do copies reach?

    python -m benchmarks.copy_model

:class:`~kvconnect.offload.copy_schedule.CopySchedule` decides, as in the executor; this module
plays the copy thread, the threads that wait, the driver, the link and the kernels, in simulated
time. It shows what the decisions cost. It does not show what a GPU does: the costs below are
measured, published by others, or assumed. So is that kernels of several streams wait for room side
by side.

``model_ratio_RUN_GBPS_...``: share of the link's rate for blocks of 2 MiB in runs of this length,
staged, on a link of so many GB/s; ``full``, ``sampled``, ``off``: which blocks are hashed;
``busy``: each launch of a kernel waits 1.6 ms for room beside prefill; ``dma``: not staged, so one
copy a run; ``hog``: another thread takes the GIL, a millisecond at a time. ``longest_lock_ms``: the
longest call that holds the GIL, of all cases. ``lock_share_...``: share of the time in which such
calls hold it.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass

from benchmarks.common import emit
from kvconnect.copy.base import MAX_DESCRIPTORS
from kvconnect.copy.calibration import DMA_ONLY, Calibration
from kvconnect.copy.cuda import digest_launches
from kvconnect.copy.driver import SHORT_CALL
from kvconnect.offload.copy_schedule import Chunks, CopySchedule
from kvconnect.offload.messages import GroupBlocks
from kvconnect.types import TransferType

KIB = 1 << 10
BLOCK_BYTES = 2 << 20
JOB_BYTES = 1 << 30
WARM_BYTES, MEASURED_BYTES = 8 << 30, 64 << 30

# Measured on an H200: benchmarks/results/gpu/h200.
DIGEST_RATE = 400e9  # bytes per second of the digest kernel
COPY_LAUNCH_S, STAGED_LAUNCH_S = 100e-6, 150e-6  # of the copy thread, for a chunk

# Assumed.
DIGEST_LAUNCH_S = 60e-6
STAGED_RATE = 500e9  # of the kernel between segments and KV cache
FOLD_S = 15e-9  # per KiB of a block; blocks of one launch are folded side by side
LAND_S, BLOCK_S = 20e-6, 1e-6  # to take a result, and per block of it
DROPS = 0  # calls of a launch by DMA that give up the GIL
HOG_S = 0.001  # for which another thread holds the GIL each time

# Published: vLLM's pull request 48434 (H100), per copy of a batch, and an H200 takes as much;
# LMCache's pull request 5067, a kernel's wait beside prefill.
SUBMIT_S = 0.5e-6
ENGINE_S = ((16 * KIB, 0.6e-6), (32 * KIB, 0.65e-6), (64 * KIB, 0.9e-6))  # by run; longer: 1 us
PREFILL_WAIT_S = 1.6e-3


@dataclass(frozen=True)
class Case:
    """Attributes:
    gbps: the link's rate, 1e9 bytes per second.
    digests: the share of blocks that are hashed.
    hog: another thread takes the GIL whenever it is given up.
    own_stream: digests delay no copy.
    run_bytes: of one copy of a batch.
    wait_s: that a kernel waits for room on the device.
    limited: batches are cut, and give the GIL up if they are long.
    staged: by way of device memory.
    """

    gbps: float
    digests: float = 1.0
    hog: bool = False
    own_stream: bool = True
    run_bytes: int = BLOCK_BYTES
    wait_s: float = 0.0
    limited: bool = True
    staged: bool = False


@dataclass(frozen=True)
class Figures:
    """What a case comes to: share of the link's rate, the longest call that holds the GIL, and the
    share of time in which such calls hold it."""

    ratio: float
    longest_lock_s: float
    lock_share: float


@dataclass(eq=False)
class _Job:
    kind: TransferType
    chunks: Chunks
    awaits_fence: bool = False


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
        self._copies = 1 if case.staged else BLOCK_BYTES // case.run_bytes  # of a block
        self._copy_bytes = BLOCK_BYTES // self._copies
        most = MAX_DESCRIPTORS // self._copies
        if case.staged:
            most = Calibration(DMA_ONLY, {"load": [case.gbps]}).segment_bytes // BLOCK_BYTES
        descriptors, most_blocks = (
            {kind: [number] for kind in TransferType} if case.limited else None
            for number in (self._copies, most)
        )
        self._schedule: CopySchedule[_Job] = CopySchedule(
            [BLOCK_BYTES], descriptors=descriptors, most_blocks=most_blocks
        )
        self._job: _Job | None = None
        self._flights: deque[_Flight] = deque()
        self._now = self._link_free = self._digests_free = self._ended = 0.0
        self.locked_s = self.longest_lock_s = 0.0

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
        blocks = len(part.slots)
        nbytes, copies = blocks * BLOCK_BYTES, blocks * self._copies
        hashed = round(blocks * self._case.digests)
        seconds = STAGED_LAUNCH_S if self._case.staged else COPY_LAUNCH_S
        seconds += self._hogged(DROPS)
        if hashed and not self._case.staged:
            seconds += DIGEST_LAUNCH_S
        first = self._now + seconds  # the device begins while the others are submitted
        self._now = first + SUBMIT_S * copies
        self._lock(copies)
        self._schedule.launched(job.kind, nbytes, self._now)
        self._schedule.submitted(job.kind, part, seconds + SUBMIT_S * copies)
        start = max(first, self._link_free)
        taken = max(nbytes / (self._case.gbps * 1e9), copies * _engine_s(self._copy_bytes))
        end = max(start + taken, self._now)
        if self._case.staged:
            self._link_free = end
            self._move_staged(first, end, blocks, hashed)
            return nbytes
        digested = max(end, self._digests_free) + self._digest_s(hashed) if hashed else end
        self._digests_free = max(digested, self._digests_free)
        self._link_free = end if self._case.own_stream else digested
        noticed = max(end, digested) + self._hogged(2)  # a waiter's thread, then the copy thread
        self._flights.append(_Flight(nbytes, end - start, noticed))
        return nbytes

    def _move_staged(self, launched: float, arrived: float, blocks: int, hashed: int) -> None:
        """Play the kernel of one chunk: chunks wait for room side by side, and run in turns."""
        began = max(arrived + self._case.wait_s, self._digests_free)
        nbytes = blocks * BLOCK_BYTES
        fold = FOLD_S * BLOCK_BYTES / KIB if hashed else 0.0
        self._digests_free = began + nbytes / STAGED_RATE + fold
        since = max(launched, self._ended)
        self._ended = max(self._digests_free, self._ended)
        noticed = self._ended + self._hogged(2)
        self._flights.append(_Flight(nbytes, self._ended - since, noticed))

    def _digest_s(self, blocks: int) -> float:
        """Return the seconds that the device takes to hash blocks."""
        launches = digest_launches(BLOCK_BYTES, blocks)
        fold = FOLD_S * BLOCK_BYTES / KIB * launches
        return launches * self._case.wait_s + blocks * BLOCK_BYTES / DIGEST_RATE + fold

    def _lock(self, copies: int) -> None:
        """Count the time for which the calls of one chunk hold the GIL."""
        longest = min(copies, MAX_DESCRIPTORS) if self._case.limited else copies
        if longest <= SHORT_CALL or not self._case.limited:
            self.locked_s += SUBMIT_S * copies
            self.longest_lock_s = max(self.longest_lock_s, SUBMIT_S * longest)

    def _take_landed(self) -> None:
        while self._flights and self._flights[0].noticed <= self._now:
            flight = self._flights.popleft()
            self._now += LAND_S + BLOCK_S * flight.nbytes / BLOCK_BYTES * self._case.digests
            self._schedule.ended(TransferType.CPU_TO_GPU)
            self._schedule.sizes[TransferType.CPU_TO_GPU].copied(flight.nbytes, flight.seconds)

    def _hogged(self, drops: int) -> float:
        return sum(self._random.uniform(0, HOG_S) for _ in range(drops)) if self._case.hog else 0.0


def _engine_s(run_bytes: int) -> float:
    """Return the seconds that a copy engine takes at least for one copy."""
    return next((seconds for longest, seconds in ENGINE_S if run_bytes <= longest), 1e-6)


def _loads() -> _Job:
    numbers = array("q", range(JOB_BYTES // BLOCK_BYTES))
    return _Job(TransferType.CPU_TO_GPU, Chunks([GroupBlocks(0, numbers, numbers)]))


def measure(case: Case) -> Figures:
    """Return what a case comes to once the schedule knows the link."""
    model = Model(case)
    model.run(WARM_BYTES)
    model.locked_s = 0.0
    taken = model.run(MEASURED_BYTES)
    ratio = MEASURED_BYTES / (case.gbps * 1e9) / taken
    return Figures(ratio, model.longest_lock_s, model.locked_s / taken)


def link_ratio(case: Case) -> float:
    """Return the part of the link's rate that copies reach once the schedule knows the link."""
    return measure(case).ratio


CASES = {
    **{
        f"{run // KIB}k_{gbps}_{digests}{busy}{dma}": Case(
            gbps,
            share,
            run_bytes=run,
            wait_s=PREFILL_WAIT_S if busy else 0.0,
            staged=not dma,
        )
        for dma in ("", "_dma")
        for run in (16 * KIB, 32 * KIB, 64 * KIB, 1024 * KIB)
        for gbps in (25, 55, 200)
        for digests, share in (("off", 0.0), ("sampled", 1 / 16), ("full", 1.0))
        for busy in ("", "_busy")
    },
    "2048k_55_full_hog": Case(55, hog=True),
    "2048k_400_full_hog": Case(400, hog=True),
}


def main() -> None:
    found = {name: measure(case) for name, case in CASES.items()}
    figures = {f"model_ratio_{name}": round(one.ratio, 3) for name, one in found.items()}
    shares = {
        f"lock_share_{name}": round(one.lock_share, 4)
        for name, one in found.items()
        if "_off" in name and "busy" not in name
    }
    longest = max(one.longest_lock_s for one in found.values())
    emit("copy_model", {**figures, **shares, "longest_lock_ms": round(longest * 1e3, 4)})


if __name__ == "__main__":
    main()
