"""Where a stream goes that leaves a drained decode engine. Pure.

That engine still has the blocks of the prompt and of all tokens so far, so it hands them off to
another decode engine, if it can. If not, the stream is continued as one whose engine was lost. If
that cannot be, it stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvconnect.router.policy.choice import (
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingChoice,
    RoutingReason,
    choose,
    choose_target,
)
from kvconnect.router.policy.fleet_view import EngineKind, EngineView, FleetView, Role, Target
from kvconnect.router.policy.ranking import RankingReason
from kvconnect.router.policy.rules import RoutingRules
from kvconnect.router.policy.serving import available
from kvconnect.router.policy.target_choice import TargetChoice


class AfterDrain(StrEnum):
    """Where a journaled stream went on after its decode engine was drained."""

    HANDED_OFF = "handed_off"  # at another engine, which got the blocks from the drained one
    COMPUTED = "computed"  # at another engine, as after a loss
    STAYED = "stayed"  # at the drained engine: it could not leave


@dataclass
class LeftEngine:
    """The decode engine that a stream leaves.

    Attributes:
        offers: it may hand the stream off.
        last: every other way has failed.
    """

    target: Target
    offers: bool = True
    last: bool = False

    def failed(self, choice: RoutingChoice) -> bool:
        """Note that an attempt failed, which no other engine makes up for; return whether another
        way is left."""
        if choice.prefill_role is Role.DECODE:
            self.offers = False
            return True
        self.last = True
        return not stays(choice)


def choose_next(
    view: FleetView,
    left: LeftEngine,
    request: RoutedRequest,
    failed: FailedTargets,
    rules: RoutingRules,
) -> RoutingChoice | None:
    """Return where the rest of a stream goes, None if no engine is left."""
    mine = next((e for e in view.decode if e.index == left.target.engine), None)
    mine = mine if mine is not None and (mine.up or mine.drained) else None
    why = RankingReason.DRAINED
    holder = TargetChoice(left.target, why, hit=request.tokens)
    if mine is not None and left.offers and (others := _takers(view, mine, request, failed)):
        found = choose_target(others, request, Role.DECODE, rules)
        reason = RoutingReason.DRAINED
        return RoutingChoice(Mode.PULL, reason, holder, found, prefill_role=Role.DECODE)
    elsewhere = None if left.last else choose(view, request, failed, rules)
    if elsewhere is not None or mine is None:
        return elsewhere
    return RoutingChoice(Mode.PLAIN, RoutingReason.DRAINED, None, holder)


def stays(choice: RoutingChoice) -> bool:
    """Return whether a stream goes on at the drained engine that it was to leave."""
    return choice.mode is Mode.PLAIN and choice.reason is RoutingReason.DRAINED


def after_drain(choice: RoutingChoice) -> AfterDrain:
    """Return where a stream has gone on."""
    if stays(choice):
        return AfterDrain.STAYED
    handed_off = choice.prefill_role is Role.DECODE
    return AfterDrain.HANDED_OFF if handed_off else AfterDrain.COMPUTED


def _takers(
    view: FleetView, mine: EngineView, request: RoutedRequest, failed: FailedTargets
) -> list[EngineView]:
    """Return the engines to which one may hand off."""
    if mine.kind is not EngineKind.VLLM:
        return []
    up = available(view.decode, failed.decode, request.model, request.kinds)
    return [engine for engine in up if engine.pairs_with(mine) and not engine.is_same(mine)]
