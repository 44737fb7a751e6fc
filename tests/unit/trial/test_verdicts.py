"""The reasons that an engine's metrics give for a prompt that was not loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvconnect.trial.counters import Change, Counters
from kvconnect.trial.engine_api import EngineName
from kvconnect.trial.verdicts import OffloadEvidence, problem_of_offload

NOTHING = Counters(series={"vllm:kvconnect_host_bytes_capacity": {(): 1e9}})
TOKENS = 1000


def counted(name: str, label: str = "", value: str = "", number: float = 5.0) -> Counters:
    """Return a reading in which one more series has a value."""
    series = {((label, value),) if label else (): number}
    return Counters(series={**NOTHING.series, f"vllm:kvconnect_{name}": series})


GOOD = OffloadEvidence(
    engine=EngineName.VLLM,
    prompt_tokens=TOKENS,
    device_tokens=0,
    outputs_equal=True,
    ratio=10.0,
    stored=Change(NOTHING, counted("transfer_bytes_total", "transfer_type", "GPU_to_CPU")),
    loaded=Change(NOTHING, counted("hit_tokens_total", "tier", "host", TOKENS)),
    evicted_by="POST /reset_prefix_cache",
)
MISSED = replace(GOOD, loaded=Change(NOTHING, counted("lookups_total")))


def said(found: OffloadEvidence) -> str:
    problem = problem_of_offload(found)
    return problem.text if problem else ""


def test_hits_that_save_time_are_no_problem() -> None:
    assert said(GOOD) == ""
    # Controls: any one thing that is missing is one.
    assert "tokens differ" in said(replace(GOOD, outputs_equal=False))
    assert "as long as computing" in said(replace(GOOD, ratio=1.05))
    few = Change(NOTHING, counted("hit_tokens_total", "tier", "host", TOKENS / 3))
    assert said(replace(GOOD, loaded=few)) != ""


def test_hits_before_the_trial_do_not_count() -> None:
    old = counted("hit_tokens_total", "tier", "host", TOKENS)
    assert said(replace(GOOD, loaded=Change(old, old))) != ""


@pytest.mark.parametrize(
    ("series", "reason"),
    [
        (("failed_blocks_total", "cause", "digest"), "loads failed: digest 5"),
        (("tier_decisions_total", "reason", "recompute"), "the cost model computes"),
        (("tier_decisions_total", "reason", "no_space"), "not used for all of the prompts"),
        (("lookups_total",), "these were found by tier: none"),
        (("query_tokens_total",), "did not look up the prompts"),
    ],
)
def test_a_miss_is_explained_by_what_was_counted_meanwhile(
    series: tuple[str, ...], reason: str
) -> None:
    assert reason in said(replace(MISSED, loaded=Change(NOTHING, counted(*series))))


def test_what_was_never_stored_is_explained_by_its_store() -> None:
    nothing = Change(NOTHING, NOTHING)
    assert "shorter than a block" in said(replace(MISSED, stored=nothing))
    skipped = counted("skipped_store_blocks_total", "reason", "no_space")
    assert "not stored: no_space 5" in said(replace(MISSED, stored=Change(NOTHING, skipped)))


def test_where_the_prompts_were_instead() -> None:
    assert "still on the device" in said(replace(MISSED, device_tokens=TOKENS))
    off = Counters(series={"vllm:kvconnect_lookups_total": {(): 5.0}})
    assert "host tier is off" in said(replace(MISSED, loaded=Change(off, off)))
    evicted = counted("evicted_blocks_total", "tier", "host")
    looked = Counters(series={**evicted.series, "vllm:kvconnect_lookups_total": {(): 5.0}})
    assert "evicted the prompts too" in said(replace(MISSED, loaded=Change(NOTHING, looked)))
