"""What a routing decision may look at: plain values, so that every decision can be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """What an engine is asked to do; also the name of a request's leg."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class UpstreamView:
    """One engine. ``index`` is its place among the URLs of its role; ``card`` its standing offer
    to decode engines, if it prefills and has one."""

    index: int
    up: bool
    card: str | None = None


@dataclass(frozen=True)
class View:
    """All engines at one moment."""

    prefill: tuple[UpstreamView, ...]
    decode: tuple[UpstreamView, ...]

    def missing(self) -> list[Role]:
        """Return the roles of which no engine is up."""
        both = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return [role for role, engines in both if not any(engine.up for engine in engines)]
