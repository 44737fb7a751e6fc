"""Which engines of a role can take a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvconnect.router.policy.fleet_view import EngineKind, EngineView


def available(
    engines: Sequence[EngineView],
    failed: Collection[int],
    model: str,
    kinds: Collection[EngineKind],
) -> list[EngineView]:
    """Return the engines that serve the request and are up, without those that ``failed``;
    untrusted ones only if there are no others."""
    found = [e for e in serving(engines, model, kinds) if e.up and e.index not in failed]
    return [e for e in found if e.trusted] or found


def serving(
    engines: Sequence[EngineView], model: str, kinds: Collection[EngineKind]
) -> list[EngineView]:
    """Return the engines that serve a request's model and path, up or not. SGLang serves its model
    under any name: where all engines have the same, no name is wrong."""
    found = [e for e in engines if e.serves(model)]
    if not found and len({(e.kind, e.models) for e in engines}) == 1:
        found = [e for e in engines if e.kind is EngineKind.SGLANG]
    return [e for e in found if e.kind in kinds]
