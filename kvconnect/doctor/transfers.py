"""``kvconnect doctor transport``: real pages between two processes, with what that means.

Both halves are child processes, or the source is somebody else's: ``--listen`` there, ``--peer``
here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from kvconnect import memory
from kvconnect.copy import native_unavailable_reason
from kvconnect.doctor.checks import nixl_distributions
from kvconnect.doctor.findings import Finding, FindingsReport
from kvconnect.doctor.judge import Facts, RequiredPaths, judge, way
from kvconnect.doctor.peer_process import (
    LOG_ENV,
    Child,
    Result,
    SourceReady,
    Task,
    Trouble,
    last_words,
    serve,
)
from kvconnect.doctor.route import Route, rdma_devices, tcp_way, ucx_cuda_trouble, ucx_way
from kvconnect.errors import TransferFailed

START_S = 60.0
"""How long a half may take to get ready: importing torch on a busy machine takes a while."""

LIMIT_S = 300.0
"""How long the reader may measure; a link that cannot be measured by then cannot be used."""

_LOOPBACK = "127.0.0.1"


def examine(task: Task, min_rate: int = 0) -> FindingsReport:
    """Measure the paths to the source at ``task.host`` and ``port``; port 0: to one of our own.

    ``task`` is the reader's. Every process started here has ended when this returns.
    """
    env = LOG_ENV if task.path != "tcp" else {}
    wish = RequiredPaths(task.path, min_rate)
    with ExitStack() as stack:
        try:
            result, ucx, words = _run(stack, task, env)
        except TransferFailed as error:
            fix = "see the message; UCX_TLS=tcp and --path tcp leave out what may not work here"
            return _report([Finding("halves", "fail", str(error), fix)], Result(), Facts())
    facts = _facts(task, result, ucx, words)
    return _report(judge(result, facts, wish), result, facts)


def _run(stack: ExitStack, task: Task, env: dict[str, str]) -> tuple[Result, Route | None, str]:
    """Start what is needed; return the reader's result, UCX's choice, and the halves' last words.

    The source's log comes first where there is one: it is the one that writes pages.
    """
    source: Child | None = None
    if not task.port:
        giving = msgspec.structs.replace(task, role="source", host=_LOOPBACK)
        source = stack.enter_context(Child(giving, env))
        source.start()
        ready = source.line(SourceReady, START_S)
        if ready.trouble.reason:
            return Result(trouble=ready.trouble), None, ""
        task = msgspec.structs.replace(task, host=_LOOPBACK, port=ready.port)
    reader = stack.enter_context(Child(task, env))
    reader.start()
    result = reader.line(Result, START_S + LIMIT_S)
    logs = [half.log() for half in (source, reader) if half]
    chosen = next(filter(None, map(ucx_way, logs)), None)
    return result, chosen, next(filter(None, map(last_words, logs)), "")


def listen(task: Task, say: Callable[[str], None], ended: Callable[[], bool]) -> None:
    """Be the source for somebody else until ``ended`` says so; ``say`` is told where, once.

    Raises:
        ConfigError: the address, the key, the certificates or the device cannot be used.
    """

    def announce(address: tuple[str, int], lacking: Trouble) -> None:
        paths = "tcp" if task.path == "tcp" or lacking.reason else "tcp and nixl"
        say(f"listening on {address[0]}:{address[1]} ({paths}); end with Ctrl-C")

    serve(task, announce, ended)


def _facts(task: Task, result: Result, ucx: Route | None, words: str) -> Facts:
    peer = task.host if task.port else _LOOPBACK
    here = tcp_way(result.local, peer) if result.local else ""
    found = nixl_distributions()
    on_cuda = os.path.exists("/dev/nvidiactl")
    return Facts(
        here=here,
        tls=bool(task.tls_dir),
        ucx=ucx,
        rdma=rdma_devices(),
        memlock=memory.memlock_bytes(),
        memory=memory.total_bytes(),
        cuda_trouble=ucx_cuda_trouble(found[0]) if found and on_cuda else "",
        native_missing=native_unavailable_reason(),
        cores=os.cpu_count() or 1,
        loopback=here == "loopback",
        words=words,
    )


def _report(findings: list[Finding], result: Result, facts: Facts) -> FindingsReport:
    measured: dict[str, object] = {
        each.path: {**msgspec.to_builtins(each), "way": way(each.path, facts)}
        for each in result.measured
    }
    if result.link_bytes_per_s:
        measured["link_bytes_per_s"] = result.link_bytes_per_s
    good = "pages move here: engines can hand off"
    bad = "something is wrong with this way: see the fail lines"
    return FindingsReport(tuple(findings), good, bad, measured)
