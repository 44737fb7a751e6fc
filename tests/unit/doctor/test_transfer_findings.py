"""Findings of ``doctor transport``: what its figures mean."""

from __future__ import annotations

import pytest

from kvconnect.doctor import Finding
from kvconnect.doctor.peer_task import Problem, Result
from kvconnect.doctor.peers import PathMeasurement
from kvconnect.doctor.route import Route
from kvconnect.doctor.transfer_findings import Environment, RequiredPaths, judge

GB = 10**9
OVER_TCP = Route(("tcp/eth0",), "zero-copy")
OVER_RDMA = Route(("rc_mlx5/mlx5_0:1",), "zero-copy")
RDMA = ["mlx5_0"]


def result(*paths: PathMeasurement, link: float = 4 * GB, **rest: object) -> Result:
    fields = {"devices": ("cpu", "cpu"), "connections": 2, "measured": list(paths), **rest}
    return Result(link_bytes_per_s=link, **fields)  # type: ignore[arg-type]


def tcp(rate: float = 3 * GB, cpu: float = 0.5) -> PathMeasurement:
    return PathMeasurement("tcp", rate, 80e-6, cpu, 5000)


def nixl(rate: float = 3 * GB) -> PathMeasurement:
    return PathMeasurement("nixl", rate, 80e-6, 0.5, 5000)


def one(found: list[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in found if finding.name == name]
    return finding


def test_a_good_path_is_described_in_one_line() -> None:
    found = judge(result(tcp()), Environment("eth0", tls=True), RequiredPaths())
    assert found == [
        Finding(
            "tcp",
            "ok",
            "3.00 GB/s, 80 us a page of 4 KiB, 0.50 CPU s/GB, 5000 pages verified; eth0, TLS",
        ),
        Finding("link", "ok", "4.00 GB/s with 2 plain sockets"),
    ]


@pytest.mark.parametrize(("rate", "status"), [(2.0 * GB, "ok"), (1.9 * GB, "warn")])
def test_under_half_of_plain_sockets_is_a_warning(rate: float, status: str) -> None:
    finding = one(judge(result(tcp(rate)), Environment(cores=8), RequiredPaths()), "tcp")
    assert finding.status == status
    assert ("plain sockets reach 4.00 GB/s" in finding.value) is (status == "warn")


@pytest.mark.parametrize(
    ("environment", "cause", "fix"),
    [
        (Environment(cores=8), "faster than this path", "not busy"),
        (Environment(cores=8, tls=True), "encrypted", "key without TLS"),
        (
            Environment(cores=8, native_missing="no gcc"),
            "the C loops are missing (no gcc)",
            "compiler",
        ),
        (Environment(cores=1), "the peer processes use 1.0 of 1 cores", "cores"),
    ],
)
def test_a_slow_tcp_path_has_a_cause_and_a_fix(
    environment: Environment, cause: str, fix: str
) -> None:
    finding = one(judge(result(tcp(GB, cpu=1.0)), environment, RequiredPaths()), "tcp")
    assert finding.status == "warn"
    assert cause in finding.value
    assert fix in finding.fix


def test_a_rate_under_the_floor_fails_with_what_limits_it() -> None:
    slow = one(
        judge(result(tcp()), Environment(cores=64), RequiredPaths(min_rate=3 * GB + 1)), "tcp"
    )
    assert (slow.status, "under 3.00 GB/s" in slow.value) == ("fail", True)
    link = one(judge(result(tcp()), Environment(), RequiredPaths(min_rate=5 * GB)), "tcp")
    assert "plain sockets reach 4.00 GB/s" in link.value
    assert "faster link" in link.fix
    assert (
        one(judge(result(tcp()), Environment(), RequiredPaths(min_rate=3 * GB)), "tcp").status
        == "ok"
    )


@pytest.mark.parametrize("changed", [{"wrong": 1}, {"bad": 1}])
def test_one_changed_page_is_a_failure(changed: dict[str, int]) -> None:
    spoilt = tcp()
    for name, number in changed.items():
        setattr(spoilt, name, number)
    finding = one(judge(result(spoilt), Environment(), RequiredPaths()), "tcp")
    assert finding.status == "fail"
    assert f"{spoilt.wrong} of 5000 pages arrived changed" in finding.value
    assert "do not use" in finding.fix


@pytest.mark.parametrize(("path", "status"), [("all", "warn"), ("nixl", "fail")])
def test_a_missing_nixl_fails_only_who_asked_for_it(path: str, status: str) -> None:
    lacking = Problem("not usable: transport='nixl'", "pip install nixl-cu12")
    found = judge(result(tcp(), nixl_problem=lacking), Environment(), RequiredPaths(path))
    assert one(found, "nixl") == Finding("nixl", status, lacking.reason, lacking.fix)  # type: ignore[arg-type]
    found = judge(result(tcp(), nixl_problem=lacking), Environment(), RequiredPaths("tcp"))
    assert [finding.name for finding in found] == ["tcp", "link"]


@pytest.mark.parametrize(
    ("ucx", "cause"),
    [
        (None, "UCX did not log its route"),
        (OVER_TCP, "(zero-copy): plain sockets reach 4.00 GB/s, UCX goes over TCP"),
        (OVER_RDMA, "rc_mlx5/mlx5_0:1 (zero-copy): plain sockets reach 4.00 GB/s, the route"),
    ],
)
def test_a_slow_nixl_names_the_route(ucx: Route | None, cause: str) -> None:
    finding = one(judge(result(nixl(GB)), Environment(ucx=ucx), RequiredPaths()), "nixl")
    assert finding.status == "warn"
    assert cause in finding.value
    assert finding.fix


@pytest.mark.parametrize(
    ("paths", "ucx", "status", "fix"),
    [
        ([tcp(), nixl()], OVER_RDMA, "ok", ""),
        ([tcp(), nixl()], OVER_TCP, "warn", "UCX_NET_DEVICES (mlx5_0:1)"),
        ([tcp()], None, "warn", "make nixl usable"),
    ],
)
def test_rdma_devices_that_lie_idle_are_a_warning(
    paths: list[PathMeasurement], ucx: Route | None, status: str, fix: str
) -> None:
    found = judge(result(*paths), Environment(ucx=ucx, rdma=RDMA), RequiredPaths())
    finding = one(found, "rdma")
    assert finding.status == status
    assert fix in finding.fix
    assert "rdma" not in {
        f.name for f in judge(result(*paths), Environment(ucx=ucx), RequiredPaths())
    }


def test_little_lockable_memory_matters_where_there_is_rdma() -> None:
    environment = {"ucx": OVER_RDMA, "memlock": 8 << 20, "memory": 64 << 30}
    (finding,) = [
        finding
        for finding in judge(result(nixl()), Environment(rdma=RDMA, **environment), RequiredPaths())  # type: ignore[arg-type]
        if finding.name == "memlock"
    ]
    assert (finding.status, finding.value[:5]) == ("warn", "8 MiB")
    for fine in (
        Environment(ucx=OVER_RDMA, memlock=8 << 20),
        Environment(ucx=OVER_RDMA, rdma=RDMA, memlock=None),
    ):
        names = {finding.name for finding in judge(result(nixl()), fine, RequiredPaths())}
        assert "memlock" not in names


def test_a_ucx_without_cuda_is_a_warning() -> None:
    environment = Environment(
        ucx=OVER_TCP, cuda_problem="libcuda.so.1: cannot open shared object file"
    )
    finding = one(judge(result(nixl()), environment, RequiredPaths()), "ucx cuda")
    assert (finding.status, finding.value) == ("warn", environment.cuda_problem)


@pytest.mark.parametrize(
    ("refused", "fix"),
    [
        ("auth", "give both sides the same --key-file"),
        ("tls", "certificates of the same authority"),
        ("address", "--key-file on both sides"),
        ("", "start the other side"),
    ],
)
def test_a_peer_that_cannot_be_had_is_one_finding(refused: str, fix: str) -> None:
    found = judge(
        Result(problem=Problem("it is so"), refused=refused), Environment(), RequiredPaths()
    )
    (finding,) = found
    assert (finding.name, finding.status, finding.value) == ("peer", "fail", "it is so")
    assert fix in finding.fix


def test_a_link_that_could_not_be_measured_is_a_warning() -> None:
    found = judge(result(tcp(), link=0.0, link_failed="timed out"), Environment(), RequiredPaths())
    assert one(found, "tcp").status == "ok"
    assert one(found, "link").status == "warn"
