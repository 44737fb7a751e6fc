"""A load runs inside the step where it holds the others up no longer than parking would one."""

from __future__ import annotations

import pytest

from kvconnect.offload.load_mode import LoadMode


def measured(block_s: float, step_s: float) -> LoadMode:
    mode = LoadMode()
    mode.loaded(10, 10 * block_s)
    mode.began(100.0, plain=True)
    mode.ended(100.0 + step_s)
    return mode


def test_nobody_waits_where_there_are_no_others() -> None:
    assert LoadMode().inside(10**6, others=0)
    assert not LoadMode().inside(1, others=1)  # nothing is known yet


@pytest.mark.parametrize(
    ("blocks", "others", "inside"), [(10, 1, True), (11, 1, False), (5, 2, True), (5, 3, False)]
)
def test_the_others_wait_a_step_at_most(blocks: int, others: int, inside: bool) -> None:
    assert measured(block_s=0.001, step_s=0.0101).inside(blocks, others) is inside


def test_both_times_follow_what_is_measured() -> None:
    mode = measured(block_s=0.001, step_s=0.0101)
    for _ in range(50):
        mode.loaded(1, 0.002)
    assert not mode.inside(10, others=1)
    for number in range(50):
        mode.began(number, plain=True)
        mode.ended(number + 0.03)
    assert mode.inside(10, others=1)


def test_steps_with_a_load_inside_do_not_count() -> None:
    mode = measured(block_s=0.001, step_s=0.0101)
    mode.began(5.0, plain=False)
    mode.ended(50.0)
    mode.ended(99.0)  # of no step
    mode.loaded(0, 0.0)  # as after a failure
    assert not mode.inside(11, others=1)
