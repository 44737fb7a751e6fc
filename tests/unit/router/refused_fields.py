"""As which field the router refuses a request for its bounds."""

from __future__ import annotations

import json
from typing import Any

from kvconnect.errors import Refused
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.fields import Permissions, permitted
from kvconnect.router.requests.limits import refuse_beyond_limits


def refused_as(
    path: str,
    sent: bytes,
    *named: str,
    kind: EngineKind = EngineKind.SGLANG,
    handed_over: bool = False,
) -> str:
    """Return the field as which a body is refused; empty: it is not."""
    try:
        body = permitted(kind, path, read_body(sent), Permissions()).body
        refuse_beyond_limits(kind, path, body, named, handed_over=handed_over)
    except Refused as refused:
        return refused.field
    return ""


def refused(
    path: str,
    *named: str,
    kind: EngineKind = EngineKind.SGLANG,
    handed_over: bool = False,
    **fields: Any,
) -> str:
    sent = json.dumps(fields).encode()
    return refused_as(path, sent, *named, kind=kind, handed_over=handed_over)
