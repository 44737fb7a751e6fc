"""``tests/forked.py``: a command and the process that was forked for it end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.fork_server import ForkServer
from tests.forked import listening

DEADLINE_S = 60.0
SLEEPS = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    path, log = tmp_path / "socket", tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "tests.forked", str(path), "sleeps"]
    with (
        ForkServer(["json"], environment) as server,
        listening(path, server),
        log.open("ab") as output,
        subprocess.Popen(command, stdout=output, env=environment, cwd=ROOT) as process,
    ):
        until(lambda: log.read_text().endswith("\n"))
        forked = Path("/proc", log.read_text().split()[1])
        assert forked.exists()
        assert process.poll() is None
        process.send_signal(number)
        until(lambda: not forked.exists())
        process.wait(DEADLINE_S)


def test_what_an_engine_leaves_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import os, time\nif os.fork() == 0:\n    print('pid', os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    path, log = tmp_path / "socket", tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "tests.forked", str(path), "leaves"]
    with ForkServer(["json"], environment) as server, listening(path, server):
        with log.open("ab") as output:
            subprocess.run(command, stdout=output, env=environment, cwd=ROOT, timeout=DEADLINE_S)
        until(lambda: log.read_text().endswith("\n"))
        until(lambda: not Path("/proc", log.read_text().split()[1]).exists())
