"""Why a request goes nowhere. Pure."""

from __future__ import annotations

from kvconnect.errors import KVConnectError, Refused
from kvconnect.router.policy.choice import RoutedRequest
from kvconnect.router.policy.fleet_view import EngineKind, FleetView, Role
from kvconnect.router.policy.serving import available, serving

_SHOWN = 200  # characters of a client's input that are shown


class Unserved(KVConnectError):
    """No engine serves the model or the path of a request."""


def explain_no_choice(view: FleetView, request: RoutedRequest) -> str:
    """Return why no engines were chosen for a request's first attempt.

    Raises:
        Unserved: no engine serves it, even among those that are down.
        Refused: no engine can take a request of this form.
    """
    sides = {Role.PREFILL: view.prefill, Role.DECODE: view.decode}
    if request.decode_only or view.unified or view.serves_alone():
        del sides[Role.PREFILL]
    if any(
        engines and not serving(engines, request.model, request.kinds) for engines in sides.values()
    ):
        named = any(e.kind in request.kinds for engines in sides.values() for e in engines)
        model = request.model[:_SHOWN]
        raise Unserved(
            f"The model `{model}` does not exist." if named else "No engine here serves this path."
        )
    missing = [role.value for role in view.missing() if role in sides]
    if missing:
        return f"no {' and no '.join(missing)} engine is up"
    if not all(available(engines, (), request.model, request.kinds) for engines in sides.values()):
        return f"no engine that is up serves the model {request.model[:_SHOWN]!r}"
    if request.sampled and not view.unified:
        if all(
            engine.kind is EngineKind.SGLANG
            for engine in serving(view.decode, request.model, request.kinds)
        ):
            fix = "send the request without n, once for each answer"
            raise Refused("n", f"SGLang hands over one answer to a prompt: {fix}")
        return "no decode engine of vLLM is up, and n needs one"
    return "no prefill and decode engine that are up can hand over: engine or version differ"
