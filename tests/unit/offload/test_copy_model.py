"""Copies reach the link's rate in the benchmark's model of the executor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import copy_model
from benchmarks.copy_model import CASES, Case, link_ratio, measure
from kvconnect.copy import calibration, cuda
from kvconnect.offload import copy_schedule


@pytest.fixture
def digest_rate(gbps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with a link of 400 GB/s hashes faster than an H200."""
    monkeypatch.setattr(copy_model, "DIGEST_RATE", max(copy_model.DIGEST_RATE, 2e9 * gbps))


@pytest.mark.usefixtures("digest_rate")
@pytest.mark.parametrize("gbps", [25, 55, 400])
@pytest.mark.parametrize("digests", [0.0, 1 / 16, 1.0])
def test_copies_fill_the_link(gbps: float, digests: float) -> None:
    assert link_ratio(Case(gbps, digests)) >= 0.95


@pytest.mark.usefixtures("digest_rate")
@pytest.mark.parametrize("gbps", [25, 55, 400])
def test_a_thread_that_holds_the_gil_hardly_slows_copies(gbps: float) -> None:
    assert link_ratio(Case(gbps, hog=True)) >= 0.95


@pytest.mark.parametrize("gbps", [25, 55])
def test_chunks_are_longer_where_launches_wait_for_the_gil(
    gbps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_model, "DROPS", 18)
    assert link_ratio(Case(gbps, hog=True)) >= 0.95
    monkeypatch.setattr(copy_schedule, "_PER_LAUNCH", 0.0)  # negative control
    assert link_ratio(Case(gbps, hog=True)) < 0.3


def test_chunks_of_a_fixed_size_would_not_fill_a_fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: 8 MiB, as if the link were not measured."""
    monkeypatch.setattr(copy_schedule, "CHUNK_S", 0.0)
    monkeypatch.setattr(copy_schedule, "_PER_LAUNCH", 0.0)
    assert link_ratio(Case(55, hog=True)) < 0.5
    assert link_ratio(Case(400)) < 0.3


def test_digests_behind_the_copies_would_hold_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: on the stream of the copies, with a slow kernel."""
    monkeypatch.setattr(copy_model, "DIGEST_RATE", 32e9)
    assert link_ratio(Case(25, own_stream=False)) < 0.6
    assert link_ratio(Case(25)) >= 0.95  # of its own, as long as it is faster than the link


@pytest.mark.parametrize(
    ("run_kib", "ratio", "lock_share"), [(16, 0.5, 0.83), (32, 0.89, 0.77), (64, 1.0, 0.42)]
)
def test_long_batches_would_hold_the_gil_most_of_the_time(
    run_kib: int, ratio: float, lock_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: batches of any length that keep the GIL, and chunks that grow with them."""
    monkeypatch.setattr(copy_schedule, "DESCRIPTOR_S", 0.0)
    found = measure(Case(55, digests=0.0, run_bytes=run_kib << 10, limited=False))
    assert found.ratio == pytest.approx(ratio, rel=0.1)
    assert found.lock_share == pytest.approx(lock_share, rel=0.1)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_no_call_holds_the_gil_for_a_millisecond(case: Case) -> None:
    found = measure(case)
    assert found.longest_lock_s <= 1e-3
    assert found.lock_share < 0.05


@pytest.mark.parametrize("run_kib", [32, 64, 1024])
def test_limits_cost_no_rate(run_kib: int) -> None:
    """Whatever the run: what is left is what the device's copy engine takes."""
    case = Case(55, digests=0.0, run_bytes=run_kib << 10)
    assert link_ratio(case) >= 0.99 * link_ratio(replace(case, limited=False))


@pytest.mark.parametrize("gbps", [25, 55, 200])
@pytest.mark.parametrize("run_kib", [16, 32, 64, 1024])
def test_staged_copies_fill_any_link_and_most_of_it_beside_prefill(
    run_kib: int, gbps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{run_kib}k_{gbps}_full"
    assert link_ratio(CASES[name]) >= 0.95
    assert link_ratio(CASES[f"{name}_busy"]) >= 0.85
    monkeypatch.setattr(calibration, "SEGMENT_S", 0.0)  # negative control: small segments
    monkeypatch.setattr(calibration, "SMALLEST_SEGMENT", 4 << 20)
    assert link_ratio(CASES[f"{name}_busy"]) < 0.5


@pytest.mark.parametrize("run_kib", [16, 32, 64])
def test_one_copy_a_run_fills_no_fast_link(run_kib: int) -> None:
    """Negative control: what staging is for."""
    assert link_ratio(CASES[f"{run_kib}k_200_off_dma"]) < 0.4


@pytest.mark.parametrize("gbps", [25, 55])
def test_digests_beside_prefill_leave_the_link_full(
    gbps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[f"1024k_{gbps}_full_busy_dma"]
    assert link_ratio(case) >= 0.95
    monkeypatch.setattr(cuda, "_SUMS_BYTES", 1 << 20)  # negative control: many launches
    assert link_ratio(case) < 0.4
