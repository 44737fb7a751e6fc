"""Whether a client's text ends where that of tokens does, as an engine says it."""

from __future__ import annotations

import json
from array import array

import pytest

from kvconnect.router.requests import text_ends


def test_the_question() -> None:
    tokens = array("i", [5, 6])
    assert json.loads(text_ends.asked("m", tokens)) == {"model": "m", "tokens": [5, 6]}
    assert json.loads(text_ends.asked("", tokens)) == {"tokens": [5, 6]}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b'{"prompt": "a \xf0\x9f\x98\x80"}', "a \U0001f600"),
        (b'{"prompt": ""}', ""),
        (b'{"prompt": 3}', None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
def test_the_answer(answer: bytes, text: str | None) -> None:
    assert text_ends.told(answer) == text


def test_a_character_in_pieces_is_no_end() -> None:
    assert text_ends.whole("a \U0001f600")
    assert not text_ends.whole("a \ufffd") and not text_ends.whole("")


@pytest.mark.parametrize(
    ("sent", "text", "alike"),
    [
        ("if x <", "if x <", True),
        (" x <", "x <", True),  # tokenizers leave out a space at the beginning
        ("whatever was before: if x <", "\ufffd\ufffdre: if x <", True),
        ("if x ", "if x <", False),
        ("x <", "if x <", False),
        ("a <<<<", "<<<<<", False),  # nor is it seen whether one is missing
        ("a <b<b<b", "<b<b<b", False),
        ("y" + "abc " * 200 + "end", "abc " * 200 + "end", True),
        ("abc", "\ufffd", False),
    ],
)
def test_what_was_sent_ends_where_the_tokens_do(sent: str, text: str, alike: bool) -> None:
    assert text_ends.alike(sent, text) is alike
