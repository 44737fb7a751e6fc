"""Request ids at SGLang: the router's own there, the client's in the answer. Pure.

SGLang aborts requests by a prefix of their id, and a client's disconnect aborts its own id. So the
router gives every request an id that nobody can guess, all of one length: none is a prefix of
another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from kvconnect.errors import Refused
from kvconnect.router.requests.body import Body
from kvconnect.router.requests.json_parts import check_parts

RID = "rid"
RESPONSE_ID = "request_id"  # of the Responses API
_RESPONSE = "resp_"
_HELD = 64  # bytes at the end of a chunk that may be a part of an id
_MOST_DIGITS = 6
_LONGEST = 256  # characters of a client's id, which an answer has many times


def with_request_id(body: Body, field: str, random: str) -> dict[str, Any]:
    """Return the body for SGLang with the router's id; ``random``: 32 hex digits."""
    return {**body, field: _made(field, random)}


class ClientIds:
    """Puts a client's own ids into an answer, in place of the router's."""

    def __init__(self, field: str, random: str, own: str | Sequence[str]) -> None:
        """``own``: the client's id, or one for each prompt."""
        self._own = own
        # SGLang numbers the prompts of one request: the id, an underscore, the number.
        made = _made(field, random).encode()
        self._pattern = re.compile(b'"%b(?:_([0-9]{1,%d}))?"' % (made, _MOST_DIGITS))
        self._held = b""

    def shown(self, answer: bytes) -> bytes:
        """Return a whole answer with the client's ids."""
        return self._pattern.sub(self._id, answer)

    def feed(self, chunk: bytes) -> bytes:
        """Return what of a stream can be passed on; the rest follows with the next chunk."""
        text = self.shown(self._held + chunk)
        kept = 0 if text.endswith(b"\n") else min(_HELD, len(text))
        passed, self._held = text[: len(text) - kept], text[len(text) - kept :]
        return passed

    def rest(self) -> bytes:
        """Return what is left at a stream's end."""
        held, self._held = self._held, b""
        return held

    def _id(self, match: re.Match[bytes]) -> bytes:
        number = match[1]
        if isinstance(self._own, str):
            suffix = "" if number is None else f"_{number.decode()}"
            return msgspec.json.encode(self._own + suffix)
        index = int(number or 0)
        return msgspec.json.encode(self._own[index]) if index < len(self._own) else match[0]


def client_ids(body: Body, field: str, random: str) -> ClientIds | None:
    """Return what shows a client the ids that it chose; None if it chose none.

    Raises:
        Refused: an id is too long, or there are too many.
    """
    value = body.get(field)
    if not isinstance(value, Raw):
        return None
    check_parts(field, bytes(value), "ask about fewer prompts at a time")
    try:
        own = msgspec.json.decode(value, type=str | list[str])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if max(map(len, [own] if isinstance(own, str) else own), default=0) > _LONGEST:
        raise Refused(field, f"{field} has more than {_LONGEST} characters: use fewer")
    return ClientIds(field, random, own) if own else None


def _made(field: str, random: str) -> str:
    return f"{_RESPONSE}{random}" if field == RESPONSE_ID else random
