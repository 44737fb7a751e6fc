"""Identities of media in a client's body, kept apart by tenant. Pure.

vLLM takes the ``uuid`` of a content part as the identity of its image, audio or video in the caches
of processed media, which all tenants share. SGLang takes a ``content_hash``, and believes it where
its operator says that callers may be trusted. So a client could name another tenant's entries.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body
from kvconnect.router.requests.json_parts import check_parts

_HOLDERS = (
    *("messages", "input", "previous_input_messages", "query", "queries", "documents", "items"),
    *("data_1", "data_2", "text_1", "text_2", "image_data", "video_data", "audio_data"),
)
_PREFIXED, _DROPPED = "uuid", "content_hash"


def _spellings(name: str) -> bytes:
    """Return a pattern of a name each of whose letters may be written as an escape."""
    return b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in name.encode("ascii"))


_NAME = re.compile(rb'"(?:%b|%b)"' % (_spellings(_PREFIXED), _spellings(_DROPPED)))
# Possessive, since the library notes each place to which it could go back: 120 bytes a character.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_DEEPEST = 16  # levels of lists and objects: each is searched once more
_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)


def with_own_media(body: Body, tenant: str) -> dict[str, Any]:
    """Return the body with each ``uuid`` of media prefixed by ``tenant`` and a dot, and without
    hashes of contents, which engines compute themselves.

    Raises:
        Refused: a field with an identity has too many parts, or is nested too deep.
    """
    found = dict(body)
    for field in _HOLDERS:
        value = found.get(field)
        if not isinstance(value, Raw):
            continue
        raw = memoryview(value)
        if _NAME.search(raw) is None:
            continue
        check_parts(field, _STRING.sub(b"", raw), f"leave out its {_PREFIXED} or {_DROPPED}")
        try:
            found[field] = Raw(msgspec.json.encode(_prefixed(value, tenant, field, _DEEPEST)))
        except _BROKEN as error:
            raise Refused(field, f"{field} is not JSON: {error}") from error
    return found


def _prefixed(value: Raw, tenant: str, field: str, levels: int) -> Any:
    """Return a JSON value whose identities are the tenant's; other parts keep their bytes."""
    raw = memoryview(value)
    first = bytes(raw[:1])
    if first not in (b"[", b"{") or not _NAME.search(raw):
        return value
    if not levels:
        what = f"a {_PREFIXED} or {_DROPPED} below {_DEEPEST} lists and objects"
        raise Refused(field, f"{field} has {what}: leave that out")
    if first == b"[":
        each_of = msgspec.json.decode(raw, type=list[Raw])
        return [_prefixed(each, tenant, field, levels - 1) for each in each_of]
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    return {
        name: _own(each, tenant)
        if name == _PREFIXED
        else _prefixed(each, tenant, field, levels - 1)
        for name, each in fields.items()
        if name != _DROPPED
    }


def _own(identity: Raw, tenant: str) -> Any:
    raw = bytes(identity)
    if raw == b"null":
        return None
    # Engines make text of an identity that is none.
    text = msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else raw.decode()
    return f"{tenant}.{text}"
