"""Dicts that keep their newest entries."""

from __future__ import annotations

from kvconnect.bounded import remember


def test_the_oldest_entry_goes_above_the_limit() -> None:
    known: dict[str, int] = {}
    assert [remember(known, key, number, 2) for number, key in enumerate("ab")] == [None, None]
    assert remember(known, "c", 2, 2) == ("a", 0)
    assert list(known.items()) == [("b", 1), ("c", 2)]


def test_an_entry_that_comes_again_is_the_newest() -> None:
    known = {"a": 0, "b": 1}
    assert remember(known, "a", 2, 2) is None
    assert remember(known, "c", 3, 2) == ("b", 1)
    assert known == {"a": 2, "c": 3}
