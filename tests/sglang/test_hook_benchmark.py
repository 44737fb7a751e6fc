"""The benchmark of the layer hooks calls the hooks as they are."""

from __future__ import annotations

import math

import pytest

from benchmarks import sglang_hooks


@pytest.mark.smokes("sglang_hooks")
def test_each_forward_of_the_benchmark_is_handed_over() -> None:
    assert math.isfinite(sglang_hooks.hook_us(rounds=2))
