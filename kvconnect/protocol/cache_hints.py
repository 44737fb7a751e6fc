"""What a request may say about the cached blocks of its own prompt.

Hints stand in ``kv_transfer_params["kvconnect"]``::

    {"pin": 600}                   keep the blocks in host memory for 600 seconds
    {"retain": 3600}               evict them after all others for an hour
    {"demote": true}               evict them before all others
    {"drop": true}                 remove them from host memory and secondary tiers
    {"prefetch": true}             bring them from secondary tiers to host memory, also where
                                   computing them would be faster
    {"pin": 600, "tokens": 2048}   only the blocks of the prompt's first 2048 tokens

A hint that is wrong is ignored and counted. It never makes a request fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from kvconnect.protocol.options import IF_ABLE, RECEIPT, SHARE, SOURCE

LONGEST_S = 86_400.0
"""Longest time of a pin or of retention, in seconds."""
ACTION_TYPE = "kvconnect.cache"
ACTION_VERSION = "1"
"""Type and version of an action in vLLM's ``kv_hints`` whose payload holds hints."""
TOKENS = "tokens"


class CacheHint(StrEnum):
    """A hint. Values are the names in requests, and metric labels."""

    PIN = "pin"
    RETAIN = "retain"
    DEMOTE = "demote"
    DROP = "drop"
    PREFETCH = "prefetch"


class IgnoredHint(StrEnum):
    """Why a hint was ignored. Values are metric labels."""

    UNKNOWN = "unknown"
    INVALID = "invalid"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class PromptHints:
    """Hints of one request, checked.

    Attributes:
        pin_s, retain_s: seconds; 0: no such hint.
        release: ``demote`` or ``drop``; both excludes the other hints.
        prefetch: whether to load what secondary tiers have.
        tokens: only blocks within the prompt's first tokens; None: the whole prompt.
    """

    pin_s: float = 0.0
    retain_s: float = 0.0
    release: CacheHint | None = None
    tokens: int | None = None
    prefetch: bool = False

    @property
    def hints(self) -> tuple[CacheHint, ...]:
        """The hints that the request gave."""
        given = {
            CacheHint.PIN: self.pin_s > 0,
            CacheHint.RETAIN: self.retain_s > 0,
            CacheHint.DEMOTE: self.release is CacheHint.DEMOTE,
            CacheHint.DROP: self.release is CacheHint.DROP,
            CacheHint.PREFETCH: self.prefetch,
        }
        return tuple(hint for hint, there in given.items() if there)


class HintsRead(NamedTuple):
    """Hints of a request, None if none is left, and why others were ignored."""

    hints: PromptHints | None
    ignored: tuple[IgnoredHint, ...] = ()


_NAMES = {*(hint.value for hint in CacheHint), TOKENS, RECEIPT, SHARE, SOURCE, IF_ABLE}


def read_hints(options: object) -> HintsRead:
    """Return the hints in ``options``, a request's value of ``kvconnect``. Never fails. Takes
    bounded time, whatever a client sent.

    ``pin``, ``retain`` and ``prefetch`` win over ``demote`` and ``drop``, and ``drop`` wins over
    ``demote``. With invalid ``tokens``, all hints are ignored: the request meant fewer blocks than
    its prompt has.
    """
    if not isinstance(options, Mapping):
        return HintsRead(None, (IgnoredHint.INVALID,))
    ignored = [IgnoredHint.UNKNOWN] * (len(options) > sum(name in options for name in _NAMES))
    tokens = options.get(TOKENS)
    if tokens is not None and not (type(tokens) is int and tokens > 0):
        return HintsRead(None, (*ignored, IgnoredHint.INVALID))
    seconds: dict[CacheHint, float] = {}
    for hint in (CacheHint.PIN, CacheHint.RETAIN):
        value: Any = options.get(hint.value)
        if type(value) in (int, float) and 0 < value <= LONGEST_S:
            seconds[hint] = float(value)
        elif value is not None:
            ignored.append(IgnoredHint.INVALID)
    asked: list[CacheHint] = []
    for hint in (CacheHint.DROP, CacheHint.DEMOTE, CacheHint.PREFETCH):
        value = options.get(hint.value)
        if value is True:
            asked.append(hint)
        elif value is not None and value is not False:
            ignored.append(IgnoredHint.INVALID)
    prefetch = CacheHint.PREFETCH in asked
    releases = [hint for hint in asked if hint is not CacheHint.PREFETCH]
    release = releases[0] if releases and not seconds and not prefetch else None
    ignored += [IgnoredHint.CONFLICT] * (len(releases) - (release is not None))
    pin_s, retain_s = seconds.get(CacheHint.PIN, 0.0), seconds.get(CacheHint.RETAIN, 0.0)
    hints = PromptHints(pin_s, retain_s, release, tokens, prefetch)
    return HintsRead(hints if hints.hints else None, tuple(ignored))
