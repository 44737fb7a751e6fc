"""Which hardware a path takes: what UCX writes, and this machine's interfaces."""

# ruff: noqa: E501 - what UCX writes has long lines

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.doctor.route import Route, rdma_devices, tcp_route, ucx_cuda_problem, ucx_route

# As UCX 1.23 of nixl-cu12 1.5.1 wrote them, for two processes on one machine.
SHARED = """
[1795280275.216194] [vm:6110 :0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from x)
[1795280292.202903] [vm:6352 :0]      ucp_worker.c:1997 UCX  INFO    dst self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
[1795280292.243467] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.243467] [vm:6352 :0]   | dst self cfg#0                                           |
[1795280292.243467] [vm:6352 :0]   | remote memory write by ucp_put* from host memory to host |
[1795280292.243467] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.243467] [vm:6352 :0]   | Range  | Description |              Config               |
[1795280292.243467] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.243467] [vm:6352 :0]   | 0..inf | zero-copy   | self/memory                       |
[1795280292.243467] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.274919] [vm:6352 :0]      ucp_worker.c:1997 UCX  INFO    dst intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
[1795280292.275916] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.275916] [vm:6352 :0]   | dst intra-node cfg#1                                     |
[1795280292.275916] [vm:6352 :0]   | remote memory write by ucp_put* from host memory to host |
[1795280292.275916] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.275916] [vm:6352 :0]   | Range  | Description |              Config               |
[1795280292.275916] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.275916] [vm:6352 :0]   | 0..inf | zero-copy   | cma/memory                        |
[1795280292.275916] [vm:6352 :0]   +--------+-------------+-----------------------------------+
[1795280292.276895] [vm:6352 :0]   +------------+--------------------+---------------+
[1795280292.276895] [vm:6352 :0]   | dst intra-node cfg#1                            |
[1795280292.276895] [vm:6352 :0]   | active message by ucp_am_send* from host memory |
[1795280292.276895] [vm:6352 :0]   +------------+--------------------+---------------+
[1795280292.276895] [vm:6352 :0]   |   Range    |    Description     |    Config     |
[1795280292.276895] [vm:6352 :0]   +------------+--------------------+---------------+
[1795280292.276895] [vm:6352 :0]   |          0 | short              | tcp/lo        |
[1795280292.276895] [vm:6352 :0]   |   1..16515 | zero-copy          | tcp/lo        |
[1795280292.276895] [vm:6352 :0]   | 16516..inf | multi-frag copy-in | tcp/lo        |
[1795280292.276895] [vm:6352 :0]   +------------+--------------------+---------------+
"""

OVER_TCP = """
[1795280293.183856] [vm:6364 :0]      ucp_worker.c:1997 UCX  INFO    src intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo tcp/eth0)  ka(tcp/lo)
[1795280293.187084] [vm:6364 :0]   | src intra-node cfg#1                                     |
[1795280293.187084] [vm:6364 :0]   | remote memory write by ucp_put* from host memory to host |
[1795280293.187084] [vm:6364 :0]   | Range  | Description |              Config               |
[1795280293.187084] [vm:6364 :0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
"""

EMULATED = (
    OVER_TCP
    + """
[1795280293.198848] [vm:6365 :0]   | dst intra-node cfg#1                                             |
[1795280293.198848] [vm:6365 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1795280293.198848] [vm:6365 :0]   | Range  |    Description     |               Config               |
[1795280293.198848] [vm:6365 :0]   | 0..inf | software emulation | tcp/lo                             |
"""
)

# The same with a network card that does it, the title in one line as older versions have it.
RDMA = """
[5.1] [node:7:0]   | ucp_context_0 inter-node cfg#2 | remote memory write by ucp_put* from host memory to host |
[5.1] [node:7:0]   |                          0..2K | short     | rc_mlx5/mlx5_0:1/path0                         |
[5.1] [node:7:0]   |                      2049..inf | zero-copy | rc_mlx5/mlx5_0:1 50% on path0 and 50% on path1 |
"""


@pytest.mark.parametrize(
    ("log", "said", "over_tcp", "over_rdma"),
    [
        (SHARED, "cma/memory (zero-copy)", False, False),
        (OVER_TCP, "tcp/lo + tcp/eth0 (zero-copy)", True, False),
        (EMULATED, "tcp/lo (software emulation)", True, False),
        (RDMA, "rc_mlx5/mlx5_0:1 (zero-copy)", False, True),
    ],
)
def test_the_way_of_large_pages_is_read_from_what_ucx_writes(
    log: str, said: str, over_tcp: bool, over_rdma: bool
) -> None:
    way = ucx_route(log)
    assert way is not None
    assert (str(way), way.over_tcp, way.over_rdma) == (said, over_tcp, over_rdma)


@pytest.mark.parametrize(
    ("line", "lanes"),
    [
        ("dst intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)", ("tcp/lo",)),
        ("0x1 inter-node cfg#3 rma(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) am(ud/x)",
         ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")),
        ("0x1 intra-node cfg#2 am(sysv/memory cma/memory)", ("sysv/memory", "cma/memory")),
    ],
)  # fmt: skip
def test_without_tables_the_line_about_the_endpoint_counts(
    line: str, lanes: tuple[str, ...]
) -> None:
    log = f"[1.0] [vm:1 :0]  ucp_worker.c:1997 UCX  INFO    {line}"
    assert ucx_route(log) == Route(lanes)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "Traceback (most recent call last):\nValueError: | 0..inf | x | tcp/lo |",
        "[1.0] [vm:1 :0]  ucp_worker.c:1997 UCX  INFO  dst self cfg#0 rma(tcp/lo) am(tcp/lo)",
        "| dst self cfg#0 |\n| remote memory write by ucp_put* |\n| 0..inf | zero-copy | cma/memory |",
        "| a inter-node cfg#1 |\n| active message by ucp_am |\n| 0..inf | zero-copy | tcp/lo |",
    ],
)
def test_nothing_is_made_up_where_ucx_does_not_say(log: str) -> None:
    assert ucx_route(log) is None


def test_interfaces() -> None:
    assert tcp_route("127.0.0.1", "127.0.0.1") == "loopback"
    assert tcp_route("10.9.8.7", "10.9.8.7") == "loopback"  # this machine's own address
    assert tcp_route("::1", "::1") == "loopback"
    assert tcp_route("192.0.2.1", "192.0.2.2") == "192.0.2.1"  # of no interface


def test_rdma_devices_are_those_the_kernel_knows(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path) == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "sys/class/infiniband" / name).mkdir(parents=True)
    assert rdma_devices(tmp_path) == ["mlx5_0", "mlx5_1"]


def test_a_distribution_without_the_cuda_module_is_named() -> None:
    assert ucx_cuda_problem("no-such-distribution") == "no-such-distribution is not installed"
    assert ucx_cuda_problem("msgspec") == "msgspec has no libuct_cuda"
