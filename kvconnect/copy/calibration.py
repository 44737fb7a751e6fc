"""Measures the largest page size at which the copy kernel is faster than batched DMA.

The measurement takes about a tenth of a second, once per machine, device and driver; a file keeps
the result. A kernel also takes multiprocessors and memory bandwidth from the model, which the
measurement does not show. So the kernel must win by a margin: a large one for stores, because
nobody waits for them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kvconnect.copy.driver import Driver
from kvconnect.errors import TransferFailed

logger = logging.getLogger(__name__)

PAGES = (4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
SAMPLE_BYTES = 16 << 20
ROUNDS = 3
MARGIN = {"load": 1.05, "store": 1.5}
_FORMAT = 1  # of the file; increase it when the kernels or their launch change


@dataclass(frozen=True)
class CopyThreshold:
    """Longest run in bytes that a kernel copies; DMA copies longer ones. 0: DMA copies all."""

    store: int
    load: int


DEFAULT = CopyThreshold(store=0, load=28 << 10)
"""Used if the measurement fails: values published for an H100 on PCIe 5."""

SampleCopy = Callable[[str, str, int], None]
"""Copies a sample, given direction, method ("kernel" or "dma") and page size."""


def choose(seconds: Mapping[tuple[str, str, int], float]) -> CopyThreshold:
    """Return the largest pages for which the kernel wins, per direction.

    ``seconds`` is keyed by (direction, method, page). The search stops at the first page for which
    the kernel loses, because a later win is noise.
    """

    def largest(direction: str) -> int:
        best = 0
        for page in PAGES:
            kernel, dma = (seconds[direction, method, page] for method in ("kernel", "dma"))
            if kernel * MARGIN[direction] > dma:
                break
            best = page
        return best

    return CopyThreshold(store=largest("store"), load=largest("load"))


def measure(driver: Driver, move: SampleCopy) -> CopyThreshold:
    """Time both methods for every page size and direction, as the best of ``ROUNDS``.

    Raises:
        TransferFailed: a copy failed.
    """
    seconds = {}
    for direction in ("store", "load"):
        for page in PAGES:
            for method in ("kernel", "dma"):
                work = partial(move, direction, method, page)
                driver.seconds(work)  # warm-up: loads code and fills tables
                seconds[direction, method, page] = min(driver.seconds(work) for _ in range(ROUNDS))
    return choose(seconds)


def calibrated(
    driver: Driver, make_move: Callable[[], SampleCopy], folder: Path | None = None
) -> CopyThreshold:
    """Return the thresholds of this machine, from the file or measured now.

    A file that is missing, broken or of another format is replaced. A file that cannot be written,
    or a measurement that fails (for lack of memory), only costs speed.
    """
    folder = folder or cache_folder()
    path = folder and folder / f"copy-{_key(driver.name)}.json"
    found = _read(path, driver.name) if path else None
    if found is not None:
        return found
    try:
        choice = measure(driver, make_move())
    except TransferFailed as error:
        logger.warning("copies cannot be measured, using defaults: %s", error)
        return DEFAULT
    if path:
        _write(path, driver.name, choice)
    logger.info("copies measured: kernel up to %s, DMA above", asdict(choice))
    return choice


def cache_folder() -> Path | None:
    """Return the folder of measurements; None for a user without a home."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "kvconnect"


def scattered(count: int) -> array[int]:
    """Return the numbers below ``count`` in a scattered order, always the same one."""
    step = next(n for n in (7919, 7907, 1) if count % n or n == 1)  # the first two are prime
    return array("q", (i * step % count for i in range(count)))


def _key(name: str) -> str:
    return hashlib.sha256(f"{_FORMAT} {name}".encode()).hexdigest()[:16]


def _read(path: Path, name: str) -> CopyThreshold | None:
    try:
        content = json.loads(path.read_text())
        store, load = content["store"], content["load"]
        fits = content["machine"] == name and {store, load} <= {0, *PAGES}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.info("%s is not usable, measuring again: %s", path, error)
        return None
    return CopyThreshold(store, load) if fits else None


def _write(path: Path, name: str, choice: CopyThreshold) -> None:
    """Replace the file atomically, because other workers of this machine use it too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"machine": name, **asdict(choice)}, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("measurements cannot be kept in %s: %s", path, error)
