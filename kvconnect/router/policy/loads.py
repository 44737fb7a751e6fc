"""Loads of one engine's ranks. Pure.

A router knows its own requests exactly. Load reports of engines are totals, so the router's own
tokens at the time of the query are subtracted; the rest belongs to other routers and clients. So
own tokens are never counted twice, and never after their request ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.router.policy.fleet_view import TargetLoad

MOST_RANKS = 1024
"""Limit of data-parallel ranks of one engine. A report with more is invalid."""


@dataclass(frozen=True)
class LoadQuery:
    """A query for a load report: its time, and the router's own tokens by rank at that time."""

    at: float
    own: tuple[int, ...]


@dataclass
class Loads:
    """Loads of one engine. Not thread-safe.

    Attributes:
        stale_s: age in seconds after which a report is ignored.
    """

    stale_s: float
    _own: list[int] = field(default_factory=lambda: [0])
    _sent: list[float] = field(default_factory=lambda: [0.0])
    _ranks: int = 1
    _foreign: list[int] | None = None
    _reported: float = float("-inf")  # query time of the report in use
    _shown: tuple[TargetLoad, ...] = ()  # what at() returned; empty: it has changed since
    _shown_foreign: bool = False  # it tells foreign loads

    def begin(self, rank: int | None, tokens: int, now: float) -> None:
        """Add a request of ``tokens`` tokens to ``rank``."""
        self._own[rank or 0] += tokens
        self._sent[rank or 0] = now
        self._shown = ()

    def end(self, rank: int | None, tokens: int) -> None:
        """Remove a request; same rank and tokens as at its begin."""
        assert self._own[rank or 0] >= tokens >= 0, "a request ends once"
        self._own[rank or 0] -= tokens
        self._shown = ()

    def ask(self, now: float) -> LoadQuery:
        """Start a query for a report; its result goes to :meth:`report`."""
        return LoadQuery(now, tuple(self._own))

    def report(self, asked: LoadQuery, totals: Mapping[int, float]) -> bool:
        """Take an engine's tokens by rank; return whether the report is used.

        A report is discarded if a later one was used, or unless it has a number of 0 or more for
        each of at most ``MOST_RANKS`` ranks: an incomplete one would make a rank look idle.
        """
        ranks = len(totals)
        good = all(0 <= totals.get(rank, -1) < 2**53 for rank in range(ranks))
        if not 0 < ranks <= MOST_RANKS or not good or asked.at <= self._reported:
            return False
        self._reported, self._ranks = asked.at, ranks
        # Never shortened: requests may be open on ranks that an engine lost in a restart.
        more = [0] * (ranks - len(self._own))
        self._own.extend(more)
        self._sent.extend(more)
        own = asked.own + (0,) * (ranks - len(asked.own))
        self._foreign = [max(0, int(totals[rank]) - own[rank]) for rank in range(ranks)]
        self._shown = ()
        return True

    def forget(self) -> None:
        """Drop the last report: the engine went down, and may restart with other ranks."""
        self._foreign, self._ranks, self._shown = None, 1, ()

    def at(self, now: float) -> tuple[TargetLoad, ...]:
        """Return the load of every rank; of one rank while their number is unknown. What has not
        changed is the same object."""
        known = self._foreign is not None and now - self._reported <= self.stale_s
        if not self._shown or known is not self._shown_foreign:
            foreign: Sequence[int | None] = (None,) * self._ranks
            if known and self._foreign is not None:
                foreign = self._foreign
            self._shown = tuple(map(TargetLoad, self._own, foreign, self._sent))
            self._shown_foreign = known
        return self._shown

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of the router's own requests, by rank, also of ranks that the engine had before a
        restart."""
        return tuple(self._own)
