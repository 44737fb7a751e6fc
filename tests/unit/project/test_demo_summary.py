"""``demo/summary.py``: what the demo says of what it measured."""

from __future__ import annotations

import pytest

from demo.summary import Summary, Turn, problem, sentence, summarize

FIRST = Turn(is_first=True, host_hits=0, with_s=1.0, without_s=1.0, is_equal=True)
LATER = Turn(is_first=False, host_hits=480, with_s=0.2, without_s=1.0, is_equal=True)


def test_first_turns_are_the_control() -> None:
    slow = FIRST._replace(with_s=1.2)
    assert summarize([FIRST, slow, slow, LATER, LATER]) == Summary(1.2, 0.2)
    # Turn by turn: one that a busy machine delayed changes no median.
    outlier = LATER._replace(with_s=9.0)
    assert summarize([FIRST, LATER, outlier, LATER]) == Summary(1.0, 0.2)


def test_the_gain_is_what_the_control_carries() -> None:
    assert sentence(Summary(1.0, 0.2)).endswith("came 5.0 times as fast.")
    assert sentence(Summary(1.2, 0.2)).endswith("came 6.0 times as fast.")
    assert "expect 1.0" in sentence(Summary(1.0, 0.2))


@pytest.mark.parametrize(
    ("control", "later", "says"),
    [(1.0, 0.95, "nothing was gained"), (0.3, 0.3, "too busy"), (2.0, 0.2, "too busy")],
)
def test_no_gain_is_claimed_without_one(control: float, later: float, says: str) -> None:
    assert says in sentence(Summary(control, later))


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([FIRST, LATER], None),
        ([FIRST, LATER._replace(is_equal=False)], "1 of 2 turns got other tokens"),
        ([FIRST, LATER._replace(host_hits=0)], "nothing was loaded"),
        ([FIRST._replace(host_hits=32), LATER], "the control is none"),
    ],
)
def test_problems_are_seen(turns: list[Turn], says: str | None) -> None:
    found = problem(turns)
    assert found is None if says is None else says in (found or "")
