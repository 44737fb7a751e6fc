"""What of a client's request goes to engines: the fields and headers that may, with ids of the
router's. Event loop only."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from kvconnect.router.http.engine_call import EngineRequest
from kvconnect.router.http.tenants import Tenant
from kvconnect.router.options import Listening
from kvconnect.router.policy.choice import TargetChoice
from kvconnect.router.policy.fleet_view import EngineKind
from kvconnect.router.requests import engine_bodies
from kvconnect.router.requests.apis import Api
from kvconnect.router.requests.fields import Permissions, permitted
from kvconnect.router.requests.request_ids import ClientIds, client_ids, with_request_id

_FORWARDED = ("X-Request-Id", "traceparent", "tracestate")
_AUTHORIZATION, _PRIORITY = "Authorization", "X-Vllm-Priority"


class OutgoingRequest:
    """One client's request, as engines get it. ``dropped`` is told each dropped field's name."""

    def __init__(
        self,
        request: web.Request,
        api: Api,
        tenant: Tenant,
        listening: Listening,
        dropped: Callable[[str], None],
    ) -> None:
        self.client_ids: ClientIds | None = None  # of the last body; None: the client chose none
        self._api, self._dropped = api, dropped
        self._permissions = Permissions(
            listed_only=bool(listening.api_keys),
            named=listening.pass_fields,
            priority=tenant.priority,
        )
        names = list(_FORWARDED)
        if listening.forward_authorization:
            names.append(_AUTHORIZATION)
        if tenant.priority:
            names.append(_PRIORITY)
        self._headers = {name: request.headers[name] for name in names if name in request.headers}

    def body(self, engine: EngineKind, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a client's body that may reach an engine. Each one for SGLang has
        another id: the server may not yet have noticed the end of the attempt before.

        Raises:
            Refused: a field may not pass.
        """
        allowed, dropped = permitted(engine, self._api.path, body, self._permissions)
        for name in dropped:
            self._dropped(name)
        field = self._api.sglang_id
        if engine is not EngineKind.SGLANG or not field:
            self.client_ids = None
            return allowed
        made = secrets.token_hex(16)
        self.client_ids = client_ids(body, field, made)
        return with_request_id(allowed, field, made)

    def request(self, body: Mapping[str, Any], chosen: TargetChoice) -> EngineRequest:
        """Return the request to a chosen engine and rank."""
        headers = dict(self._headers)
        if chosen.target.rank is not None:
            headers[engine_bodies.RANK_HEADER] = str(chosen.target.rank)
        raw = engine_bodies.encoded(body) if self._api.method == "POST" else None
        return EngineRequest(self._api.method, self._api.path, headers, raw)
