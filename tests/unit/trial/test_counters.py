"""What a trial reads from an engine's metrics: series of ranks, added up."""

from __future__ import annotations

import pytest

from kvconnect.trial.counters import Counters, Series
from kvconnect.trial.engine_api import EngineName

STAGES = ("pp_rank", "0"), ("pp_rank", "1")


def of_stages(name: str, label: str, value: str) -> Counters:
    """Return a reading in which each of SGLang's two pipeline stages has counted 100."""
    series: Series = {((label, value), stage): 100.0 for stage in STAGES}
    return Counters(EngineName.SGLANG, {f"sglang:kvconnect_{name}": series})


@pytest.mark.parametrize(
    ("name", "label", "value", "number"),
    [
        ("hit_tokens_total", "tier", "host", 100),
        ("transfer_bytes_total", "transfer_type", "GPU_to_CPU", 200),  # each stage moves its own
    ],
)
def test_what_pipeline_stages_count_alike_is_counted_once(
    name: str, label: str, value: str, number: float
) -> None:
    found = of_stages(name, label, value)
    assert found.by(name, label) == {value: number}
    assert found.total(name) == found.total(name, **{label: value}) == number
    assert found.total(name, **{label: "other"}) == 0


def test_engines_behind_one_address_are_added_up() -> None:
    series: Series = {(("dp_rank", rank), stage): 100.0 for rank in "01" for stage in STAGES}
    found = Counters(EngineName.SGLANG, {"sglang:kvconnect_hit_tokens_total": series})
    assert found.total("hit_tokens_total") == 200
