"""A peer of ``doctor transport`` as a process of its own.

    python -m kvconnect.doctor.peer_process

The process reads one line, a :class:`Task`, and writes one line. A source writes a
:class:`SourceReady` and answers until its standard input is closed; a reader writes a
:class:`Result` and ends. A separate process is needed because UCX reads its settings when it is
loaded, and CPU time is counted per process.
"""

from __future__ import annotations

import ipaddress
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from types import TracebackType
from typing import Literal, TypeVar

import msgspec

from kvconnect.doctor.buffers import make_buffer
from kvconnect.doctor.peers import DoctorReader, DoctorSource, PathMeasurement, Sizes
from kvconnect.errors import ConfigError, KVConnectError, Refused, TransferFailed
from kvconnect.transport import PAGE_PATHS, ConnectionOptions, Security, Transport, make_transport
from kvconnect.transport.base import Memory
from kvconnect.transport.security import read_key_file, tls_files

PathChoice = Literal["tcp", "nixl", "all"]
Device = Literal["cpu", "cuda"]


class Task(msgspec.Struct, frozen=True):
    """A peer's task. ``host`` and ``port``: where a source listens, or a reader connects to."""

    role: Literal["source", "reader"]
    host: str
    port: int = 0
    path: PathChoice = "all"
    device: Device = "cpu"
    key_file: str = ""
    tls_dir: str = ""
    sizes: Sizes = Sizes()


class Problem(msgspec.Struct):
    """Why something is unusable, and the fix; both are empty if it is usable."""

    reason: str = ""
    fix: str = ""


def problem_of(error: ConfigError) -> Problem:
    """Return the problem of an unusable setting."""
    return Problem(f"not usable: {error.field}={error.value!r}", error.fix)


class SourceReady(msgspec.Struct):
    """A source's answer: its port, or why it does not listen."""

    port: int = 0
    problem: Problem = msgspec.field(default_factory=Problem)


class Result(msgspec.Struct):
    """A reader's answer.

    Attributes:
        local: this side's address of the connection.
        devices: of the reader's and the source's test buffer.
        connections: of the transport, and of the plain sockets.
        link_bytes_per_s: of plain sockets; 0 if they failed. ``link_failed``: why.
        measured: one entry per path.
        nixl_problem: why NIXL was not measured.
        problem: why nothing was measured. ``refused``: the field of a rejection, see ``PeerDown``.
    """

    local: str = ""
    devices: tuple[str, str] = ("", "")
    connections: int = 0
    link_bytes_per_s: float = 0.0
    link_failed: str = ""
    measured: list[PathMeasurement] = msgspec.field(default_factory=list)
    nixl_problem: Problem = msgspec.field(default_factory=Problem)
    problem: Problem = msgspec.field(default_factory=Problem)
    refused: str = ""


def open_transport(
    task: Task, options: ConnectionOptions, memory: Memory
) -> tuple[Transport, Problem]:
    """Return a transport for the paths of ``task``, with ``memory`` registered, and why it lacks
    NIXL.

    Raises:
        ConfigError: the key, the certificates or TCP cannot be used.
    """
    key = read_key_file(task.key_file) if task.key_file else b""
    security = Security(key, (), *tls_files(task.tls_dir))
    nixl_problem = Problem()
    if task.path != "tcp":
        try:
            return _registered(make_transport("nixl", security, options), memory), nixl_problem
        except ConfigError as error:
            nixl_problem = problem_of(error)
    return _registered(make_transport("tcp", security, options), memory), nixl_problem


def _options(task: Task) -> ConnectionOptions:
    return ConnectionOptions(local=ipaddress.ip_address(task.host).is_loopback)


def _registered(transport: Transport, memory: Memory) -> Transport:
    try:
        transport.register(memory)
    except ConfigError:
        transport.close()
        raise
    return transport


def read(task: Task) -> Result:
    """Connect to a source and measure it. Every failure is in the result."""
    result = Result()
    options = _options(task)
    transport: Transport | None = None
    try:
        buffer = make_buffer(task.device, task.sizes.buffer_bytes)
        transport, result.nixl_problem = open_transport(task, options, buffer.memory)
        reader = DoctorReader(transport, buffer, task.sizes)
        up, hello = reader.connect(task.host, task.port)
        result.local = local_address(task.host, task.port)
        result.devices = (task.device, hello.device)
        if "nixl" not in up.paths and not result.nixl_problem.reason:
            result.nixl_problem = Problem(
                f"not usable: {up.path_error}", "make nixl usable on both sides"
            )
        _measure(reader, task, up.paths, result)
    except ConfigError as error:
        result.problem = problem_of(error)
    except KVConnectError as error:
        result.refused = error.field if isinstance(error, Refused) else ""
        result.problem = Problem(str(error))
    finally:
        if transport:
            transport.close()
    return result


def _measure(reader: DoctorReader, task: Task, paths: tuple[str, ...], result: Result) -> None:
    result.connections = ConnectionOptions().connections
    for path in PAGE_PATHS:
        if path in paths and task.path in (path, "all"):
            result.measured.append(reader.measure(path))
            if result.measured[-1].failed:
                return  # the connection may be gone
    try:
        result.link_bytes_per_s = reader.measure_sockets(task.host, result.connections)
    except OSError as error:
        result.link_failed = str(error)


def local_address(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``; sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])


def answer(task: Task) -> None:
    """Listen and answer until standard input is closed."""
    try:
        serve(task, lambda address, _: _write(SourceReady(address[1])), _input_closed)
    except ConfigError as error:
        _write(SourceReady(problem=problem_of(error)))


def serve(
    task: Task,
    announce: Callable[[tuple[str, int], Problem], None],
    ended: Callable[[], bool],
) -> None:
    """Run a source on the calling thread until ``ended`` returns true.

    ``announce`` is called once, with the address and why NIXL is not served.

    Raises:
        ConfigError: the address, the key, the certificates or the device cannot be used.
    """
    buffer = make_buffer(task.device, task.sizes.buffer_bytes)
    transport, nixl_problem = open_transport(task, _options(task), buffer.memory)
    with closing(transport):
        address = transport.listen(task.host, task.port)
        with closing(DoctorSource(transport, buffer, task.host)) as source:
            announce(address, nixl_problem)
            source.serve(ended)


def _input_closed() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready)


def _write(line: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the task that standard input gives."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    if task.role == "source":
        answer(task)
    else:
        _write(read(task))


if __name__ == "__main__":
    main()


# The parent's side ------------------------------------------------------------------------------

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
            (sys.executable, "-m", "kvconnect.doctor.peer_process"),
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
