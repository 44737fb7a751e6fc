"""``kvconnect doctor copy``: real copies, and one that is broken on purpose."""

from __future__ import annotations

import pytest

from kvconnect.copy.base import Copier
from kvconnect.errors import TransferFailed

torch = pytest.importorskip("torch")

from kvconnect.doctor import copies  # noqa: E402

MIB = 1 << 20
AREA, SAMPLE = 8 * MIB, 2 * MIB


def test_both_directions_of_both_sizes_are_measured() -> None:
    report = copies.examine("cpu", AREA, SAMPLE)
    assert report.ok
    assert [finding.name for finding in report.findings] == [
        *("store 64k", "load 64k"),
        *("store 1024k", "load 1024k"),
    ]
    for name in ("store_64k", "load_64k", "store_1024k", "load_1024k"):
        assert float(str(report.measured[f"{name}_bytes_per_s"])) > 0
        ratio = float(str(report.measured[f"{name}_ratio"]))
        finding = report.findings[list(report.measured).index(f"{name}_ratio") // 2 - 1]
        assert (finding.status == "ok") is (ratio >= copies.SLOW)
        assert bool(finding.fix) is (finding.status != "ok")


class Broken(Copier):
    """Does nothing, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def store(self, group: int, block_ids: object, slots: object) -> None:
        if self._error:
            raise self._error

    load = store


@pytest.mark.parametrize(
    ("error", "value"),
    [(None, "32 of 32 pages were copied wrong"), (TransferFailed("lost the device"), "lost")],
)
def test_a_copy_that_does_not_copy_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, value: str
) -> None:
    monkeypatch.setattr(copies, "make_copier", lambda *arguments: Broken(error))
    report = copies.examine("cpu", AREA, SAMPLE)
    assert not report.ok
    assert value in report.findings[0].value
    assert report.findings[0].fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_one_finding() -> None:
    (finding,) = copies.examine("cuda", AREA, SAMPLE).findings
    assert (finding.status, finding.value) == ("fail", "no CUDA device")
    assert finding.fix


def test_too_much_memory_is_one_finding() -> None:
    (finding,) = copies.examine("cpu", 1 << 60, SAMPLE).findings
    assert finding.status == "fail"
    assert "MiB of memory" in finding.fix


def test_a_slow_copy_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = copies._Bench("cpu", AREA, SAMPLE)
    try:
        monkeypatch.setattr(copies, "native_unavailable_reason", lambda: "no compiler")
        slow = bench._finding("store 64k", 1e9, 4e9)
        assert (slow.status, "no compiler" in slow.value) == ("warn", True)
        assert bench._finding("store 64k", 2e9, 4e9).status == "ok"
        monkeypatch.setattr(copies, "native_unavailable_reason", lambda: None)
        assert bench._finding("store 64k", 1e9, 4e9).fix
    finally:
        bench.close()
