"""Servers that stand for machines of their own: which cores they get, and that all of each move."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import machines

THREADS = 3
BUSY = f"""
import threading
ready = threading.Barrier({THREADS})
def wait():
    ready.wait()
    threading.Event().wait()
for _ in range({THREADS - 1}):
    threading.Thread(target=wait, daemon=True).start()
ready.wait()
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("there", "apart", "found"),
    [
        ({0, 1}, True, [{0}, {1}]),
        ({0, 1}, False, [{0, 1}, {0, 1}]),
        ({2, 3, 5, 7, 8}, True, [{2, 3}, {5, 7}]),
    ],
)
def test_machines_that_are_apart_share_no_core(
    there: set[int], apart: bool, found: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: there)
    assert machines.cores(2, apart) == found


def test_one_core_is_not_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert machines.cores(2, apart=False) == [{3}, {3}]
    with pytest.raises(SystemExit, match="2 machines need 2 cores to be apart"):
        machines.cores(2, apart=True)


@pytest.mark.smokes("machines")
def test_every_thread_of_a_process_moves() -> None:
    """Control: a process that was not named stays where it was."""
    everywhere = os.sched_getaffinity(0)
    one = {min(everywhere)}
    command = [sys.executable, "-c", BUSY]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as moved,
        subprocess.Popen(command, stdout=subprocess.PIPE) as left,
    ):
        try:
            for process in (moved, left):
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
            moved.send_signal(signal.SIGSTOP)
            machines.move([moved.pid], one)
            threads = [int(found.name) for found in Path(f"/proc/{moved.pid}/task").iterdir()]
            assert len(threads) == THREADS
            assert [os.sched_getaffinity(thread) for thread in threads] == [one] * THREADS
            assert os.sched_getaffinity(left.pid) == everywhere
        finally:
            moved.kill()
            left.kill()
    machines.move([moved.pid], one)  # it has ended: nothing to move
