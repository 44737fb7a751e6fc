"""Pages of other origins (CORS): which of them may read the router's answers in a browser. Pure.

aiohttp-cors was looked at: it is set up route by route, and its refusals are plain text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_ASKED_METHOD, _ASKED_HEADERS = "access-control-request-method", "access-control-request-headers"
_KEPT_S = "600"  # a browser may keep a permission this long


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a browser asks what a page of another origin may send; it sends no key.
    ``headers``: names in lower case."""
    return method == "OPTIONS" and _ASKED_METHOD in headers


def answer_headers(origin: str, origins: Collection[str]) -> dict[str, str]:
    """Return the headers that let a page of an origin read any answer; none if it may not."""
    if not _allowed(origin, origins):
        return {}
    return {
        "Access-Control-Allow-Origin": "*" if "*" in origins else origin,
        "Access-Control-Expose-Headers": "*",
        "Vary": "Origin",
    }


def preflight_headers(headers: Mapping[str, str], origins: Collection[str]) -> dict[str, str]:
    """Return what a browser is told that a page may send; nothing if it may send nothing."""
    if not _allowed(headers.get("origin", ""), origins):
        return {}
    return {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": headers.get(_ASKED_HEADERS)
        or "Authorization, Content-Type",
        "Access-Control-Max-Age": _KEPT_S,
    }


def _allowed(origin: str, origins: Collection[str]) -> bool:
    return bool(origin) and (origin in origins or "*" in origins)
