"""Types of settings, each with its limits and the fix that an error names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from msgspec import Meta

from kvconnect.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MOST_BYTES = 2**60

LONGEST_S = 86_400
"""Longest time that a setting may say, in seconds."""


@dataclass(frozen=True)
class Rule:
    """What :mod:`~kvconnect.settings.validation` must know about a type beside its limits.

    Attributes:
        fix: what to write instead of a wrong value.
        size: a value may be written with a unit, such as ``"4GiB"``.
        check: called with a value of the right type; raises :class:`ConfigError` or
            :class:`ValueError` for an unusable one.
    """

    fix: str
    size: bool = False
    check: Callable[[Any], object] | None = None


SIZE_SCHEMA = {"pattern": rf"^{_SIZE.pattern}$"}
"""What JSON Schema says of a size, beside that of a number, where it is a text."""

Size = Annotated[
    int,
    Meta(ge=0, le=_MOST_BYTES, extra_json_schema=SIZE_SCHEMA),
    Rule("use a size of 0 bytes or more, at most 2**60", size=True),
]
"""A number of bytes, or of bytes per second; users may write it with a unit."""

Seconds = Annotated[
    float,
    Meta(gt=0, le=LONGEST_S),
    Rule(f"use seconds, more than 0 and at most {LONGEST_S}"),
]

Flag = Annotated[bool, Rule("use true or false")]

Path = Annotated[str, Meta(pattern=r"^[^\0]*$"), Rule("use a path")]


def parse_bytes(field: str, value: object) -> int:
    """Return ``value`` in bytes: an int, or a string such as ``"4GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: not a size, unknown unit, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(field, value, "use a size of 0 bytes or more")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(field, value, 'write a size such as "4GiB", or a number of bytes')
    number, unit = match.groups()
    if unit not in _UNITS:
        by_lower = {name.lower(): name for name in _UNITS if name}
        near = by_lower[difflib.get_close_matches(unit.lower(), by_lower, n=1, cutoff=0.0)[0]]
        raise ConfigError(field, value, f"unknown unit {unit!r}, did you mean {near!r}?")
    return int(Fraction(number) * _UNITS[unit])
