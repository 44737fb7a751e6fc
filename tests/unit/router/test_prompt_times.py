"""Times of prompts: what is learned from which requests, and what waits at an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.policy.prompt_times import (
    FEWEST,
    LONGEST_S,
    STALE_S,
    LinearTime,
    PromptTimer,
    StartedPrompt,
    TimeFit,
)

SAMPLES = st.lists(
    st.tuples(
        st.floats(-1e30, 1e30) | st.integers(0, 10**6),
        st.floats(-1e30, 1e30) | st.floats(0, 10),
        st.floats(0, 1000),
    ),
    min_size=1,
    max_size=60,
)


def learned(*samples: tuple[float, float], by_length: bool = True) -> LinearTime | None:
    """What is known after samples of tokens and seconds, one a second."""
    fit = TimeFit(by_length=by_length)
    for second, (tokens, seconds) in enumerate(samples):
        fit.add(tokens, seconds, second)
    return fit.at(len(samples))


@pytest.mark.parametrize("line", [LinearTime(0.02, 0.0005), LinearTime(0.0, 0.001)])
def test_a_line_is_found(line: LinearTime) -> None:
    lengths = [100, 4000, 250, 1000, 60, 2000]
    found = learned(*((n, line.seconds(n)) for n in lengths))
    assert found == pytest.approx(line)


def test_few_requests_teach_nothing_yet() -> None:
    assert learned(*[(100, 0.1)] * (FEWEST - 1)) is None
    assert learned(*[(100, 0.1)] * FEWEST) is not None


def test_equal_lengths_are_a_rate_or_a_fixed_time() -> None:
    assert learned(*[(100, 0.1)] * 5) == pytest.approx((0.0, 0.001))
    assert learned(*[(100, 0.1)] * 5, by_length=False) == pytest.approx((0.1, 0.0))


def test_what_was_not_measured_for_long_is_unknown_and_then_counts_little() -> None:
    fit = TimeFit(by_length=True)
    for _ in range(50):
        fit.add(1000, 1.0, 0.0)
    assert fit.at(STALE_S) == pytest.approx((0.0, 0.001))
    assert fit.at(STALE_S + 1) is None
    for _ in range(3):  # it is twice as slow now
        fit.add(1000, 2.0, STALE_S + 1)
    found = fit.at(STALE_S + 1)
    assert found is not None and found.seconds(1000) == pytest.approx(2.0, rel=0.5)
    # Control: without the pause, three of so many change little.
    steady = learned(*[(1000, 1.0)] * 50, *[(1000, 2.0)] * 3)
    assert steady is not None and steady.seconds(1000) < 1.2


def test_one_request_that_was_stuck_does_not_decide() -> None:
    usual = [(1000, 1.0), (100, 0.1)] * 10
    found, before = learned(*usual, (1000, 500.0)), learned(*usual)
    assert found is not None and before is not None
    assert found.seconds(1000) < 1.5 * before.seconds(1000)
    # Control: an engine that has become slow is found to be so.
    slow = learned(*usual, *[(1000, 20.0), (100, 2.0)] * 16)
    assert slow is not None and slow.seconds(1000) > 10


@given(SAMPLES, st.booleans(), st.integers(0, 10**7), st.integers(0, 10**7))
def test_whatever_was_measured_a_time_is_bounded_and_grows(
    samples: list[tuple[float, float, float]], by_length: bool, few: int, more: int
) -> None:
    fit, now = TimeFit(by_length=by_length), 0.0
    for tokens, seconds, passed in samples:
        now += passed
        fit.add(tokens, seconds, now)
    line = fit.at(now)
    if line is not None:
        assert 0 <= line.fixed_s <= LONGEST_S and 0 <= line.token_s <= LONGEST_S
        assert line.seconds(few) <= line.seconds(few + more)


def test_a_prompt_waits_for_those_before_it() -> None:
    timer = PromptTimer()
    first = timer.begin(0, 1000, 0.0, seen=True)
    second = timer.begin(0, 500, 0.0, seen=True)
    other = timer.begin(1, 70, 0.0, seen=True)
    assert (first.ahead, second.ahead, other.ahead) == (0, 1000, 0)
    assert (timer.at(0.0).waiting(0), timer.at(0.0).waiting(1)) == (1500, 70)
    timer.end(first, 1.0, measured=True)
    timer.end(second, 1.5, measured=True)
    third = timer.begin(None, 200, 2.0, seen=True)
    timer.end(third, 2.2, measured=True)
    known = timer.at(2.2)
    assert known.compute == pytest.approx((0.0, 0.001)), "of the tokens before it, too"
    assert (known.waiting(0), known.waiting(1)) == (0, 70)


def test_what_nobody_sees_counts_as_long_as_it_is_expected_to_take() -> None:
    timer = PromptTimer()
    unknown = timer.begin(0, 1000, 0.0, seen=False)
    assert timer.at(100.0).waiting(0) == 1000, "nothing is expected yet"
    timer.end(unknown, 100.0, measured=False)
    for _ in range(FEWEST):
        timer.end(timer.begin(0, 1000, 100.0, seen=True), 101.0, measured=True)
    first = timer.begin(0, 1000, 101.0, seen=False)
    second = timer.begin(0, 1000, 101.0, seen=False)
    waiting = [timer.at(101.0 + passed).waiting(0) for passed in (0.5, 1.5, 2.5)]
    assert waiting == [2000, 1000, 0]
    for prompt in (first, second):
        timer.end(prompt, 110.0, measured=False)
    assert timer.at(110.0).waiting(0) == 0
    # Control: one that is seen waits until it is.
    timer.begin(0, 1000, 110.0, seen=True)
    assert timer.at(200.0).waiting(0) == 1000


def test_when_the_engine_begins_with_a_prompt() -> None:
    timer = PromptTimer()
    early = timer.begin(0, 1000, 0.0, seen=True)
    behind = timer.begin(0, 1000, 0.0, seen=True)
    assert timer.starts_in_s(behind, 0.0) == 0, "nothing is known yet"
    for prompt in (early, behind):
        timer.end(prompt, 0.0, measured=False)
    for _ in range(FEWEST):
        timer.end(timer.begin(0, 1000, 100.0, seen=True), 101.0, measured=True)

    first, second, third, short = (
        timer.begin(0, tokens, 101.0, seen=True) for tokens in (2000, 500, 100, 10)
    )
    other = timer.begin(1, 100, 101.0, seen=True)  # of another rank

    def starts(now: float) -> list[float]:
        return [timer.starts_in_s(each, now) for each in (first, second, third, other)]

    assert starts(101.0) == pytest.approx([0, 2, 2.5, 0])
    assert starts(102.5) == pytest.approx([0, 0.5, 1, 0])
    assert starts(105.0) == [0, 0, 0, 0], "it takes longer than expected"
    timer.end(first, 106.0, measured=True)
    compute = timer.at(106.0).compute
    assert compute is not None
    assert starts(106.0) == pytest.approx([0, 0, 500 * compute.token_s, 0])
    timer.end(short, 106.0, measured=True)  # out of turn
    timer.end(second, 106.0, measured=True)
    assert starts(106.0) == [0, 0, 0, 0]


def test_modes_arrive_in_their_own_time() -> None:
    timer = PromptTimer()
    for _ in range(FEWEST):
        timer.arrived("push", 100, 0.01, 0.0)
        timer.arrived("pull", 100, 0.2, 0.0)
    timer.arrived("bootstrap", 100, 0.2, 0.0)
    known = timer.at(0.0).arrival
    assert known.keys() == {"push", "pull"}
    assert known["push"].seconds(100) == pytest.approx(0.01)
    assert not timer.at(STALE_S + 1).arrival


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 999), st.booleans()), max_size=40))
def test_nothing_waits_once_all_have_ended(prompts: list[tuple[int, int, bool]]) -> None:
    timer = PromptTimer()
    started: list[StartedPrompt] = []
    for second, (rank, tokens, seen) in enumerate(prompts):
        started.append(timer.begin(rank, tokens, second, seen=seen))
        if tokens % 3 == 0:
            timer.end(started.pop(), second + 0.5, measured=seen)
    for prompt in started:
        timer.end(prompt, 1000.0, measured=False)
    assert not any(timer.at(1000.0).waiting(rank) for rank in range(3))
