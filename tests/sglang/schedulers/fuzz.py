"""Random runs of SGLang's schedulers with KVConnect for as long as you like.

::

    python -m tests.sglang.schedulers.fuzz --seed 1 --hours 2

Prints each fault with the mode and the seed that show it, and ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fork_server import ForkServer
from tests.sglang.schedulers import model
from tests.sglang.schedulers.engine import MODULES, EngineDied, Engines
from tests.sglang.schedulers.modes import MODES
from tests.sglang.schedulers.pair import Fault, Pair
from tests.sglang.schedulers.workload import Run

_RUNS = 10
"""Of a mode, before the next mode's turn."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sglang.schedulers.fuzz")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=0, help="so many of each mode, however long")
    parser.add_argument("--mode", choices=MODES, action="append", help="all if there is none")
    parser.add_argument("--ticks", type=int, default=150, help="length of a run")
    given = parser.parse_args()
    began, runs, failed = time.monotonic(), 0, 0
    until = began + given.hours * 3600
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, ForkServer(MODULES, environment) as server:
        checkpoint = model.write(Path(folder) / "model")
        seed, count = given.seed, given.runs or _RUNS
        while True:
            for name in given.mode or MODES:
                with Engines(server, checkpoint) as engines:
                    for number in range(seed, seed + count):
                        if not given.runs and time.monotonic() > until:
                            break
                        runs += 1
                        failed += not _run(engines, name, number, given.ticks)
            seed += count
            if given.runs or time.monotonic() > until:
                break
    hours = (time.monotonic() - began) / 3600
    print(f"SGLang: {runs} runs in {hours:.2f} hours, {failed} failed")
    return int(failed > 0)


def _run(engines: Engines, name: str, seed: int, ticks: int) -> bool:
    """Make one run; return whether it found nothing wrong."""
    mode = MODES[name]
    with Pair(*engines.get(mode.prefill, mode.decode)) as pair:
        try:
            Run(pair, seed, mode.rates).go(ticks)
        except (Fault, EngineDied) as fault:
            print(f"--mode {name} --seed {seed} --runs 1 --ticks {ticks}: {fault}", flush=True)
            engines.discard(mode.prefill)
            engines.discard(mode.decode)
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
