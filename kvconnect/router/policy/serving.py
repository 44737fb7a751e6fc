"""Which engines of a role can take a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvconnect.router.policy.fleet_view import EngineKind, EngineView, ModelKnowledge


def available(
    engines: Sequence[EngineView],
    failed: Collection[int],
    model: str,
    kinds: Collection[EngineKind],
) -> list[EngineView]:
    """Return the engines that serve the request and are up, without those that ``failed``;
    untrusted ones only if there are no others.

    Only those whose models are known best of all engines, up or not: SGLang answers for any name,
    so an engine whose models are unknown could answer with another model.
    """
    found = [e for e in serving(engines, model, kinds) if e.up and e.index not in failed]
    known = [e for e in found if e.knowledge is ModelKnowledge.CONFIRMED]
    if found and not known:
        best = max(e.knowledge for e in engines if e.kind in kinds)
        known = [e for e in found if e.knowledge is best]
    return [e for e in known if e.trusted] or known


def serving(
    engines: Sequence[EngineView], model: str, kinds: Collection[EngineKind]
) -> list[EngineView]:
    """Return the engines that serve a request's model and path, up or not. SGLang serves its model
    under any name: where all engines have the same, no name is wrong."""
    found = [e for e in engines if e.serves(model)]
    if not found and len({(e.kind, e.models) for e in engines}) == 1:
        found = [e for e in engines if e.kind is EngineKind.SGLANG]
    return [e for e in found if e.kind in kinds]
