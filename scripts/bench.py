"""Runs all benchmarks, one after the other; ``make bench``.

    python -m scripts.bench [NAME]... [--list] [--again]

What has a result of the current commit already is left out, so that an interrupted run goes on.
One that fails does not stop the others; their names are the last line, and the status is 1. Use an
otherwise idle machine. ``--list`` says what is to be run, and how long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import RESULTS, commit, progress

ROOT = Path(__file__).resolve().parents[1]
VLLM, SGLANG, PEERS = ".venv", ".venv-sglang", ".venv-peers"


class Run(NamedTuple):
    """One benchmark.

    Attributes:
        name: of its module.
        minutes: that it takes on two cores.
        needs: environments beside vLLM's.
        result: name of its result file, where that is another.
        python: environment that runs it.
        arguments: of its command.
    """

    name: str
    minutes: int
    needs: tuple[str, ...] = ()
    result: str = ""
    python: str = VLLM
    arguments: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.result or self.name}.json"


PLAN = (
    Run("plan", 1),
    Run("copy", 1, result="copy_cpu", arguments=("--device", "cpu")),
    Run("copy_model", 1),
    Run("scheduler_ops", 2),
    Run("store", 1),
    Run("disk_paths", 1),
    Run("handoff_beside", 1),
    Run("decisions", 1),
    Run("hostile", 3),
    Run("metrics", 2),
    Run("transport", 3),
    Run("router", 4, needs=(PEERS,)),
    Run("balance", 4),
    Run("continue_streams", 6),
    Run("overhead", 4),
    Run("offload_engine", 4),
    Run("tiers_default", 4),
    Run("first_hit", 5),
    Run("tiers", 6),
    Run("hybrids", 6),
    Run("soak", 10),
    Run("chaos", 14),
    Run("handoff", 16, arguments=("--quick",)),
    Run("disaggregate", 18),
    Run("sharing", 20),
    Run("sglang_handoff", 30, needs=(SGLANG,), python=SGLANG, arguments=("--quick",)),
    Run("fuzz", 90, needs=(SGLANG,), arguments=("--hours", "0.5")),
    Run("choosing", 110, needs=(SGLANG, PEERS)),
    Run("serve", 170, needs=(SGLANG, PEERS)),
    Run("models", 50, arguments=("--again",)),
)
"""The shortest first, but for the last one, which rewrites docs/models.md."""
BY_HAND = {
    "mooncake_storage": "needs a checkout of Mooncake",
    "copy_cuda": "needs a GPU: make gpu",
    "fake_engines": "a program that router and balance start",
}


def measured(run: Run, now: str) -> bool:
    """Say whether there is a result of the current commit."""
    if not run.file.exists():
        return False
    return bool(json.loads(run.file.read_text(encoding="utf-8")).get("commit") == now)


def command(run: Run) -> list[str]:
    """Return the program and its arguments."""
    python = ROOT / run.python / "bin" / "python"
    return [str(python), "-m", f"benchmarks.{run.name}", *run.arguments]


def go(run: Run) -> bool:
    """Run one benchmark; return whether it ended well."""
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{ROOT / run.python / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(command(run), cwd=ROOT, env={**os.environ, **paths}).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of benchmarks; all by default")
    parser.add_argument("--list", action="store_true", help="say what is to be run, and end")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    options = parser.parse_args(arguments)
    names = {run.name for run in PLAN}
    if unknown := sorted({*options.names} - names):
        parser.error(f"no benchmark {', '.join(unknown)}: choose of {', '.join(sorted(names))}")
    now, failed = commit(ROOT), []
    if now.endswith("+"):
        progress(f"files differ from commit {now[:-1]}: results will not count as measured")
    for run in PLAN:
        if options.names and run.name not in options.names:
            continue
        if not options.again and measured(run, now):
            progress(f"{run.name}: has a result of {now}")
            continue
        if missing := [each for each in run.needs if not (ROOT / each).exists()]:
            progress(f"{run.name}: left out, {' and '.join(missing)} not there (scripts/setup)")
            continue
        progress(f"{run.name}: about {run.minutes} minutes")
        if options.list:
            continue
        began = time.monotonic()
        ended = go(run)
        progress(f"{run.name}: {'done' if ended else 'FAILED'}, {time.monotonic() - began:.0f} s")
        failed += [] if ended else [run.name]
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
