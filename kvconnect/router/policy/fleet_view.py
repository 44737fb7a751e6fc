"""The engines of a fleet, as routing decisions see them: plain values. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import NamedTuple

from kvconnect.router.policy.prompt_times import NOTHING_KNOWN, PromptTimes


class Role(StrEnum):
    """What an engine does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineKind(StrEnum):
    """Kind of server at a URL: the engine, and the connector that moves its KV."""

    VLLM = "vllm"  # with KVConnect: push or pull
    NIXL = "nixl"  # vLLM with its NixlConnector: pull
    MOONCAKE = "mooncake"  # vLLM with its MooncakeConnector: pull
    SGLANG = "sglang"  # with any transfer backend: bootstrap


class ModelKnowledge(IntEnum):
    """How well an engine's models are known."""

    NONE = 0  # it has never told them
    EARLIER = 1  # it has told them, but not since it came up
    CONFIRMED = 2


class Target(NamedTuple):
    """An engine by number, and its data-parallel rank.

    ``rank`` None: the engine chooses, because it has one rank or has not reported how many.
    """

    engine: int
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


@dataclass
class EngineView:
    """One engine. ``index`` is its number in its role; numbers are never reused. Nobody changes a
    view; a frozen one would take three times as long to make, twice in each request.

    Attributes:
        up: requests may go there: it answers, and is not being drained.
        ranks: loads of its data-parallel ranks in order; one entry while their number is unknown.
        standing_tickets: by rank; None: none valid. Prefill engines only.
        models: names that it serves, as it last told; empty: unknown.
        version: only engines of equal versions pair. Empty: unknown.
        name: its URL; equal after restarts and in all routers.
        trusted: it has not just failed several requests. Untrusted engines are a last resort.
        proven: a probe has moved KV from or to it. Others are a last resort.
        share_tickets: by rank, as ``standing_tickets``; of engines that others may read from.
        times: what its prompts took; nothing in a view for decisions that do not depend on it.
        drained: it answers, and is being drained.
        confirmed: it has told its models since it came up. It may have restarted with others.
    """

    index: int
    up: bool
    ranks: tuple[TargetLoad, ...] = (TargetLoad(),)
    standing_tickets: tuple[str | None, ...] = ()
    kind: EngineKind = EngineKind.VLLM
    models: frozenset[str] = frozenset()
    version: str = ""
    name: str = ""
    trusted: bool = True
    proven: bool = False
    share_tickets: tuple[str | None, ...] = ()
    times: PromptTimes = NOTHING_KNOWN
    drained: bool = False
    confirmed: bool = True

    def is_same(self, other: EngineView) -> bool:
        """Whether both are one server, in two roles."""
        return bool(self.name) and self.name == other.name

    @cached_property
    def knowledge(self) -> ModelKnowledge:
        """How well its models are known."""
        if not self.models:
            return ModelKnowledge.NONE
        return ModelKnowledge.CONFIRMED if self.confirmed else ModelKnowledge.EARLIER

    @cached_property
    def targets(self) -> tuple[tuple[Target, TargetLoad], ...]:
        """Its targets with their loads."""
        if len(self.ranks) == 1:
            return ((Target(self.index), self.ranks[0]),)
        return tuple((Target(self.index, rank), load) for rank, load in enumerate(self.ranks))

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
        bases = self.models if self.kind is EngineKind.SGLANG else ()
        return any(model.startswith(f"{name}:") for name in bases)

    def pairs_with(self, other: EngineView, *, untold: bool = False) -> bool:
        """Whether one can use the other's KV: same engine, connector, version and model.
        ``untold``: also if only one has told its models."""
        return (
            self.kind is other.kind
            and _agree(self.version, other.version)
            and (
                bool(self.models & other.models)
                or not (self.models or other.models)
                or (untold and not (self.models and other.models))
            )
        )


def _of_rank(tickets: Sequence[str | None], rank: int | None) -> str | None:
    index = rank or 0
    return tickets[index] if index < len(tickets) else None


def _agree(mine: str, theirs: str) -> bool:
    return not mine or not theirs or mine == theirs


@dataclass(frozen=True)
class FleetView:
    """All engines at one moment. ``broken``: pairs, by number, whose last probe failed.
    ``unified``: there are only decode engines, and they serve requests alone. ``alone``: those of
    vLLM may do so, too, where there are prefill engines."""

    prefill: tuple[EngineView, ...]
    decode: tuple[EngineView, ...]
    broken: Collection[tuple[int, int]] = ()
    unified: bool = False
    alone: bool = False

    def serves_alone(self) -> bool:
        """Whether decode engines may serve requests without a prefill engine, if they are up."""
        up = [e for e in self.decode if e.up] or self.decode
        able = any(e.kind is not EngineKind.SGLANG for e in up)
        return self.unified or (self.alone and able)

    def has_common_model(self) -> bool:
        """Whether all engines that told their models serve one of them."""
        told = [engine.models for engine in (*self.prefill, *self.decode) if engine.models]
        return not told or bool(frozenset.intersection(*told))

    def missing(self) -> list[Role]:
        """Return the roles without an engine that is up."""
        both = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        needed = both[1:] if self.serves_alone() else both
        return [role for role, engines in needed if not any(engine.up for engine in engines)]

    def can_hand_over(self) -> bool:
        """Whether a probe of two engines that are up has passed, or may still pass; true where no
        hand-off is needed, or an engine is missing."""
        pairs = [
            (prefill.index, decode.index)
            for prefill in self.prefill
            for decode in self.decode
            if prefill.up and decode.up
        ]
        return self.unified or not pairs or any(pair not in self.broken for pair in pairs)
