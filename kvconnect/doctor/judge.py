"""What the figures of ``doctor transport`` mean: each becomes a finding with a cause and a fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvconnect.doctor.findings import Finding, Status, rate
from kvconnect.doctor.peer_process import Result
from kvconnect.doctor.reader import Measured
from kvconnect.doctor.route import Route

SLOW = 0.5
"""A path under this share of plain sockets is worth a warning."""

_BUSY = 0.8  # of the machine's cores, taken by the two halves
_FIXES = {
    "auth": "give both sides the same --key-file",
    "tls": "give both sides certificates of the same authority: --tls-dir",
    "address": "give --key-file on both sides: without one only loopback addresses are talked to",
}
_NO_PEER = (
    "start the other half (kvconnect doctor transport --listen HOST:PORT), "
    "and open its port in firewalls between"
)


@dataclass(frozen=True)
class Facts:
    """What is known beside the figures.

    Attributes:
        here: interface of the TCP connection.
        ucx: the way UCX chose; None if it did not say.
        rdma: RDMA devices of this machine.
        memlock: bytes that may be locked; None: no limit. ``memory``: bytes there are, if known.
        cuda_trouble: why UCX cannot reach CUDA memory, where there is a CUDA device.
        native_missing: why the C loops are not used; None if they are.
        cores: of this machine.
        loopback: both halves share them.
        words: last line of what the halves that run here wrote to standard error.
    """

    here: str = "loopback"
    tls: bool = False
    ucx: Route | None = None
    rdma: list[str] = field(default_factory=list)
    memlock: int | None = None
    memory: int | None = None
    cuda_trouble: str = ""
    native_missing: str | None = None
    cores: int = 1
    loopback: bool = True
    words: str = ""


@dataclass(frozen=True)
class RequiredPaths:
    """What was asked for: paths, and bytes per second that each must reach."""

    path: str = "all"
    min_rate: int = 0


def judge(result: Result, facts: Facts, wish: RequiredPaths) -> list[Finding]:
    """Return the findings: paths first, then the link and the machine."""
    if result.trouble.reason:
        reason, fix = result.trouble.reason, result.trouble.fix
        return [Finding("peer", "fail", reason, fix or _FIXES.get(result.refused, _NO_PEER))]
    findings = [_path(measured, result, facts, wish) for measured in result.measured]
    if wish.path != "tcp" and result.lacking.reason:
        status: Status = "fail" if wish.path == "nixl" else "warn"
        findings.append(Finding("nixl", status, result.lacking.reason, result.lacking.fix))
    return [*findings, *_link(result), *_machine(result, facts, wish)]


def way(path: str, facts: Facts) -> str:
    """Return which hardware a path really takes, for people."""
    if path == "tcp":
        return f"{facts.here}, {'TLS' if facts.tls else 'no TLS'}"
    return str(facts.ucx) if facts.ucx else "UCX did not say which way"


def _path(measured: Measured, result: Result, facts: Facts, wish: RequiredPaths) -> Finding:
    name = measured.path
    if measured.failed:
        fix = "see that the other half still runs, and that nothing between cuts connections"
        words = f" ({facts.words})" if facts.words else ""
        return Finding(name, "fail", measured.failed + words, fix)
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
        f"{way(name, facts)}"
    )
    ceiling = result.link_bytes_per_s
    if measured.bytes_per_s < wish.min_rate:
        cause, fix = _why(measured, result, facts)
        if ceiling and ceiling < wish.min_rate:
            cause = f"plain sockets reach {rate(ceiling)}"
            fix = "use a faster link, or another interface of both machines"
        value = f"{value}: under {rate(wish.min_rate)}, {cause}"
        return Finding(name, "fail", value, fix)
    if measured.bytes_per_s < SLOW * ceiling:
        cause, fix = _why(measured, result, facts)
        value = f"{value}: plain sockets reach {rate(ceiling)}, {cause}"
        return Finding(name, "warn", value, fix)
    return Finding(name, "ok", value)


def _why(measured: Measured, result: Result, facts: Facts) -> tuple[str, str]:
    """Return the likeliest cause of a low rate, and what to do about it."""
    if measured.path == "nixl":
        return _why_nixl(facts)
    if "cuda" in result.devices[0] or result.devices[1] not in ("", "cpu"):
        return "pages are staged through host memory", "use nixl where both sides have RDMA"
    if facts.tls:
        return "pages are encrypted", "use a key without TLS on networks that you trust"
    if facts.native_missing:
        fix = "install a C compiler and reinstall with KVCONNECT_BUILD_NATIVE=1"
        return f"the C loops are missing ({facts.native_missing})", fix
    used = measured.cpu_s_per_gb * measured.bytes_per_s / 1e9
    there = facts.cores if facts.loopback else 2 * facts.cores
    if used > _BUSY * there:
        return f"the halves take {used:.1f} of {there} cores", "give the engines more cores"
    return "which is more than this path does", "measure again on a machine that is not busy"


def _why_nixl(facts: Facts) -> tuple[str, str]:
    if facts.ucx is None:
        return "UCX did not say why", "run with UCX_LOG_LEVEL=info to see its choices"
    if facts.ucx.over_tcp:
        return "UCX goes over TCP", "use the path tcp, or RDMA devices"
    fix = "let UCX choose another way with UCX_TLS and UCX_NET_DEVICES, or use the path tcp"
    return "the way that UCX chose is slower", fix


def _link(result: Result) -> Iterator[Finding]:
    if result.link_bytes_per_s:
        text = f"{rate(result.link_bytes_per_s)} with {result.connections} plain sockets"
        yield Finding("link", "ok", text)
    elif result.link_failed:
        fix = "open all ports between the machines while measuring, to compare with plain sockets"
        yield Finding("link", "warn", f"plain sockets: {result.link_failed}", fix)


def _machine(result: Result, facts: Facts, wish: RequiredPaths) -> Iterator[Finding]:
    if wish.path == "tcp":
        return
    if facts.rdma:
        yield _rdma(result, facts)
        limit, memory = facts.memlock, facts.memory
        if limit is not None and (memory is None or limit < memory):
            value = f"{limit / 2**20:.0f} MiB may be locked, RDMA locks all that it can reach"
            yield Finding("memlock", "warn", value, "ulimit -l unlimited, or --ulimit memlock=-1")
    if facts.cuda_trouble:
        fix = "install the NIXL that fits CUDA (nixl-cu12 or nixl-cu13), and the CUDA driver"
        yield Finding("ucx cuda", "warn", facts.cuda_trouble, fix)


def _rdma(result: Result, facts: Facts) -> Finding:
    devices = ", ".join(facts.rdma)
    if not any(measured.path == "nixl" for measured in result.measured):
        fix = "make nixl usable on both sides (pip install 'kvconnect[nixl]')"
        return Finding("rdma", "warn", f"{devices} not used: no path nixl", fix)
    if facts.ucx is not None and facts.ucx.over_tcp and not facts.ucx.over_rdma:
        fix = (
            "unset UCX_TLS or add rc to it, name the device in UCX_NET_DEVICES "
            f"({facts.rdma[0]}:1), and give containers /dev/infiniband"
        )
        return Finding("rdma", "warn", f"{devices} not used: UCX goes over {facts.ucx}", fix)
    return Finding("rdma", "ok", devices)
