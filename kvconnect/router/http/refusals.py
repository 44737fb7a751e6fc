"""Answers to requests that failed before their first byte."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvconnect.errors import KVConnectError, Refused
from kvconnect.router.http.admission import Busy
from kvconnect.router.http.engine_call import EngineFailed, EngineResponse, Rejected
from kvconnect.router.http.http_request import HttpError
from kvconnect.router.http.http_response import HttpResponse
from kvconnect.router.http.reply import Reply
from kvconnect.router.metrics import RequestOutcome
from kvconnect.router.policy.choice import RoutingReason
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.policy.no_choice import Unserved
from kvconnect.router.requests import engine_bodies


class Refusal(NamedTuple):
    """What the client gets, and how its request is counted."""

    response: HttpResponse
    outcome: RequestOutcome


def refusal(reply: Reply, error: KVConnectError) -> Refusal:
    """Return the answer to a request that ended with an error."""
    rejected = RequestOutcome.REJECTED
    match error:
        case Busy():
            again = {"Retry-After": str(error.retry_s)}
            return Refusal(reply.error(429, str(error), again), rejected)
        case HttpError():
            return Refusal(reply.error(error.status, str(error)), rejected)
        case Refused():
            return Refusal(reply.error(400, str(error)), rejected)
        case Unserved():
            return Refusal(reply.error(404, str(error)), rejected)
        case Rejected():
            return Refusal(reply.whole(error.answer), rejected)
        case EngineFailed(answer=EngineResponse() as answer, role=Role.DECODE):
            choice = reply.choice
            if choice is not None and choice.reason is RoutingReason.PUSH_FAILED:
                answer = _explained(answer)
            return Refusal(reply.whole(answer), RequestOutcome.FAILED)
    return Refusal(reply.error(502, str(error)), RequestOutcome.FAILED)


def _explained(answer: EngineResponse) -> EngineResponse:
    why = "the hand-off failed by push and by pull; the decode engine's log says why"
    return replace(answer, body=engine_bodies.explained(answer.status, answer.body, why))
