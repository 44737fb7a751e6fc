"""Values of a client's fields, read for the bounds that they have to keep. Pure.

``tests/unit/router/test_limits.py`` tests it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body, raw_of
from kvconnect.router.requests.json_parts import check_parts

UNSET = (b"", b"null")
NOT_SET = (*UNSET, b"false", b"[]")
"""What a switch is when it is off, and a list when it is empty."""
FEWER = "ask about fewer prompts at a time"
BROKEN = (msgspec.DecodeError, ValueError, RecursionError)
"""Errors of decoding bytes that are not JSON of the expected type."""


def refusal(name: str, fix: str) -> Refused:
    """Return the error about a field, which begins with its name."""
    return Refused(name, f"{name}: {fix}")


def view_of(fields: Body, name: str) -> memoryview:
    """Return a field's JSON without a copy of what a client sent."""
    value = fields.get(name, b"")
    return memoryview(value if isinstance(value, bytes | Raw) else msgspec.json.encode(value))


def first_of(view: memoryview) -> bytes:
    """Return the first byte, which tells a list from a text; b"" if there is none."""
    return bytes(view[:1])


def is_set(fields: Body, name: str) -> bool:
    """Return whether a switch is on, or a list has something."""
    return raw_of(fields, name) not in NOT_SET


def values_of(fields: Body, name: str) -> list[Any]:
    """Return a field's value for each prompt, or the one for all.

    Raises:
        Refused: it is not JSON that can be read, or has too many parts.
    """
    raw = raw_of(fields, name)
    check_parts(name, raw, FEWER)
    try:
        found = msgspec.json.decode(raw or b"null")
    except BROKEN as error:
        raise refusal(name, "use one value, or a list, one for each prompt") from error
    return found if isinstance(found, list) else [found]


def one_value(fields: Body, name: str) -> Any:
    """Return a field's value; None if it is a list or an object.

    Raises:
        Refused: it cannot be read.
    """
    return values_of(fields, name)[0] if raw_of(fields, name)[:1] not in (b"[", b"{") else None


def decoded(name: str, raw: bytes, decoder: msgspec.json.Decoder[Any], fix: str) -> Any:
    """Return what a decoder makes of a field's JSON.

    Raises:
        Refused: it is of another form.
    """
    try:
        return decoder.decode(raw)
    except BROKEN as error:
        raise refusal(name, fix) from error


def outside(value: Any, low: float, high: float) -> bool:
    """Return whether a number lies outside; it may stand in a text. NaN does. What is no number is
    left to the engine, which refuses it."""
    try:
        return not low <= float(value) <= high
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False
