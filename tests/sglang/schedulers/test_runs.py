"""Random runs of each mode: every request gets its tokens or a reason, and nothing is left."""

from __future__ import annotations

import pytest

from tests.sglang.schedulers.modes import MODES
from tests.sglang.schedulers.pair import Pair
from tests.sglang.schedulers.workload import Run

_SEEDS = (1, 2)
_TICKS = 120


@pytest.mark.parametrize(("pair", "mode"), [(name, name) for name in MODES], indirect=["pair"])
def test_runs(pair: Pair, mode: str) -> None:
    for seed in _SEEDS:
        Run(pair, seed, MODES[mode].rates).go(_TICKS)
    for event in MODES[mode].must_see:
        assert pair.seen[event], f"no run has seen any of: {event}"
