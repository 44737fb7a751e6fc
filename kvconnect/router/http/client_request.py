"""What is decided about one request: what its body asks, and what is known beside it."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvconnect.protocol.cache_hints import CacheHint
from kvconnect.router.decision import ClientRequest
from kvconnect.router.http.http_request import HttpRequest
from kvconnect.router.http.request_reader import ParsedRequest
from kvconnect.router.http.services import Services
from kvconnect.router.http.tenants import Tenant
from kvconnect.router.requests.apis import Api
from kvconnect.router.requests.disaggregation import asked_disaggregation
from kvconnect.router.requests.fields import Permissions

_SESSION = "x-session-id"
_FORWARDED = ("X-Request-Id", "traceparent", "tracestate")
_LONGEST = 1024  # of a forwarded header's value: engines repeat the id in their own heads
_AUTHORIZATION, _PRIORITY = "Authorization", "X-Vllm-Priority"


def client_request(
    services: Services, request: HttpRequest, asked: ParsedRequest, api: Api, turn: int
) -> ClientRequest:
    """Return what is decided about. ``request``: of a known tenant. ``turn``: its number.

    Raises:
        Refused: a header has a wrong value.
    """
    assert request.tenant is not None, "who asks is known"
    tenant, prompt, headers = request.tenant, asked.prompt, request.headers
    listening = services.options.listening
    base = asked.prefix is not None and services.fleet.is_base(prompt.model)
    retain_s = min(prompt.retention_s, listening.retention_s)
    forward = listening.forward_authorization
    return ClientRequest(
        api,
        asked.body,
        prompt,
        turn,
        draw=random.random(),
        session=headers.get(_SESSION, "") or prompt.session,
        hits=services.caches.hits(asked.prefix, prompt.tokens, base=base),
        headers=_forwarded(headers, tenant, authorization=forward),
        permissions=Permissions(
            listed_only=bool(listening.api_keys),
            named=listening.pass_fields,
            priority=tenant.priority,
        ),
        hints={CacheHint.RETAIN.value: retain_s} if retain_s else {},
        disaggregate=asked_disaggregation(headers) if tenant.disaggregate else None,
    )


def _forwarded(
    headers: Mapping[str, str], tenant: Tenant, *, authorization: bool
) -> dict[str, str]:
    """Return the client's headers that engines get."""
    names = list(_FORWARDED)
    if authorization:
        names.append(_AUTHORIZATION)
    if tenant.priority:
        names.append(_PRIORITY)
    given = ((name, headers.get(name.lower())) for name in names)
    return {
        name: value
        for name, value in given
        if value is not None and (len(value) <= _LONGEST or name == _AUTHORIZATION)
    }
