"""Measures up to which page size the gather kernel is faster than batched DMA.

Measured once per machine, device and driver, in about a tenth of a second, and kept on disk.
A kernel also takes multiprocessors and memory bandwidth from the model, which a measurement of
the copy alone does not show; so it has to win by a margin, and for stores, which nobody waits
for, by a large one.
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
_FORMAT = 1  # of the file; goes up when the kernels or their launch change


@dataclass(frozen=True)
class CopyThreshold:
    """Runs up to this many bytes go by kernel, longer ones by DMA; 0: all by DMA."""

    store: int
    load: int


DEFAULT = CopyThreshold(store=0, load=28 << 10)
"""Where nothing can be measured: what was published for an H100 on PCIe 5."""

SampleCopy = Callable[[str, str, int], None]
"""Copies a sample: direction, method ("kernel" or "dma"), page size."""


def choose(seconds: Mapping[tuple[str, str, int], float]) -> CopyThreshold:
    """Return up to which page the kernel wins, from seconds per (direction, method, page).

    It stops at the first page where it does not: a later win is noise.
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
    """Time both methods for every page size and direction; the best of some rounds counts.

    Raises:
        TransferFailed: a copy failed.
    """
    seconds = {}
    for direction in ("store", "load"):
        for page in PAGES:
            for method in ("kernel", "dma"):
                work = partial(move, direction, method, page)
                driver.seconds(work)  # the first loads code and fills tables
                seconds[direction, method, page] = min(driver.seconds(work) for _ in range(ROUNDS))
    return choose(seconds)


def calibrated(
    driver: Driver, make_move: Callable[[], SampleCopy], folder: Path | None = None
) -> CopyThreshold:
    """Return the choice for this machine, from its file or measured now.

    A file that is missing, broken or of another format is measured again; one that cannot be
    written, or a measurement that fails (no memory left for it), costs speed and nothing else.
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
    """Return where measurements are kept, None for a user without a home."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "kvconnect"


def scattered(count: int) -> array[int]:
    """Return the numbers below ``count`` in an order that jumps; the same every time."""
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
    """Replace the file in one go: other workers of this machine read and write it too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"machine": name, **asdict(choice)}, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("measurements cannot be kept in %s: %s", path, error)
