"""The history of prompts: equal pieces are equal, and it is bounded."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.policy.fleet_view import Target
from kvconnect.router.policy.prefixes import CacheHit
from kvconnect.router.policy.prompt_history import History
from kvconnect.router.requests.body import prefix_of, read_body

A, B, C = Target(0), Target(1), Target(0, 1)
TARGETS = st.sampled_from([A, B, C])
PROMPTS = st.lists(st.integers(1, 3), max_size=6)


def hit(chunks: int) -> CacheHit:
    return CacheHit(64 * chunks, 64.0 * chunks, 64 * chunks)


def units_of(body: dict[str, Any]) -> list[int]:
    return prefix_of(read_body(msgspec.json.encode(body))).chunk_hashes


def test_units_are_equal_for_equal_pieces() -> None:
    ids = list(range(200))
    assert len(units_of({"prompt": ids})) == 3
    assert units_of({"prompt": ids})[:2] == units_of({"prompt": ids[:160]})
    text = "abcd" * 256
    assert len(units_of({"prompt": text})) == 4
    assert units_of({"prompt": text}) == units_of({"prompt": text + "e" * 255})
    assert units_of({"prompt": "x" + text}) != units_of({"prompt": text})
    assert units_of({}) == []


def test_a_history_is_bounded_and_forgets_the_ends_of_old_prompts_first() -> None:
    history = History(most=6)
    history.sent(A, [1, 2, 3, 4])
    assert history.match([1, 2, 3, 9]) == {A: hit(3)}
    history.sent(B, [5, 6, 7, 8])
    assert history.match([1, 2, 3, 4]) == {A: hit(3)}, "two targets have three each"
    assert history.match([5, 6, 7, 8]) == {B: hit(3)}
    history.sent(A, [1, 2])
    history.sent(A, [9])
    assert history.match([1, 2, 3]) == {A: hit(2)}, "what is sent again is kept"
    history.forget(A)
    assert history.match([1, 2]) == {}
    for turn in range(50):
        history.sent(A, [turn, turn])
        history.sent(B, [turn, turn])
    assert len(history) == 6


def test_each_target_has_the_prefix_that_it_was_sent() -> None:
    history = History()
    history.sent(A, [1, 2, 3])
    history.sent(B, [1, 2])
    history.sent(C, [2, 1])
    assert history.match([1, 2, 3, 4]) == {A: hit(3), B: hit(2)}
    history.forget(A)
    history.sent(C, [1])
    assert history.match([1, 2, 3, 4]) == {B: hit(2), C: hit(1)}


@given(
    st.lists(
        st.tuples(st.sampled_from(["sent", "forget"]), TARGETS, PROMPTS),
        max_size=30,
    ),
    PROMPTS,
)
def test_it_is_a_list_of_prefixes_by_target(
    steps: list[tuple[str, Target, list[int]]], prompt: list[int]
) -> None:
    history, model = History(most=12), dict[Target, list[tuple[int, ...]]]()
    for step, target, chunks in steps:
        if step == "forget":
            history.forget(target)
            model.pop(target, None)
            continue
        history.sent(target, chunks)
        known = model.setdefault(target, [])
        for end in range(len(chunks), 0, -1):
            prefix = tuple(chunks[:end])
            known[:] = [one for one in known if one != prefix] + [prefix]
        for held in model.values():
            del held[: max(0, len(held) - 12 // len(model))]
    ends = {
        target: sum(tuple(prompt[:end]) in held for end in range(1, len(prompt) + 1))
        for target, held in model.items()
    }
    assert history.match(prompt) == {target: hit(end) for target, end in ends.items() if end}
    assert len(history) == sum(map(len, model.values()))
