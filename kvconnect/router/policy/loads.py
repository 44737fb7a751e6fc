"""What a routing decision may look at: plain values, so that every decision can be replayed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Role(str, Enum):
    """What an engine is asked to do; also the name of a request's leg."""

    PREFILL = "prefill"
    DECODE = "decode"


class Engine(str, Enum):
    """What answers at a URL: an engine, and the connector that moves its KV."""

    VLLM = "vllm"  # with KVConnect: both legs at once, or one after the other
    NIXL = "nixl"  # vLLM with its NixlConnector: one leg after the other
    MOONCAKE = "mooncake"  # vLLM with its MooncakeConnector: one leg after the other
    SGLANG = "sglang"  # with any transfer backend: both legs at once, by bootstrap room


class Target(NamedTuple):
    """Where one leg runs: an engine by number, and its data-parallel rank.

    ``rank`` None: the engine chooses, because it has one rank or has not said how many.
    """

    worker: int
    rank: int | None = None


class TargetLoad(NamedTuple):
    """Tokens at one target.

    Attributes:
        own: of this router's requests that are under way there; exact.
        foreign: of everybody else's, from the engine's last report; None: unknown.
        sent: when this router last sent a request there; 0: never. Unit: seconds.
    """

    own: int = 0
    foreign: int | None = None
    sent: float = 0.0


@dataclass(frozen=True)
class WorkerView:
    """One engine. ``index`` is its number among those of its role and never used again.

    Attributes:
        up: requests may go there (it answers, and is not being drained).
        ranks: loads of its data-parallel ranks in order; one entry if it has not said how many.
        cards: standing offers to decode engines, by rank; a prefill engine's only.
        models: names it serves; empty: unknown.
        version: of the engine; only equal ones hand over to each other. Empty: unknown.
        name: stable over restarts and over routers: its URL.
        trusted: it has not just failed several requests; if none of a role has not, all serve.
        proven: KV has been seen to get from or to it; as with ``trusted``.
    """

    index: int
    up: bool
    ranks: tuple[TargetLoad, ...] = (TargetLoad(),)
    standing_tickets: tuple[str | None, ...] = ()
    engine: Engine = Engine.VLLM
    models: frozenset[str] = frozenset()
    version: str = ""
    name: str = ""
    trusted: bool = True
    proven: bool = False

    def targets(self) -> list[tuple[Target, TargetLoad]]:
        """Return where on it a leg can run, with the load there."""
        if len(self.ranks) == 1:
            return [(Target(self.index), self.ranks[0])]
        return [(Target(self.index, rank), load) for rank, load in enumerate(self.ranks)]

    def standing_ticket(self, rank: int | None) -> str | None:
        """Return its standing offer for a rank, None if there is none that holds."""
        index = rank or 0
        return self.standing_tickets[index] if index < len(self.standing_tickets) else None

    def serves(self, model: str) -> bool:
        """Whether it may serve ``model``; an engine that has not said what it serves may. SGLang
        takes an adapter's name behind the model's."""
        if not model or not self.models or model in self.models:
            return True
        bases = self.models if self.engine is Engine.SGLANG else ()
        return any(model.startswith(f"{name}:") for name in bases)

    def pairs_with(self, other: WorkerView) -> bool:
        """Whether KV of one can be used by the other: same engine, connector, model, version."""
        return (
            self.engine is other.engine
            and _agree(self.version, other.version)
            and (not self.models or not other.models or bool(self.models & other.models))
        )


def _agree(one: str, other: str) -> bool:
    return not one or not other or one == other


@dataclass(frozen=True)
class FleetView:
    """All engines at one moment. ``broken``: pairs, by number, between which KV did not get."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    broken: Collection[tuple[int, int]] = ()

    def missing(self) -> list[Role]:
        """Return the roles of which no engine is up."""
        both = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return [role for role, engines in both if not any(engine.up for engine in engines)]


# How many tokens each data-parallel rank of one engine works on. Pure: time is an argument.
#
# A router knows its own requests exactly. Of everybody else's (other routers, clients that go to an
# engine directly) it learns from reports, each of which is a total: what was its own when it asked
# is subtracted. So tokens of its own are never counted twice, nor for longer than the request runs,
# however old the report; a report can only add what is not its own.


MOST_RANKS = 1024
"""Data-parallel ranks of one engine. What names more is a broken report, and each costs memory."""


@dataclass(frozen=True)
class LoadQuery:
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

    def ask(self, now: float) -> LoadQuery:
        """A report is being asked for; pass what this returns on to :meth:`report`."""
        return LoadQuery(now, tuple(self._own))

    def report(self, asked: LoadQuery, totals: Mapping[int, float]) -> bool:
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

    def at(self, now: float) -> tuple[TargetLoad, ...]:
        """Return the load of every rank: of one, while the engine has not said how many."""
        foreign: Sequence[int | None] | None = self._foreign
        if foreign is None or now - self._reported > self.stale_s:
            foreign = (None,) * self._ranks
        return tuple(map(TargetLoad, self._own, foreign, self._sent))

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of the router's own requests, by rank."""
        return tuple(self._own)
