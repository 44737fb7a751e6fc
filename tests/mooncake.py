"""A Mooncake Store of a test's own."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.servers import free_port


class Mooncake:
    """A master and a process that lends it memory, on ports of their own.

    ``programs`` is the folder of the package ``mooncake``.
    """

    def __init__(self, programs: Path, memory: str = "64MB") -> None:
        self._programs = programs
        self._memory = memory
        self.ports = [free_port() for _ in range(3)]
        self._master: subprocess.Popen[bytes] | None = None
        self._lender: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        master, admin, lender = map(str, self.ports)
        here = ("-rpc_address", "127.0.0.1", "-metrics_host", "127.0.0.1")
        ports = ("-rpc_port", master, "-metrics_port", admin, "-client_ttl", "2")
        self._master = self._run("mooncake_master", *here, *ports)
        for port in self.ports[:2]:
            wait_until(partial(answers, port), "the master does not start")
        place = ("-host", "127.0.0.1", "-port", lender, "-metadata_server", "P2PHANDSHAKE")
        memory = (
            "-global_segment_size",
            self._memory,
            "-master_server_address",
            f"127.0.0.1:{master}",
        )
        self._lender = self._run("mooncake_client", *place, *memory)
        wait_until(lambda: self._segments() > 0, "nobody lends memory")

    def pause(self, stop: bool = True) -> None:
        assert self._master is not None
        self._master.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)
        tasks = Path(f"/proc/{self._master.pid}/task")

        def is_so() -> bool:
            return all(("T (stop" in (t / "status").read_text()) is stop for t in tasks.iterdir())

        wait_until(is_so, "the master does not take the signal")

    def kill_lender(self) -> None:
        kill(self._lender)

    def kill(self) -> None:
        kill(self._lender)
        kill(self._master)

    def settings(self, **more: object) -> dict[str, object]:
        return {"address": f"127.0.0.1:{self.ports[0]}", "buffer": "64MiB"} | more

    def _run(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([str(self._programs / name), *options], **quiet)

    def _segments(self) -> int:
        url = f"http://127.0.0.1:{self.ports[1]}/get_all_segments"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return len(answer.read().split())
        except urllib.error.HTTPError as error:
            assert error.code == 503, error  # it is not ready to answer yet
            return 0


def kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
