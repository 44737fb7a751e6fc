"""What a replay reads of an event, whatever its API, and how it makes another one of it. Pure.

A replayed stream is compared as a row of bytes: the answer's text, and between its parts one mark
for each event that has a place in the stream, as the beginning of a message. Engines cut the same
answer into other events, but not into another row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from kvconnect.router.requests.continuation import AfterLoss

BROKEN = (msgspec.DecodeError, ValueError, RecursionError)
"""Errors of decoding an event that is none of the expected format."""

_DATA = b"data: "
_LATER_DATA = b"\ndata: "  # after the event's name
_MARK = b"\xff"  # in no text: it is no byte of UTF-8


class StreamNames(NamedTuple):
    """Names and numbers that an event tells of its stream; empty: it does not tell them.

    Attributes:
        item: id of the message in a response.
        number: of the event in its stream.
    """

    id: str = ""
    created: int = 0
    model: str = ""
    item: str = ""
    number: int | None = None

    def then(self, later: StreamNames) -> StreamNames:
        """Return these, with those of a later event that are not known yet, and its number."""
        number = self.number if later.number is None else later.number
        pairs = zip(self[:-1], later[:-1], strict=True)
        return StreamNames._make([*(known or new for known, new in pairs), number])


class Reading(NamedTuple):
    """What an event of a stream is.

    Attributes:
        text: of the answer.
        begins: what begins before the text; empty: nothing.
        ends: what ends after it.
        last: it ends the stream.
        awaits: whether it may be passed on depends on the next event.
        prevented: why a stream with such an event cannot be replayed.
        broken: why the engine's stream is no good.
    """

    text: str = ""
    begins: str = ""
    ends: str = ""
    last: bool = False
    awaits: bool = False
    prevented: AfterLoss | None = None
    broken: str = ""
    names: StreamNames = StreamNames()

    @property
    def head(self) -> bytes:
        """The mark before the text."""
        return _mark(self.begins)

    @property
    def row(self) -> bytes:
        """The event as a part of its stream."""
        return self.head + self.text.encode() + _mark(self.ends)


class EventChange(NamedTuple):
    """How an event of the engine that answers again becomes one of the first stream.

    Attributes:
        ours: names of the first stream; ``number`` is that of the event.
        theirs: what the engine has called them.
        text: what follows the client's text; None: all of the event does.
    """

    ours: StreamNames
    theirs: StreamNames
    text: str | None = None


class EventFormat(Protocol):
    """The events of one API, of one engine's stream. They have no empty line at their end."""

    def read(self, event: bytes) -> Reading:
        """Return what an event is."""

    def changed(self, event: bytes, change: EventChange) -> bytes:
        """Return an event that was read as one of the first stream.

        Raises:
            ValueError: it is not one of this API.
        """

    def asked_again(self, names: StreamNames) -> dict[str, Any]:
        """Return fields of the request to the engine that answers again, beside the client's."""


def data_of(event: bytes) -> bytes | None:
    """Return the JSON of an event with or without a name; None: there is none."""
    at = _data_at(event)
    return None if at is None else event[at:]


def fields_of(event: bytes) -> dict[str, Any]:
    """Return the fields of an event's JSON.

    Raises:
        ValueError: it is not an object.
    """
    return object_of(data_of(event) or b"")


def object_of(raw: bytes | Raw) -> dict[str, Any]:
    """Return the fields of an object; those that nobody changes keep their bytes.

    Raises:
        ValueError: it is not an object.
    """
    return msgspec.json.decode(raw, type=dict[str, Raw])


def with_fields(event: bytes, fields: dict[str, Any]) -> bytes:
    """Return an event with the name of another one, and these fields."""
    return event[: _data_at(event)] + msgspec.json.encode(fields)


def _data_at(event: bytes) -> int | None:
    if event.startswith(_DATA):
        return len(_DATA)
    at = event.find(_LATER_DATA)
    return None if at < 0 else at + len(_LATER_DATA)


def _mark(what: str) -> bytes:
    return _MARK + what.encode() + _MARK if what else b""
