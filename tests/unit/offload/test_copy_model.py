"""Copies reach the link's rate in the benchmark's model of the executor."""

from __future__ import annotations

import pytest

from benchmarks import copy_model
from benchmarks.copy_model import Case, link_ratio
from kvconnect.offload import copy_schedule


@pytest.mark.parametrize("gbps", [25, 55, 400])
@pytest.mark.parametrize("digests", [0.0, 1 / 16, 1.0])
def test_copies_fill_the_link(gbps: float, digests: float) -> None:
    assert link_ratio(Case(gbps, digests)) >= 0.95


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
