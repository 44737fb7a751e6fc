"""Groups of engines that all pair with one another, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvconnect.router.policy.fleet_view import FleetView, WorkerView


class PairedEngines(NamedTuple):
    """Engines that all pair with one another, and the request's turn among them."""

    prefill: list[WorkerView]
    decode: list[WorkerView]
    turn: int


def best_group(
    view: FleetView, prefill: list[WorkerView], decode: list[WorkerView], turn: int
) -> PairedEngines | None:
    """Return engines that pair; engines proven by probes are preferred."""
    proven_prefill = [w for w in prefill if w.proven]
    proven_decode = [w for w in decode if w.proven]
    return (
        _group(proven_prefill, proven_decode, view.broken, turn)
        or _group(prefill, decode, view.broken, turn)
        or _group(prefill, decode, (), turn)
    )


def _group(
    prefill: list[WorkerView],
    decode: list[WorkerView],
    broken: Collection[tuple[int, int]],
    turn: int,
) -> PairedEngines | None:
    """Return engines that pair. If several groups exist, as during an upgrade, each gets requests
    in proportion to its smaller side."""
    if not prefill or not decode:
        return None
    first = prefill[0]
    if not broken and all(_identical(first, worker) for worker in (*prefill, *decode)):
        return PairedEngines(prefill, decode, turn)
    groups: dict[tuple[int, ...], PairedEngines] = {}
    for worker in prefill:
        partners = [
            other
            for other in decode
            if worker.pairs_with(other) and (worker.index, other.index) not in broken
        ]
        if partners:
            key = tuple(other.index for other in partners)
            groups.setdefault(key, PairedEngines([], partners, 0)).prefill.append(worker)
    weights = [min(len(group.prefill), len(group.decode)) for group in groups.values()]
    if not weights:
        return None
    cycle, target_choice = divmod(turn, sum(weights))
    for group, weight in zip(groups.values(), weights, strict=True):
        if target_choice < weight:
            return group._replace(turn=cycle * weight + target_choice)
        target_choice -= weight
    raise AssertionError("a turn falls into one group")


def _identical(one: WorkerView, other: WorkerView) -> bool:
    return (
        one.engine is other.engine and one.version == other.version and one.models == other.models
    )
