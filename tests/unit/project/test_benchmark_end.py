"""A benchmark that is terminated ends what it has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import contextlib, os, signal, sys
from benchmarks.common import end_when_terminated
def end_servers():
    os.kill(os.getpid(), signal.SIGTERM)
    print("ended", flush=True)
{first}
with contextlib.ExitStack() as stack:
    stack.callback(end_servers)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""
ONCE = "end_when_terminated()"
EACH_TIME = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))"


@pytest.mark.parametrize(("first", "output"), [(ONCE, "ended\n"), (EACH_TIME, "")])
def test_a_second_signal_does_not_interrupt_the_end(first: str, output: str) -> None:
    """Control: with the same exception for each signal, what was started is left behind."""
    program = PROGRAM.format(first=first)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == output
    assert done.returncode != 0
