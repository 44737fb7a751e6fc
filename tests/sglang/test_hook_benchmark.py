"""The benchmark of the layer hooks calls the hooks as they are."""

from __future__ import annotations

import math

from benchmarks import sglang_hooks


def test_each_forward_of_the_benchmark_is_handed_over() -> None:
    assert math.isfinite(sglang_hooks.hook_us(rounds=2))
