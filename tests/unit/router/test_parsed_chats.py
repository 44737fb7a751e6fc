"""Chats whose engine's parser holds back a part of a token's text: none of it is lost where another
engine goes on (``kvconnect.router.requests.journal``)."""

from __future__ import annotations

import pytest

from kvconnect.router.requests.continuation import AfterLoss
from tests.fakes.journaled import Continued, streamed
from tests.fakes.token_model import TokenModel, merged, text_of, text_of_ids

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
TAG = "<tool>"
TAGGED = [
    *(b"if", b" x", b" <", b" 5", b" or", b" <", b"to", b"p", b" a<t", b"o b", b"<", b"<too", b"t"),
    *(b" =", b" <<", b"<", b"<<", b"/", b" end"),
]
"""Tokens that end with what may begin a tag, and with the same again."""


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("stop", [[], ["never"]])
def test_what_a_parser_holds_back_is_not_lost(each: int, answers: bool, stop: list[str]) -> None:
    asked = CHAT | {"stop": stop, "return_token_ids": True}
    first = TokenModel("a", TAGGED, each=each, tag=TAG)
    events, whole = streamed(asked, first), first.answer(asked)
    assert text_of(whole) == b"".join(TAGGED).decode()
    held = 0
    for cut in range(2, len(events)):
        stream = Continued(asked, tokens=TAGGED, answers=answers)
        stream.feed(events[:cut])
        if stream.journal.prevented is not None:  # an event without text is taken for another one
            assert stream.journal.prevented is AfterLoss.PARSER
            continue
        tail = stream.journal.doubtful()
        held += bool(tail) and text_of_ids(tail, TAGGED) != text_of(stream.got)
        stream.go_on(TokenModel("b", TAGGED, each=each))
        assert merged(stream.got) == merged(whole), cut
    assert held


def test_text_that_is_held_back_within_a_repetition_is_not_lost() -> None:
    """A part that is missing of such a text is not seen where only its end is compared."""
    tokens = [b"a ", *[b"<"] * 60, b"b"]
    asked = CHAT | {"max_tokens": 100}
    first = TokenModel("a", tokens, each=2, tag="<x")
    for cut in range(3, 30):
        stream = Continued(asked, tokens=tokens)
        stream.feed(streamed(asked, first)[:cut])
        stream.go_on(TokenModel("b", tokens))
        assert text_of(stream.got) == b"".join(tokens).decode()
