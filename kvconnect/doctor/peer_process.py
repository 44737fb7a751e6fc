"""A peer of ``doctor transport`` as a child process: started, given its task, read, killed."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import msgspec

from kvconnect.doctor.peer_task import Task
from kvconnect.errors import TransferFailed

S = TypeVar("S", bound=msgspec.Struct)

LOG_ENV = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr", "UCX_PROTO_INFO": "y"}
"""Makes UCX log its choices to standard error. A log file of its own would be lost on a kill."""

_UCX_LOG = re.compile(r"^\[.*(UCX +(INFO|DIAG) |\] +[|+])")  # lines due to LOG_ENV

_END_S = 5.0
_MAX_LINE = 1 << 20
_LOG_BYTES = 4 << 20


class PeerProcess:
    """A child process with one task. The context manager always kills it and waits for its end.

    Its standard error goes to an unnamed file.
    """

    def __init__(self, task: Task, env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            (sys.executable, "-m", "kvconnect.doctor.peer_main"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,  # no writes are pending when the process dies
            env={**os.environ, **env},
        )
        self.pid = self._process.pid
        self._task = task

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait(_END_S)
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def start(self) -> None:
        """Send the task."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it died, which ``read_line`` reports
            self._process.stdin.write(msgspec.json.encode(self._task) + b"\n")

    def read_line(self, kind: type[S], timeout_s: float) -> S:
        """Return the line that the process writes.

        Raises:
            TransferFailed: the process died, or wrote nothing in time.
        """
        assert self._process.stdout
        handle = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                raise TransferFailed(f"the {self._task.role} wrote nothing for {timeout_s:g} s")
            part = os.read(handle, _MAX_LINE)
            if not part:
                code = self._process.wait(_END_S)
                words = last_error(self.log()) or "no message"
                raise TransferFailed(f"the {self._task.role}'s process died with {code}: {words}")
            data += part
        return msgspec.json.decode(data, type=kind)

    def log(self) -> str:
        """Return the end of the process's standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LOG_BYTES))
        return self._errors.read().decode(errors="replace")


def last_error(log: str) -> str:
    """Return the last line of a log, without UCX's log of its choices."""
    lines = [line.strip() for line in log.splitlines() if not _UCX_LOG.match(line)]
    return next((line for line in reversed(lines) if line.strip("=-+ ")), "")
