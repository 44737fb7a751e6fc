"""Measures up to which page size the copy kernel is faster than batched DMA, and staging is not
slower than either.

The time to submit a copy counts: the driver takes 0.5 to 5 us for each page of a batch, which is
more than a link needs for a short one. An H200 loads pages of 16 KiB by DMA at 3.5 GB/s, and by a
kernel or staged at 50. It counts twice where ways are compared, because one thread submits the
copies of both directions, and launches of the model wait for the driver's locks meanwhile.

The measurement takes a few seconds, once per machine, device, driver and version of the
kernels; a file keeps the result. A kernel also takes multiprocessors and memory bandwidth from the
model, which the measurement does not show. So the kernel must win by a margin: a larger one for
stores, because nobody waits for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from kvconnect.copy.base import MAX_IN_FLIGHT, Direction
from kvconnect.copy.driver import Driver, Taken
from kvconnect.errors import TransferFailed
from kvconnect.user_folders import cache_folder

logger = logging.getLogger(__name__)

PAGES = (4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
SAMPLE_BYTES = 16 << 20
REPEATS = MAX_IN_FLIGHT
"""Copies of the sample in one measurement: back to back, and those that are staged beside one
another, as chunks are."""

ROUNDS = 3
DIRECTIONS: tuple[Direction, ...] = ("store", "load")
MARGIN = {"load": 1.3, "store": 1.5}
LOCK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.05
_FORMAT = 6  # of the file; increase it when the measurement or the launch of kernels changes


GRIDS = (2, 4, 8, 16)
"""Thread blocks of the copy kernel: as few as are about as fast as the most, because each takes a
multiprocessor from the model."""

GRID_SHARE = 1.25
"""Time that fewer thread blocks may take, of that of the most. Beside matrix products on an H200,
16 made stores slower than 2 did (25 and 34 GB/s), and the products by 77 % instead of 20."""

SEGMENT_S = 0.0008
"""Seconds that a staged chunk takes on the link: four in flight outlast the wait of a kernel beside
prefill (1.6 ms: LMCache's pull request 5067) and the launch of the next chunks, of which each takes
the copy thread 0.15 ms (measured on an H200)."""

SMALLEST_SEGMENT, LARGEST_SEGMENT = 16 << 20, 192 << 20

FEWEST_ROWS = 32
"""Fewer rows hide no launch, which takes 0.1 ms: on an H200, DMA was faster for fewer than 17 loads
of 16 KiB, and than 64 stores (16 to 64 on an H100: vLLM's issue 57555)."""


@dataclass(frozen=True)
class CopyThreshold:
    """What is staged, and what a kernel copies; DMA copies all else.

    Attributes:
        store, load: longest run in bytes that a kernel copies if it is not staged, by direction; 0:
            none.
        fewest_rows: of one call of a kernel.
        staged_store, staged_load: longest run that is staged, by direction; 0: none.
        grid: thread blocks of the kernel.
    """

    store: int
    load: int
    fewest_rows: int = FEWEST_ROWS
    staged_store: int = 0
    staged_load: int = 0
    grid: int = GRIDS[-1]

    def method(self, direction: Direction, run_bytes: int) -> str:
        """Return how blocks of runs of this length are copied: ``staged``, ``kernel`` or
        ``dma``."""
        if run_bytes <= getattr(self, f"staged_{direction}"):
            return "staged"
        return self.direct(direction, run_bytes)

    def direct(self, direction: Direction, run_bytes: int) -> str:
        """Return how such runs are copied where they cannot be staged: ``kernel`` or ``dma``."""
        return "kernel" if run_bytes <= getattr(self, direction) else "dma"


_LIMITS = ("store", "load", "staged_store", "staged_load")
_KEPT = (*_LIMITS, "grid")  # what a file has

DMA_ONLY = CopyThreshold(store=0, load=0)

DEFAULT = CopyThreshold(16 << 10, 16 << 10, staged_store=64 << 10, staged_load=64 << 10, grid=4)
"""Used if the measurement fails: measured on an H200 on PCIe 5."""

SampleCopy = Callable[[Direction, str, int], None]
"""Copies a sample, given direction, method ("kernel", "staged", "dma", or "kernel/N" with N thread
blocks) and page size."""


Times = Mapping[tuple[str, str, int], Taken]
"""Of one copy of the sample, by direction, method and page."""


def choose(times: Times) -> CopyThreshold:
    """Return the largest pages for which the kernel wins over DMA, and the largest for which
    staging does over both.

    A method that was not timed loses. The search stops at the first page for which a method loses,
    because a later win is noise.
    """

    def taken(direction: str, method: str, page: int) -> float:
        found = times.get((direction, method, page))
        return math.inf if found is None else found.submit_s + found.total_s

    def kernel_wins(direction: str, page: int) -> bool:
        by_kernel = MARGIN[direction] * taken(direction, "kernel", page)
        return by_kernel <= taken(direction, "dma", page)

    def staging_wins(direction: str, page: int) -> bool:
        by_kernel = MARGIN[direction] * taken(direction, "kernel", page)
        by_dma = taken(direction, "dma", page)
        return taken(direction, "staged", page) <= min(by_kernel, by_dma)

    def largest(wins: Callable[[str, int], bool], direction: str) -> int:
        return max(itertools.takewhile(partial(wins, direction), PAGES), default=0)

    kernel, staged = (
        {direction: largest(wins, direction) for direction in DIRECTIONS}
        for wins in (kernel_wins, staging_wins)
    )
    return CopyThreshold(
        store=kernel["store"],
        load=kernel["load"],
        staged_store=staged["store"],
        staged_load=staged["load"],
    )


@dataclass(frozen=True)
class Calibration:
    """What was measured. ``gbps``: GB/s per direction, for each of ``PAGES`` by the faster method;
    empty if the measurement failed."""

    threshold: CopyThreshold
    gbps: Mapping[str, Sequence[float]]

    @property
    def segment_bytes(self) -> int:
        """Bytes of device memory for each staged chunk."""
        fastest = max((max(rates) for rates in self.gbps.values()), default=0.0)
        return min(max(int(fastest * 1e9 * SEGMENT_S), SMALLEST_SEGMENT), LARGEST_SEGMENT)

    def describe(self) -> str:
        """Return how each direction copies, and how fast."""
        return "; ".join(map(self._describe, DIRECTIONS))

    def _describe(self, direction: str) -> str:
        limits = {
            "staging": getattr(self.threshold, f"staged_{direction}"),
            "kernel": getattr(self.threshold, direction),
        }
        named = [f"{name} up to {limit >> 10} KiB" for name, limit in limits.items() if limit]
        method = ", ".join([*named, "DMA above"]) if named else "DMA"
        if not self.gbps:
            return f"{direction} by {method} (not measured)"
        first, last = (
            f"{self.gbps[direction][i]:.1f} GB/s in runs of {PAGES[i] >> 10} KiB" for i in (0, -1)
        )
        return f"{direction} by {method} ({first}, {last})"


def measure(driver: Driver, move: SampleCopy) -> Calibration:
    """Time the methods that the driver has, as the best of ``ROUNDS``, and choose.

    Raises:
        TransferFailed: a copy failed.
    """
    times = time_methods(driver, move)
    threshold = choose(times)
    threshold = replace(threshold, grid=_smallest_grid(driver, move, threshold, times))
    gbps: dict[str, Sequence[float]] = {}
    for direction in DIRECTIONS:
        chosen = [(direction, threshold.method(direction, page), page) for page in PAGES]
        gbps[direction] = [round(SAMPLE_BYTES / times[key].total_s / 1e9, 2) for key in chosen]
    return Calibration(threshold, gbps)


def time_methods(driver: Driver, move: SampleCopy) -> Times:
    """Time the methods that the driver has, for every page and direction. Raises
    :class:`TransferFailed`."""
    methods = ("dma",) if driver.kernels_unavailable_reason else ("kernel", "staged", "dma")
    return {
        (direction, method, page): _time(driver, move, direction, method, page)
        for direction in DIRECTIONS
        for page in PAGES
        for method in methods
    }


def _time(driver: Driver, move: SampleCopy, direction: Direction, method: str, page: int) -> Taken:
    once = partial(move, direction, method, page)
    pieces = [once] * REPEATS if method == "staged" else [partial(_repeat, once)]
    driver.seconds(pieces)  # warm-up: loads code and fills tables
    best = min((driver.seconds(pieces) for _ in range(ROUNDS)), key=lambda taken: taken.total_s)
    return Taken(best.submit_s / REPEATS, best.total_s / REPEATS)


def _smallest_grid(driver: Driver, move: SampleCopy, threshold: CopyThreshold, times: Times) -> int:
    """Return how many thread blocks are enough for the longest runs that the kernel copies."""
    limits = [(way, getattr(threshold, way)) for way in DIRECTIONS if getattr(threshold, way)]
    for grid in GRIDS[:-1] if limits else ():
        if all(
            _time(driver, move, direction, f"kernel/{grid}", page).total_s
            <= GRID_SHARE * times[direction, "kernel", page].total_s
            for direction, page in limits
        ):
            return grid
    return GRIDS[-1]


def _repeat(once: Callable[[], None]) -> None:
    for _ in range(REPEATS):
        once()


def calibrated(
    driver: Driver, make_move: Callable[[], SampleCopy], folder: Path | None = None
) -> Calibration:
    """Return the thresholds and rates of this machine, from the file or measured now.

    Workers of one machine measure one after the other, because they may share a link; usually the
    first one writes the file and the others read it. A file that is missing, broken or of another
    format is replaced. A file that cannot be written, or a measurement that fails (for lack of
    memory), only costs speed.
    """
    folder = folder or cache_folder()
    path = folder and folder / f"copy-{_key(driver.name)}.json"
    found = _read(path, driver.name)
    if found is not None:
        return found
    with _turn(folder):
        found = _read(path, driver.name)
        if found is not None:
            return found
        try:
            made = measure(driver, make_move())
        except TransferFailed as error:
            logger.warning("copies cannot be measured, using defaults: %s", error)
            return Calibration(DMA_ONLY if driver.kernels_unavailable_reason else DEFAULT, {})
        if path:
            _write(path, driver.name, made)
    return made


@contextmanager
def _turn(folder: Path | None) -> Iterator[None]:
    """Hold the lock file of a folder, if it can be had within ``LOCK_TIMEOUT_S``."""
    with ExitStack() as stack:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((folder / "copy.lock").open("w"))
                _lock(file)
                # Closing alone would not unlock what a child process has inherited.
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        except OSError as error:
            logger.info("copies are measured without a lock in %s: %s", folder, error)
        yield


def _lock(file: IO[str]) -> None:
    stop = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= stop:
                raise
        time.sleep(_LOCK_POLL_S)


def scattered(count: int) -> array[int]:
    """Return the numbers below ``count`` in a scattered order, always the same one."""
    step = next(n for n in (7919, 7907, 1) if count % n or n == 1)  # the first two are prime
    return array("q", (i * step % count for i in range(count)))


def _key(name: str) -> str:
    return hashlib.sha256(f"{_FORMAT} {name}".encode()).hexdigest()[:16]


def _read(path: Path | None, name: str) -> Calibration | None:
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
        threshold = CopyThreshold(**{name: content[name] for name in _KEPT})
        gbps: dict[str, Sequence[float]] = {
            d: [float(rate) for rate in content["gbps"][d]] for d in DIRECTIONS
        }
        fits = (
            content["machine"] == name
            and {content[name] for name in _LIMITS} <= {0, *PAGES}
            and threshold.grid in GRIDS
            and all(len(rates) == len(PAGES) for rates in gbps.values())
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("%s is not usable, measuring again: %s", path, error)
        return None
    return Calibration(threshold, gbps) if fits else None


def _write(path: Path, name: str, made: Calibration) -> None:
    """Replace the file atomically, because other workers of this machine use it too."""
    limits = {name: getattr(made.threshold, name) for name in _KEPT}
    content = {"machine": name, **limits, "gbps": made.gbps}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file)
            os.replace(fresh, path)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it is at its place
                os.unlink(fresh)
    except OSError as error:
        logger.info("measurements cannot be kept in %s: %s", path, error)
