"""The clients' API keys, as the file of ``--api-key-file`` lists them."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvconnect.errors import ConfigError

SHORTEST_KEY = 16
"""Fewest characters of a key."""

_KEY = re.compile(r"[!-~]*")  # what an HTTP header carries unchanged
_PRIORITY, _DISAGGREGATE = "priority", "disaggregate"
_WEIGHT = re.compile(r"weight=([1-9][0-9]{0,2})")
_FORM = (
    "KEY, NAME KEY, or NAME KEY and behind it any of priority, disaggregate, weight=N (1 to 999)"
)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ApiKey(NamedTuple):
    """One client: its key, and its name for the operator. Empty: it has none. ``priority``: it may
    set the priority of its requests. ``weight``: turns in a row while clients wait for theirs.
    ``disaggregate``: it may say whether its prompts are handed off."""

    key: str
    name: str = ""
    priority: bool = False
    weight: int = 1
    disaggregate: bool = False


def parse_api_keys(field: str, path: str, text: str) -> tuple[ApiKey, ...]:
    """Return the keys in a file's text: ``KEY``, ``NAME KEY`` or ``NAME KEY priority disaggregate
    weight=N`` a line, of which the last three may be left out, and comments after ``#``.

    Raises:
        ConfigError: a line is something else, or a key or name stands twice. The line is named by
            its number, since its text may be a key.
    """
    found: list[ApiKey] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if wrong := _wrong(words, found):
            raise ConfigError(field, path, f"line {number}: {wrong}")
        name, key, *rest = words if len(words) > 1 else ("", *words)
        weights = (int(weight[1]) for word in rest if (weight := _WEIGHT.fullmatch(word)))
        asks = _DISAGGREGATE in rest
        found.append(ApiKey(key, name, _PRIORITY in rest, next(weights, 1), asks))
    if not found:
        raise ConfigError(field, path, "put a key in it, or several, one a line")
    return tuple(found)


def _wrong(words: list[str], before: list[ApiKey]) -> str:
    """Return what is wrong with a line, empty if nothing."""
    name, key, *rest = words if len(words) > 1 else ("", *words)
    kinds = ["weight" if _WEIGHT.fullmatch(word) else word for word in rest]
    if sorted(kinds) != sorted({*kinds} & {_PRIORITY, _DISAGGREGATE, "weight"}) or key.startswith(
        "#"
    ):
        return f"write {_FORM}, and comments on lines of their own that begin with #"
    if len(key) < SHORTEST_KEY:
        return f"use a key of {SHORTEST_KEY} characters or more: openssl rand -hex 32"
    if not _KEY.fullmatch(key):
        return "use a key of printable ASCII characters"
    if name and not _NAME.fullmatch(name):
        return "use a name of at most 64 letters, digits, dots, hyphens and underscores"
    if any(each.key == key or (name and each.name == name) for each in before):
        return "its key or name stands on a line before it"
    return ""
