"""Errors of the router, in the format of the API that the client uses. Pure."""

from __future__ import annotations

import json

from kvconnect.router.requests import engine_bodies

_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(path: str, status: int, message: str) -> bytes:
    """Return an error in Anthropic's format on the paths of its API, else in OpenAI's."""
    if path not in _ANTHROPIC_PATHS:
        return engine_bodies.error_body(status, message)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message}
    return json.dumps({"type": "error", "error": error}).encode()
