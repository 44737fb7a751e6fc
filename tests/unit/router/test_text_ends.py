"""Whether the text of tokens ends with a whole character, as an engine says it."""

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
    ("answer", "sure"),
    [
        (b'{"prompt": "a \xf0\x9f\x98\x80"}', True),
        (b'{"prompt": "a \xef\xbf\xbd"}', False),
        (b'{"prompt": ""}', False),
        (b'{"prompt": 3}', None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
def test_the_answer(answer: bytes, sure: bool | None) -> None:
    assert text_ends.ends(answer) is sure
