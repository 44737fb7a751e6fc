"""Where a stream goes that leaves a drained decode engine. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvconnect.router.policy.choice import (
    MODES,
    FailedTargets,
    Mode,
    RoutedRequest,
    RoutingChoice,
    RoutingReason,
)
from kvconnect.router.policy.fleet_view import EngineKind, EngineView, FleetView, Role, Target
from kvconnect.router.policy.leaving import (
    AfterDrain,
    LeftEngine,
    after_drain,
    choose_next,
    stays,
)
from kvconnect.router.policy.rules import RoutingRules

LEFT = Target(0, 1)
ASK = RoutedRequest(0, 100, "m")
MODELS = frozenset({"m"})


def engine(index: int, **more: Any) -> EngineView:
    name = more.pop("name", f"d{index}")
    return EngineView(index, True, name=name, **{"models": MODELS, "version": "1", **more})


DRAINED = replace(engine(0), up=False, drained=True)


def fleet(*others: EngineView, drained: EngineView = DRAINED, prefill: int = 0) -> FleetView:
    computing = tuple(engine(n, name=f"p{n}", version="2") for n in range(prefill))
    return FleetView(computing, (drained, *others), unified=not prefill)


def chosen(
    view: FleetView, left: LeftEngine | None = None, failed: FailedTargets | None = None
) -> RoutingChoice:
    left = left or LeftEngine(LEFT)
    found = choose_next(view, left, ASK, failed or FailedTargets(), RoutingRules())
    assert found is not None and (found.mode, found.reason) in MODES
    return found


def test_the_drained_rank_hands_off_to_an_engine_that_pairs_with_it() -> None:
    found = chosen(fleet(engine(1, version="2"), engine(2)))
    assert (found.mode, found.reason) == (Mode.PULL, RoutingReason.DRAINED)
    assert found.prefill is not None
    assert (found.prefill.target, found.prefill_role) == (LEFT, Role.DECODE)
    assert (found.prefill.tokens, found.prefill.hit) == (0, 100), "it computes nothing"
    assert found.decode.target == Target(2)
    assert found.targets == {Role.DECODE: Target(2)}, "no prefill engine has that number"
    assert after_drain(found) is AfterDrain.HANDED_OFF


@pytest.mark.parametrize(
    "other",
    [
        engine(1, version="2"),
        engine(1, models=frozenset({"m", "n"}), version="2"),
        engine(1, name="d0"),
    ],
    ids=["another version", "another version and model", "the same server"],
)
def test_without_a_partner_another_engine_computes(other: EngineView) -> None:
    found = chosen(fleet(other))
    assert (found.mode, found.reason) == (Mode.PLAIN, RoutingReason.UNIFIED)
    assert after_drain(found) is AfterDrain.COMPUTED
    assert chosen(fleet(engine(1))).mode is Mode.PULL, "the control"


@pytest.mark.parametrize("kind", [EngineKind.NIXL, EngineKind.MOONCAKE])
def test_only_kvconnect_hands_off_what_it_has_decoded(kind: EngineKind) -> None:
    found = chosen(fleet(engine(1, kind=kind), drained=replace(DRAINED, kind=kind)))
    assert found.reason is RoutingReason.UNIFIED


def test_one_that_is_down_hands_nothing_off_and_keeps_nothing() -> None:
    down = replace(DRAINED, drained=False)
    assert chosen(fleet(engine(1), drained=down)).reason is RoutingReason.UNIFIED
    view = fleet(replace(engine(1), up=False), drained=down)
    assert choose_next(view, LeftEngine(LEFT), ASK, FailedTargets(), RoutingRules()) is None


def test_a_drain_that_was_called_off_ends_where_it_began() -> None:
    """As of an engine that could not change its role."""
    again = engine(0)
    assert chosen(fleet(engine(1), drained=again)).reason is RoutingReason.DRAINED
    assert chosen(fleet(drained=again)).decode.target.engine == 0


@pytest.mark.parametrize("prefill", [0, 1])
def test_what_fails_is_followed_by_the_next_way_and_at_last_by_the_drained_engine(
    prefill: int,
) -> None:
    view, left = fleet(engine(1), engine(2, version="2"), prefill=prefill), LeftEngine(LEFT)
    first = chosen(view, left)
    assert first.decode.target == Target(1) and left.failed(first)
    second = chosen(view, left)
    reason = RoutingReason.UNIFIED if not prefill else RoutingReason.NO_STANDING_TICKET
    assert second.reason is reason and second.prefill_role is Role.PREFILL
    assert not stays(second) and left.failed(second)
    third = chosen(view, left)
    assert stays(third) and third.decode.target == LEFT
    assert after_drain(third) is AfterDrain.STAYED
    assert not left.failed(third), "nothing is left"


def test_it_stays_where_no_other_engine_is_up_or_all_have_failed() -> None:
    assert stays(chosen(fleet()))
    assert stays(chosen(fleet(replace(engine(1), up=False))))
    assert stays(chosen(fleet(engine(1)), failed=FailedTargets(decode={1})))
    assert not stays(chosen(fleet(engine(1))))
