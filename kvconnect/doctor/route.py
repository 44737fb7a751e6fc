"""The hardware that a path uses: interfaces, RDMA devices, and the choice that UCX logs."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import re
import socket
import struct
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_ROOT = Path("/")
_SIOCGIFADDR = 0x8915
_LANE = re.compile(r"[a-z][a-z0-9_]*/[\w.:-]+")
_ENDPOINT = re.compile(r"\b(?:self|intra-node|inter-node) cfg#\d+")
_OPERATION = re.compile(r"remote memory (read|write) by ")
_CONFIGURED = re.compile(r"UCX\s+INFO\s+\S.*\b(?:intra|inter)-node cfg#\d+\s*(.*)")
_OVER_TCP = ("tcp/",)
_SHARED = ("cma/", "sysv/", "posix/", "xpmem/", "knem/", "self/", "cuda", "gdr_copy/")


@dataclass(frozen=True)
class Route:
    """How UCX moves pages.

    Attributes:
        lanes: transports and devices as ``cma/memory``, ``tcp/eth0`` or ``rc_mlx5/mlx5_0:1``.
        how: ``zero-copy``, ``software emulation`` ...; empty if UCX did not log it.
    """

    lanes: tuple[str, ...]
    how: str = ""

    @property
    def over_tcp(self) -> bool:
        """Whether pages go through the kernel's TCP."""
        return any(lane.startswith(_OVER_TCP) for lane in self.lanes)

    @property
    def over_rdma(self) -> bool:
        """Whether pages go through an RDMA device."""
        return any(not lane.startswith(_OVER_TCP + _SHARED) for lane in self.lanes)

    def __str__(self) -> str:
        return " + ".join(self.lanes) + (f" ({self.how})" if self.how else "")


def ucx_route(log: str) -> Route | None:
    """Return the route of large pages to and from another process, or None if the log lacks it.

    The tables of ``UCX_PROTO_INFO=y`` are read first: reads before writes, and the last table of
    each, which is for the registered memory. Without tables, the endpoint lines of
    ``UCX_LOG_LEVEL=info`` are read: these list all that UCX may use.
    """
    found: dict[str, Route] = {}
    operation, own = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) in (1, 2):
            title = " ".join(cells)
            if endpoint := _ENDPOINT.search(title):
                own = endpoint[0].startswith("self")
                operation = ""
            if match := _OPERATION.search(title):
                operation = match[1]
            elif len(cells) == 1 and not endpoint:
                operation = ""
        elif len(cells) == 3 and operation and not own and cells[0].endswith("..inf"):
            found[operation] = Route(_lanes(cells[2]), cells[1])
    return found.get("read") or found.get("write") or _configured(log)


def _configured(log: str) -> Route | None:
    """Return the lanes of the last endpoint to another process, for RMA or for messages."""
    lines = [match[1] for line in log.splitlines() if (match := _CONFIGURED.search(line))]
    for kind in ("rma_bw", "rma", "rma_am", "am"):
        match = re.search(rf"(?<!\w){kind}\(([^)]*)\)", lines[-1]) if lines else None
        if match:
            return Route(_lanes(match[1]))
    return None


def _lanes(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_LANE.findall(text)))


def tcp_route(local: str, peer: str) -> str:
    """Return the interface of TCP between two addresses."""
    if local == peer or ipaddress.ip_address(local).is_loopback:
        return "loopback"
    return _interface(ipaddress.ip_address(local)) or local


def _interface(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(address, ipaddress.IPv6Address):
        return _interface_v6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == address.packed:
                return name
    return ""


def _interface_v6(address: ipaddress.IPv6Address, root: Path = _ROOT) -> str:
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        words = line.split()
        if words[0] == address.packed.hex():
            return words[-1]
    return ""


def rdma_devices(root: Path = _ROOT) -> list[str]:
    """Return the names of the kernel's RDMA devices."""
    try:
        return sorted(path.name for path in (root / "sys/class/infiniband").iterdir())
    except OSError:
        return []


def ucx_cuda_problem(distribution: str) -> str:
    """Return why the UCX in an installed NIXL cannot reach CUDA memory; empty if it can."""
    try:
        modules = [
            str(file.locate())
            for file in files(distribution) or []
            if file.name.startswith("libuct_cuda.so")
        ]
    except PackageNotFoundError:
        return f"{distribution} is not installed"
    for module in modules:
        try:
            ctypes.CDLL(module)
        except OSError as error:
            return str(error)
    return "" if modules else f"{distribution} has no libuct_cuda"
