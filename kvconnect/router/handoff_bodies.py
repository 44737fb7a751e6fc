"""Bodies of the two requests of a hand-off, for the engines of a routing choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from kvconnect.router.fleet.engines import Engine
from kvconnect.router.policy.choice import Mode, RoutingChoice, TargetChoice
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests import engine_bodies


def bodies(
    choice: RoutingChoice,
    chosen: TargetChoice,
    prefill: Engine,
    body: Mapping[str, Any],
    one_token: Mapping[str, Any] = engine_bodies.ONE_TOKEN,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the bodies for prefill and decode; in pull mode, decode's still lacks the ticket."""
    if choice.mode is Mode.BOOTSTRAP:
        spec, room = prefill.spec, secrets.randbelow(engine_bodies.ROOMS)
        meeting = engine_bodies.BootstrapRoom(spec.host, spec.bootstrap, room, chosen.target.rank)
        return (
            engine_bodies.bootstrap_body(body, meeting, chosen.target.rank),
            engine_bodies.bootstrap_body(body, meeting, choice.decode.target.rank),
        )
    transfer = secrets.token_hex(16)
    asked = engine_bodies.prefill_body(body, transfer, one_token)
    if choice.mode is Mode.PUSH:
        return asked, engine_bodies.push_body(body, transfer, choice.standing_ticket)
    return asked, body


def mooncake_ticket(
    prefill: Engine, rank: int | None, asked: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the ticket of vLLM's MooncakeConnector, whose responses have none; else None."""
    engine_id = prefill.info.engine_ids.get(rank or 0)
    if prefill.spec.kind is not EngineKind.MOONCAKE or engine_id is None:
        return None
    return engine_bodies.mooncake_ticket(
        engine_bodies.transfer_of(asked), engine_id, prefill.spec.bootstrap_url
    )
