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
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "fuzz"
LONGEST = 4096
"""Bytes of one input."""


def fuzz(name: str, runs: int, keep: bool) -> None:
    """Fuzz one target in this process; does not return."""
    import atheris

    logging.disable()
    with atheris.instrument_imports(include=["kvconnect", "tests"]):
        from tests.fuzz.readers import CONTROL, TARGETS
    FOUND.mkdir(parents=True, exist_ok=True)
    new = CORPUS / name if keep else FOUND / f"{name}.corpus"  # gets what reached new code
    new.mkdir(parents=True, exist_ok=True)
    folders = dict.fromkeys(str(folder) for folder in (new, CORPUS / name) if folder.exists())
    flags = [f"-runs={runs}", f"-max_len={LONGEST}", "-timeout=60", "-rss_limit_mb=2048"]
    flags += ["-seed=1", "-reduce_inputs=0", "-verbosity=0", f"-artifact_prefix={FOUND}/{name}-"]
    atheris.Setup([sys.argv[0], *flags, *folders], (TARGETS | CONTROL)[name])
    atheris.Fuzz()


def in_process(name: str, runs: int, keep: bool = False) -> subprocess.CompletedProcess[str]:
    """Fuzz one target in a process of its own."""
    code = f"from tests.fuzz.guided import fuzz; fuzz({name!r}, {runs}, {keep})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    """Fuzz each target in a process of its own; return the exit code."""
    from tests.fuzz.readers import CONTROL, TARGETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--keep", action="store_true", help="add inputs to the corpus")
    given = parser.parse_args()
    if wrong := set(given.names) - set(TARGETS | CONTROL):
        parser.error(f"no target is called {wrong.pop()!r}: use {', '.join(TARGETS)}")
    for name in given.names or TARGETS:
        done = in_process(name, given.runs, given.keep)
        if done.returncode:
            sys.stderr.write(done.stdout)
            print(f"{name} failed: its input is in {FOUND}", file=sys.stderr)
            return 1
        print(f"{name}: {given.runs} inputs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
