"""A half of ``doctor transport`` that runs as a child process."""

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

from kvconnect.doctor.half import Task
from kvconnect.errors import TransferFailed

S = TypeVar("S", bound=msgspec.Struct)

LOG_ENV = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr", "UCX_PROTO_INFO": "y"}
"""Has UCX say which ways it chooses. Not into a file of its own: it would write that only when the
process ends in peace."""

_TALK = re.compile(r"^\[.*(UCX +(INFO|DIAG) |\] +[|+])")  # what LOG_ENV has UCX say

_END_S = 5.0
_MAX_LINE = 1 << 20
_LOG_BYTES = 4 << 20


class Child:
    """A process with one task. As a context manager: killed and waited for, whatever happens.

    Everything it writes to standard error ends in a file without a name.
    """

    def __init__(self, task: Task, env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            (sys.executable, "-m", "kvconnect.doctor.half"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,  # nothing is left to write when it is gone
            env={**os.environ, **env},
        )
        self.pid = self._process.pid
        self._task = task

    def __enter__(self) -> Child:
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
        """Give it its task."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it died; ``line`` says so
            self._process.stdin.write(msgspec.json.encode(self._task) + b"\n")

    def line(self, kind: type[S], timeout_s: float) -> S:
        """Return the line that it writes.

        Raises:
            TransferFailed: it died, or wrote nothing in time.
        """
        assert self._process.stdout
        handle = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                raise TransferFailed(f"the {self._task.role} said nothing for {timeout_s:g} s")
            part = os.read(handle, _MAX_LINE)
            if not part:
                code = self._process.wait(_END_S)
                words = last_words(self.log()) or "no message"
                raise TransferFailed(f"the {self._task.role}'s process died with {code}: {words}")
            data += part
        return msgspec.json.decode(data, type=kind)

    def log(self) -> str:
        """Return the end of what it has written to standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LOG_BYTES))
        return self._errors.read().decode(errors="replace")


def last_words(log: str) -> str:
    """Return the last line of a log that is not UCX's talk about its choices."""
    lines = [line.strip() for line in log.splitlines() if not _TALK.match(line)]
    return next((line for line in reversed(lines) if line.strip("=-+ ")), "")
