"""Groups of engines that all pair with one another, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvconnect.router.policy.fleet_view import EngineView, FleetView


class PairedEngines(NamedTuple):
    """Engines that all pair with one another, and the request's turn among them."""

    prefill: list[EngineView]
    decode: list[EngineView]
    turn: int


class _Partners(NamedTuple):
    engines: list[EngineView]
    places: tuple[int, ...]


def best_group(
    view: FleetView, prefill: list[EngineView], decode: list[EngineView], turn: int
) -> PairedEngines | None:
    """Return engines that pair; engines proven by probes are preferred. Where one side has not told
    its models, it pairs only if the other side's tell of one: it could be another."""
    proven_prefill = [engine for engine in prefill if engine.proven]
    proven_decode = [engine for engine in decode if engine.proven]
    return (
        _group(proven_prefill, proven_decode, view.broken, turn)
        or _group(prefill, decode, view.broken, turn)
        or _group(prefill, decode, (), turn)
        or (_group(prefill, decode, (), turn, untold=True) if view.has_common_model() else None)
    )


def _group(
    prefill: list[EngineView],
    decode: list[EngineView],
    broken: Collection[tuple[int, int]],
    turn: int,
    *,
    untold: bool = False,
) -> PairedEngines | None:
    """Return engines that pair. If several groups exist, as during an upgrade, each gets requests
    in proportion to its smaller side."""
    if not prefill or not decode:
        return None
    first = prefill[0]
    if not broken and all(_identical(first, engine) for engine in (*prefill, *decode)):
        return PairedEngines(prefill, decode, turn)
    groups: dict[tuple[int, ...], PairedEngines] = {}
    some_broken = {index for index, _ in broken}
    alike: list[tuple[EngineView, _Partners]] = []  # most engines have the same ones
    for engine in prefill:
        partners = next((theirs for other, theirs in alike if _identical(engine, other)), None)
        if partners is None:
            partners = _partners(each for each in decode if engine.pairs_with(each, untold=untold))
            alike.append((engine, partners))
        if engine.index in some_broken:
            well = (each for each in partners.engines if (engine.index, each.index) not in broken)
            partners = _partners(well)
        if partners.engines:
            found = groups.setdefault(partners.places, PairedEngines([], partners.engines, 0))
            found.prefill.append(engine)
    weights = [min(len(group.prefill), len(group.decode)) for group in groups.values()]
    if not weights:
        return None
    cycle, rest = divmod(turn, sum(weights))
    for group, weight in zip(groups.values(), weights, strict=True):
        if rest < weight:
            return group._replace(turn=cycle * weight + rest)
        rest -= weight
    raise AssertionError("a turn falls into one group")


def _partners(engines: Iterable[EngineView]) -> _Partners:
    found = list(engines)
    return _Partners(found, tuple(each.index for each in found))


def _identical(mine: EngineView, theirs: EngineView) -> bool:
    return (
        mine.kind is theirs.kind and mine.version == theirs.version and mine.models == theirs.models
    )
