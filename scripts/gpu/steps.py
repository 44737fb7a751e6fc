"""Runs the steps of a phase, one process after the other, and reports what became of each.

A step that fails, hangs or cannot start never keeps the next one from running. A phase writes
``<phase>.json``, anew after each step, and ``<phase>.log``, which has what the steps print.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

SKIPPED = 77
"""Exit status of a step that this machine lacks something for."""

SHOWN_LINES = 30


@dataclass(frozen=True)
class Step:
    """One process. ``dry``: what a dry run starts instead, if that differs."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    dry: tuple[str, ...] | None = None


@dataclass
class Result:
    """``state``: passed, failed, skipped, timed out or not started. ``figures``: what the step
    printed as lines of JSON."""

    step: str
    command: Sequence[str]
    state: str
    exit_status: int | None = None
    seconds: float = 0.0
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.state in ("passed", "skipped")


class Phase:
    """Runs steps within ``limit_s`` together, with ``environment`` added to this process's."""

    def __init__(
        self, name: str, out: Path, limit_s: float, environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._out = out
        self._ends = time.monotonic() + limit_s
        self._environment = {**os.environ, **environment}
        self.results: list[Result] = []

    def run(self, steps: Sequence[Step], dry: bool = False) -> list[Result]:
        """Run the steps in order; return their results."""
        self._out.mkdir(parents=True, exist_ok=True)
        with (self._out / f"{self._name}.log").open("w+", errors="replace") as log:
            for step in steps:
                command = step.dry if dry and step.dry is not None else step.command
                left = min(step.limit_s, self._ends - time.monotonic())
                result = self._run(Result(step.name, command, "not started"), left, log)
                self.results.append(result)
                self._write(dry)
                print(f"{result.state:11} {result.step} ({result.seconds:.1f} s)", flush=True)
        return self.results

    def _run(self, result: Result, limit_s: float, log: IO[str]) -> Result:
        if limit_s <= 0:
            return result
        log.write(f"== {result.step}: {' '.join(result.command)}\n")
        log.flush()
        start = log.tell()
        began = time.monotonic()
        try:
            result.exit_status = _call(result.command, limit_s, log, self._environment)
        except OSError as error:
            log.write(f"{error}\n")
            result.state = "failed"
        else:
            states = {None: "timed out", 0: "passed", SKIPPED: "skipped"}
            result.state = states.get(result.exit_status, "failed")
        result.seconds = round(time.monotonic() - began, 2)
        log.flush()
        log.seek(start)
        printed = log.read()
        log.seek(0, os.SEEK_END)
        result.figures = figures_in(printed)
        if not result.good:
            sys.stdout.write("".join(printed.splitlines(keepends=True)[-SHOWN_LINES:]))
        return result

    def _write(self, dry: bool) -> None:
        report = {
            "phase": self._name,
            "dry_run": dry,
            "failed": [result.step for result in self.results if not result.good],
            "steps": [asdict(result) for result in self.results],
        }
        path = self._out / f"{self._name}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


def _call(
    command: Sequence[str], limit_s: float, log: IO[str], environment: Mapping[str, str]
) -> int | None:
    """Return the exit status; None after ``limit_s``, when all processes of the step are ended."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what the step left behind
        process.wait()


def figures_in(printed: str) -> dict[str, object]:
    """Return the values of all lines that are JSON objects; a later line wins."""
    found: dict[str, object] = {}
    for line in printed.splitlines():
        if line.startswith("{"):
            try:
                found |= json.loads(line)
            except ValueError:
                continue
    return found
