"""Coverage-guided fuzzing of everything that reads what others wrote, with atheris.

::

    python -m tests.fuzz.guided                          # every target, 20,000 inputs each
    python -m tests.fuzz.guided --runs 1000000 ticket disk_index

Every target begins with the inputs in ``tests/fuzz/corpus/TARGET``; ``--keep`` adds those that
reached new code. An input that broke a target is written to ``build/fuzz`` and ends the run.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

CORPUS = Path(__file__).with_name("corpus")
ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "fuzz"
LONGEST = 4096
"""Bytes of one input."""


def readers() -> dict[str, Callable[[bytes], object]]:
    """Import all targets, so that their coverage is seen."""
    import atheris

    with atheris.instrument_imports(include=["kvconnect", "tests"]):
        from tests.fuzz.readers import CONTROL, TARGETS
    return TARGETS | CONTROL


def fuzz(name: str, reader: Callable[[bytes], object], runs: int, keep: bool) -> NoReturn:
    """Fuzz one target until this process ends."""
    import atheris

    logging.disable()
    FOUND.mkdir(parents=True, exist_ok=True)
    new = CORPUS / name if keep else FOUND / f"{name}.corpus"  # gets what reached new code
    new.mkdir(parents=True, exist_ok=True)
    folders = dict.fromkeys(str(folder) for folder in (new, CORPUS / name) if folder.exists())
    flags = [f"-runs={runs}", f"-max_len={LONGEST}", "-timeout=60", "-rss_limit_mb=2048"]
    flags += ["-seed=1", "-reduce_inputs=0", "-verbosity=0", f"-artifact_prefix={FOUND}/{name}-"]
    atheris.Setup([sys.argv[0], *flags, *folders], reader)
    atheris.Fuzz()
    sys.exit()  # not reached


def in_process(name: str, reader: Callable[[bytes], object], runs: int, keep: bool) -> str | None:
    """Fuzz one target in a fork of this process: imports take longer than thousands of inputs.
    Return what it printed if it failed."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            fuzz(name, reader, runs, keep)  # ends the process, which then writes what broke it
        failed = os.waitpid(pid, 0)[1]
        printed.seek(0)
        return f"{printed.read()}status {failed}\n" if failed else None


def main() -> int:
    """Fuzz each target in a process of its own; return the exit code."""
    found = readers()
    from tests.fuzz.readers import TARGETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--keep", action="store_true", help="add inputs to the corpus")
    given = parser.parse_args()
    if wrong := set(given.names) - set(found):
        parser.error(f"no target is called {wrong.pop()!r}: use {', '.join(TARGETS)}")
    for name in given.names or TARGETS:
        if printed := in_process(name, found[name], given.runs, given.keep):
            sys.stderr.write(printed)
            print(f"{name} failed: its input is in {FOUND}", file=sys.stderr)
            return 1
        print(f"{name}: {given.runs} inputs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
