"""The history of prompts: equal pieces are equal, and it is bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.policy import prompt_history
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


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_history, "_LONG", 2)


def test_a_history_is_bounded_and_forgets_the_ends_of_old_prompts_first() -> None:
    history = History(most=32)  # a prompt has room for four
    history.sent(A, [1, 2, 3, 4, 5])
    assert history.match([1, 2, 3, 4, 5]) == {A: hit(4)}
    for turn in range(7):
        history.sent(A, [10 + turn, 0, 0, 0])
    assert len(history) == 32
    assert history.match([1, 2, 3, 9]) == {A: hit(3)}
    history.sent(A, [1, 2])
    history.sent(A, [20])
    assert history.match([1, 2, 3, 4]) == {A: hit(3)}, "its end goes first"
    history.sent(B, [5])  # two targets have sixteen each
    assert (len(history), history.match([5])) == (17, {B: hit(1)})
    assert history.match([1, 2, 3, 4]) == {A: hit(2)}, "what is sent again is kept"
    history.forget(A)
    assert (len(history), history.match([1, 2])) == (1, {})


def test_one_long_prompt_is_not_all_that_is_known() -> None:
    history = History(most=80)
    history.sent(B, [])  # takes no share
    for prompt in range(7):
        history.sent(A, [prompt, 1])
    history.sent(A, list(range(100, 300)))
    assert all(history.match([prompt, 1]) == {A: hit(2)} for prompt in range(7))


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
    history, model = History(most=48), dict[Target, list[tuple[int, ...]]]()
    for step, target, chunks in steps:
        if step == "forget":
            history.forget(target)
            model.pop(target, None)
            continue
        history.sent(target, chunks)
        if not chunks:
            continue
        known = model.setdefault(target, [])
        share = 48 // len(model)
        for end in range(min(len(chunks), max(2, share // 8)), 0, -1):
            prefix = tuple(chunks[:end])
            known[:] = [one for one in known if one != prefix] + [prefix]
        for held in model.values():
            del held[: max(0, len(held) - share)]
    ends = {
        target: sum(tuple(prompt[:end]) in held for end in range(1, len(prompt) + 1))
        for target, held in model.items()
    }
    assert history.match(prompt) == {target: hit(end) for target, end in ends.items() if end}
    assert len(history) == sum(map(len, model.values()))
