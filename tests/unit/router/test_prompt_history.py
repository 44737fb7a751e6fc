"""The history of prompts: equal pieces are equal, and it is bounded."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.prompt_history import History
from kvconnect.router.requests.body import prefix_of, read_body

A = Target(0)


def units_of(body: dict[str, Any]) -> list[int]:
    return prefix_of(read_body(msgspec.json.encode(body))).chunk_hashes


def test_units_are_equal_for_equal_pieces() -> None:
    ids = list(range(50))
    assert len(units_of({"prompt": ids})) == 3
    assert units_of({"prompt": ids})[:2] == units_of({"prompt": ids[:40]})
    text = "abcd" * 64
    assert len(units_of({"prompt": text})) == 4
    assert units_of({"prompt": text}) == units_of({"prompt": text + "e" * 63})
    assert units_of({"prompt": "x" + text}) != units_of({"prompt": text})
    assert units_of({}) == []


def test_a_history_is_bounded_and_forgets_the_ends_of_old_prompts_first() -> None:
    history = History(most=6)
    history.sent(A, [1, 2, 3, 4])
    assert history.match([1, 2, 3, 9]) == {A: CacheHit(48, 48.0, 48)}
    history.sent(Target(1), [5, 6, 7, 8])
    assert history.match([1, 2, 3, 4]) == {A: CacheHit(32, 32.0, 32)}
    history.sent(A, [1, 2])
    history.sent(Target(1), [5, 6, 7, 8])
    assert history.match([1, 2]) == {A: CacheHit(32, 32.0, 32)}, "what is sent again is kept"
    history.forget(A)
    assert history.match([1, 2]) == {}
    for turn in range(50):
        history.sent(A, [turn, turn])
    assert len(history._sent) == 6
