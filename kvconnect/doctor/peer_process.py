"""One half of ``doctor transport`` as a process of its own: UCX reads its settings from the
environment when it is loaded, and CPU time is counted per process.

    python -m kvconnect.doctor.peer_process

It reads one line, a :class:`Task`, and writes one line. A source writes a :class:`SourceReady` and
answers until its standard input is closed; a reader writes a :class:`Result` and ends.
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

from kvconnect.doctor.reader import DoctorReader, Measured, Sizes
from kvconnect.doctor.source import DoctorSource
from kvconnect.doctor.test_buffer import make_area
from kvconnect.errors import ConfigError, KVConnectError, Refused, TransferFailed
from kvconnect.transport import ConnectionOptions, Security, Transport, make_transport
from kvconnect.transport.base import Memory
from kvconnect.transport.security import read_key_file, tls_files

PathChoice = Literal["tcp", "nixl", "all"]
Device = Literal["cpu", "cuda"]


class Task(msgspec.Struct, frozen=True):
    """What a half is to do. ``host`` and ``port``: where to listen, or whom to connect to."""

    role: Literal["source", "reader"]
    host: str
    port: int = 0
    path: PathChoice = "all"
    device: Device = "cpu"
    key_file: str = ""
    tls_dir: str = ""
    sizes: Sizes = Sizes()


class Trouble(msgspec.Struct):
    """Why something cannot be used, and what to do about it; both empty if it can."""

    reason: str = ""
    fix: str = ""


def trouble_of(error: ConfigError) -> Trouble:
    """Return what an unusable setting means for people."""
    return Trouble(f"not usable: {error.field}={error.value!r}", error.fix)


class SourceReady(msgspec.Struct):
    """A source: where it listens, or why it does not."""

    port: int = 0
    trouble: Trouble = msgspec.field(default_factory=Trouble)


class Result(msgspec.Struct):
    """A reader: what it found out.

    Attributes:
        local: this side's address of the connection.
        devices: where the pages are, here and there.
        connections: of the transport, and of the plain sockets.
        link_bytes_per_s: of plain sockets; 0 if ``link_failed`` says why not.
        measured: path by path.
        lacking: why there is no path nixl.
        trouble: why nothing was measured. ``refused``: its cause, see ``PeerDown``.
    """

    local: str = ""
    devices: tuple[str, str] = ("", "")
    connections: int = 0
    link_bytes_per_s: float = 0.0
    link_failed: str = ""
    measured: list[Measured] = msgspec.field(default_factory=list)
    lacking: Trouble = msgspec.field(default_factory=Trouble)
    trouble: Trouble = msgspec.field(default_factory=Trouble)
    refused: str = ""


def open_transport(
    task: Task, options: ConnectionOptions, memory: Memory
) -> tuple[Transport, Trouble]:
    """Return the transport with the most of the paths asked for, which has the memory, and why
    nixl is not among them.

    Raises:
        ConfigError: the key, the certificates or TCP itself cannot be used.
    """
    key = read_key_file(task.key_file) if task.key_file else b""
    security = Security(key, (), *tls_files(task.tls_dir))
    lacking = Trouble()
    if task.path != "tcp":
        try:
            return _registered(make_transport("nixl", security, options), memory), lacking
        except ConfigError as error:
            lacking = trouble_of(error)
    return _registered(make_transport("tcp", security, options), memory), lacking


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
    """Connect to a source and measure it; whatever goes wrong is in the result."""
    result = Result()
    options = _options(task)
    transport: Transport | None = None
    try:
        area = make_area(task.device, task.sizes.area_bytes)
        transport, result.lacking = open_transport(task, options, area.memory)
        reader = DoctorReader(transport, area, task.sizes)
        up, hello = reader.meet(task.host, task.port)
        result.local = local_address(task.host, task.port)
        result.devices = (task.device, hello.device)
        if "nixl" not in up.paths and not result.lacking.reason:
            result.lacking = Trouble(f"not usable: {up.lacking}", "make nixl usable on both sides")
        _measure(reader, task, up.paths, result)
    except ConfigError as error:
        result.trouble = trouble_of(error)
    except KVConnectError as error:
        result.refused = error.field if isinstance(error, Refused) else ""
        result.trouble = Trouble(str(error))
    finally:
        if transport:
            transport.close()
    return result


def _measure(reader: DoctorReader, task: Task, paths: tuple[str, ...], result: Result) -> None:
    result.connections = ConnectionOptions().connections
    for path in ("tcp", "nixl"):
        if path in paths and task.path in (path, "all"):
            result.measured.append(reader.measure(path))
            if result.measured[-1].failed:
                return  # the connection may be gone, and the other half with it
    try:
        result.link_bytes_per_s = reader.link(task.host, result.connections)
    except OSError as error:
        result.link_failed = str(error)


def local_address(host: str, port: int) -> str:
    """Return the address that this machine uses towards another; sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))
        return str(sock.getsockname()[0])


def answer(task: Task) -> None:
    """Listen and answer until standard input is closed."""
    try:
        serve(task, lambda address, _: _say(SourceReady(address[1])), _input_closed)
    except ConfigError as error:
        _say(SourceReady(trouble=trouble_of(error)))


def serve(
    task: Task,
    announce: Callable[[tuple[str, int], Trouble], None],
    ended: Callable[[], bool],
) -> None:
    """Be a source until ``ended`` says so, on the calling thread.

    ``announce`` is told once where it listens, and why there is no path nixl.

    Raises:
        ConfigError: the address, the key, the certificates or the device cannot be used.
    """
    area = make_area(task.device, task.sizes.area_bytes)
    transport, lacking = open_transport(task, _options(task), area.memory)
    with closing(transport):
        address = transport.listen(task.host, task.port)
        with closing(DoctorSource(transport, area, task.host)) as source:
            announce(address, lacking)
            source.serve(ended)


def _input_closed() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready)


def _say(line: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do the task on standard input."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    if task.role == "source":
        answer(task)
    else:
        _say(read(task))


if __name__ == "__main__":
    main()


# A half of ``doctor transport`` that runs as a child process.


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
            (sys.executable, "-m", "kvconnect.doctor.peer_process"),
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
