"""Events of one stream that differ in their text and token ids only. Pure.

Native code passes such events on without reading JSON, and notes what differs. What it looks for is
taken from an event that a journal has read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvconnect.router.requests import stream_events
from kvconnect.router.requests.stream_events import TokenId

NOTED_BYTES = 8 << 10
"""Bytes of the notes of one stream; with more, it comes back, and they are journaled."""

_STRING = rb'("(?:[^"\\]++|\\.)*+")'
# Within a JSON string, the quotation marks of such names would be escaped.
_TEXTS = {name: re.compile(b'"%b":%b' % (name, _STRING)) for name in (b"text", b"content")}
_IDS = re.compile(rb'"token_ids":(\[[0-9,]+\])')
_PROBE, _PROBE_IDS = "?", [1, 2]
UNREADABLE = (msgspec.DecodeError, ValueError)
"""What :meth:`NotedEvents.taken` raises."""


class EventForm(NamedTuple):
    """What events have in common, as native code takes it (``_native.pyi``).

    Attributes:
        head: before the JSON string that is the text.
        middle: between that and the list of token ids.
        tail: after the list.
        room: bytes of notes at most.
        shows_ids: the client asked for token ids; else it gets null in their place.
    """

    head: bytes
    middle: bytes
    tail: bytes
    room: int
    shows_ids: bool


class TokenEvent(msgspec.Struct, array_like=True):
    """An event's token ids and text; a note has the JSON of both, and a comma."""

    token_ids: list[TokenId]
    text: str


class NotedEvents:
    """The events of a stream of which there are notes."""

    def __init__(self, take: Callable[[int], bool], *, chat: bool, shows_ids: bool) -> None:
        """``take``: takes so many bytes of memory; returns whether they are left."""
        self._take, self._chat, self._shows_ids = take, chat, shows_ids
        self._notes: list[bytes] = []
        self._example: bytes | None = None
        self._form: EventForm | None = None

    def learn(self, event: bytes) -> None:
        """Take an event with text and token ids, in mid-stream, as an example: the first counts."""
        if self._example is None:
            self._example = event

    def form(self) -> EventForm | None:
        """Return the form of further events, for native code; None: they are left to Python. The
        memory for their notes is taken the first time."""
        if self._example:
            example, self._example = self._example, b""  # once
            # Twice: notes that came back are journaled when the next ones are made already.
            if self._take(2 * NOTED_BYTES):
                self._form = form_of(example, chat=self._chat, shows_ids=self._shows_ids)
        return self._form

    def add(self, notes: bytes) -> None:
        """Keep notes of native code."""
        if notes:
            self._notes.append(notes)

    def note(self, event: TokenEvent) -> None:
        """Make a note of an event, as native code would."""
        self._notes.append(msgspec.json.encode(event) + b",")

    def taken(self) -> list[TokenEvent]:
        """Return what the notes say, and forget them.

        Raises:
            UNREADABLE: an engine sent what is no text.
        """
        if not self._notes:
            return []
        notes = b"[%b]" % b"".join(self._notes)[:-1]
        self._notes.clear()
        return msgspec.json.decode(notes, type=list[TokenEvent])


def form_of(event: bytes, *, chat: bool, shows_ids: bool) -> EventForm | None:
    """Return the form of an event; None if it has none."""
    texts = list(_TEXTS[b"content" if chat else b"text"].finditer(event))
    ids = list(_IDS.finditer(event))
    if len(texts) != 1 or len(ids) != 1 or texts[0].end() > ids[0].start():
        return None
    head, middle = event[: texts[0].start(1)], event[texts[0].end(1) : ids[0].start(1)]
    made = EventForm(
        head, middle, event[ids[0].end(1) :] + stream_events.END, NOTED_BYTES, shows_ids
    )
    # The two may stand for something else.
    probe = stream_events.read(b'%b"%b"%b[1,2]%b' % (head, _PROBE.encode(), middle, made.tail))
    if probe is None or len(probe.choices) != 1:
        return None
    choice = probe.choices[0]
    text = (choice.delta or {}).get("content") if chat else choice.text
    return made if text == _PROBE and choice.token_ids == _PROBE_IDS else None
