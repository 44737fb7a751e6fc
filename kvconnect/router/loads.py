"""How many tokens each data-parallel rank of one engine works on. Pure: time is an argument.

A router knows its own requests exactly. Of everybody else's (other routers, clients that go to an
engine directly) it learns from reports, each of which is a total: what was its own when it asked
is subtracted. So tokens of its own are never counted twice, nor for longer than the request runs,
however old the report; a report can only add what is not its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.router.view import Load

MOST_RANKS = 1024
"""Data-parallel ranks of one engine. What names more is a broken report, and each costs memory."""


@dataclass(frozen=True)
class Asked:
    """A report was asked for: when, and what was the router's own then."""

    at: float
    own: tuple[int, ...]


@dataclass
class Loads:
    """Loads of one engine. Not thread-safe.

    Attributes:
        stale_s: age in seconds after which a report says nothing any more.
    """

    stale_s: float
    _own: list[int] = field(default_factory=lambda: [0])
    _sent: list[float] = field(default_factory=lambda: [0.0])
    _ranks: int = 1
    _foreign: list[int] | None = None
    _reported: float = float("-inf")  # when the report that holds was asked for

    def begin(self, rank: int | None, tokens: int, now: float) -> None:
        """A request of ``tokens`` goes to ``rank``."""
        self._own[rank or 0] += tokens
        self._sent[rank or 0] = now

    def end(self, rank: int | None, tokens: int) -> None:
        """It ended; the same rank and tokens as when it began."""
        assert self._own[rank or 0] >= tokens >= 0, "a request ends once"
        self._own[rank or 0] -= tokens

    def ask(self, now: float) -> Asked:
        """A report is being asked for; pass what this returns on to :meth:`report`."""
        return Asked(now, tuple(self._own))

    def report(self, asked: Asked, totals: Mapping[int, float]) -> bool:
        """The engine reported its tokens by rank; return whether the report is used.

        It is not if a later one has been, or if it is not a number of 0 or more for every rank
        from 0 on, at most ``MOST_RANKS``: half a truth would make a rank look idle.
        """
        ranks = len(totals)
        good = all(0 <= totals.get(rank, -1) < 2**53 for rank in range(ranks))
        if not 0 < ranks <= MOST_RANKS or not good or asked.at <= self._reported:
            return False
        self._reported, self._ranks = asked.at, ranks
        # Never shortened: requests may be under way on ranks that an engine lost in a restart.
        more = [0] * (ranks - len(self._own))
        self._own.extend(more)
        self._sent.extend(more)
        own = asked.own + (0,) * (ranks - len(asked.own))
        self._foreign = [max(0, int(totals[rank]) - own[rank]) for rank in range(ranks)]
        return True

    def forget(self) -> None:
        """The engine was lost: its last report is of another incarnation."""
        self._foreign = None

    def at(self, now: float) -> tuple[Load, ...]:
        """Return the load of every rank: of one, while the engine has not said how many."""
        foreign: Sequence[int | None] | None = self._foreign
        if foreign is None or now - self._reported > self.stale_s:
            foreign = (None,) * self._ranks
        return tuple(map(Load, self._own, foreign, self._sent))

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of the router's own requests, by rank."""
        return tuple(self._own)
