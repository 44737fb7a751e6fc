"""``kvconnect doctor transport``: moves pages between two processes, and shows the findings.

Both peers are child processes; or the source runs elsewhere with ``--listen``, and the reader here
with ``--peer``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from kvconnect import memory
from kvconnect.copy import native_unavailable_reason
from kvconnect.doctor import Finding, FindingsReport
from kvconnect.doctor.checks import nixl_distributions
from kvconnect.doctor.peer_main import serve
from kvconnect.doctor.peer_process import LOG_ENV, PeerProcess, last_error
from kvconnect.doctor.peer_task import Problem, Result, SourceReady, Task
from kvconnect.doctor.route import Route, rdma_devices, tcp_route, ucx_cuda_problem, ucx_route
from kvconnect.doctor.transfer_findings import Environment, RequiredPaths, judge, route_of
from kvconnect.errors import TransferFailed

START_S = 60.0
"""Time for a peer process to get ready; importing torch on a busy machine is slow."""

LIMIT_S = 300.0
"""Time for the whole measurement; a link that needs more is unusable."""

_LOOPBACK = "127.0.0.1"


def examine(task: Task, min_rate: int = 0) -> FindingsReport:
    """Measure the paths to the source at ``task.host`` and ``task.port``.

    ``task`` is the reader's. Port 0 starts a source on this machine. Every process started here
    has ended on return.
    """
    env = LOG_ENV if task.path != "tcp" else {}
    required = RequiredPaths(task.path, min_rate)
    with ExitStack() as stack:
        try:
            result, ucx, words = _run(stack, task, env)
        except TransferFailed as error:
            fix = "see the message; try UCX_TLS=tcp or --path tcp to rule out UCX"
            return _report(
                [Finding("peer process", "fail", str(error), fix)], Result(), Environment()
            )
    environment = _environment(task, result, ucx, words)
    return _report(judge(result, environment, required), result, environment)


def _run(stack: ExitStack, task: Task, env: dict[str, str]) -> tuple[Result, Route | None, str]:
    """Start the processes; return the reader's result, UCX's route and the last error line.

    The source's log has precedence, because the source writes the pages.
    """
    source: PeerProcess | None = None
    if not task.port:
        serving = msgspec.structs.replace(task, role="source", host=_LOOPBACK)
        source = stack.enter_context(PeerProcess(serving, env))
        source.start()
        ready = source.read_line(SourceReady, START_S)
        if ready.problem.reason:
            return Result(problem=ready.problem), None, ""
        task = msgspec.structs.replace(task, host=_LOOPBACK, port=ready.port)
    reader = stack.enter_context(PeerProcess(task, env))
    reader.start()
    result = reader.read_line(Result, START_S + LIMIT_S)
    logs = [process.log() for process in (source, reader) if process]
    chosen = next(filter(None, map(ucx_route, logs)), None)
    return result, chosen, next(filter(None, map(last_error, logs)), "")


def listen(task: Task, say: Callable[[str], None], ended: Callable[[], bool]) -> None:
    """Run a source for readers elsewhere until ``ended`` returns true; ``say`` gets the address.

    Raises:
        ConfigError: the address, the key, the certificates or the device cannot be used.
    """

    def announce(address: tuple[str, int], nixl_problem: Problem) -> None:
        paths = "tcp" if task.path == "tcp" or nixl_problem.reason else "tcp and nixl"
        say(f"listening on {address[0]}:{address[1]} ({paths}); end with Ctrl-C")

    serve(task, announce, ended)


def _environment(task: Task, result: Result, ucx: Route | None, words: str) -> Environment:
    peer = task.host if task.port else _LOOPBACK
    interface = tcp_route(result.local, peer) if result.local else ""
    found = nixl_distributions()
    on_cuda = os.path.exists("/dev/nvidiactl")
    return Environment(
        interface=interface,
        tls=bool(task.tls_dir),
        ucx=ucx,
        rdma=rdma_devices(),
        memlock=memory.memlock_bytes(),
        memory=memory.total_bytes(),
        cuda_problem=ucx_cuda_problem(found[0]) if found and on_cuda else "",
        native_missing=native_unavailable_reason(),
        cores=os.cpu_count() or 1,
        loopback=interface == "loopback",
        last_error=words,
    )


def _report(findings: list[Finding], result: Result, environment: Environment) -> FindingsReport:
    measured: dict[str, object] = {
        each.path: {**msgspec.to_builtins(each), "route": route_of(each.path, environment)}
        for each in result.measured
    }
    if result.link_bytes_per_s:
        measured["link_bytes_per_s"] = result.link_bytes_per_s
    good = "pages move here: engines can hand off"
    bad = "this route does not work: see the fail lines"
    return FindingsReport(tuple(findings), good, bad, measured)
