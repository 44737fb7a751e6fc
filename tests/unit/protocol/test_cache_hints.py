"""Hints of requests: what is understood, and that nothing else can do harm."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.protocol.cache_hints import (
    LONGEST_S,
    CacheHint,
    HintsRead,
    IgnoredHint,
    PromptHints,
    read_hints,
)

UNKNOWN, INVALID, CONFLICT = IgnoredHint.UNKNOWN, IgnoredHint.INVALID, IgnoredHint.CONFLICT

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["pin", "retain", "demote", "drop", "tokens", "receipt", "Pin", "prefetch", "hold"]
)


@pytest.mark.parametrize(
    ("options", "hints", "ignored"),
    [
        ({}, None, ()),
        ({"receipt": True}, None, ()),
        ({"pin": 600}, PromptHints(pin_s=600.0), ()),
        ({"pin": 0.5, "retain": LONGEST_S}, PromptHints(0.5, LONGEST_S), ()),
        ({"pin": 60, "tokens": 7}, PromptHints(60.0, tokens=7), ()),
        ({"demote": True, "pin": None}, PromptHints(release=CacheHint.DEMOTE), ()),
        ({"drop": True, "demote": False}, PromptHints(release=CacheHint.DROP), ()),
        ({"drop": True, "demote": True}, PromptHints(release=CacheHint.DROP), (CONFLICT,)),
        ({"drop": True, "retain": 1}, PromptHints(retain_s=1.0), (CONFLICT,)),
        ({"pin": 60, "if_able": True}, PromptHints(60.0), ()),
        ({"pin": 60, "hold": 1, "fetch": True}, PromptHints(60.0), (UNKNOWN,)),
        ({"prefetch": True, "tokens": 7}, PromptHints(tokens=7, prefetch=True), ()),
        ({"prefetch": True, "pin": 60}, PromptHints(60.0, prefetch=True), ()),
        ({"prefetch": True, "drop": True}, PromptHints(prefetch=True), (CONFLICT,)),
        ({"prefetch": 1, "drop": True}, PromptHints(release=CacheHint.DROP), (INVALID,)),
        ({"pin": LONGEST_S + 1, "retain": 5}, PromptHints(retain_s=5.0), (INVALID,)),
        ({"pin": True}, None, (INVALID,)),
        ({"pin": 0}, None, (INVALID,)),
        ({"pin": float("nan"), "retain": float("inf")}, None, (INVALID, INVALID)),
        ({"drop": 1}, None, (INVALID,)),
        ({"pin": 60, "tokens": 0}, None, (INVALID,)),
        ({"pin": 60, "tokens": True}, None, (INVALID,)),
        ([], None, (INVALID,)),
        ("pin", None, (INVALID,)),
    ],
)
def test_hints(
    options: object, hints: PromptHints | None, ignored: tuple[IgnoredHint, ...]
) -> None:
    assert read_hints(options) == HintsRead(hints, ignored)


@given(st.dictionaries(NAMES, JSON | st.floats(0, 100_000) | st.integers(1, 10**30)) | JSON)
def test_whatever_is_sent_hints_are_sound_and_few(options: Any) -> None:
    hints, ignored = read_hints(options)
    assert len(ignored) <= 6
    if hints is None:
        return
    assert 0 <= hints.pin_s <= LONGEST_S and 0 <= hints.retain_s <= LONGEST_S
    assert hints.hints
    assert hints.release is None or hints.hints == (hints.release,)
    assert hints.tokens is None or (type(hints.tokens) is int and hints.tokens > 0)
    for hint in hints.hints:  # none that was not asked for
        assert options[hint.value] is not None and options[hint.value] is not False


def test_the_property_tells_a_reader_that_trusts_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconnect.protocol.cache_hints.LONGEST_S", 10**40)
    with pytest.raises(AssertionError):
        test_whatever_is_sent_hints_are_sound_and_few()


class Watched(dict[str, Any]):
    """A dict of a client, which says how much of it is looked at."""

    looked_up = 0

    def __contains__(self, key: object) -> bool:
        self.looked_up += 1
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of it is walked through")

    keys = values = items = __iter__  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


LARGE: dict[str, Any] = {
    "a text": "x" * (10 << 20),
    "many keys": {str(number): number for number in range(1_000_000)},
    "a long list": [True] * 1_000_000,
    "deeply nested": nested(100_000),
    "a long number": 10**100_000,
    "a large number": 1e308,
    "no number": float("nan"),
    "infinity": float("-inf"),
    "true": True,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_ignored_without_looking_at_them(name: str) -> None:
    """Neither time nor memory goes with their size."""
    value = LARGE[name]
    flags = {CacheHint.DROP, CacheHint.DEMOTE, CacheHint.PREFETCH}
    wrong = [hint.value for hint in CacheHint if value is not True or hint not in flags]
    for field in [*wrong, "tokens"] if name != "a long number" else wrong:
        options = Watched({field: value})
        tracemalloc.start()
        assert read_hints(options) == HintsRead(None, (INVALID,))
        assert tracemalloc.get_traced_memory()[1] < 16_384
        tracemalloc.stop()
        assert options.looked_up < 32
    if not isinstance(value, dict):
        assert read_hints(value) == HintsRead(None, (INVALID,))


def test_a_million_fields_cost_as_much_as_a_few() -> None:
    few = Watched({"pin": 60, "a": 1})
    many = Watched({"pin": 60, **LARGE["many keys"]})
    assert read_hints(few) == read_hints(many) == HintsRead(PromptHints(60.0), (UNKNOWN,))
    assert few.looked_up == many.looked_up


def test_a_reader_that_walks_through_a_client_s_fields_is_found() -> None:
    """The control."""
    with pytest.raises(AssertionError, match="walked"):
        set(Watched({"pin": 60}))
