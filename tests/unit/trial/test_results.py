"""What a report says of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.trial import results
from kvconnect.trial.engine_api import AskedEngine, EngineName
from kvconnect.trial.results import Measurement, TrialResult


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            "echo 'NVIDIA H100 80GB HBM3, 570.86.15, 5, 16'",
            [{"name": "NVIDIA H100 80GB HBM3", "driver": "570.86.15", "link": "PCIe 5 x16"}],
        ),
        ("echo 'No devices were found'", []),
        ("exit 9", []),
        ("printf '\\377\\n'", []),
        ("exec sleep 60", []),
    ],
)
def test_gpus_are_what_the_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: list[dict[str, str]]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(results, "_SMI_S", 0.5 if "sleep" in script else 30.0)
    assert results.gpus() == found


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results.gpus() == []


@pytest.mark.parametrize(("version", "said"), [("0.32.0+cpu", "0.32.0+cpu"), ("http://h\n", "")])
def test_a_report_takes_no_other_text_of_a_server(
    monkeypatch: pytest.MonkeyPatch, version: str, said: str
) -> None:
    monkeypatch.setattr(results, "gpus", list)
    times = tuple(Measurement(name, [1.0], "") for name in ("cold", "loaded", "control"))
    info = AskedEngine(EngineName.VLLM, "secret-model", 4096, version)
    result = TrialResult(info, times, True, None, "")  # type: ignore[arg-type]
    assert result.record()["engine_version"] == said
    assert "secret-model" not in result.report("127.0.0.1")
    assert "on another machine" in result.report("10.1.2.3")
