"""Engines, targets and loads, as routing decisions see them: plain values. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Role(str, Enum):
    """What an engine does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Engine(str, Enum):
    """Kind of server at a URL: the engine, and the connector that moves its KV."""

    VLLM = "vllm"  # with KVConnect: push or pull
    NIXL = "nixl"  # vLLM with its NixlConnector: pull
    MOONCAKE = "mooncake"  # vLLM with its MooncakeConnector: pull
    SGLANG = "sglang"  # with any transfer backend: bootstrap


class Target(NamedTuple):
    """An engine by number, and its data-parallel rank.

    ``rank`` None: the engine chooses, because it has one rank or has not reported how many.
    """

    worker: int
    rank: int | None = None


class TargetLoad(NamedTuple):
    """Tokens in work at one target.

    Attributes:
        own: of this router's open requests; exact.
        foreign: of all other requests, from the engine's last report; None: unknown.
        sent: time of this router's last request to the target; 0: never. Unit: seconds.
    """

    own: int = 0
    foreign: int | None = None
    sent: float = 0.0


@dataclass(frozen=True)
class WorkerView:
    """One engine. ``index`` is its number in its role; numbers are never reused.

    Attributes:
        up: requests may go there: it answers, and is not being drained.
        ranks: loads of its data-parallel ranks in order; one entry while their number is unknown.
        standing_tickets: by rank; None: none valid. Prefill engines only.
        models: names that it serves; empty: unknown.
        version: only engines of equal versions pair. Empty: unknown.
        name: its URL; equal after restarts and in all routers.
        trusted: it has not just failed several requests. Untrusted engines are a last resort.
        proven: a probe has moved KV from or to it. Others are a last resort.
        share_tickets: by rank, as ``standing_tickets``; of engines that others may read from.
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
    share_tickets: tuple[str | None, ...] = ()

    def targets(self) -> list[tuple[Target, TargetLoad]]:
        """Return its targets with their loads."""
        if len(self.ranks) == 1:
            return [(Target(self.index), self.ranks[0])]
        return [(Target(self.index, rank), load) for rank, load in enumerate(self.ranks)]

    def standing_ticket(self, rank: int | None) -> str | None:
        """Return its valid standing ticket for a rank, None if there is none."""
        return _of_rank(self.standing_tickets, rank)

    def share_ticket(self, rank: int | None) -> str | None:
        """Return its valid share ticket for a rank, None if there is none."""
        return _of_rank(self.share_tickets, rank)

    def serves(self, model: str) -> bool:
        """Whether it may serve ``model``; true while its models are unknown. SGLang accepts an
        adapter's name after the model's."""
        if not model or not self.models or model in self.models:
            return True
        bases = self.models if self.engine is Engine.SGLANG else ()
        return any(model.startswith(f"{name}:") for name in bases)

    def pairs_with(self, other: WorkerView) -> bool:
        """Whether one can use the other's KV: same engine, connector, version and model."""
        return (
            self.engine is other.engine
            and _agree(self.version, other.version)
            and (not self.models or not other.models or bool(self.models & other.models))
        )


def _of_rank(tickets: Sequence[str | None], rank: int | None) -> str | None:
    index = rank or 0
    return tickets[index] if index < len(tickets) else None


def _agree(one: str, other: str) -> bool:
    return not one or not other or one == other


@dataclass(frozen=True)
class FleetView:
    """All engines at one moment. ``broken``: pairs, by number, whose last probe failed.
    ``unified``: there are only decode engines, and they serve requests alone."""

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    broken: Collection[tuple[int, int]] = ()
    unified: bool = False

    def missing(self) -> list[Role]:
        """Return the roles without an engine that is up."""
        both = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        needed = both[1:] if self.unified else both
        return [role for role, engines in needed if not any(engine.up for engine in engines)]

    def can_hand_over(self) -> bool:
        """Whether a probe of two engines that are up has passed, or may still pass; true where no
        hand-off is needed, or an engine is missing."""
        pairs = [
            (one.index, other.index)
            for one in self.prefill
            for other in self.decode
            if one.up and other.up
        ]
        return self.unified or not pairs or any(pair not in self.broken for pair in pairs)


# Loads ------------------------------------------------------------------------------------------
#
# A router knows its own requests exactly. Load reports of engines are totals, so the router's own
# tokens at the time of the query are subtracted; the rest belongs to other routers and clients.
# So own tokens are never counted twice, and never after their request ended.


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

    def begin(self, rank: int | None, tokens: int, now: float) -> None:
        """Add a request of ``tokens`` tokens to ``rank``."""
        self._own[rank or 0] += tokens
        self._sent[rank or 0] = now

    def end(self, rank: int | None, tokens: int) -> None:
        """Remove a request; same rank and tokens as at its begin."""
        assert self._own[rank or 0] >= tokens >= 0, "a request ends once"
        self._own[rank or 0] -= tokens

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
        return True

    def forget(self) -> None:
        """Drop the last report: the engine went down, and may restart."""
        self._foreign = None

    def at(self, now: float) -> tuple[TargetLoad, ...]:
        """Return the load of every rank; of one rank while their number is unknown."""
        foreign: Sequence[int | None] | None = self._foreign
        if foreign is None or now - self._reported > self.stale_s:
            foreign = (None,) * self._ranks
        return tuple(map(TargetLoad, self._own, foreign, self._sent))

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of the router's own requests, by rank."""
        return tuple(self._own)
