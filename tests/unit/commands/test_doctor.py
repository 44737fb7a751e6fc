"""``kvconnect doctor`` on the command line: its exit codes, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnect import cli
from kvconnect.commands import doctor
from kvconnect.doctor import Finding, FindingsReport, Status, checks, disk, engines, transfers
from kvconnect.doctor.peer_task import Task


def doctor_says(monkeypatch: pytest.MonkeyPatch, *statuses: Status) -> None:
    found = tuple(
        lambda status=status: Finding(f"check {status}", status, "found", "do this")
        for status in statuses
    )
    monkeypatch.setattr(checks, "CHECKS", found)
    monkeypatch.setattr(engines, "check_engines", list)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["ok"], 0), (["ok", "warn"], 0), (["ok", "fail", "warn"], 1)],
)
def test_exit_code_says_whether_offload_can_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[Status],
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
    expected = len(engines.check_engines()) + len(checks.CHECKS)
    assert len(answer["findings"]) == expected
    assert len({finding["name"] for finding in answer["findings"]}) == expected
    for finding in answer["findings"]:
        assert finding["value"]
        assert bool(finding["fix"]) is (finding["status"] != "ok"), finding


def test_flags_of_the_transport_become_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Task, int]] = []
    report = FindingsReport((Finding("tcp", "fail", "slow", "faster"),), "good", "bad")

    def examine(task: Task, min_rate: int) -> FindingsReport:
        asked.append((task, min_rate))
        return report

    monkeypatch.setattr(transfers, "examine", examine)
    assert cli.main(["doctor", "transport"]) == 1
    words = "--peer [::1]:7000 --path nixl --device cuda --min-rate 1GB --key-file K --tls-dir T"
    assert cli.main(["doctor", "transport", *words.split()]) == 1
    assert asked == [
        (Task("reader", "", 0), 0),
        (Task("reader", "::1", 7000, "nixl", "cuda", "K", "T"), 10**9),
    ]


@pytest.mark.parametrize("side", ["--listen", "--peer"])
def test_another_machine_is_asked_with_a_key_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], side: str
) -> None:
    report = FindingsReport((), "good", "bad")
    monkeypatch.setattr(transfers, "examine", lambda task, min_rate: report)
    monkeypatch.setattr(transfers, "listen", lambda task, say, ended: None)
    monkeypatch.setattr(doctor, "log_to_stderr", lambda: None)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "transport", side, "10.1.2.3:7000"])
    assert f"{side} 10.1.2.3:7000: give --key-file on both sides" in capsys.readouterr().err
    assert cli.main(["doctor", "transport", side, "10.1.2.3:7000", "--key-file", "K"]) == 0


def test_an_interrupted_listener_ends_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []

    def listen(task: Task, say: object, ended: object) -> None:
        asked.append(task)
        raise KeyboardInterrupt

    monkeypatch.setattr(transfers, "listen", listen)
    monkeypatch.setattr(doctor, "log_to_stderr", lambda: None)
    assert cli.main(["doctor", "transport", "--listen", "127.0.0.1:0"]) == 0
    assert asked == [Task("source", "127.0.0.1", 0)]


@pytest.mark.parametrize("argv", [["--json", "disk", "D"], ["disk", "D", "--json"]])
def test_json_counts_before_and_after_the_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    report = FindingsReport((Finding("disk", "ok", "fast"),), "good", "bad", {"bytes_per_s": 1.5})
    monkeypatch.setattr(disk, "examine", lambda folder, nbytes: report)
    assert cli.main(["doctor", *argv]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "findings": [{"name": "disk", "status": "ok", "value": "fast", "fix": ""}],
        "measured": {"bytes_per_s": 1.5},
    }


def test_a_disk_is_measured_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "disk", str(tmp_path / "none")]) == 1
    assert "name a folder that exists" in capsys.readouterr().out
    assert cli.main(["doctor", "disk", str(tmp_path), "--bytes", "1MiB"]) == 0
    assert "written" in capsys.readouterr().out


def test_copies_need_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvconnect.doctor.copies", None)
    monkeypatch.delattr("kvconnect.doctor.copies", raising=False)
    assert cli.main(["doctor", "copy"]) == 1
    assert "pip install 'kvconnect[vllm]'" in capsys.readouterr().out


class _Broken:
    """Stands for modules that cannot be imported: a finder that raises an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name == "kvconnect.doctor.copies":
            raise self._error


@pytest.mark.parametrize(
    "error", [OSError("libcudart.so.12: cannot open it"), ImportError("libcudart.so.12: no symbol")]
)
def test_a_torch_without_its_libraries_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvconnect.doctor.copies", raising=False)
    monkeypatch.delattr("kvconnect.doctor.copies", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Broken(error), *sys.meta_path])
    assert cli.main(["doctor", "copy"]) == 1
    out = capsys.readouterr().out
    assert str(error) in out and "None" not in out
