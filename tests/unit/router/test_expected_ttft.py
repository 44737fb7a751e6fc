"""What is expected sooner: a hand-off, or decode alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvconnect.router.policy.expected_ttft import (
    ExpectedTtft,
    PromptHandoff,
    WaitingPrompt,
    expected_ttft,
)
from kvconnect.router.policy.prompt_times import LinearTime

FAST = LinearTime(0.01, 0.0001)  # 10,000 tokens a second
SLOW = LinearTime(0.01, 0.001)
LINK = LinearTime(0.05, 0.00001)
SLOW_LINK = LinearTime(0.05, 0.002)


def expected(
    tokens: float = 1000,
    *,
    on_p: float = 0,
    on_d: float = 0,
    queue_p: float = 0,
    queue_d: float = 0,
    prefill: LinearTime | None = FAST,
    decode: LinearTime | None = SLOW,
    link: LinearTime | None = LINK,
) -> ExpectedTtft | None:
    """What is expected of a prompt with cached tokens, and tokens of others before it."""
    on_prefill = WaitingPrompt(prefill, queue_p, tokens - on_p)
    handoff = PromptHandoff(on_prefill, decode, queue_d, link, tokens - on_d)
    return expected_ttft(handoff, WaitingPrompt(decode, queue_d, tokens - on_d))


@pytest.mark.parametrize(
    ("about", "alone"),
    [
        ({"tokens": 1000}, False),
        ({"tokens": 20}, True),  # the fixed time of a hand-off is more
        ({"tokens": 1000, "on_d": 990}, True),
        ({"tokens": 1000, "on_p": 990}, False),
        ({"tokens": 1000, "queue_p": 50_000}, True),
        ({"tokens": 20, "queue_d": 5_000}, True),  # both wait for it
        ({"tokens": 1000, "queue_d": 5_000}, False),
        ({"tokens": 1000, "link": SLOW_LINK}, True),
        ({"tokens": 1000, "link": SLOW_LINK, "on_d": 800, "on_p": 1000}, True),
        ({"tokens": 1000, "decode": FAST}, True),  # as fast: a hand-off gains nothing
        ({"tokens": 1000, "decode": FAST, "queue_d": 9_000}, False),
        ({"tokens": 30_000, "decode": FAST, "queue_d": 20_000}, False),  # meanwhile D is free
        ({"tokens": 1000, "decode": None}, True),  # taken to be as fast: it is tried
        ({"tokens": 1000, "decode": None, "queue_d": 9_000}, False),
    ],
)
def test_what_is_sooner(about: dict[str, Any], alone: bool) -> None:
    found = expected(**about)
    assert found is not None and found.alone is alone


@pytest.mark.parametrize("missing", ["prefill", "link"])
def test_without_data_nothing_is_expected(missing: str) -> None:
    assert expected(**{missing: None}) is None  # type: ignore[arg-type]
    assert expected() is not None


def test_equal_times_are_handed_off() -> None:
    none = LinearTime(0.0, 0.0)
    found = expected(prefill=FAST, decode=FAST, link=none)
    assert found is not None and found.handoff_s == found.alone_s and not found.alone


TOKENS = st.integers(0, 10**6)
LINES = st.builds(LinearTime, st.floats(0, 10), st.floats(0, 0.01))
SOME = st.fixed_dictionaries(
    {
        "tokens": TOKENS,
        "queue_p": TOKENS,
        "queue_d": TOKENS,
        "prefill": LINES,
        "decode": LINES,
        "link": LINES,
    }
)
_CLOSE = 1e-6  # of rounding


def gain(**about: Any) -> float:
    """Seconds that decode alone is expected to be sooner."""
    found = expected(**about)
    assert found is not None
    return found.handoff_s - found.alone_s


@given(SOME, TOKENS)
def test_a_longer_queue_never_makes_its_engine_more_likely(some: dict[str, Any], more: int) -> None:
    before = gain(**some)
    margin = _CLOSE * (1 + abs(before) + more)
    assert gain(**{**some, "queue_p": some["queue_p"] + more}) >= before - margin
    assert gain(**{**some, "queue_d": some["queue_d"] + more}) <= before + margin


def test_the_queue_decides_both_ways() -> None:
    """Control: each queue does make the other engine more likely."""
    assert gain(queue_p=50_000) > gain() > gain(queue_d=5_000)


@given(SOME, st.floats(0, 1))
def test_more_cached_tokens_never_make_their_engine_less_likely(
    some: dict[str, Any], share: float
) -> None:
    cached = int(share * some["tokens"])
    before = gain(**some)
    margin = _CLOSE * (1 + abs(before) + cached)
    assert gain(**some, on_p=cached) <= before + margin
    assume(some["link"].token_s <= some["decode"].token_s)  # else it saves the transfer more
    assert gain(**some, on_d=cached) >= before - margin


@given(SOME, st.floats(0, 0.01))
def test_a_slower_link_never_makes_a_hand_off_more_likely(
    some: dict[str, Any], slower: float
) -> None:
    link = some["link"]
    worse = link._replace(token_s=link.token_s + slower)
    margin = _CLOSE * (1 + some["tokens"])
    assert gain(**{**some, "link": worse}) >= gain(**some) - margin
