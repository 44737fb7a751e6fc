"""Ratios of `benchmarks/router.py`."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.router import RATIOS, ratios


def test_a_peer_is_compared_with_the_same_mode() -> None:
    figures = {f"{name}_{who}": 1.0 for name in RATIOS for who in ("push", "pull", "bootstrap")}
    assert ratios(figures) == {}  # no peer was measured
    figures |= {f"{name}_smg": 4.0 for name in RATIOS}
    figures |= {f"{name}_vllm_router": 2.0 for name in RATIOS}
    figures["added_p50_ms_bootstrap"] = 2.0
    figures["streams_per_core_second_pull"] = 3.0
    found = ratios(figures)
    assert len(found) == 2 * len(RATIOS)
    assert found["added_p50_over_smg"] == 0.5
    assert found["added_p50_over_vllm_router"] == 0.5
    assert found["streams_per_core_second_over_smg"] == 0.25
    assert found["streams_per_core_second_over_vllm_router"] == 1.5


def test_the_committed_ratios_are_those_of_the_committed_figures() -> None:
    figures = json.loads((RESULTS / "router.json").read_text(encoding="utf-8"))["figures"]
    committed = {name: value for name, value in figures.items() if "_over_" in name}
    assert committed
    assert committed == pytest.approx(ratios(figures), rel=2e-3, abs=1e-4)
