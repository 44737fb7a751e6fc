"""Findings of a measurement of ``doctor transport``: what its figures mean, and what to mend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvconnect.doctor import Finding, Status, rate
from kvconnect.doctor.peer_task import Result
from kvconnect.doctor.peers import PathMeasurement
from kvconnect.doctor.route import Route

SLOW = 0.5
"""A path slower than this share of plain sockets gets a warning."""

_BUSY = 0.8  # share of the machine's cores

REFUSAL_FIXES = {
    "auth": "give both sides the same --key-file",
    "tls": "give both sides certificates of the same authority: --tls-dir",
    "protocol": "use the same version of kvconnect on both sides",
    "address": "give --key-file on both sides: without a key only loopback addresses are accepted",
}
"""What to do where the other side refused to talk, by :attr:`PeerDown.refused`."""

_NO_PEER = (
    "start the other side (kvconnect doctor transport --listen HOST:PORT), "
    "and open its port in firewalls"
)


@dataclass(frozen=True)
class Environment:
    """Facts about this machine and the connection, used to explain the figures.

    Attributes:
        interface: of the TCP connection.
        ucx: the route that UCX chose; None if UCX did not log it.
        rdma: RDMA devices of this machine.
        memlock: bytes that may be locked; None: no limit. ``memory``: bytes in total, if known.
        cuda_problem: why UCX cannot reach CUDA memory, if there is a CUDA device.
        native_missing: why the C loops are not used; None if they are.
        cores: of this machine.
        loopback: whether both peers share the cores.
        last_error: last line of standard error of the peer processes here.
    """

    interface: str = "loopback"
    tls: bool = False
    ucx: Route | None = None
    rdma: list[str] = field(default_factory=list)
    memlock: int | None = None
    memory: int | None = None
    cuda_problem: str = ""
    native_missing: str | None = None
    cores: int = 1
    loopback: bool = True
    last_error: str = ""


@dataclass(frozen=True)
class RequiredPaths:
    """The paths to measure, and the bytes per second that each must reach."""

    path: str = "all"
    min_rate: int = 0


def judge(result: Result, environment: Environment, required: RequiredPaths) -> list[Finding]:
    """Return the findings: paths first, then the link and the machine."""
    if result.problem.reason:
        reason, fix = result.problem.reason, result.problem.fix
        return [Finding("peer", "fail", reason, fix or REFUSAL_FIXES.get(result.refused, _NO_PEER))]
    findings = [_path(measured, result, environment, required) for measured in result.measured]
    if required.path != "tcp" and result.nixl_problem.reason:
        status: Status = "fail" if required.path == "nixl" else "warn"
        findings.append(
            Finding("nixl", status, result.nixl_problem.reason, result.nixl_problem.fix)
        )
    return [*findings, *_link(result), *_machine(result, environment, required)]


def route_of(path: str, environment: Environment) -> str:
    """Return the hardware that a path uses, for people."""
    if path == "tcp":
        return f"{environment.interface}, {'TLS' if environment.tls else 'no TLS'}"
    return str(environment.ucx) if environment.ucx else "UCX did not log its route"


def _path(
    measured: PathMeasurement, result: Result, environment: Environment, required: RequiredPaths
) -> Finding:
    name = measured.path
    if measured.failed:
        fix = "check that the other side still runs, and that no firewall cuts connections"
        detail = f" ({environment.last_error})" if environment.last_error else ""
        return Finding(name, "fail", measured.failed + detail, fix)
    if measured.wrong or measured.bad:
        value = (
            f"{measured.wrong} of {measured.verified} pages arrived changed, "
            f"{measured.bad} of them found by the transport's digest"
        )
        fix = "do not use this path: check memory, network cards and drivers on both sides"
        return Finding(name, "fail", value, fix)
    value = (
        f"{rate(measured.bytes_per_s)}, {measured.page_s * 1e6:.0f} us a page of 4 KiB, "
        f"{measured.cpu_s_per_gb:.2f} CPU s/GB, {measured.verified} pages verified; "
        f"{route_of(name, environment)}"
    )
    ceiling = result.link_bytes_per_s
    if measured.bytes_per_s < required.min_rate:
        cause, fix = _why(measured, result, environment)
        if ceiling and ceiling < required.min_rate:
            cause = f"plain sockets reach {rate(ceiling)}"
            fix = "use a faster link, or another interface of both machines"
        value = f"{value}: under {rate(required.min_rate)}, {cause}"
        return Finding(name, "fail", value, fix)
    if measured.bytes_per_s < SLOW * ceiling:
        cause, fix = _why(measured, result, environment)
        value = f"{value}: plain sockets reach {rate(ceiling)}, {cause}"
        return Finding(name, "warn", value, fix)
    return Finding(name, "ok", value)


def _why(measured: PathMeasurement, result: Result, environment: Environment) -> tuple[str, str]:
    """Return the likeliest cause of a low rate, and the fix."""
    if measured.path == "nixl":
        return _why_nixl(environment)
    if "cuda" in result.devices[0] or result.devices[1] not in ("", "cpu"):
        return "pages are staged through host memory", "use nixl where both sides have RDMA"
    if environment.tls:
        return "pages are encrypted", "use a key without TLS on networks that you trust"
    if environment.native_missing:
        fix = "install a C compiler and reinstall with KVCONNECT_BUILD_NATIVE=1"
        return f"the C loops are missing ({environment.native_missing})", fix
    used = measured.cpu_s_per_gb * measured.bytes_per_s / 1e9
    available = environment.cores if environment.loopback else 2 * environment.cores
    if used > _BUSY * available:
        return (
            f"the peer processes use {used:.1f} of {available} cores",
            "give the engines more cores",
        )
    return "which is faster than this path", "measure again on a machine that is not busy"


def _why_nixl(environment: Environment) -> tuple[str, str]:
    if environment.ucx is None:
        return "UCX did not log its route", "run with UCX_LOG_LEVEL=info to see its choices"
    if environment.ucx.over_tcp:
        return "UCX goes over TCP", "use the path tcp, or RDMA devices"
    fix = "let UCX choose another route with UCX_TLS and UCX_NET_DEVICES, or use the path tcp"
    return "the route that UCX chose is slower", fix


def _link(result: Result) -> Iterator[Finding]:
    if result.link_bytes_per_s:
        text = f"{rate(result.link_bytes_per_s)} with {result.connections} plain sockets"
        yield Finding("link", "ok", text)
    elif result.link_failed:
        fix = "open all ports between the machines while measuring, to compare with plain sockets"
        yield Finding("link", "warn", f"plain sockets: {result.link_failed}", fix)


def _machine(
    result: Result, environment: Environment, required: RequiredPaths
) -> Iterator[Finding]:
    if required.path == "tcp":
        return
    if environment.rdma:
        yield _rdma(result, environment)
        limit, memory = environment.memlock, environment.memory
        if limit is not None and (memory is None or limit < memory):
            value = (
                f"{limit / 2**20:.0f} MiB may be locked, RDMA locks all memory that it registers"
            )
            yield Finding("memlock", "warn", value, "ulimit -l unlimited, or --ulimit memlock=-1")
    if environment.cuda_problem:
        fix = "install the NIXL that fits CUDA (nixl-cu12 or nixl-cu13), and the CUDA driver"
        yield Finding("ucx cuda", "warn", environment.cuda_problem, fix)


def _rdma(result: Result, environment: Environment) -> Finding:
    devices = ", ".join(environment.rdma)
    if not any(measured.path == "nixl" for measured in result.measured):
        fix = "make nixl usable on both sides (pip install 'kvconnect[nixl]')"
        return Finding("rdma", "warn", f"{devices} not used: no path nixl", fix)
    if environment.ucx is not None and environment.ucx.over_tcp and not environment.ucx.over_rdma:
        fix = (
            "unset UCX_TLS or add rc to it, name the device in UCX_NET_DEVICES "
            f"({environment.rdma[0]}:1), and give containers /dev/infiniband"
        )
        return Finding("rdma", "warn", f"{devices} not used: UCX goes over {environment.ucx}", fix)
    return Finding("rdma", "ok", devices)
