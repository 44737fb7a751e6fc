"""The same runs with the version of vLLM that is not installed."""

from __future__ import annotations

from tests.schedulers import other_version

RUNS = 6


def test_the_other_version_runs_too_and_shows_what_is_broken_on_purpose() -> None:
    control = "--kind=alone --seed=0 --runs=4 --control=swapped_slots"
    printed = other_version.run(f"--seed=0 --runs={RUNS}", control)
    sound, broken, _ = printed.split("status")
    assert sound.startswith(f"vLLM {other_version.VERSION}: {RUNS} runs"), printed
    assert "0 failed" in sound
    assert broken.startswith(" 0")
    assert "WrongTokens" in broken
