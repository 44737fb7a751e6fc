"""The question to an engine whether the text of tokens ends where a client's does. Pure."""

from __future__ import annotations

from array import array

import msgspec

PATH = "/detokenize"
MOST_COMPARED = 512
"""Characters of both texts that are compared."""

_INCOMPLETE = "\ufffd"  # of a character in pieces, as tokenizers show it
_MOST_PARSED = 32  # characters that a parser holds back, as the beginning of a tag


class _Text(msgspec.Struct):
    prompt: str


def asked(model: str, tokens: array[int]) -> bytes:
    """Return the body of the question."""
    named = {"model": model} if model else {}
    return msgspec.json.encode({**named, "tokens": tokens.tolist()})


def told(answer: bytes) -> str | None:
    """Return the text of the tokens; None if the answer does not say it."""
    try:
        return msgspec.json.decode(answer, type=_Text).prompt
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def whole(text: str) -> bool:
    """Return whether a text ends with a whole character."""
    return bool(text) and not text.endswith(_INCOMPLETE)


def alike(sent: str, text: str) -> bool:
    """Return whether what was sent ends where ``text`` does, the text of its last tokens.

    Where a text repeats itself, a part that is missing would not be seen. So such ones are not.
    """
    last = text.lstrip(_INCOMPLETE)[-MOST_COMPARED:]  # it may begin within a character
    periods = range(1, min(_MOST_PARSED, len(last) - 1) + 1)
    if any(last.endswith(last[: len(last) - each]) for each in periods):
        return False
    return bool(last) and sent.endswith(last)
