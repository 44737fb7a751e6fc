"""Starts engines by forking a process that has imported them already.

An engine of a test is three processes, and each spends seven seconds on imports and less than one
on a small model. A fork server pays for the imports once; what it forks is then the same program
as from the command line, but for two things. Its own processes are forked too, not spawned: what
spawning alone would show (settings that cannot be pickled) is left to the demos and benchmarks,
which start servers as users do. And where it would poll without a pause, as vLLM's processes of one
rank wait for each other, it sleeps between two looks: with Linux 6.18, some that call
``sched_yield`` in a loop have kept everything else off a machine's two cores for 25 seconds.

Run as ``python -m tests.fork_server MODULE...``: imports the modules, then forks a process for
every line of JSON on its standard input and answers with its PID.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import setproctitle  # a dependency of either engine

VLLM = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)
"""What the three processes of a vLLM engine import sooner or later."""

SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "tests.sglang.patient",
)
"""What the processes of an SGLang server import, as far as it may be imported before there is a
server: the client of Prometheus may not."""

_POLL_S = 0.02
_YIELD_S = 50e-6


class Child:
    """A process that a fork server forked; what is used of :class:`subprocess.Popen`.

    Its exit status is the fork server's to collect: :meth:`poll` says 0 for any process that ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """Return ``None`` while the process runs."""
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; raises ``subprocess.TimeoutExpired`` after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_S)

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """A process that has imported ``modules`` and forks; use as a context manager.

    ``python`` is its interpreter, and that of the processes.
    """

    def __init__(
        self, modules: Iterable[str], env: dict[str, str], python: str = sys.executable
    ) -> None:
        self.python = python
        self._command = [python, "-m", "tests.fork_server", *modules]
        self._env = env
        self._lock = threading.Lock()

    def __enter__(self) -> ForkServer:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            pass

    def start(self, argv: list[str], env: dict[str, str], log: Path | str) -> Child:
        """Run ``python -m`` with these arguments in a session of its own, output to ``log``."""
        line = json.dumps({"argv": argv, "env": env, "log": str(log)})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended, status {self._process.wait()}")
        return Child(int(answer))


def main(modules: list[str]) -> None:
    """Import, then fork for every line of standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a module prints may look like a PID
    for name in modules:
        importlib.import_module(name)
    setproctitle.getproctitle()  # it finds the command line next to the environment of the start
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[assignment]
    os.sched_yield = lambda: time.sleep(_YIELD_S)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for their status
    gc.freeze()  # a collection in a child would copy every page
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(json.loads(line))
        out.write(f"{pid}\n")
        out.flush()


def _become(request: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None  # asked for again, where this environment says
        paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        module, *sys.argv[1:] = request["argv"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        if (raised := sys.exc_info())[1] is not None:
            sys.excepthook(*raised)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
