"""A peer of ``doctor transport`` as a process of its own.

    python -m kvconnect.doctor.peer_main

The process reads one line, a :class:`Task`, and writes one line. A source writes a
:class:`SourceReady` and answers until its standard input is closed; a reader writes a
:class:`Result` and ends. A separate process is needed because UCX reads its settings when it is
loaded, and CPU time is counted per process.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import sys
from collections.abc import Callable
from contextlib import closing

import msgspec

from kvconnect.doctor.buffers import make_buffer
from kvconnect.doctor.peer_task import Problem, Result, SourceReady, Task, problem_of
from kvconnect.doctor.peers import DoctorReader, DoctorSource
from kvconnect.errors import ConfigError, KVConnectError, Refused
from kvconnect.transport import PAGE_PATHS, ConnectionOptions, Security, Transport, make_transport
from kvconnect.transport.base import Memory
from kvconnect.transport.security import read_key_file, tls_files


def open_transport(
    task: Task, options: ConnectionOptions, memory: Memory
) -> tuple[Transport, Problem]:
    """Return a transport for the paths of ``task``, with ``memory`` registered, and why it lacks
    NIXL.

    Raises:
        ConfigError: the key, the certificates or TCP cannot be used.
    """
    key = read_key_file(task.key_file) if task.key_file else b""
    tls = tls_files(task.tls_dir)
    security = Security(
        key=key, tls_cert=tls.certificate, tls_key=tls.private_key, tls_ca=tls.authority
    )
    nixl_problem = Problem()
    if task.path != "tcp":
        try:
            return _registered(make_transport("nixl", security, options), memory), nixl_problem
        except ConfigError as error:
            nixl_problem = problem_of(error)
    return _registered(make_transport("tcp", security, options), memory), nixl_problem


def _options(task: Task, *, reads: bool) -> ConnectionOptions:
    local = ipaddress.ip_address(task.host).is_loopback
    return ConnectionOptions(local=local, reads=reads, serves=not reads)


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
    options = _options(task, reads=True)
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
    transport, nixl_problem = open_transport(task, _options(task, reads=False), buffer.memory)
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
