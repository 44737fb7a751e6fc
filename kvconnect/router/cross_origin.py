"""Pages of other origins (CORS): which of them may read the router's answers in a browser.

aiohttp-cors was looked at: it is set up route by route, and its refusals are plain text.
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web

_ASKED_METHOD, _ASKED_HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"
_KEPT_S = "600"  # a browser may keep a permission this long


def is_preflight(request: web.Request) -> bool:
    """Return whether a browser asks what a page of another origin may send; it sends no key."""
    return request.method == "OPTIONS" and _ASKED_METHOD in request.headers


def allow(app: web.Application, origins: Collection[str]) -> None:
    """Have the answers of an application say that pages of these origins may read them."""

    async def preflight(request: web.Request) -> web.Response:
        answer = web.Response(status=204)
        if _allowed(request, origins):
            answer.headers["Access-Control-Allow-Methods"] = "GET, POST"
            asked = request.headers.get(_ASKED_HEADERS, "")
            answer.headers["Access-Control-Allow-Headers"] = asked or "Authorization, Content-Type"
            answer.headers["Access-Control-Max-Age"] = _KEPT_S
        return answer

    async def say(request: web.Request, answer: web.StreamResponse) -> None:
        if origin := _allowed(request, origins):
            answer.headers["Access-Control-Allow-Origin"] = "*" if "*" in origins else origin
            answer.headers["Access-Control-Expose-Headers"] = "*"
            answer.headers["Vary"] = "Origin"

    app.router.add_route("OPTIONS", "/{path:.*}", preflight)
    app.on_response_prepare.append(say)


def _allowed(request: web.Request, origins: Collection[str]) -> str:
    """Return the origin of a request if it is allowed, else an empty text."""
    origin = request.headers.get("Origin", "")
    return origin if origin in origins or "*" in origins else ""
