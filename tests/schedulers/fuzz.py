"""Runs of vLLM's schedulers with KVConnect for as long as you like.

::

    python -m tests.schedulers.fuzz --seed 1 --hours 2

Prints each seed that fails, with how to run it alone, and ends with 1 if one did.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext

import vllm

from tests.schedulers import controls
from tests.schedulers.fleets import run_handoffs, run_sharing
from tests.schedulers.workload import run_alone

KINDS = {"alone": run_alone, "sharing": run_sharing, "handoffs": run_handoffs}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schedulers.fuzz")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=0, help="so many instead, however long")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all if there is none")
    parser.add_argument("--control", help="break this on purpose, see tests/schedulers/controls.py")
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    kinds = given.kind or list(KINDS)
    control = getattr(controls, given.control) if given.control else nullcontext
    began, failed, count = time.monotonic(), 0, 0
    for seed in _seeds(given.seed, given.runs, began + given.hours * 3600):
        kind = kinds[seed % len(kinds)]
        count += 1
        try:
            with control():
                KINDS[kind](seed)
        except Exception:  # noqa: BLE001 - whatever it is, the next seed may show more
            failed += 1
            print(f"--kind {kind} --seed {seed} --runs 1", flush=True)
            traceback.print_exc(file=sys.stdout)
    hours = (time.monotonic() - began) / 3600
    print(f"vLLM {vllm.__version__}: {count} runs in {hours:.2f} hours, {failed} failed")
    return int(failed > 0)


def _seeds(first: int, runs: int, until: float) -> Iterator[int]:
    seed = first
    while seed < first + runs if runs else time.monotonic() < until:
        yield seed
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
