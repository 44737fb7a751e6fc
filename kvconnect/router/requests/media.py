"""Identities of media in a client's body, kept apart by tenant. Pure.

vLLM takes the ``uuid`` of a content part as the identity of its image, audio or video in the caches
of processed media, which all tenants share. So a client could name another tenant's entries.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body

MOST_STRUCTURE = 65_536
"""Limit of brackets and commas in a field with a ``uuid``: they bound its decoded size."""

_HOLDERS = (
    *("messages", "input", "previous_input_messages", "query", "queries", "documents", "items"),
    *("data_1", "data_2", "text_1", "text_2"),
)
# Each letter may be written as an escape.
_NAME = re.compile(rb'"(?:u|\\u0075)(?:u|\\u0075)(?:i|\\u0069)(?:d|\\u0064)"')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)


def with_own_media(body: Body, tenant: str) -> dict[str, Any]:
    """Return the body with each ``uuid`` of media prefixed by ``tenant`` and a dot.

    Raises:
        Refused: a field with a ``uuid`` has too many parts.
    """
    found = dict(body)
    for field in _HOLDERS:
        value = found.get(field)
        if not isinstance(value, Raw):
            continue
        raw = bytes(value)
        if _NAME.search(raw) is None:
            continue
        structure = _STRING.sub(b"", raw)
        if sum(map(structure.count, (b",", b"{", b"["))) > MOST_STRUCTURE:
            raise Refused(field, "it has too many parts beside a uuid: send the media without one")
        try:
            found[field] = Raw(msgspec.json.encode(_prefixed(value, tenant)))
        except _BROKEN as error:
            raise Refused(field, f"it is not JSON: {error}") from error
    return found


def _prefixed(value: Raw, tenant: str) -> Any:
    """Return a JSON value whose ``uuid`` fields have the prefix; other parts keep their bytes."""
    raw = bytes(value)
    if raw[:1] == b"[" and _NAME.search(raw):
        return [_prefixed(each, tenant) for each in msgspec.json.decode(raw, type=list[Raw])]
    if raw[:1] != b"{" or not _NAME.search(raw):
        return value
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    return {
        name: _own(each, tenant) if name == "uuid" else _prefixed(each, tenant)
        for name, each in fields.items()
    }


def _own(identity: Raw, tenant: str) -> Any:
    raw = bytes(identity)
    if raw == b"null":
        return None
    # Engines make text of an identity that is none.
    text = msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else raw.decode()
    return f"{tenant}.{text}"
