"""The question to an engine whether the text of tokens ends with a whole character. Pure."""

from __future__ import annotations

from array import array

import msgspec

PATH = "/detokenize"
_INCOMPLETE = "\ufffd"  # of a character in pieces, as tokenizers show it


class _Text(msgspec.Struct):
    prompt: str


def asked(model: str, tokens: array[int]) -> bytes:
    """Return the body of the question."""
    named = {"model": model} if model else {}
    return msgspec.json.encode({**named, "tokens": tokens.tolist()})


def ends(answer: bytes) -> bool | None:
    """Return whether the text ends there; None if the answer does not say it."""
    try:
        text = msgspec.json.decode(answer, type=_Text).prompt
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return bool(text) and not text.endswith(_INCOMPLETE)
