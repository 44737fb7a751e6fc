"""The journal of a stream that another engine can answer again: what it needs to leave out what the
client has. Pure.

It keeps no text, only how long the stream was and a digest of it. What another engine sends is
passed on from there, if all before has the same digest: until then, nothing is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvconnect.router.requests.continuation import AfterLoss
from kvconnect.router.requests.replay_events import (
    BROKEN,
    EventChange,
    EventFormat,
    Reading,
    StreamNames,
)
from kvconnect.router.requests.whole_events import END, WholeEvents

_OTHER = "answered again with another text than the one that was sent"


class _Held(NamedTuple):
    event: bytes
    reading: Reading


class ReplayJournal:
    """The journal of one stream. See :class:`Journal` for what others use of it."""

    by_ids = False

    def __init__(self, events: Callable[[], EventFormat]) -> None:
        """``events``: makes what reads the events of one engine."""
        self._formats, self._format = events, events()
        self.prevented: AfterLoss | None = None
        self.broken = ""
        self.done = False
        self.sent = 0
        self._events = WholeEvents()
        self._names = StreamNames()
        self._digest = _digest()  # of what the client has
        self._held: _Held | None = None
        # Of the engine that answers again:
        self._again = False
        self._theirs = StreamNames()
        self._at = 0  # how long its stream is
        self._known = 0  # how long it is when the client has all before
        self._compared = _digest()

    def feed(self, chunk: bytes) -> bytes:
        """Take what an engine has sent; return what of it the client gets."""
        passed = []
        for event in self._events.of(chunk):
            if self.broken:
                break
            passed.append(self._event(event))
        if self._events.too_long:
            self._break("sent an event over the size limit")
        return b"".join(passed)

    def rest(self, body: Mapping[str, Any]) -> Mapping[str, Any] | AfterLoss:
        """Return the request to the next engine, whose events follow: the client's."""
        if self.prevented is not None:
            return self.prevented
        self._events, self._format = WholeEvents(), self._formats()
        self.broken, self._held, self._again = "", None, True
        self._theirs, self._at, self._known = StreamNames(), 0, self.sent
        self._compared = _digest()
        return {**body, **self._format.asked_again(self._names)}

    def can_leave(self, body: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Never: all would be computed again."""
        return False

    def next_form(self) -> None:
        """Return none: native code keeps no digest."""

    def relayed(self, notes: bytes) -> None:
        """Nothing: there is no form."""

    def doubtful(self) -> array[int]:
        """Return no token: text is compared."""
        return array("i")

    def settle(self, text: str) -> None:
        """Nothing is in doubt."""

    def ending(self) -> None:
        """Return none: the rest is answered again, however short it is."""

    def _event(self, event: bytes) -> bytes:
        """Return what the client gets now that there is one more event."""
        if event.startswith(b":"):  # a comment
            return b"" if self._at < self._known else event + END
        reading = self._format.read(event)
        if self.prevented is None and reading.broken:
            self._break(reading.broken)
            return b""
        if reading.prevented is not None:
            self._prevent(reading.prevented)
            if self._at < self._known:  # before it came, the stream had only text
                self._break(_OTHER)
                return b""
        held, self._held = self._held, None
        before = b"" if held is None else self._passed(held.event, held.reading)
        if reading.awaits and self.prevented is None:
            self._held = _Held(event, reading)
            return before
        return before + (b"" if self.broken else self._passed(event, reading))

    def _passed(self, event: bytes, reading: Reading) -> bytes:
        """Return what the client gets of an event."""
        if self._again:
            return self._of_next(event, reading)
        self._note(reading, reading.row, self._names.then(reading.names))
        return event + END

    def _of_next(self, event: bytes, reading: Reading) -> bytes:
        """Return what the client gets of an event of the engine that answers again."""
        self._theirs = self._theirs.then(reading.names)
        begin, row = self._at, reading.row
        self._at += len(row)
        known = min(len(row), max(0, self._known - begin))
        if known:
            self._compare(row[:known])
        if self.broken or (begin < self._known and known == len(row)):  # the client has it
            if reading.last:  # and more, which this engine does not say
                self._break(_OTHER)
            return b""
        text = _rest_of(reading, known) if known else None
        if known and text is None:
            self._break(_OTHER)
            return b""
        ours = self._names.then(reading.names._replace(number=None))
        if reading.names.number is not None:
            ours = ours._replace(number=0 if ours.number is None else ours.number + 1)
        try:
            made = self._format.changed(event, EventChange(ours, self._theirs, text))
        except BROKEN:
            self._break("sent an event of another format")
            return b""
        self._note(reading, row[known:], ours)
        return made + END

    def _compare(self, row: bytes) -> None:
        """Compare a part of what the client has, once all of it has come again."""
        self._compared.update(row)
        if self._at >= self._known and self._compared.digest() != self._digest.digest():
            self._break(_OTHER)

    def _note(self, reading: Reading, row: bytes, names: StreamNames) -> None:
        """Note what is sent now: an event's row, or the rest of it."""
        self.sent += len(row)
        self._digest.update(row)
        self._names, self.done = names, self.done or reading.last

    def _break(self, why: str) -> None:
        self.broken = self.broken or why

    def _prevent(self, why: AfterLoss) -> None:
        self.prevented = self.prevented or why


def _rest_of(reading: Reading, known: int) -> str | None:
    """Return what of an event's text comes after so many bytes of its part of the row; None: these
    do not end between two characters."""
    begin = known - len(reading.head)
    raw = reading.text.encode()
    if not 0 <= begin <= len(raw):
        return None
    try:
        return raw[begin:].decode()
    except UnicodeDecodeError:
        return None


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
